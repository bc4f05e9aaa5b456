"""How long planning takes at cluster scale, and how near the plans come to the bound: one JSON line a case.

Run ``python benchmarks/plan_scale.py`` (``--case dsv3`` for one kind; ``--order`` for rounds too; ``--profile FOLDER``
for a table of functions by own time beside). Times are processor seconds of one core beside wall seconds, since other
work on the machine only shows in the latter; memory is the most that the process has used, manifests included. Each
case is planned in a process of its own. ``json_mib`` is the size of the saved plan; ``save`` and ``read`` make it and
read it, digest and JSON included.

The layouts are those that the field reports: experts by expert-parallel rank and pipeline stage at the source, replicas
of tensor-parallel groups at the destination.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from own_time import own_time

from reshard.layouts.holding import Entry, Rule
from reshard.layouts.manifest import Manifest
from reshard.layouts.mesh import Mesh
from reshard.models.catalogue import find_model
from reshard.models.roles import Role, is_input_embedding
from reshard.plan.plan import Plan, plan_refit
from reshard.schedule.schedule import plan_schedule
from reshard.topology import presets

if TYPE_CHECKING:
    from collections.abc import Callable

    from reshard.models.model import Model, Weight
    from reshard.topology.topology import Topology


@dataclass(frozen=True)
class Case:
    """A model, the two worlds, the cluster, and the most seconds that its plan may take."""

    name: str
    model: str
    pipeline: int
    data: int
    expert: int
    tensor: int
    replicas: int
    cluster: str
    domain: int
    limit_seconds: float
    """Of planning; of planning, bound, reach and proof together where ``all_in`` is set."""

    all_in: bool

    @property
    def source_size(self) -> int:
        return self.pipeline * self.data * self.expert

    @property
    def size(self) -> int:
        return self.source_size + self.tensor * self.replicas


_CLUSTERS = (("dgx-h100", 8), ("gb200-nvl72", 64), ("gb200-nvl72", 72))
CASES = tuple(
    Case(f"{kind}-{cluster}-{domain}", model, *shape, cluster, domain, limit, all_in)
    for kind, model, shape, limit, all_in in (
        ("dsv3", "deepseek-v3", (4, 2, 16, 8, 16), 1.0, True),
        ("1t-ep64-pp16-tp8", "generic-1t", (16, 1, 64, 8, 128), 5.0, False),
        ("1t-ep64-pp8-tp32", "generic-1t", (8, 2, 64, 32, 32), 5.0, False),
        ("1t-ep32-pp8-tp8", "generic-1t", (8, 4, 32, 8, 128), 5.0, False),
    )
    for cluster, domain in _CLUSTERS
)

ROWS = (Role.VOCABULARY, Role.QUERY, Role.HEAD_ROWS, Role.FFN_ROWS, Role.EXPERT_ROWS)
COLUMNS = (Role.HEAD_COLUMNS, Role.FFN_COLUMNS, Role.EXPERT_COLUMNS)


def source(model: Model, case: Case) -> Manifest:
    """Stages of equal layers; an expert on one expert-parallel rank of each data-parallel group, all else on each."""
    ranks = case.data * case.expert  # of a stage
    rules: dict[tuple[int, int | None, int], Rule] = {}

    def rule(weight: Weight) -> Rule:
        stage = 0 if is_input_embedding(weight.spec.name) else case.pipeline - 1
        if weight.layer is not None:
            stage = weight.layer * case.pipeline // model.layers
        place = None if weight.expert is None else weight.expert * case.expert // model.experts
        dims = len(weight.spec.shape)
        if (stage, place, dims) not in rules:
            first = stage * ranks
            held = range(first, first + ranks) if place is None else range(first + place, first + ranks, case.expert)
            rules[stage, place, dims] = Rule(Mesh({"replica": len(held)}, held), ((),) * dims, "even")
        return rules[stage, place, dims]

    return Manifest(tuple(Entry(w.spec, (rule(w),)) for w in model.weights), "trainer", case.source_size)


def destination(model: Model, case: Case) -> Manifest:
    """Replicas of tensor-parallel groups; what has no heads or hidden units is on every rank."""
    mesh = Mesh({"dp": case.replicas, "tp": case.tensor})
    rules: dict[tuple[str, int], Rule] = {}

    def rule(weight: Weight) -> Rule:
        dims = len(weight.spec.shape)
        how = "rows" if weight.role in ROWS else "columns" if weight.role in COLUMNS else "whole"
        if (how, dims) not in rules:
            split = {"rows": 0, "columns": dims - 1, "whole": None}[how]
            placement = tuple(("tp",) if dim == split else () for dim in range(dims))
            rules[how, dims] = Rule(mesh, placement, "ceil")
        return rules[how, dims]

    return Manifest(tuple(Entry(w.spec, (rule(w),)) for w in model.weights), "generator", mesh.size)


def cluster(case: Case) -> Topology:
    """The case's preset with domains of its size."""
    if case.cluster == "dgx-h100":
        return presets.dgx_h100(case.size)
    return presets.gb200_nvl72(case.size, case.domain)


