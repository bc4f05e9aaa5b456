"""Expected: the rows of the local benchmark as the simulator predicts them from a calibration of the machine.

Refits are simulated from their own plan and schedule. The usual ways and the bare transfers are written down as the
copies and messages that they consist of; gloo's broadcast is a binomial tree, of which two are under way in a group.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.bench.bare import BareStaged, rings_of
from reshard.bench.case import DTYPE, SIZE, SOURCES
from reshard.bench.local import CHUNK_NBYTES, cases_of
from reshard.bench.usual_way import FORMS
from reshard.layouts.layout import Layout
from reshard.layouts.manifest import Manifest
from reshard.layouts.mesh import Mesh
from reshard.plan.plan import plan_refit
from reshard.schedule.schedule import plan_schedule
from reshard.simulate.simulator import simulate
from reshard.simulate.tasks import Tasks
from reshard.topology.topology import ONE_HOST

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from reshard.bench.case import Case
    from reshard.plan.plan import Plan
    from reshard.simulate.calibration import Calibration
    from reshard.simulate.costs import CopyKind, Costs

DESTINATION_RANKS = range(SOURCES, SIZE)
_UNDER_WAY = 4
_GROUP_THREADS = 2
_KEPT_NBYTES = 32 << 20
"""Up to this glibc keeps what is freed for the next who asks (DEFAULT_MMAP_THRESHOLD_MAX of its malloc, on 64 bits)."""


def expected_local(scenario: str, size: int, machine: Calibration) -> dict[str, float]:
    """Seconds of each row of ``reshard bench local``, by name; the usual ways also by form, whole and in chunks.

    Args:
        scenario: One of ``reshard.bench.SCENARIOS``.
        size: As the benchmark has it.
        machine: What was measured of it.
    """
    cases = cases_of(scenario, size)
    if scenario == "small-tensors":
        kinds = ("gloo", "shm", "shm_private")
        return {
            f"{case.name}_{kind}": refit_seconds(plan_of(case), machine, f"reshard_{kind}")
            for case in cases
            for kind in kinds
        }
    (case,) = cases
    rows = _usual_rows(case, machine)
    plan, direct = plan_of(case), plan_of(case, "point-to-point")
    rows["point_to_point_gloo"] = refit_seconds(direct, machine, "reshard_gloo")
    for name in ("reshard_gloo", "reshard_shm", "reshard_shm_private"):
        rows[name] = refit_seconds(plan, machine, name)
    for kind, rate in (("sum", machine.sum), ("fingerprint", machine.fingerprint)):
        rows[f"reshard_shm_{kind}"] = rows["reshard_shm"] + _compare_seconds(plan, machine, rate)
    return rows | _bare_rows(case, machine)


def plan_of(case: Case, strategy: str = "reshard") -> Plan:
    """The plan that the benchmark's ranks agree on."""
    source = Mesh({"fsdp": SOURCES}, range(SOURCES))
    destination = Mesh({"dp": case.replicas, "tp": case.tp}, DESTINATION_RANKS)

    def side(mesh: Mesh, placement: tuple[str | None, ...]) -> Manifest:
        layouts = {
            f"tensor{at:04}": Layout(shape, str(DTYPE).removeprefix("torch."), mesh, placement)
            for at, shape in enumerate(case.shapes)
        }
        return Manifest.from_layouts(layouts)

    return plan_refit(side(source, ("fsdp", None)), side(destination, (None, "tp")), strategy=strategy)


def refit_seconds(plan: Plan, machine: Calibration, name: str) -> float:
    """Of a refit on one host over the transport that the row's name says."""
    costs = machine.costs("gloo" if name.endswith("gloo") else "shm")
    trace = simulate(plan_schedule(plan), ONE_HOST, costs, reads_in_place=name == "reshard_shm")
    return trace.seconds


def _compare_seconds(plan: Plan, machine: Calibration, rate: float) -> float:
    """Both ends of every pair sum what went between them."""
    tasks = Tasks(ONE_HOST, machine.costs("shm"))
    sums: dict[int, int] = {}
    for pair, nbytes in plan.pair_nbytes().items():
        for rank in pair:
            sums[rank] = sums.get(rank, 0) + nbytes
    for rank, nbytes in sums.items():
        tasks.copy(rank, nbytes / rate)
    return tasks.seconds()


# -- the usual ways ----------------------------------------------------------------------------------------------------


