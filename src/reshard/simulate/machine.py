"""Machine: what carries out work and messages on a simulated clock: the ranks' cores, their links, their ports.

A message leaves once its port, or its rank's fast link, has sent what came before; it arrives after the latency, at the
rate of the slowest end on its way, in turn with what else crosses the same leaves and arrives at that port. Where ranks
share the cores of one machine, its bytes also take a thread of the sender and one of the receiver, each of which
handles one message after the other; and over the network it goes on a TCP connection of its pair, which shares ports
with others (``sharing``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.simulate.links import Links, Way
from reshard.simulate.processor import Clock, Processor, Thread
from reshard.simulate.sharing import Sharing

if TYPE_CHECKING:
    from collections.abc import Callable

    from reshard.simulate.costs import Costs
    from reshard.topology.topology import Topology

Span = tuple[float, float]


class Machine:
    """All ranks of a topology under some costs.

    Args:
        topology: What joins the ranks.
        costs: Of copies and messages.
    """

    def __init__(self, topology: Topology, costs: Costs) -> None:
        self.clock = Clock()
        self.costs = costs
        self.processor = Processor(self.clock, costs.cpu.cores if costs.cpu else float("inf"))
        self._links = Links(topology, costs)
        self._sharing = Sharing(self.clock)
        self._ways: dict[tuple[int, int], Way] = {}
        self._threads: dict[int, Thread] = {}

    def send(
        self,
        sender: int,
        receiver: int,
        nbytes: int,
        *,
        left: Callable[[Span], None],
        landed: Callable[[Span], None],
    ) -> None:
        """Put a message on its way now.

        Args:
            sender: From whom.
            receiver: To whom.
            nbytes: How much.
            left: Called when the sender's memory is free again, with when its port or link was in use.
            landed: Called when all is there, with when the receiver's port or link was in use.
        """
        clock, pair = self.clock, (sender, receiver)
        way = self._ways.setdefault(pair, self._links.way(*pair))
        is_stream = way.is_network and self.costs.cpu is not None
        start, stop = (clock.now, clock.now) if is_stream else way.out.take(clock.now, nbytes)
        out_seconds, in_seconds = self._cpu_seconds(way, nbytes)
        gone, here = _Count(2), _Count(3)  # the link and the sender's thread; and for arriving the receiver's too

        def has_left() -> None:
            if gone.down():
                left((start, max(stop, clock.now)))

        def has_landed(span: Span) -> None:
            here.span = max(here.span, span)
            if here.down():
                landed((here.span[0], max(here.span[1], clock.now)))

        def arrive() -> None:
            span = way.into.take(clock.now, nbytes)
            clock.at(span[1], lambda: has_landed(span))

        def pass_on(at: int, first: float, last: float) -> None:
            """Go through what is on the way from its ``at``-th end on; the message's bytes come from first to last."""
            if at == len(way.through):
                into, latency = way.into.seconds(nbytes), way.latency_seconds
                clock.at(max(first + latency, last + latency - into), arrive)
                return
            end = way.through[at]
            due = max(first, last - end.seconds(nbytes))

            def take() -> None:
                start, stop = end.take(clock.now, nbytes)
                pass_on(at + 1, first + start - due, stop)  # its first byte too waited for what came before

            clock.at(due, take)

        def is_sent() -> None:
            has_left()
            has_landed((0.0, 0.0))

        def is_through(span: Span) -> None:
            nonlocal start, stop
            start, stop = span
            has_left()
            there = start + way.latency_seconds, stop + way.latency_seconds
            clock.at(there[1], lambda: has_landed(there))

        if is_stream:
            self._sharing.send(pair, (way.out, *way.through, way.into), nbytes, is_through)
        else:
            clock.at(stop, has_left)
            # its last byte has to be here before it has arrived; an end faster than the sender's is in use only so long
            pass_on(0, start, stop)
        if out_seconds or in_seconds:
            self._thread(sender).work(out_seconds, is_sent)
            self._thread(receiver).work(in_seconds, lambda: has_landed((0.0, 0.0)))
        else:
            is_sent()
            has_landed((0.0, 0.0))

    def _cpu_seconds(self, way: Way, nbytes: int) -> tuple[float, float]:
        cpu = self.costs.cpu
        if cpu is None:
            return 0.0, 0.0
        if way.is_network:
            return nbytes * cpu.network_send, nbytes * cpu.network_receive
        return nbytes * cpu.local_send, nbytes * cpu.local_receive

    def _thread(self, rank: int) -> Thread:
        return self._threads.setdefault(rank, Thread(self.processor))


class _Count:
    """Counts down to the last of several things that have to happen."""

    def __init__(self, things: int) -> None:
        self._left = things
        self.span: Span = (0.0, 0.0)

    def down(self) -> bool:
        self._left -= 1
        return not self._left
