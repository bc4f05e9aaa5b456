"""Fifty refits of a model into two engine worlds with an optimizer step between: do times and memory stay as they are?

Run ``python benchmarks/session_endurance.py`` (SmolLM2-135M of the demo, unless ``--model`` names a folder); it takes
some minutes and prints one JSON document. Nine processes: a trainer of 2 x 2 ranks (FSDP2 over tensor parallelism,
float32 weights) under torchrun, engines of TP3 and TP2 (bf16, fused buffers) as plain processes. After each refit every
engine rank compares all its weights with a dense copy that was cast once; a difference ends the run.

``ratio`` is the median of the last ten refits over that of refits 6 to 15; a refit takes as long as on its slowest
rank, the wait for the others to call (the optimizer step, the comparison) not included. ``cpu_ratio`` is the same of
the processor seconds of all ranks together, which hardly depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict
from pathlib import Path

from reshard.demo.checkpoint import Checkpoint, cache_folder, packaged_checkpoint
from reshard.testing.endurance import EXPECT, Told, run

EARLY, LATE = 10, 50


def summary(told: list[Told], refits: int) -> dict[str, object]:
    """What the processes told, as the numbers that the endurance of a session is judged by."""
    by_refit = [max(one.seconds[at] for one in told) for at in range(refits)]
    early, late = statistics.median(by_refit[5:15]), statistics.median(by_refit[-10:])
    cpu = [sum(one.cpu_seconds[at] for one in told) for at in range(refits)]
    cpu_early, cpu_late = statistics.median(cpu[5:15]), statistics.median(cpu[-10:])
    held = {one.member: {str(count): asdict(held) for count, held in one.held.items()} for one in told}
    return {
        "refits": refits,
        "worlds": EXPECT,
        "equal_nbytes": sum(one.equal_nbytes for one in told),
        "least_elements_changed_by_a_step": min(min(one.changed) for one in told if one.changed),
        "tensors_cast": max(one.casts for one in told),
        "first_seconds": by_refit[0],
        "median_seconds_of_6_to_15": early,
        "median_seconds_of_the_last_10": late,
        "ratio": late / early,
        "cpu_seconds_of_all_ranks_6_to_15": cpu_early,
        "cpu_seconds_of_all_ranks_the_last_10": cpu_late,
        "cpu_ratio": cpu_late / cpu_early,
        "held": held,
        "most_growth": {
            what: max(getattr(one.held[LATE], what) - getattr(one.held[EARLY], what) for one in told)
            for what in ("descriptors", "threads", "pss_kib")
            if refits >= LATE
        },
    }


def main() -> None:
    """Run it, and print the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="a folder of weights; the demo's model if not given")
    parser.add_argument("--refits", type=int, default=LATE)
    parser.add_argument("--verify", default="sum", choices=["none", "sum", "fingerprint"])
    parser.add_argument(
        "--drawn-gradients", action="store_true", help="optimizer steps without a forward and backward pass"
    )
    parser.add_argument("--timeout", type=float, default=1800.0, help="seconds for all of it")
    options = parser.parse_args()
    if options.model is None:
        checkpoint = packaged_checkpoint(cache_folder(), lambda text: print(text, file=sys.stderr))
    else:
        checkpoint = Checkpoint.open(options.model)
    told = run(
        checkpoint.folder,
        options.refits,
        look_at=(EARLY, LATE),
        verify=options.verify,
        backward=not options.drawn_gradients,
        timeout=options.timeout,
    )
    print(json.dumps({"model": checkpoint.name, **summary(told, options.refits)}, indent=2))


if __name__ == "__main__":
    main()