def _usual_rows(case: Case, machine: Calibration) -> dict[str, float]:
    rows: dict[str, float] = {}
    for suffix, chunk_nbytes in (("/whole", None), ("/chunks", CHUNK_NBYTES)):
        for form in FORMS:
            rows[f"{form}{suffix}"] = _Usual(case, machine, chunk_nbytes).seconds(form)
        rows[f"gather_broadcast_shm{suffix}"] = _usual_shm(case, machine, in_chunks=chunk_nbytes is not None)
    for stem in (*FORMS, "gather_broadcast_shm"):
        rows[stem] = min(rows[f"{stem}/whole"], rows[f"{stem}/chunks"])
    rows["gather_broadcast"] = min(rows[form] for form in FORMS)
    return rows


class GlooGroup:
    """Broadcasts of one group in order.

    Args:
        tasks: Where their messages are added.
        members: The root first, then the others as the group counts them from there.
    """

    def __init__(self, tasks: Tasks, members: Sequence[int]) -> None:
        self._tasks, self._members = tasks, tuple(members)
        self._edges = _binomial_tree(len(self._members))
        self._before: list[list[int]] = []

    def broadcast(self, nbytes: int, after: Mapping[int, Iterable[int]]) -> dict[int, int]:
        """Add one.

        Args:
            nbytes: How much.
            after: By rank: what must be done before it takes part.

        Returns:
            By rank the task that is done when it has the bytes; of the root, the last of its messages.
        """
        has: dict[int, int] = {}
        threads = self._before[-_GROUP_THREADS] if len(self._before) >= _GROUP_THREADS else []
        messages = []
        for at, to in self._edges:
            sender, receiver = self._members[at], self._members[to]
            before = [*after.get(sender, ()), *after.get(receiver, ()), *threads]
            if at and sender in has:
                before.append(has[sender])
            message = self._tasks.message(sender, receiver, nbytes, before)
            has[receiver] = message
            if not at:
                has[sender] = message
            messages.append(message)
        self._before.append(messages)
        return has


def allgather(tasks: Tasks, costs: Costs, ranks: Sequence[int], nbytes: int, before: Iterable[int]) -> list[int]:
    """Add gloo's allgather: it makes one flat tensor, gathers into that, and copies out of it.

    Args:
        tasks: Of the ranks.
        costs: Of copies.
        ranks: Who takes part.
        nbytes: Of each rank's part.
        before: What must be done before.

    Returns:
        The tasks after which the ranks have all parts.
    """
    flat_nbytes = len(ranks) * nbytes
    into: CopyKind = "fresh" if flat_nbytes > _KEPT_NBYTES else "run"
    faults = max(0.0, costs.copy_seconds(nbytes, into) - costs.copy_seconds(nbytes))
    own = [tasks.copy(rank, costs.copy_seconds(nbytes, into), before) for rank in ranks]
    done = []
    for rank in ranks:
        came = [tasks.message(peer, rank, nbytes, own) for peer in ranks if peer != rank]
        seconds = (len(ranks) - 1) * faults + costs.copy_seconds(flat_nbytes)
        done.append(tasks.copy(rank, seconds, came))
    return done


def _binomial_tree(size: int) -> list[tuple[int, int]]:
    """Who sends to whom in gloo's broadcast, in order; 0 is the root.

    >>> _binomial_tree(5)
    [(0, 4), (0, 2), (0, 1), (2, 3)]
    """
    edges = []
    bits = (size - 1).bit_length()
    for bit in reversed(range(bits)):
        step = 1 << bit
        edges += [(at, at + step) for at in range(0, 1 << bits, 2 * step) if at + step < size]
    return edges


