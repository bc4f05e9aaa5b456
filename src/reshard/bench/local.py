"""The local benchmark: two source ranks and four destination ranks, a process each, on one host.

``run_local`` starts the processes and puts their samples together; ``rank_main`` is the whole life of one of them.
"""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from reshard.bench import RATIOS, REACH, SCENARIOS, SMALL_REACH, TRANSPORTS
from reshard.bench.bare import BarePull, BareStaged, Memcpy
from reshard.bench.case import SIZE, SOURCES, WORD, Case, Memory
from reshard.bench.measure import Figures, RankSamples, measure, put_together
from reshard.bench.operation import Operation, Refit
from reshard.bench.tokens import Tokens
from reshard.bench.usual_way import FORMS, Groups, UsualWay, UsualWayShm
from reshard.demo.groups import gloo_group
from reshard.demo.launch import Job, run_jobs
from reshard.errors import ConfigError
from reshard.transports.recorder import trace_of
from reshard.transports.shm import ShmTransport, share_memory_

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reshard.schedule.trace import Trace
    from reshard.transports.recorder import Row

FULL_SIZE = 8192
CHUNK_NBYTES = 8 << 20
_SMALL_TENSORS, _SMALL_NBYTES, _ONE_WIDTH = 2000, 10**9, 2048  # at full size


@dataclass(frozen=True)
class Setup:
    """What every rank is told."""

    host: str
    port: int
    tokens: Tokens
    scenarios: tuple[str, ...]
    transports: tuple[str, ...]
    size: int
    repeat: int
    timeout: timedelta
    shared: tuple[torch.Tensor, ...]
    """Shared memory of every source for its tensors, flat words; empty where shared memory is not measured."""
    arenas: tuple[torch.Tensor, ...]
    """Shared memory of every source for the slots of the bare pipeline."""
    records: bool = False
    """Whether a refit of the first scenario is run once more for a trace."""


