"""The simulator against reality: calibrate this machine, run both benchmarks, and print predicted beside measured.

Run ``python benchmarks/simulator_vs_reality.py`` on a machine that does nothing else (``--calibration FILE`` reads an
earlier calibration). Nothing is fitted: the calibration measures copies, messages and one link, of other sizes and of
another rate than the rows have. A row counts as bound by a link where its busiest link needs longer than the processor
seconds that were measured need on all cores, else by the processor; the aim is 15 % for the first and 30 % for the
second kind. Prints one JSON document, and the table as Markdown on stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reshard.bench import SCENARIOS
from reshard.bench.calibrate import calibrate
from reshard.bench.cluster import run_cluster
from reshard.bench.cluster_scenarios import SCENARIO_NAMES
from reshard.bench.expected import expected_local
from reshard.bench.expected_cluster import expected_cluster
from reshard.bench.local import run_local
from reshard.simulate.calibration import Calibration
from reshard.units import parse_nbytes

AIMS = {"link": 0.15, "processor": 0.30}


@dataclass(frozen=True)
class Row:
    """One row of a benchmark."""

    bench: str
    scenario: str
    name: str
    bound_by: str
    measured_seconds: float
    predicted_seconds: float

    @property
    def difference(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_seconds / self.measured_seconds - 1

    @property
    def is_within(self) -> bool:
        return abs(self.difference) <= AIMS[self.bound_by]

    def to_json(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return own | {"difference": self.difference, "is_within": self.is_within}


def local_rows(machine: Calibration, size: int, repeat: int) -> list[Row]:
    """Measure ``reshard bench local`` and predict it."""
    report = run_local(scenarios=SCENARIOS, size=size, repeat=repeat, progress=_say)
    rows = []
    for scenario, measured in report["scenarios"].items():
        predicted = expected_local(scenario, size, machine)
        seconds = {**measured["seconds"], **measured.get("whole_or_chunks", {})}
        rows += [
            Row("local", scenario, name, "processor", seconds[name], predicted[name])
            for name in sorted(seconds)
            if name in predicted
        ]
    return rows


def cluster_rows(machine: Calibration, rate: str, nbytes: int, repeat: int) -> list[Row]:
    """Measure ``reshard bench cluster`` and predict it."""
    report = run_cluster(scenarios=SCENARIO_NAMES, rate=rate, nbytes=nbytes, repeat=repeat, progress=_say)
    rows = []
    for measured in report["scenarios"]:
        name, link = measured["name"], report["bytes_per_second"]
        predicted = expected_cluster(name, report["shape"][0], link, machine)
        rows.append(Row("cluster", name, "raw_socket", "link", measured["raw_socket_seconds"], predicted["raw_socket"]))
        for strategy, figures in measured["strategies"].items():
            host = figures["busiest_link"].split()[0]
            text = measured["hosts"][host]["rate"]
            part = int(text.removesuffix("bit")) / 8
            on_cores = figures["cpu_seconds"] / machine.cores
            bound_by = "link" if figures["busiest_link_nbytes"] / part >= on_cores else "processor"
            rows.append(Row("cluster", name, strategy, bound_by, figures["seconds"], predicted[strategy]))
        if "one_host_seconds" in measured:
            seconds = measured["one_host_seconds"]
            rows.append(Row("cluster", name, "reshard_to_one_host", "link", seconds, predicted["reshard_to_one_host"]))
    return rows


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = [
        "| bench | scenario | row | bound by | measured ms | predicted ms | difference |",
        "|---|---|---|---|--:|--:|--:|",
    ]
    for row in rows:
        miss = "" if row.is_within else " (misses)"
        lines.append(
            f"| {row.bench} | {row.scenario} | {row.name} | {row.bound_by} | {1e3 * row.measured_seconds:.1f} | "
            f"{1e3 * row.predicted_seconds:.1f} | {row.difference:+.0%}{miss} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Calibrate, measure, predict, print."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--calibration", type=Path, help="read this one instead of measuring")
    options.add_argument("--size", type=int, default=8192, help="of the local benchmark's tensor")
    options.add_argument("--repeat", type=int, default=5, help="measured runs of each local operation")
    options.add_argument("--rate", default="2Gbit", help="of the cluster's links")
    options.add_argument("--nbytes", default="256MiB", help="of the cluster's tensors")
    options.add_argument("--cluster-repeat", type=int, default=2, help="measured runs of each cluster operation")
    options.add_argument("--only", choices=("local", "cluster"), help="one of the two benchmarks")
    asked = options.parse_args()
    if asked.calibration is None:
        machine = calibrate(_say)
        _say(json.dumps(machine.to_json()))
    else:
        machine = Calibration.from_json(json.loads(asked.calibration.read_text("utf-8")))
    rows: list[Row] = []
    if asked.only != "cluster":
        rows += local_rows(machine, asked.size, asked.repeat)
        _say(table(rows))
    if asked.only != "local":
        rows += cluster_rows(machine, asked.rate, parse_nbytes(asked.nbytes), asked.cluster_repeat)
    counts = {
        kind: [sum(r.is_within for r in rows if r.bound_by == kind), sum(r.bound_by == kind for r in rows)]
        for kind in AIMS
    }
    print(json.dumps({"calibration": machine.to_json(), "within": counts, "rows": [row.to_json() for row in rows]}))
    _say(table(rows))
    _say(", ".join(f"bound by the {kind}: {ok} of {n} within {AIMS[kind]:.0%}" for kind, (ok, n) in counts.items()))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