class _Usual:
    """One form of the usual way: chunks of every source's rows, some under way at a time."""

    def __init__(self, case: Case, machine: Calibration, chunk_nbytes: int | None) -> None:
        self._costs = machine.costs("gloo")
        self._tasks = Tasks(ONE_HOST, self._costs)
        ((rows, columns),) = case.shapes
        rows, row_nbytes = rows // SOURCES, columns * DTYPE.itemsize
        step = rows if chunk_nbytes is None else min(rows, max(1, chunk_nbytes // row_nbytes))
        self._chunks = [(min(rows, at + step) - at) * row_nbytes for at in range(0, rows, step)]
        self._tp = case.tp
        self._run_nbytes = _run_nbytes(case)
        self._depth = min(_UNDER_WAY, len(self._chunks))

    def seconds(self, form: str) -> float:
        roots = range(SOURCES) if form == "own_shards" else range(1)
        groups = [GlooGroup(self._tasks, [root, *DESTINATION_RANKS]) for root in roots]
        cut: dict[int, list[int]] = {rank: [] for rank in DESTINATION_RANKS}
        sent: list[int] = []
        gathered: list[int] = []
        for index, nbytes in enumerate(self._chunks):
            ready = self._gathered(form, index, nbytes, sent, gathered)
            for source in range(SOURCES):
                root = source if form == "own_shards" else 0
                after = {
                    rank: done[-SOURCES * self._depth :][:1] if index >= self._depth else []
                    for rank, done in cut.items()
                }
                after[root] = ready[source]
                has = groups[root if form == "own_shards" else 0].broadcast(nbytes, after)
                sent.append(has[root])
                for rank in DESTINATION_RANKS:
                    seconds = self._costs.copy_seconds(nbytes // self._tp, "strided", run_nbytes=self._run_nbytes)
                    cut[rank].append(self._tasks.copy(rank, seconds, [has[rank]]))
        return self._tasks.seconds()

    def _gathered(self, form: str, index: int, nbytes: int, sent: list[int], gathered: list[int]) -> list[list[int]]:
        """By source: what must be done before its chunk can be broadcast."""
        if form == "own_shards":
            return [[] for _ in range(SOURCES)]
        free = [sent[SOURCES * (index - self._depth)]] if index >= self._depth else []
        if form == "gather":
            others = [[self._tasks.message(source, 0, nbytes, free)] for source in range(1, SOURCES)]
            return [[], *others]
        gathered[:] = allgather(self._tasks, self._costs, range(SOURCES), nbytes, [*free, *gathered])
        return [list(gathered) for _ in range(SOURCES)]


def _usual_shm(case: Case, machine: Calibration, *, in_chunks: bool) -> float:
    """A destination copies every shard whole, then cuts its columns out; in chunks its buffer stays warm."""
    costs = machine.costs("shm")
    tasks, run = Tasks(ONE_HOST, costs), _run_nbytes(case)
    for rank in DESTINATION_RANKS:
        whole = costs.copy_seconds(case.nbytes, "warm" if in_chunks else "lent")
        part = costs.copy_seconds(case.nbytes // case.tp, "warm" if in_chunks else "strided", run_nbytes=run)
        tasks.copy(rank, whole + part)
    return tasks.seconds()


def _run_nbytes(case: Case) -> int:
    """Of the columns that a destination takes of each row."""
    return case.shapes[0][1] // case.tp * DTYPE.itemsize


# -- bare transfers ----------------------------------------------------------------------------------------------------


def _bare_rows(case: Case, machine: Calibration) -> dict[str, float]:
    costs = machine.costs("shm")
    pull = Tasks(ONE_HOST, costs)
    for rank in DESTINATION_RANKS:
        pull.copy(rank, costs.copy_seconds(case.nbytes // case.tp, "lent", run_nbytes=_run_nbytes(case)))
    landed = case.nbytes * case.replicas
    return {
        "bare_pull": pull.seconds(),
        "bare_staged": _bare_staged(case, machine),
        "memcpy": landed / machine.copy_alone,
    }


def _bare_staged(case: Case, machine: Calibration) -> float:
    """Sources pack chunks for every block of columns, two ahead of those who copy them out."""
    costs = machine.costs("shm")
    tasks = Tasks(ONE_HOST, costs)
    rings = rings_of(case)
    shard = case.nbytes // SOURCES // len(rings)
    count = -(-shard // BareStaged.SLOT_NBYTES)
    taken: dict[tuple[int, int, int], list[int]] = {}
    for index in range(count):
        nbytes = min(BareStaged.SLOT_NBYTES, shard - index * BareStaged.SLOT_NBYTES)
        seconds = costs.copy_seconds(nbytes, "staging")
        for at, ring in enumerate(rings):
            for source in range(SOURCES):
                free = taken.get((source, at, index - BareStaged.SLOTS), [])
                packed = tasks.copy(source, seconds, free)
                taken[source, at, index] = [tasks.copy(rank, seconds, [packed]) for rank in ring.readers]
    return tasks.seconds()
