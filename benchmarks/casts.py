"""Casts: what many small tensors cost against one of as many bytes, where float32 masters become bfloat16 on the way.

Run ``python benchmarks/casts.py``; it takes some minutes, 3 GiB of memory and 1 GiB of shared memory, and prints a JSON
line for each transport and kind of verification. Two source ranks hold float32 tensors by rows, four destination ranks
want them in bfloat16 by columns, each a process: the tensors of ``reshard bench local small-tensors``, and one tensor
as wide as most bytes of these are. Sessions refit by turns, so that both numbers of a ratio come from the same minute.

``cpu_ratio`` is the processor seconds of all ranks together for the many tensors over those for the one, medians of the
turns; ``lowest_cpu_ratio`` the same of the lowest, which depends less on what else the machine does. ``narrow`` is the
same for tensors of 64 x 256 elements: rows of 64, where a row of the one tensor has 512.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch

import reshard
from reshard.bench.case import SIZE, SOURCES, Case
from reshard.bench.local import small_shapes
from reshard.testing.processes import ProcessPool
from reshard.transports.shm import share_memory_

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.testing.processes import RankContext

WORLDS = {"trainer": SOURCES, "engine": SIZE - SOURCES}
WIDTH = 2048
KINDS = {"gloo": ("torch_p2p", False), "shm": ("shm", True), "shm_private": ("shm", False)}
Shapes = tuple[tuple[int, int], ...]


def main() -> None:
    """Run it, and print the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=256, help="of all tensors in bfloat16")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    parser.add_argument("--verify", nargs="*", default=["none", "sum", "fingerprint"])
    told = parser.parse_args()
    nbytes = told.mib << 20
    many = small_shapes(max(20, nbytes // 500_000), nbytes)
    sets: dict[str, Shapes] = {"many": many, "one": (_one(many),)}
    sets["narrow"] = ((64, 256),) * (sum(rows * columns for rows, columns in many) // (64 * 256))
    with ProcessPool(SIZE) as pool:
        for kind in told.kinds:
            for verify in told.verify:
                with ExitStack() as stack:
                    stores = [str(stack.enter_context(reshard.serve_store())) for _ in sets]
                    shapes = list(sets.values())
                    ranks = pool.run(refits, stores, shapes, *KINDS[kind], verify, told.repeat, timeout=600)
                print(json.dumps({"transport": kind, "verify": verify, **_summary(list(sets), ranks)}), flush=True)


def _one(shapes: Shapes) -> tuple[int, int]:
    numel = sum(rows * columns for rows, columns in shapes)
    return -(-numel // (SOURCES * WIDTH)) * SOURCES, WIDTH


def _summary(names: Sequence[str], ranks: Sequence[Sequence[Sequence[float]]]) -> dict[str, object]:
    turns = {
        name: [sum(turn) for turn in zip(*(rank[at] for rank in ranks), strict=True)] for at, name in enumerate(names)
    }
    middle = {name: statistics.median(seconds) for name, seconds in turns.items()}
    lowest = {name: min(seconds) for name, seconds in turns.items()}
    return {
        "cpu_seconds": middle,
        "cpu_ratio": {name: middle[name] / middle["one"] for name in names if name != "one"},
        "lowest_cpu_ratio": {name: lowest[name] / lowest["one"] for name in names if name != "one"},
    }


def refits(
    ctx: RankContext,
    stores: Sequence[str],
    sets: Sequence[Shapes],
    transport: str,
    shared: bool,
    verify: str,
    repeat: int,
) -> list[list[float]]:
    """By set of tensors: this rank's processor seconds of each turn but the first."""
    torch.set_num_threads(1)
    is_source = ctx.rank < SOURCES
    group = ctx.process_group("turns")
    with ExitStack() as stack:
        sessions = []
        for store, shapes in zip(stores, sets, strict=True):
            session = stack.enter_context(
                reshard.connect(
                    store,
                    role="source" if is_source else "destination",
                    world="trainer" if is_source else "engine",
                    rank=ctx.rank if is_source else ctx.rank - SOURCES,
                    world_size=WORLDS["trainer" if is_source else "engine"],
                    expect=WORLDS,
                    transport=transport,
                    verify=verify,
                    commit="in-place",
                )
            )
            side = _manifest(Case("casts", shapes), ctx.rank, shared=shared)
            (session.offer if is_source else session.accept)(side)
            sessions.append(session)
        seconds: list[list[float]] = [[] for _ in sets]
        for turn in range(repeat + 1):
            for at, session in enumerate(sessions):
                group.barrier().wait()
                before = time.process_time()
                report = session.refit(turn)
                seconds[at].append(time.process_time() - before)
                assert len(report.casts) == len(sets[at])
        group.barrier().wait()
    return [row[1:] for row in seconds]


def _manifest(case: Case, rank: int, *, shared: bool) -> reshard.Manifest:
    boxes = case.boxes[rank]
    if rank < SOURCES:
        flat = torch.empty(case.numel(rank)).uniform_(-1, 1)
        if shared:
            share_memory_([flat])
    else:
        flat = torch.zeros(case.numel(rank), dtype=torch.bfloat16)
    views = [part.view(box.shape) for part, box in zip(flat.split([box.numel for box in boxes]), boxes, strict=True)]
    return reshard.Manifest.from_views(
        (f"tensor{at:05}", shape, box.start, view)
        for at, (shape, box, view) in enumerate(zip(case.shapes, boxes, views, strict=True))
    )


if __name__ == "__main__":
    main()
