"""Every layout pair of the sweep on every cluster: proof, busiest port against the bound, entries; one JSON line a row.

Run ``python benchmarks/sweep.py``. The last line adds up: rows, how many pass, the worst of them, and the processor
seconds of this one process. Exit code 1 if a row does not pass.
"""

from __future__ import annotations

import gc
import json
import sys
import time

from reshard.testing.sweep import CLUSTERS, PAIRS, sweep


def main() -> None:
    """Print the rows as they come."""
    gc.disable()  # plans hold many small values and no cycles; counting them again and again takes a third of the time
    started = time.process_time()
    rows = []
    for row in sweep():
        rows.append(row)
        print(json.dumps(row.to_json()), flush=True)
    crossing = [row for row in rows if row.of_bound is not None]
    worst = max(crossing, key=lambda row: row.of_bound)
    summary = {
        "pairs": len(PAIRS),
        "clusters": list(CLUSTERS),
        "rows": len(rows),
        "passes": sum(row.passes for row in rows),
        "with_several_domains": len(crossing),
        "worst_busiest_of_bound": float(worst.of_bound),
        "worst": f"{worst.pair} on {worst.cluster}",
        "cpu_seconds": time.process_time() - started,
    }
    print(json.dumps(summary))
    sys.exit(0 if all(row.passes for row in rows) else 1)


if __name__ == "__main__":
    main()
