"""Simulator: a schedule, a topology and costs -> a trace of what every rank would do when, on a clock of its own.

Each rank is carried out as a program over a transport would be: copies within the rank, then its operations in the
order of rounds, with receives posted ahead, and with what it hands on over the network posted some rounds early. A rank
does one thing at a time: it packs a bucket (once for all its receivers, while a slot holds it), posts it and goes on;
or it waits for one and unpacks it. Meanwhile messages move by themselves:

- a message departs once both ends have posted it, and its port, or its rank's fast link, has sent what came before;
- it arrives after the latency, at the rate of the slower end, in turn with what else arrives at that port;
- a receive is posted at most ``depth`` ahead, and a packed slot is used again when all that was sent from it has left.

Left out: that links slow each other down beyond the ports, that memory for what is handed on may run short, and the
time in which ranks find that all are here.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from reshard.errors import ScheduleError
from reshard.schedule.trace import Trace, TraceEvent
from reshard.simulate.links import Links, Way

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from reshard.schedule.schedule import Operation, Schedule
    from reshard.schedule.trace import Kind
    from reshard.simulate.costs import Costs
    from reshard.topology.topology import Topology


def simulate(schedule: Schedule, topology: Topology, costs: Costs, *, post_early: bool = True) -> Trace:
    """Say when every rank would do what.

    Args:
        schedule: What is carried out; every rank's part is expanded.
        topology: What joins the ranks; it may be another one than was planned for.
        costs: Of copies and messages.
        post_early: Whether what goes over the network is posted some rounds before its own.

    Returns:
        A trace in seconds from the moment at which all ranks are here. Equal arguments give an equal trace.

    Raises:
        ConfigError: The topology does not list a rank of the plan.
        ScheduleError: Ranks would wait for each other for ever. No schedule of ours is like that.
    """
    return _Simulation(schedule, topology, costs, post_early=post_early).run()


@dataclass
class _Signal:
    """Something that happens once, and who goes on then."""

    has_happened: bool = False
    waiting: list[Callable[[], None]] = field(default_factory=list)


@dataclass
class _Message:
    """A bucket on its way over one edge; it departs when both ends have posted it."""

    sender: int
    receiver: int
    nbytes: int
    round: int
    posted: int = 0
    left: _Signal = field(default_factory=_Signal)
    landed: _Signal = field(default_factory=_Signal)


class _Simulation:
    """The clock, what is due on it, and the messages of every pair in order."""

    def __init__(self, schedule: Schedule, topology: Topology, costs: Costs, *, post_early: bool) -> None:
        self._schedule, self._topology, self._costs = schedule, topology, costs
        self._links = Links(topology, costs)
        self._now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._events: list[TraceEvent] = []
        self._messages: dict[tuple[int, int], list[_Message]] = {}
        self._ways: dict[tuple[int, int], Way] = {}
        self._local_nbytes = _local_nbytes(schedule)
        self._running = 0
        self._early_rounds = schedule.early_rounds if post_early else 0

    def run(self) -> Trace:
        for rank in range(self._schedule.plan.size):
            self._running += 1
            self._at(0.0, partial(self._resume, self._program(rank)))
        while self._due:
            self._now, _, then = heapq.heappop(self._due)
            then()
        if self._running:
            raise ScheduleError(
                f"After {self._now} s {self._running} ranks of this schedule wait for each other for ever: its rounds "
                f"are not an order in which they can all go on."
            )
        early = f", network sends up to {self._early_rounds} rounds early" if self._early_rounds else ""
        origin = f"simulated, event by event, on {self._topology.name}{early}"
        return Trace(tuple(self._events), origin, self._schedule.plan.digest)

    # -- the clock -------------------------------------------------------------------------------------------------

    def _at(self, time: float, then: Callable[[], None]) -> None:
        self._count += 1  # equal times keep the order in which they were asked for
        heapq.heappush(self._due, (time, self._count, then))

    def _resume(self, program: Generator[float | _Signal, None, None]) -> None:
        """Carry a rank's program on to where it has to wait: some seconds, or for a signal."""
        for wanted in program:
            if isinstance(wanted, float):
                if wanted:
                    self._at(self._now + wanted, lambda: self._resume(program))
                    return
            elif not wanted.has_happened:
                wanted.waiting.append(lambda: self._resume(program))
                return
        self._running -= 1

    def _happen(self, signal: _Signal) -> None:
        signal.has_happened = True
        for then in signal.waiting:
            then()

    def _note(
        self, rank: int, kind: Kind, peer: int | None, round_: int | None, span: tuple[float, float], n: int
    ) -> None:
        if span[1] > span[0] or n:
            self._events.append(TraceEvent(rank, kind, peer, round_, *span, n))

    # -- messages --------------------------------------------------------------------------------------------------

    def _message(self, sender: int, receiver: int, at: int, op: Operation) -> _Message:
        """The ``at``-th message of a pair, whichever end comes first."""
        line = self._messages.setdefault((sender, receiver), [])
        if at == len(line):
            line.append(_Message(sender, receiver, op.bucket.nbytes, op.round))
        return line[at]

    def _post(self, message: _Message) -> None:
        message.posted += 1
        if message.posted < 2:
            return
        pair = message.sender, message.receiver
        way = self._ways.setdefault(pair, self._links.way(*pair))
        start, stop = way.out.take(self._now, message.nbytes)
        self._note(message.sender, "send", message.receiver, message.round, (start, stop), message.nbytes)
        self._at(stop, lambda: self._happen(message.left))
        # its last byte has to be here before it has arrived; an end faster than the sender's is in use only so long
        first, last = start + way.latency_seconds, stop + way.latency_seconds
        self._at(max(first, last - way.into.seconds(message.nbytes)), lambda: self._arrive(message, way))

    def _arrive(self, message: _Message, way: Way) -> None:
        span = way.into.take(self._now, message.nbytes)
        self._note(message.receiver, "recv", message.sender, message.round, span, message.nbytes)
        self._at(span[1], lambda: self._happen(message.landed))

    # -- ranks -----------------------------------------------------------------------------------------------------

    def _program(self, rank: int) -> Generator[float | _Signal, None, None]:
        """What a rank does: yields the seconds that something takes, or a signal that it waits for."""
        schedule, costs = self._schedule, self._costs
        depth, early = schedule.size.depth, self._early_rounds
        order = _in_order(schedule.for_rank(rank), early)
        receives = [op for _, op in order if op.kind == "recv"]
        numbers: dict[tuple[int, int], int] = {}
        posted: deque[_Message] = deque()
        slots: OrderedDict[tuple[int, int], list[_Message]] = OrderedDict()
        open_sends: deque[tuple[When, _Message]] = deque()

        def next_message(op: Operation) -> _Message:
            pair = (rank, op.peer) if op.kind == "send" else (op.peer, rank)
            numbers[pair] = numbers.get(pair, -1) + 1
            return self._message(*pair, numbers[pair], op)

        yield from self._copy(rank, "copy", None, self._local_nbytes.get(rank, 0))
        ahead = 0
        for when, op in order:
            while ahead < len(receives) and len(posted) < depth:
                message = next_message(receives[ahead])
                posted.append(message)
                ahead += 1
                self._post(message)
            key = op.bucket.stream, op.bucket.index
            if op.kind == "recv":
                message = posted.popleft()
                began = self._now
                yield message.landed
                self._note(rank, "wait", op.peer, op.round, (began, self._now), 0)
                yield costs.message_seconds
                yield from self._copy(rank, "unpack", op.round, op.bucket.nbytes)
                continue
            if not op.forwarded and key in slots:
                slots.move_to_end(key)
            elif not op.forwarded:
                if len(slots) == depth:
                    for message in slots.popitem(last=False)[1]:
                        yield message.left
                slots[key] = []
                yield from self._copy(rank, "pack", op.round, op.bucket.nbytes)
            while early and len(open_sends) >= depth and open_sends[0][0] < when:
                yield open_sends.popleft()[1].left
            yield costs.message_seconds
            message = next_message(op)
            open_sends.append(((op.round, op.step), message))
            if not op.forwarded:
                slots[key].append(message)
            self._post(message)

    def _copy(self, rank: int, kind: Kind, round_: int | None, nbytes: int) -> Generator[float, None, None]:
        began = self._now
        yield nbytes / self._costs.copy_bytes_per_second
        self._note(rank, kind, None, round_, (began, self._now), nbytes)


When = tuple[int, int]
"""Round and step."""


def _in_order(operations: tuple[Operation, ...], early_rounds: int) -> list[tuple[When, Operation]]:
    """By when they are posted: what is handed on over the network some rounds early; a pair keeps its order."""
    order: list[tuple[When, Operation]] = []
    latest: dict[int, When] = {}
    for op in operations:
        when = op.round, op.step
        if op.kind == "send":
            if op.forwarded and op.step == 0:
                early = op.round - early_rounds, 0
                when = max(early, latest.get(op.peer, early))
            latest[op.peer] = when
        order.append((when, op))
    return sorted(order, key=lambda entry: (entry[0], entry[1].kind == "recv"))


def _local_nbytes(schedule: Schedule) -> dict[int, int]:
    """Bytes that each rank copies within its own memory."""
    copied: dict[int, int] = {}
    for route in schedule.plan.routes:
        for sender, receiver in route.edges:
            if sender == receiver:
                copied[sender] = copied.get(sender, 0) + route.nbytes
    return copied