def run_local(
    *,
    scenarios: Sequence[str] = SCENARIOS,
    transports: Sequence[str] = TRANSPORTS,
    size: int = FULL_SIZE,
    repeat: int = 7,
    timeout_seconds: float = 600.0,
    progress: Callable[[str], None] = lambda _: None,
    keep_trace: Callable[[Trace, dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Measure on this machine.

    Args:
        scenarios: Some of ``SCENARIOS``.
        transports: Some of ``TRANSPORTS``; the usual way on gloo is measured always.
        size: The tensor is bf16 ``[size, size]``; the small tensors become fewer with it.
        repeat: Measured runs of every operation.
        timeout_seconds: For all of it.
        progress: Told what is being done.
        keep_trace: Given the trace of one more run of the first scenario's refit, on gloo where that is measured, and
            the plan that was followed, as JSON.

    Returns:
        For JSON: by scenario the figures of every operation (medians over the runs) and ratios.

    Raises:
        VerifyError: An operation brought a wrong element.
        ConfigError: A size that cannot be cut.
        EnvironmentNotSupported: Shared memory is asked for and /dev/shm has too little room.
        RefitTimeout: The processes were not done in time.
    """
    cases = [case for scenario in scenarios for case in cases_of(scenario, size)]
    shared: tuple[torch.Tensor, ...] = ()
    arenas: tuple[torch.Tensor, ...] = ()
    if "shm" in transports:
        shared = tuple(torch.empty(max(c.numel(s) for c in cases), dtype=WORD) for s in range(SOURCES))
        numel = max((BareStaged.arena_numel(case) for case in cases if len(case.shapes) == 1), default=0)
        arenas = tuple(torch.empty(numel, dtype=WORD) for _ in range(SOURCES))
        share_memory_([*shared, *arenas])
        for memory in (*shared, *arenas):
            memory.zero_()  # the pages are there at once
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    setup = Setup(
        store.host,
        store.port,
        Tokens(multiprocessing.get_context("spawn"), SIZE, timeout_seconds),
        tuple(scenarios),
        tuple(transports),
        size,
        repeat,
        timedelta(seconds=min(60.0, timeout_seconds)),
        shared,
        arenas,
        keep_trace is not None,
    )
    jobs = [Job(_label(rank), rank_main, (rank, setup)) for rank in range(SIZE)]
    told: list[Told] = run_jobs(jobs, timeout=timeout_seconds, progress=progress)
    if keep_trace is not None:
        rows = {rank: one.recorded for rank, one in enumerate(told)}
        origin = f"measured on this machine, {scenarios[0]}, {told[0].recorded_name}"
        keep_trace(trace_of(rows, origin, told[0].plan["digest"]), told[0].plan)
    return {
        "shape": [size, size],
        "dtype": "bfloat16",
        "repeat": repeat,
        "transports": list(transports),
        "scenarios": {
            scenario: _report(scenario, size, put_together([one.samples[scenario] for one in told]))
            for scenario in scenarios
        },
    }


def cases_of(scenario: str, size: int) -> list[Case]:
    """The cases that a scenario measures side by side.

    Raises:
        ConfigError: There is no such scenario.
    """
    if scenario == "tp4":
        return [Case("tp4", ((size, size),))]
    if scenario == "tp2dp2":
        return [Case("tp2dp2", ((size, size),), replicas=2)]
    if scenario == "small-tensors":
        shapes = small_shapes(max(20, _SMALL_TENSORS * size // FULL_SIZE), _SMALL_NBYTES * size // FULL_SIZE)
        # As wide as most bytes of the small ones are, so that runs of memory are as long and only the number differs.
        numel = sum(rows * columns for rows, columns in shapes)
        return [Case("many", shapes), Case("one", ((-(-numel // (SOURCES * _ONE_WIDTH)) * SOURCES, _ONE_WIDTH),))]
    raise ConfigError(f"There is no scenario {scenario!r}; choose from {', '.join(SCENARIOS)}.")


def small_shapes(count: int, nbytes: int) -> tuple[tuple[int, int], ...]:
    """Shapes of bf16 tensors between 4 KiB and 8 MiB, as square as powers of two allow, about ``nbytes`` in all.

    Tensor i of n, in order of size, has 4 KiB * 2048 ** ((i / n) ** power), where power is what makes the sum right.
    They are then mixed, so that neighbours differ in size.
    """
    low, high = 0.05, 64.0
    for _ in range(60):
        power = (low + high) / 2
        low, high = (power, high) if sum(_sizes(count, power)) > nbytes else (low, power)
    sizes = _sizes(count, (low + high) / 2)
    shapes = []
    for at in range(count):
        size = sizes[at * 787 % count]  # 787 is prime: every size once
        columns = 256
        while columns < 2048 and 2 * columns * columns < size:
            columns *= 2
        shapes.append((max(8, round(size / (2 * columns) / 8) * 8), columns))
    return tuple(shapes)


def _sizes(count: int, power: float) -> list[float]:
    return [4096 * 2048 ** ((at / (count - 1)) ** power) for at in range(count)]


def _label(rank: int) -> str:
    return f"source {rank}" if rank < SOURCES else f"destination {rank - SOURCES}"


# -- one rank ----------------------------------------------------------------------------------------------------------


@dataclass
class Told:
    """What one rank tells the leader."""

    samples: dict[str, dict[str, RankSamples]] = field(default_factory=dict)
    """By scenario and operation."""
    recorded: list[Row] = field(default_factory=list)
    """What it did in the recorded run, if there was one."""
    recorded_name: str = ""
    plan: dict[str, Any] = field(default_factory=dict)
    """What was followed then, as JSON; of rank 0."""


def rank_main(say: Callable[..., None], rank: int, setup: Setup) -> Told:
    """Measure every scenario as one rank."""
    torch.set_num_threads(1)
    store = dist.TCPStore(setup.host, setup.port, None, is_master=False, timeout=setup.timeout, wait_for_workers=False)
    told = Told()
    for scenario in setup.scenarios:
        say(f"{scenario}: connecting", aloud=rank == 0)
        operations = _operations(scenario, rank, setup, dist.PrefixStore(scenario, store))
        say(f"{scenario}: measuring {len(operations)} operations", aloud=rank == 0)
        told.samples[scenario] = measure(operations, rank, setup.tokens, repeat=setup.repeat)
        refits = [operation for operation, _ in operations if isinstance(operation, Refit)]
        if setup.records and scenario == setup.scenarios[0]:
            setup.tokens.meet(rank)
            refit = next((operation for operation in refits if operation.name == "reshard_gloo"), refits[0])
            told.recorded_name = refit.name
            told.recorded = refit.recorded_run()
            told.plan = refit.plan.to_json() if rank == 0 else {}
    setup.tokens.meet(rank)  # nobody closes what others still use
    return told


def _operations(scenario: str, rank: int, setup: Setup, store: dist.Store) -> list[tuple[Operation, Memory]]:
    cases = cases_of(scenario, setup.size)
    flat = torch.zeros(max(case.numel(rank) for case in cases), dtype=WORD)
    private, landing = (flat, None) if rank < SOURCES else (None, flat)
    memories = [Memory(case, rank, landing=landing, private=private, shared=setup.shared) for case in cases]
    if scenario == "small-tensors":
        return [pair for memory in memories for pair in _small(memory, setup, store)]
    return [(operation, memories[0]) for operation in _one_tensor(memories[0], setup, store)]


def _refits(
    memory: Memory, setup: Setup, store: dist.Store, wanted: Mapping[str, Mapping[str, Any]]
) -> list[tuple[Operation, Memory]]:
    made: list[tuple[Operation, Memory]] = []
    for name, options in wanted.items():
        if options["transport"] in setup.transports:
            group = gloo_group(store, name, memory.rank, SIZE, setup.timeout)
            made.append((Refit(name, group, memory, timeout=setup.timeout, **options), memory))
    return made


def _one_tensor(memory: Memory, setup: Setup, store: dist.Store) -> list[Operation]:
    timeout, with_shm = setup.timeout, "shm" in setup.transports
    groups = Groups(store, memory.rank, timeout)
    operations: list[Operation] = [
        UsualWay(f"{form}{suffix}", groups, memory, form, chunk, timeout)
        for form in FORMS
        for suffix, chunk in _WHOLE_OR_CHUNKS.items()
    ]
    if with_shm:
        transport = ShmTransport(dist.PrefixStore("usual", store), memory.rank, SIZE, timeout=timeout)
        operations += [
            UsualWayShm(f"gather_broadcast_shm{suffix}", transport, memory, chunk, timeout)
            for suffix, chunk in _WHOLE_OR_CHUNKS.items()
        ]
    operations += [operation for operation, _ in _refits(memory, setup, store, _REFITS)]
    if with_shm:
        operations += [
            BarePull("bare_pull", setup.tokens, memory),
            BareStaged("bare_staged", setup.tokens, memory, setup.arenas),
        ]
    return [*operations, Memcpy("memcpy", memory)]


def _small(memory: Memory, setup: Setup, store: dist.Store) -> list[tuple[Operation, Memory]]:
    kinds = {f"{memory.case.name}_{name.removeprefix('reshard_')}": _REFITS[name] for name in _SMALL_REFITS}
    return _refits(memory, setup, store, kinds)


_WHOLE_OR_CHUNKS = {"/whole": None, "/chunks": CHUNK_NBYTES}
_REFITS: dict[str, dict[str, Any]] = {
    "point_to_point_gloo": {"strategy": "point-to-point", "transport": "torch_p2p", "shared": False},
    "reshard_gloo": {"transport": "torch_p2p", "shared": False},
    "reshard_shm": {"transport": "shm", "shared": True},
    "reshard_shm_private": {"transport": "shm", "shared": False},
    "reshard_shm_sum": {"transport": "shm", "shared": True, "verify": "sum"},
    "reshard_shm_fingerprint": {"transport": "shm", "shared": True, "verify": "fingerprint"},
}
_SMALL_REFITS = ("reshard_gloo", "reshard_shm", "reshard_shm_private")

# -- the report --------------------------------------------------------------------------------------------------------


def _report(scenario: str, size: int, figures: dict[str, Figures]) -> dict[str, Any]:
    cases = cases_of(scenario, size)
    report: dict[str, Any] = {
        "tensors": len(cases[0].shapes),
        "nbytes": cases[0].nbytes,
        "replicas": cases[0].replicas,
    }
    pairs: Sequence[tuple[str, str]] = RATIOS
    reach: Mapping[str, Any] = REACH if scenario == "tp4" else {}
    if scenario == "small-tensors":
        reach = {"cpu_seconds_ratio": SMALL_REACH}
        pairs = [(name, f"one_{name.removeprefix('many_')}") for name in figures if name.startswith("many_")]
        report["cpu_seconds_ratio"] = {
            many.removeprefix("many_"): figures[many].median_cpu_seconds / figures[one].median_cpu_seconds
            for many, one in pairs
        }
    else:
        report["whole_or_chunks"] = {name: figure.median_seconds for name, figure in figures.items() if "/" in name}
        figures = _choose(figures)
        fastest = min(FORMS, key=lambda form: figures[form].median_seconds)
        figures["gather_broadcast"] = figures[fastest]
        report["fastest_usual_way"] = fastest
    report["ratios"] = {
        f"{a} / {b}": figures[a].median_seconds / figures[b].median_seconds
        for a, b in pairs
        if a in figures and b in figures
    }
    if reach and size == FULL_SIZE:
        report["reach"] = dict(reach)
    columns: dict[str, Callable[[Figures], Any]] = {
        "seconds": lambda f: f.median_seconds,
        "seconds_range": lambda f: [min(f.seconds), max(f.seconds)],
        "cpu_seconds": lambda f: f.median_cpu_seconds,
        "wire_nbytes": lambda f: f.wire_nbytes,
        "peak_extra_nbytes": lambda f: f.peak_extra_nbytes,
        "compared": lambda f: list(f.compared),
    }
    return report | {
        column: {name: value(figure) for name, figure in figures.items()} for column, value in columns.items()
    }


def _choose(figures: Mapping[str, Figures]) -> dict[str, Figures]:
    """Keep the faster of whole and in chunks, under the name without the way."""
    chosen: dict[str, Figures] = {}
    for name, figure in figures.items():
        stem = name.split("/")[0]
        if stem not in chosen or figure.median_seconds < chosen[stem].median_seconds:
            chosen[stem] = figure
    return chosen