class Clock:
    """Times calls: processor and wall seconds by name."""

    def __init__(self) -> None:
        self.cpu_seconds: dict[str, float] = {}
        self.wall_seconds: dict[str, float] = {}

    def call(self, name: str, what: Callable[[], Any]) -> Any:
        cpu, wall = time.process_time(), time.perf_counter()
        result = what()
        self.cpu_seconds[name] = round(time.process_time() - cpu, 3)
        self.wall_seconds[name] = round(time.perf_counter() - wall, 3)
        return result


def measure(case: Case, *, order: bool) -> dict[str, Any]:
    """Plan one case, with ``order`` put it into rounds too, and say what it took."""
    clock = Clock()
    model = find_model(case.model)
    src, dst = source(model, case), destination(model, case)
    topology = cluster(case)
    plan: Plan = clock.call("plan", lambda: plan_refit(src, dst, topology))
    bound = clock.call("bound", lambda: plan.bound)
    reach = clock.call("reach", lambda: plan.reach)
    clock.call("proof", plan.proof)
    for name, rank in (("for_source_rank", 3), ("for_destination_rank", case.size - 3)):
        clock.call(name, lambda rank=rank: plan.for_rank(rank))
    planned_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    text = clock.call("save", lambda: json.dumps(plan.to_json()))
    assert clock.call("read", lambda: Plan.from_json(json.loads(text))) == plan
    ordered = {}
    if order:
        schedule = clock.call("order", lambda: plan_schedule(plan))
        ordered = {"rounds": schedule.rounds, "rounds_of_least": round(schedule.rounds / schedule.least_rounds, 4)}
    counted = ("plan", "bound", "reach", "proof") if case.all_in else ("plan",)
    counted_seconds = sum(clock.cpu_seconds[name] for name in counted)
    return {
        "case": case.name,
        "tensors": len(plan.specs),
        "patterns": len(plan.patterns),
        "classes": len(plan.classes),
        "routes": len(plan.routes),
        "edges": sum(len(route.edges) for route in plan.routes),
        "cpu_seconds": clock.cpu_seconds,
        "wall_seconds": clock.wall_seconds,
        "counted": "+".join(counted),
        "counted_cpu_seconds": round(counted_seconds, 3),
        "of_limit": round(counted_seconds / case.limit_seconds, 3),
        "bound_seconds": float(bound.seconds),
        "busiest_of_bound": round(float(reach.busiest_seconds / bound.seconds), 5),
        "most_copies_into_a_domain": max(float(copies) for _, copies in reach.copies_into),
        "relayed_of_crossing": round(reach.relayed_nbytes / reach.crossing_nbytes, 4),
        **ordered,
        "json_mib": round(len(text.encode()) / 2**20, 3),
        "planned_mib": planned_mib,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


def profile(case: Case) -> str:
    """Where the time of plan, bound, reach and proof goes."""
    model = find_model(case.model)
    src, dst, topology = source(model, case), destination(model, case), cluster(case)

    def counted() -> None:
        plan = plan_refit(src, dst, topology)
        assert plan.reach.busiest_seconds >= plan.bound.seconds
        plan.proof()

    return own_time(counted)[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="", help="only cases whose name begins so")
    parser.add_argument("--order", action="store_true", help="put each plan into rounds too")
    parser.add_argument("--profile", metavar="FOLDER", type=Path, help="write CASE.txt there: functions by own time")
    parser.add_argument("--here", choices=("measure", "profile"), help="one of the two, in this process")
    given = parser.parse_args()
    for case in CASES:
        if not case.name.startswith(given.case):
            continue
        if given.here:
            made = json.dumps(measure(case, order=given.order)) if given.here == "measure" else profile(case)
            print(made, flush=True)
            continue
        line = _apart(case, "measure", *(["--order"] if given.order else []))
        print(line, end="", flush=True)
        if given.profile:
            given.profile.mkdir(parents=True, exist_ok=True)
            (given.profile / f"{case.name}.txt").write_text(f"{line}\n{_apart(case, 'profile')}", "utf-8")


def _apart(case: Case, what: str, *more: str) -> str:
    """What a process of its own prints of a case."""
    command = [sys.executable, __file__, "--here", what, "--case", case.name, *more]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main()
