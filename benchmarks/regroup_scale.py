"""How long it takes to make one manifest of rules out of what 128 ranks publish box by box: one JSON line a case.

Run ``python benchmarks/regroup_scale.py`` (``--case qwen3`` for some; ``--profile FOLDER`` for a table of functions by
own time beside). Each rank publishes explicit pieces alone, as a
traced engine does, in the JSON that ranks exchange; ranks that say the same are read once, as a refit does it. Times
are processor seconds of one core. Reading the JSON and planning stand beside, and with ``--explicit`` planning once
more with the pieces left as they are.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from own_time import own_time

from reshard.layouts.holding import HERE, Entry, Pieces, Rule
from reshard.layouts.manifest import Manifest
from reshard.layouts.merge import merge
from reshard.layouts.regroup import regroup
from reshard.models.catalogue import find_model
from reshard.models.parallelism import Parallelism
from reshard.models.worlds import manifest_of
from reshard.plan.plan import plan_refit

if TYPE_CHECKING:
    from collections.abc import Callable

    from reshard.layouts.box import Box
    from reshard.layouts.holding import Holding


@dataclass(frozen=True)
class Case:
    """A model on 128 engine ranks, fed by 128 trainer ranks."""

    name: str
    model: str
    trainer: Parallelism
    engine: Parallelism


CASES = (
    Case("dsv3-tp8-dp16", "deepseek-v3", Parallelism("megatron", ep=16, pp=4, dp=2), Parallelism("vllm", tp=8, dp=16)),
    Case(
        "dsv3-tp8-dp2-pp8",
        "deepseek-v3",
        Parallelism("megatron", ep=16, pp=4, dp=2),
        Parallelism("vllm", tp=8, pp=8, dp=2),
    ),
    Case("dsv3-ep128", "deepseek-v3", Parallelism("megatron", ep=16, pp=4, dp=2), Parallelism("vllm", tp=1, ep=128)),
    Case(
        "qwen3-235b-tp8-dp16",
        "qwen3-235b-a22b",
        Parallelism("megatron", tp=4, ep=8, pp=4, dp=4),
        Parallelism("vllm", tp=8, dp=16),
    ),
    Case(
        "qwen3-235b-ep32-dp4",
        "qwen3-235b-a22b",
        Parallelism("megatron", tp=4, ep=8, pp=4, dp=4),
        Parallelism("vllm", tp=4, ep=32, dp=4),
    ),
)


def published(manifest: Manifest) -> dict[int, str]:
    """What each rank of a world says of itself: its boxes, tensor by tensor, as JSON."""
    entries: dict[int, list[Entry]] = {rank: [] for rank in range(manifest.size)}
    known: dict[tuple[tuple[int, ...], tuple[int, ...]], dict[int, Pieces]] = {}
    one: dict[Pieces, Pieces] = {}
    for entry in manifest.entries:
        key = entry.spec.shape, tuple(map(id, entry.holdings))
        if key not in known:
            made = _boxes_by_rank(entry, entry.holdings)
            known[key] = {rank: one.setdefault(pieces, pieces) for rank, pieces in made.items()}
        for rank, pieces in known[key].items():
            entries[rank].append(Entry(entry.spec, (pieces,)))
    texts: dict[tuple[int, ...], str] = {}  # replicas say the same
    said = {}
    for rank, rows in entries.items():
        same = tuple(id(part) for row in rows for part in (row.spec, row.holdings[0]))
        if same not in texts:
            texts[same] = json.dumps(Manifest(tuple(rows), "engine").to_json())
        said[rank] = texts[same]
    return said


def _boxes_by_rank(entry: Entry, holdings: tuple[Holding, ...]) -> dict[int, Pieces]:
    held: dict[int, list[Box]] = {}
    for holding in holdings:
        for box, ranks in holding.boxes(entry.spec):
            for rank in ranks:
                held.setdefault(rank, []).append(box)
    return {rank: Pieces(((HERE, tuple(sorted(boxes))),)) for rank, boxes in held.items()}


def measure(case: Case, texts: dict[int, str], *, explicit: bool) -> dict[str, Any]:
    """Read what the ranks published, merge, regroup and plan it."""
    seconds: dict[str, float] = {}

    def clock(name: str, what: Callable[[], Any]) -> Any:
        began = time.process_time()
        result = what()
        seconds[name] = round(time.process_time() - began, 3)
        return result

    read = clock("read", lambda: {text: Manifest.from_json(json.loads(text)) for text in set(texts.values())})
    parts = {rank: read[text] for rank, text in texts.items()}
    merged: Manifest = clock("merge", lambda: merge(parts, world="engine"))
    ruled: Manifest = clock("regroup", lambda: regroup(merged))
    src = manifest_of(find_model(case.model), case.trainer, world="trainer")
    plan = clock("plan", lambda: plan_refit(src, ruled))
    sizes = {
        "explicit_json_mib": round(len(json.dumps(merged.to_json())) / 2**20, 2),
        "ruled_json_mib": round(len(json.dumps(ruled.to_json())) / 2**20, 2),
        "plan_json_mib": round(len(json.dumps(plan.to_json())) / 2**20, 2),
    }
    if explicit:
        same = clock("plan_explicit", lambda: plan_refit(src, merged))
        assert same.wire_nbytes == plan.wire_nbytes
    holdings = {holding for entry in ruled.entries for holding in entry.holdings}
    return {
        "case": case.name,
        "ranks": ruled.size,
        "said_differently": len(read),
        "tensors": len(ruled.entries),
        "rules": sum(isinstance(holding, Rule) for holding in holdings),
        "left_explicit": sum(isinstance(holding, Pieces) for holding in holdings),
        "cpu_seconds": seconds,
        "merge_and_regroup_seconds": round(seconds["merge"] + seconds["regroup"], 3),
        **sizes,
    }


def profile(texts: dict[int, str]) -> str:
    """Where the time of merging and regrouping goes."""
    read = {text: Manifest.from_json(json.loads(text)) for text in set(texts.values())}
    return own_time(lambda: regroup(merge({rank: read[text] for rank, text in texts.items()}, world="engine")))[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="", help="only cases whose name begins so")
    parser.add_argument("--explicit", action="store_true", help="plan with the explicit pieces too")
    parser.add_argument("--profile", metavar="FOLDER", type=Path, help="write regroup-CASE.txt there")
    given = parser.parse_args()
    for case in CASES:
        if not case.name.startswith(given.case):
            continue
        texts = published(manifest_of(find_model(case.model), case.engine, world="engine"))
        line = json.dumps(measure(case, texts, explicit=given.explicit))
        print(line, flush=True)
        if given.profile:
            given.profile.mkdir(parents=True, exist_ok=True)
            (given.profile / f"regroup-{case.name}.txt").write_text(f"{line}\n\n{profile(texts)}\n", "utf-8")


if __name__ == "__main__":
    main()
