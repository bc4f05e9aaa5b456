"""Mover: carries out one rank's sends and receives, in one of three ways.

in batches          NCCL: the posts of a round are one group, and waits order the stream
as they come        where a rank relays and its transport tells which message is done first
in order            else: one after the other, with as many receives posted ahead as there are slots
"""

from __future__ import annotations

import time
from collections import Counter, deque
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import TYPE_CHECKING

from reshard.errors import TransportError
from reshard.transports.copies import carry_out, wire_copies
from reshard.transports.operations import Receive, Send, due_of, key_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from reshard.schedule.schedule import Schedule
    from reshard.transports.base import Deadline, Ticket, Transport
    from reshard.transports.operations import Account, Slot

_OPEN_TO_ONE_PEER = 3
"""Sends that one peer may have open: enough for its link to have something to carry always."""


class Mover:
    """Carries out the operations of one rank, any number of times.

    Args:
        schedule: What they are part of.
        order: The operations, in the order in which they are carried out where each waits for its turn.
        in_batches: Whether the transports want the posts of a round together.
        early_rounds: How many rounds before its own a send may come in that order.
        account: Where it says what it has done.
        packed: Called with each send whose slot was just filled.
    """

    def __init__(
        self,
        schedule: Schedule,
        order: Sequence[Send | Receive],
        *,
        in_batches: bool,
        early_rounds: int,
        account: Account,
        packed: Callable[[Send], None] | None = None,
    ) -> None:
        self._schedule = schedule
        self._order = order
        self._receives = [op for op in order if isinstance(op, Receive)]
        self._early_rounds = early_rounds
        self._wants_batches = in_batches
        self._watched = None if in_batches else self._one_that_watches()
        self.account = account
        self._packed = packed

    def _one_that_watches(self) -> Transport | None:
        """The one transport of all operations, if it tells what is done first, and nothing has to be packed.

        Slots for packing are taken in the order of rounds.
        """
        transports = {id(op.link.transport): op.link.transport for op in self._order}
        packs = any(isinstance(op, Send) and op.pack is not None for op in self._order)
        if len(transports) != 1 or packs or not self._schedule.hops:
            return None
        (transport,) = transports.values()
        return transport if transport.watches else None

    def move(self, deadline: Deadline) -> None:
        """Carry out all of them once."""
        if self._wants_batches:
            self._in_batches(deadline)
        elif self._watched is not None:
            self._as_they_come(self._watched, deadline)
        else:
            self._in_order(deadline)
        for op in self._order:
            if op.slot is not None:
                op.slot.tickets.clear()

    def _in_batches(self, deadline: Deadline) -> None:
        """Post a round's send and receive together, and unpack a round while the next one is under way.

        Waits order the current stream and do not block the host, so packing, moving and unpacking of neighbouring
        rounds overlap on the device. No GPU has run this.
        """
        before: list[tuple[Receive, Ticket]] = []
        for _, operations in groupby(self._order, key=lambda op: op.when):
            now: list[tuple[Receive, Ticket]] = []
            mine = list(operations)
            taken = [receive.slot for receive, _ in before if receive.slot is not None]
            if any(op.forwards if isinstance(op, Send) else op.slot in taken for op in mine):
                for receive, ticket in before:
                    self._finish(receive, ticket, deadline)
                before = []
            for op in mine:
                if isinstance(op, Send):
                    self._pack(op, deadline)
            with ExitStack() as stack:
                for transport in {id(op.link.transport): op.link.transport for op in mine}.values():
                    stack.enter_context(transport.batch())
                for op in mine:
                    transport = op.link.transport
                    if isinstance(op, Receive):
                        self._drain(op.slot, deadline)
                        now.append((op, transport.post_recv(op.link.peer, op.nbytes, op.into)))
                    else:
                        self._post(op)
            for receive, ticket in before:
                self._finish(receive, ticket, deadline)
            before = now
        for receive, ticket in before:
            self._finish(receive, ticket, deadline)

    def _in_order(self, deadline: Deadline) -> None:
        """Send and receive one after the other, with as many receives posted ahead as there are slots.

        Buckets for the network are posted some rounds before their own, since posting does not wait: a link then has
        something to carry while this rank waits for a bucket that is late. The order within a pair stays.
        """
        ahead = max(1, self._schedule.size.depth)
        tickets: dict[int, Ticket] = {}
        posted = done = 0
        open_sends: deque[tuple[Send, Ticket]] = deque()
        for op in self._order:
            while posted < len(self._receives) and posted < done + ahead:
                receive = self._receives[posted]
                if receive.after >= op.when:
                    break
                self._drain(receive.slot, deadline)
                tickets[posted] = receive.link.transport.post_recv(receive.link.peer, receive.nbytes, receive.into)
                posted += 1
            if isinstance(op, Send):
                self._pack(op, deadline)
                while (
                    self._early_rounds
                    and len(open_sends) >= self._schedule.size.depth
                    and open_sends[0][0].due < op.when  # never for what is not due yet: its receiver may need this rank
                ):
                    sent, ticket = open_sends.popleft()
                    sent.link.transport.wait(ticket, deadline)
                open_sends.append((op, self._post(op)[1]))
            else:
                self._finish(op, tickets.pop(done), deadline)
                done += 1
        for sent, ticket in open_sends:
            sent.link.transport.wait(ticket, deadline)

    def _as_they_come(self, transport: Transport, deadline: Deadline) -> None:
        """Post every send once its bytes are here, whichever bucket comes first; the order within a pair stays.

        A rank that relays what many send it would else stand still for a late bucket while others could go on. The
        send that is due first goes first. One peer has few sends open, so that a late peer does not take all of them;
        but the send that is due first of all is never held back: so of all messages that have not come, the one of the
        least round and step can always move on.
        """
        depth = self._schedule.size.depth
        sends = sorted((op for op in self._order if isinstance(op, Send)), key=lambda op: op.due)
        to_post = {peer: deque(op for op in sends if op.peer == peer) for peer in {op.peer for op in sends}}
        open_to = dict.fromkeys(to_post, 0)
        kept_for = Counter(key_of(op.bucket) for op in sends if op.slot is not None)  # sends to come out of a slot
        came: set[tuple[int, int]] = set()
        under_way: dict[Ticket, Send | Receive] = {}
        receives = deque(self._receives)
        in_slot: dict[int, Receive] = {}
        open_receives = 0

        def has_room(op: Receive) -> bool:
            before = None if op.slot is None else in_slot.get(id(op.slot))
            if op.slot is None or before is None:
                return True
            key = key_of(before.bucket)
            return key in came and not kept_for[key] and all(ticket.done for _, ticket in op.slot.tickets)

        def next_send() -> Send | None:
            first = best = None
            is_full = sum(open_to.values()) >= depth
            for queue in to_post.values():
                op = queue[0]
                if first is None or op.due < first.due:
                    first = op
                if is_full or open_to[op.peer] >= _OPEN_TO_ONE_PEER or (best is not None and best.due < op.due):
                    continue
                if not op.forwards or key_of(op.bucket) in came:
                    best = op
            if first is not None and (not first.forwards or key_of(first.bucket) in came):
                return first
            return best

        while receives or under_way or to_post:
            while receives and open_receives < 2 * depth and has_room(receives[0]):
                receive = receives.popleft()
                if receive.slot is not None:
                    receive.slot.tickets.clear()
                    in_slot[id(receive.slot)] = receive
                ticket = transport.post_recv(receive.link.peer, receive.nbytes, receive.into)
                transport.watch(ticket, deadline)
                under_way[ticket] = receive
                open_receives += 1
            while (send := next_send()) is not None:
                to_post[send.peer].popleft()
                if not to_post[send.peer]:
                    del to_post[send.peer]
                kept_for[key_of(send.bucket)] -= send.slot is not None
                _, ticket = self._post(send)
                transport.watch(ticket, deadline)
                under_way[ticket] = send
                open_to[send.peer] += 1
            for ticket in self._landed(transport, under_way, deadline):
                op = under_way.pop(ticket)
                if isinstance(op, Send):
                    open_to[op.peer] -= 1
                else:
                    open_receives -= 1
                    self._finish(op, ticket, deadline)
                    came.add(key_of(op.bucket))

    def _landed(
        self, transport: Transport, under_way: Mapping[Ticket, Send | Receive], deadline: Deadline
    ) -> list[Ticket]:
        """What is done by now, at least one; at the deadline, the error names whom the first in order waits for."""
        found = transport.landed(deadline)
        if not found:
            late = min(under_way, key=lambda ticket: due_of(under_way[ticket]))
            with self._context("waiting for", under_way[late]):
                transport.wait(late, deadline)
        return found

    def _pack(self, op: Send, deadline: Deadline) -> None:
        """Fill the operation's slot, once what was sent from it before has left."""
        if op.slot is not None and op.pack is not None:
            self._drain(op.slot, deadline)
            began = time.perf_counter()
            carry_out(op.pack)
            if self.account.recorder is not None:
                self.account.recorder.note("pack", began, op.payload.numel(), None, op.due[0])
            if self._packed is not None:
                self._packed(op)

    def _drain(self, slot: Slot | None, deadline: Deadline) -> None:
        """Wait until nobody reads a slot any more."""
        if slot is None:
            return
        for transport, ticket in slot.tickets:
            transport.wait(ticket, deadline)
        slot.tickets.clear()

    def _post(self, op: Send) -> tuple[Transport, Ticket]:
        began = time.perf_counter()
        with self._context("sending", op):
            posted = (op.link.transport, op.link.transport.post_send(op.link.peer, op.payload))
        if self.account.recorder is not None:
            self.account.recorder.note("send", began, op.payload.numel(), op.peer, op.due[0])
        if op.slot is not None:
            op.slot.tickets.append(posted)
        return posted

    def _finish(self, op: Receive, ticket: Ticket, deadline: Deadline) -> None:
        transport = op.link.transport
        began = time.perf_counter()
        with self._context("receiving", op):
            shown = transport.wait(ticket, deadline)
        if self.account.recorder is not None:
            self.account.recorder.note("recv", began, op.nbytes, op.peer, op.when[0])
        if op.when[1] == 0:
            self.account.network_done = time.perf_counter()
        if op.regions:
            assert shown is not None
            at = shown.data_ptr()
            if at not in op.shown:
                op.shown[at] = wire_copies(op.regions, shown, int(shown.storage_offset()), pack=False)
            began = time.perf_counter()
            carry_out(op.shown[at])
            if self.account.recorder is not None:
                self.account.recorder.note("unpack", began, op.nbytes, None, op.when[0])
        transport.release(ticket)
        self.account.landed_nbytes += op.nbytes

    @contextmanager
    def _context(self, doing: str, op: Send | Receive) -> Iterator[None]:
        """Say in a transport's error which bucket, round and tensor it was about."""
        try:
            yield
        except TransportError as error:
            tensor = self._schedule.plan.specs[op.bucket.items[0][0]].name
            where = (
                f"It was {doing} bucket {op.bucket.index} of stream {op.bucket.stream}, which begins with {tensor!r}, "
                f"in round {(op.due if isinstance(op, Send) else op.when)[0] + 1} of {self._schedule.rounds}."
            )
            raise type(error)(f"{error.message} {where}", **{**error.facts, "tensor": tensor}) from error
