"""Simulator: a schedule, a topology and costs -> a trace of what every rank would do when, on a clock of its own.

Each rank is carried out as a program over a transport would be: copies within the rank, then its operations in the
order of rounds, with receives posted ahead, and with what it hands on over the network posted some rounds early. A rank
does one thing at a time: it packs a bucket (once for all its receivers, while a slot holds it), posts it and goes on;
or it waits for one and unpacks it. Where transports tell which message is done first (``Costs.watched``), a rank that
packs nothing acts on whichever comes first (``arrivals``). Meanwhile messages move by themselves:

- a message departs once both ends have posted it, and its port, or its rank's fast link, has sent what came before;
- it arrives after the latency, at the rate of the slower end, in turn with what else arrives at that port;
- a receive is posted at most ``depth`` ahead, and a packed slot is used again when all that was sent from it has left.

Where ranks share the cores of one machine (``Costs.cpu``), whatever is done at once goes on slower, and the bytes of
messages take cores too (``machine``).

Left out: that links slow each other down beyond the ports, that memory for what is handed on may run short, and the
time in which ranks find that all are here.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from reshard.errors import ScheduleError
from reshard.schedule.trace import Trace, TraceEvent
from reshard.simulate.arrivals import Arrivals, give_slots, key_of, last_uses
from reshard.simulate.copies import Copies
from reshard.simulate.machine import Machine

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from reshard.plan.strings import Item
    from reshard.schedule.schedule import Operation, Schedule
    from reshard.schedule.trace import Kind
    from reshard.simulate.arrivals import When
    from reshard.simulate.costs import Costs
    from reshard.topology.topology import Topology


def simulate(
    schedule: Schedule, topology: Topology, costs: Costs, *, post_early: bool = True, reads_in_place: bool = False
) -> Trace:
    """Say when every rank would do what.

    Args:
        schedule: What is carried out; every rank's part is expanded.
        topology: What joins the ranks; it may be another one than was planned for.
        costs: Of copies and messages.
        post_early: Whether what goes over the network is posted some rounds before its own.
        reads_in_place: Whether ranks of a domain read a source's weights where they lie, in one copy, as they do where
            these lie in shared memory.

    Returns:
        A trace in seconds from the moment at which all ranks are here. Equal arguments give an equal trace.

    Raises:
        ConfigError: The topology does not list a rank of the plan.
        ScheduleError: Ranks would wait for each other for ever. No schedule of ours is like that.
    """
    return _Simulation(schedule, topology, costs, post_early=post_early, reads_in_place=reads_in_place).run()


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


Program: TypeAlias = "Generator[float | _Signal, None, None]"
"""What a rank does: seconds that it is busy, and signals that it waits for."""


class _Simulation:
    """The machine, and the messages of every pair in order."""

    def __init__(
        self, schedule: Schedule, topology: Topology, costs: Costs, *, post_early: bool, reads_in_place: bool
    ) -> None:
        self._schedule, self._topology, self._costs = schedule, topology, costs
        self._machine = Machine(topology, costs)
        self._copies = Copies(schedule.plan, costs)
        self._in_place = _read_in_place(schedule, topology) if reads_in_place else {}
        self._events: list[TraceEvent] = []
        self._messages: dict[tuple[int, int], list[_Message]] = {}
        self._local_nbytes = _local_nbytes(schedule)
        self._running = 0
        self._early_rounds = schedule.early_rounds if post_early else 0

    def run(self) -> Trace:
        for rank in range(self._schedule.plan.size):
            self._running += 1
            self._machine.clock.at(0.0, partial(self._resume, self._program(rank)))
        self._machine.clock.run()
        if self._running:
            raise ScheduleError(
                f"After {self._now} s {self._running} ranks of this schedule wait for each other for ever: its rounds "
                f"are not an order in which they can all go on."
            )
        early = f", network sends up to {self._early_rounds} rounds early" if self._early_rounds else ""
        origin = f"simulated, event by event, on {self._topology.name}{early}"
        return Trace(tuple(self._events), origin, self._schedule.plan.digest)

    # -- the clock -------------------------------------------------------------------------------------------------

    @property
    def _now(self) -> float:
        return self._machine.clock.now

    def _resume(self, program: Program) -> None:
        """Carry a rank's program on to where it has to wait: some seconds, or for a signal."""
        for wanted in program:
            if isinstance(wanted, float):
                if wanted:
                    self._machine.processor.work(wanted, lambda: self._resume(program))
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

        def left(span: tuple[float, float]) -> None:
            self._note(message.sender, "send", message.receiver, message.round, span, message.nbytes)
            self._happen(message.left)

        def landed(span: tuple[float, float]) -> None:
            self._note(message.receiver, "recv", message.sender, message.round, span, message.nbytes)
            self._happen(message.landed)

        self._machine.send(message.sender, message.receiver, message.nbytes, left=left, landed=landed)

    # -- ranks -----------------------------------------------------------------------------------------------------

    def _program(self, rank: int) -> Program:
        """What a rank does: yields the seconds that something takes, or a signal that it waits for."""
        schedule, costs = self._schedule, self._costs
        operations = tuple(op for op in schedule.for_rank(rank) if not self._is_read(rank, op))
        kept = self._local_nbytes.get(rank, 0)
        yield from self._copy(rank, "copy", None, kept, costs.copy_seconds(kept) if kept else 0.0)
        arrivals = self._arrivals(rank, operations)
        yield from self._in_order(rank, operations) if arrivals is None else self._as_they_come(rank, arrivals)
        for (sender, receiver), items in self._in_place.items():
            if receiver == rank:
                nbytes = sum(box.numel * schedule.plan.specs[tensor].itemsize for tensor, box in items)
                seconds = self._copies.read_seconds(sender, rank, items)
                yield from self._copy(rank, "copy", None, nbytes, seconds)

    def _in_order(self, rank: int, operations: tuple[Operation, ...]) -> Program:
        """One operation after the other, each when its turn comes."""
        depth, early = self._schedule.size.depth, self._early_rounds
        order = _in_order(operations, early)
        handed_on = last_uses(operations)
        receives = [op for _, op in order if op.kind == "recv"]
        numbers: dict[tuple[int, int], int] = {}
        posted: deque[_Message] = deque()
        slots: OrderedDict[tuple[int, int], list[_Message]] = OrderedDict()
        open_sends: deque[tuple[When, _Message]] = deque()
        ahead = 0
        for when, op in order:
            while ahead < len(receives) and len(posted) < depth:
                message = self._next_message(rank, receives[ahead], numbers)
                posted.append(message)
                ahead += 1
                self._post(message)
            key = key_of(op)
            if op.kind == "recv":
                message = posted.popleft()
                began = self._now
                yield message.landed
                self._note(rank, "wait", op.peer, op.round, (began, self._now), 0)
                yield from self._finish(rank, op, is_handed_on=key in handed_on)
                continue
            if not op.forwarded and key in slots:
                slots.move_to_end(key)
            elif not op.forwarded:
                if len(slots) == depth:
                    for message in slots.popitem(last=False)[1]:
                        yield message.left
                slots[key] = []
                yield from self._copy(rank, "pack", op.round, op.bucket.nbytes, self._pack_seconds(rank, op))
            while early and len(open_sends) >= depth and open_sends[0][0] < when:
                yield open_sends.popleft()[1].left
            yield self._message_seconds(rank, op.peer)
            message = self._next_message(rank, op, numbers)
            open_sends.append(((op.round, op.step), message))
            if not op.forwarded:
                slots[key].append(message)
            self._post(message)

    def _arrivals(self, rank: int, operations: tuple[Operation, ...]) -> Arrivals | None:
        """Set where a rank acts on whichever bucket comes first: it packs none, and one watched transport has all."""
        watched = self._costs.watched
        if watched == "none" or not self._early_rounds or not operations:
            return None
        if watched == "network" and not all(self._is_network(rank, op.peer) for op in operations):
            return None

        def lands(op: Operation) -> bool:
            return self._copies.is_in_place(rank, op.bucket.items, is_source=False)

        depth = self._schedule.size.depth
        slots, kept = give_slots(operations, depth, lands)
        for op in operations:
            if op.kind == "send" and (
                self._pack_seconds(rank, op) if not op.forwarded else key_of(op) not in kept and not lands(op)
            ):
                return None
        return Arrivals(operations, depth, slots)

    def _as_they_come(self, rank: int, arrivals: Arrivals) -> Program:
        """Whatever can go on does, as ``arrivals`` chooses; else wait for any message to land or leave."""
        handed_on = last_uses(arrivals.operations)
        numbers: dict[tuple[int, int], int] = {}
        done: deque[Operation] = deque()
        anything = _Signal()

        def watch(signal: _Signal, op: Operation) -> None:
            def then() -> None:
                done.append(op)
                if not anything.has_happened:
                    self._happen(anything)

            if signal.has_happened:
                then()
            else:
                signal.waiting.append(then)

        while not arrivals.is_done:
            while (op := arrivals.next_receive()) is not None:
                message = self._next_message(rank, op, numbers)
                self._post(message)
                watch(message.landed, op)
            while (op := arrivals.next_send()) is not None:
                yield self._message_seconds(rank, op.peer)
                message = self._next_message(rank, op, numbers)
                self._post(message)
                watch(message.left, op)
            if not done:
                anything, began = _Signal(), self._now
                yield anything
                self._note(rank, "wait", None, None, (began, self._now), 0)
            for op in tuple(done):
                done.popleft()
                if op.kind == "send":
                    arrivals.has_left(op)
                else:
                    yield from self._finish(rank, op, is_handed_on=key_of(op) in handed_on)
                    arrivals.has_come(op)

    def _next_message(self, rank: int, op: Operation, numbers: dict[tuple[int, int], int]) -> _Message:
        pair = (rank, op.peer) if op.kind == "send" else (op.peer, rank)
        numbers[pair] = numbers.get(pair, -1) + 1
        return self._message(*pair, numbers[pair], op)

    def _finish(self, rank: int, op: Operation, *, is_handed_on: bool) -> Program:
        """Take what has landed to where it belongs."""
        yield self._message_seconds(rank, op.peer)
        seconds = self._copies.unpack_seconds(
            rank,
            op.bucket.items,
            op.bucket.nbytes,
            is_network=self._is_network(rank, op.peer),
            is_handed_on=is_handed_on,
        )
        yield from self._copy(rank, "unpack", op.round, op.bucket.nbytes, seconds)

    def _pack_seconds(self, rank: int, op: Operation) -> float:
        is_network = self._is_network(rank, op.peer)
        return self._copies.pack_seconds(rank, op.bucket.items, op.bucket.nbytes, is_network=is_network)

    def _is_network(self, rank: int, peer: int) -> bool:
        return self._topology.domain_of(rank) != self._topology.domain_of(peer)

    def _message_seconds(self, rank: int, peer: int) -> float:
        cpu = self._costs.cpu
        if cpu is not None and cpu.network_message_seconds and self._is_network(rank, peer):
            return cpu.network_message_seconds
        return self._costs.message_seconds

    def _is_read(self, rank: int, op: Operation) -> bool:
        pair = (rank, op.peer) if op.kind == "send" else (op.peer, rank)
        return not op.forwarded and pair in self._in_place

    def _copy(self, rank: int, kind: Kind, round_: int | None, nbytes: int, seconds: float) -> Program:
        began = self._now
        yield seconds
        if seconds or self._costs.cpu is None:
            self._note(rank, kind, None, round_, (began, self._now), nbytes)


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


def _read_in_place(schedule: Schedule, topology: Topology) -> dict[tuple[int, int], list[Item]]:
    """What each receiver reads out of a sender's weights: of pairs inside a domain that hand nothing of it on."""
    plan, handed_on = schedule.plan, set()
    read: dict[tuple[int, int], list[Item]] = {}
    for route in plan.routes:
        senders, holders = {sender for sender, _ in route.edges}, plan.classes[route.route_class].holders
        for sender, receiver in route.edges:
            is_near = topology.domain_of(sender) == topology.domain_of(receiver)
            if sender != receiver and holders >> sender & 1 and is_near:
                read.setdefault((sender, receiver), []).extend(plan.route_items(route))
                if receiver in senders:
                    handed_on.add((sender, receiver))
    return {
        pair: sorted(items, key=lambda item: (item[0], item[1].start))
        for pair, items in sorted(read.items())
        if pair not in handed_on
    }
