"""Program: one rank's part of a schedule, bound to its memory and its transports, compiled once and run many times.

Compiling finds where every box lies, decides which buckets need a staging copy and which slot each uses, and makes
every view that a copy needs. Running then only posts, waits and copies: no allocation, no lookup by name.

What one rank does in a run, once all ranks are known to be here::

    copies within this rank
    in order of rounds:  pack + send  |  wait + unpack    (receives are posted ahead, as many as there are slots)
    reads from the memory of others                       (one-copy links: the source lies in shared memory)
    tells them that it has read, and waits for those who read from here
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from reshard.errors import BindingError, TransportError, VerifyError
from reshard.transports.verify import Verify, box_sum
from reshard.transports.views import BoundMemory, Region, aligned_word, copy_all, merged_run

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from reshard.layouts.box import Box
    from reshard.plan.plan import Plan
    from reshard.plan.strings import Item
    from reshard.schedule.bucket import Bucket
    from reshard.schedule.schedule import Operation, Schedule
    from reshard.transports.base import Deadline, Ticket, Transport


@dataclass(frozen=True)
class Link:
    """How this rank reaches one peer: a transport, and the peer's number in it."""

    transport: Transport
    peer: int


When = tuple[int, int]
"""A step of a round."""

Copies = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Targets and sources, as words of equal shape."""


@dataclass(eq=False)
class _Slot:
    """A place in staging memory and the tickets that still use it."""

    arena: torch.Tensor
    offset: int
    holds: tuple[int, int] | None = None
    busy_until: When = (-1, 0)
    """While compiling: when what has landed here is needed last."""
    tickets: list[tuple[Transport, Ticket]] = field(default_factory=list)


@dataclass
class _Send:
    peer: int
    link: Link
    payload: torch.Tensor
    bucket: Bucket
    slot: _Slot | None
    pack: Copies | None
    """What to copy into the slot first; None where the payload is the weights themselves or the slot holds it."""

    due: When
    """Its round and step."""

    when: When
    """When it is posted, which may be before that."""

    forwards: bool = False


@dataclass
class _Receive:
    peer: int
    link: Link
    bucket: Bucket
    nbytes: int
    into: torch.Tensor | None
    slot: _Slot | None
    regions: list[tuple[Box, int, Region]]
    """(outer box, its offset in the bucket, where a part of it goes): what unpacking writes."""

    when: When
    """Its round and step."""

    after: When = (-1, 0)
    """When its slot is needed last by what landed there before; it may be posted in any later step."""
    shown: dict[int, Copies] = field(default_factory=dict)
    """Views for unpacking, by the address at which the transport shows the bytes."""


@dataclass
class _Pull:
    """Reads from one peer's memory in place."""

    peer: int
    link: Link
    copies: Copies


@dataclass(frozen=True)
class StagingNeed:
    """Bytes of staging that one rank's part of a schedule needs, by what it is for."""

    send_nbytes: int
    receive_nbytes: int


def staging_need(
    schedule: Schedule,
    rank: int,
    links: Mapping[int, Link],
    *,
    borrowed: Iterable[int] = (),
    lent_to: Iterable[int] = (),
    verify: Verify = "none",
) -> StagingNeed:
    """How much staging ``Program`` will want: slots for buckets in flight, and room for the sums of a verification."""
    size, in_place = schedule.size, _InPlace(borrowed, lent_to)
    whole = schedule.plan.strategy == "gather-broadcast"
    operations = [op for op in schedule.for_rank(rank) if not in_place.covers(op)]
    handed_on = _handed_on(operations)
    sends = sum(op.kind == "send" for op in operations)
    receives = sum(
        links[op.peer].transport.lands == "caller" or whole or _key(op.bucket) in handed_on
        for op in operations
        if op.kind == "recv"
    )
    checks = 0
    if verify != "none":
        for route in schedule.plan.routes:
            edges = sum(1 for edge in route.edges if edge[0] == rank and edge[1] != rank)
            if edges:
                checks += edges * (8 * len(schedule.plan.route_items(route)) + 16)
    slot = align(size.slot_nbytes)
    return StagingNeed(max(min(sends, size.depth) * slot, align(checks)), min(receives, size.depth) * slot)


class _InPlace:
    """Which operations are not messages, since the receiver reads the sender's weights where they lie."""

    def __init__(self, borrowed: Iterable[int], lent_to: Iterable[int]) -> None:
        self._peers = {"recv": frozenset(borrowed), "send": frozenset(lent_to)}

    def covers(self, op: Operation) -> bool:
        return not op.forwarded and op.peer in self._peers[op.kind]


def _key(bucket: Bucket) -> tuple[int, int]:
    return bucket.stream, bucket.index


def _handed_on(operations: Sequence[Operation]) -> dict[tuple[int, int], When]:
    """The buckets that this rank hands on, each with the step in which it does so for the last time."""
    return {_key(op.bucket): (op.round, op.step) for op in operations if op.kind == "send" and op.forwarded}


@dataclass(frozen=True)
class _Check:
    """Items whose sums are compared with a peer's, and where they lie here."""

    peer: int
    items: list[Item]
    memory: BoundMemory


class Program:
    """The compiled part of one rank; ``run`` carries it out once.

    Args:
        schedule: The schedule, equal on all ranks.
        rank: This rank in the plan's numbers.
        src: Where this rank's source pieces lie.
        dst: Where its destination pieces lie.
        links: How each peer is reached.
        borrowed: For peers whose memory is read in place: where their pieces lie, as seen from here.
        lent_to: The peers that read this rank's memory in place.
        send_arena: Staging for packed buckets, uint8; None where nothing is packed.
        receive_arena: Staging for transports that land bytes in the caller's memory; None where there is none.
        verify: What is compared after the bytes have landed.
        device: Where the weights lie.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        src: BoundMemory,
        dst: BoundMemory,
        links: Mapping[int, Link],
        *,
        borrowed: Mapping[int, BoundMemory] | None = None,
        lent_to: Sequence[int] = (),
        send_arena: torch.Tensor | None = None,
        receive_arena: torch.Tensor | None = None,
        verify: Verify = "none",
        device: torch.device | str = "cpu",
    ) -> None:
        self.schedule = schedule
        self.plan: Plan = schedule.plan
        self.rank = rank
        self._src = src
        self._dst = dst
        self._links = links
        self._lent_to = tuple(lent_to)
        self._borrowed = dict(borrowed or {})
        self._send_slots = self._slots(send_arena)
        self._receive_slots = self._slots(receive_arena)
        self._send_arena = send_arena
        self._landed: dict[tuple[int, int], _Slot | None] = {}
        self._verify: Verify = verify
        self._device = device
        self._in_batches = any(link.transport.groups_posts for link in links.values())
        self._early_rounds = 0 if self._in_batches else schedule.early_rounds
        self._lands_whole = self.plan.strategy == "gather-broadcast"
        in_place = _InPlace(self._borrowed, self._lent_to)
        operations = [op for op in schedule.for_rank(rank) if not in_place.covers(op)]
        self._order: list[_Send | _Receive] = self._compile(operations)
        self._receives = [op for op in self._order if isinstance(op, _Receive)]
        self._copies = self._compile_copies()
        self._pulls = [self._compile_pull(peer) for peer in sorted(self._borrowed)]
        self._checks = self._compile_checks() if verify != "none" else ([], [])
        self.sent_nbytes = sum(op.payload.numel() for op in self._order if isinstance(op, _Send))
        self.received_nbytes = sum(op.nbytes for op in self._receives)
        self.pulled_nbytes = sum(t.numel() * t.element_size() for pull in self._pulls for t in pull.copies[0])
        self.local_nbytes = sum(t.numel() * t.element_size() for t in self._copies[0])
        self.network_done = 0.0
        """On the clock of ``time.perf_counter``: when the last bucket came of the first step of a round, which
        is the network's where there are several domains."""

    # -- compiling -------------------------------------------------------------------------------------------------

    def _slots(self, arena: torch.Tensor | None) -> list[_Slot]:
        if arena is None:
            return []
        slot = align(self.schedule.size.slot_nbytes)
        return [_Slot(arena, k * slot) for k in range(arena.numel() // slot)]

    def _compile(self, operations: Sequence[Operation]) -> list[_Send | _Receive]:
        """Bind operations to memory, in the order in which they are carried out.

        Some sends are posted before their own round: those over the network that need no packing. Everything that
        waits for an operation is carried out after that one's own round, and only such waits exist. So of all messages
        that have not come, the one of the least round and step can always move on, whatever was posted early.
        """
        last_use = _handed_on(operations)
        receives = {
            at: self._compile_receive(op, last_use.get(_key(op.bucket)))
            for at, op in enumerate(operations)
            if op.kind == "recv"
        }
        order: list[_Send | _Receive] = []
        latest: dict[int, When] = {}
        for at, op in enumerate(operations):
            if op.kind == "recv":
                order.append(receives[at])
                continue
            send = self._compile_send(op)
            if send.slot is None or send.slot not in self._send_slots:  # nothing to wait for
                early = op.round - (self._early_rounds if op.step == 0 else 0), op.step
                send.when = max(early, latest.get(op.peer, early))  # the order within a pair stays
            latest[op.peer] = send.when
            order.append(send)
        return sorted(order, key=lambda op: (op.when, isinstance(op, _Receive)))

    def _compile_send(self, op: Operation) -> _Send:
        """Send from where the bytes are: the weights, the slot in which they came, or a slot they are packed into."""
        bucket, link, due = op.bucket, self._links[op.peer], (op.round, op.step)
        slot = self._landed.get(_key(bucket)) if op.forwarded else None
        if slot is not None:
            return _Send(op.peer, link, self._slot_memory(slot, bucket.nbytes), bucket, slot, None, due, due, True)
        memory = self._dst if op.forwarded else self._src
        if link.transport.sends_from == "anywhere":
            run = merged_run(self._one_region_an_item(bucket, memory))
            if run is not None:
                return _Send(op.peer, link, run, bucket, None, None, due, due, op.forwarded)
        slot, packed = self._slot_to_pack(bucket)
        payload = self._slot_memory(slot, bucket.nbytes)
        pack = None if packed else self._pack_views(bucket, slot, memory)
        return _Send(op.peer, link, payload, bucket, slot, pack, due, due, op.forwarded)

    def _slot_to_pack(self, bucket: Bucket) -> tuple[_Slot, bool]:
        """A slot for a bucket, the least recently used; or the one that holds it still."""
        slot = next((slot for slot in self._send_slots if slot.holds == _key(bucket)), None)
        packed = slot is not None
        slot = slot or self._send_slots[0]
        slot.holds = _key(bucket)
        self._send_slots.remove(slot)
        self._send_slots.append(slot)
        return slot, packed

    def _slot_memory(self, slot: _Slot, nbytes: int) -> torch.Tensor:
        return slot.arena[slot.offset : slot.offset + nbytes]

    def _one_region_an_item(self, bucket: Bucket, memory: BoundMemory) -> list[Region]:
        """The regions of a bucket in wire order where each item is one region; otherwise they are packed."""
        found: list[Region] = []
        for tensor, box in bucket.items:
            regions = list(memory.regions(self.plan.specs[tensor].name, box))
            self._check_found(tensor, box, regions)
            found.extend(regions if len(regions) == 1 else [])
        return found if len(found) == len(bucket.items) else _NOT_ONE_RUN

    def _check_found(self, tensor: int, box: Box, regions: Iterable[Region]) -> None:
        have = sum(region.box.numel for region in regions)
        if have != box.numel:
            name = self.plan.specs[tensor].name
            raise BindingError(
                f"{name!r}: {self.plan.rank_name(self.rank)} declared that it holds {box}, but only {have} of its "
                f"{box.numel} elements lie in the memory it gave. The tensors must be those that were declared.",
                tensor=name,
                rank=self.rank,
                box=box,
            )

    def _pack_views(self, bucket: Bucket, slot: _Slot, memory: BoundMemory) -> Copies:
        base = int(slot.arena.storage_offset()) + slot.offset
        return _wire_copies(self._placed(bucket, memory), slot.arena, base, pack=True)

    def _placed(self, bucket: Bucket, memory: BoundMemory) -> list[tuple[Box, int, Region]]:
        """(item's box, its offset in the bucket, region) for what of the bucket lies in ``memory``."""
        placed: list[tuple[Box, int, Region]] = []
        at = 0
        for tensor, box in bucket.items:
            spec = self.plan.specs[tensor]
            placed.extend((box, at, region) for region in memory.regions(spec.name, box))
            at += box.numel * spec.itemsize
        return placed

    def _compile_receive(self, op: Operation, last_use: When | None) -> _Receive:
        bucket, link = op.bucket, self._links[op.peer]
        placed = self._placed(bucket, self._dst)
        receive = _Receive(op.peer, link, bucket, bucket.nbytes, None, None, placed, (op.round, op.step))
        complete = len(placed) == len(bucket.items) and sum(r.nbytes for _, _, r in placed) == bucket.nbytes
        run = merged_run([region for _, _, region in placed]) if complete else None
        if last_use is not None and self._hold(receive, last_use):
            self._landed[_key(bucket)] = receive.slot
        elif run is not None and not self._lands_whole:  # the usual way lands whole tensors, then takes its part
            receive.into, receive.regions = run, []
        elif link.transport.lands == "caller" or self._lands_whole:
            self._hold(receive, (op.round, op.step))
        return receive

    def _hold(self, receive: _Receive, last_use: When) -> bool:
        """Give a receive a slot until ``last_use``; False where that would leave none for later receives.

        What cannot be kept is packed again from the weights when it is handed on, so that staging stays bounded. A slot
        is free again in the step after its last use, never in the same one: a rank that sends from it and receives into
        it in one step would wait for its peer to have read, while that one does the same.
        """
        now = receive.when
        free = [slot for slot in self._receive_slots if slot.busy_until < now]
        if not free or (last_use > now and len(free) < 2):
            assert last_use > now, "a slot is always left for a receive that is not kept"
            return False
        slot = min(free, key=lambda s: s.busy_until)
        receive.slot, receive.after = slot, slot.busy_until
        receive.into = self._slot_memory(slot, receive.nbytes)
        slot.busy_until = last_use
        return True

    def _compile_copies(self) -> Copies:
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for route in self.plan.routes:
            if (self.rank, self.rank) in route.edges:
                for tensor, box in self.plan.route_items(route):
                    self._pair_up(tensor, box, self._src, targets, sources)
        return targets, sources

    def _compile_pull(self, peer: int) -> _Pull:
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for tensor, box in self._edge_items(peer, self.rank, forwarded=False):
            self._pair_up(tensor, box, self._borrowed[peer], targets, sources)
        return _Pull(peer, self._links[peer], (targets, sources))

    def _edge_items(self, sender: int, receiver: int, *, forwarded: bool) -> list[Item]:
        """Everything that goes over an edge, whole boxes where buckets would have cut them.

        Args:
            sender: The rank at its start.
            receiver: The rank at its end.
            forwarded: What the sender hands on; otherwise what it holds as a source.
        """
        items = [
            item
            for route in self.plan.routes
            if (sender, receiver) in route.edges and sender != receiver
            if bool(self.plan.classes[route.route_class].holders >> sender & 1) != forwarded
            for item in self.plan.route_items(route)
        ]
        return sorted(items, key=lambda item: (item[0], item[1].start))

    def _pair_up(
        self, tensor: int, box: Box, source: BoundMemory, targets: list[torch.Tensor], sources: list[torch.Tensor]
    ) -> None:
        """Add the copies that bring ``box`` from a source memory of this machine into this rank's destination."""
        name = self.plan.specs[tensor].name
        self._check_found(tensor, box, source.regions(name, box))
        for want, have in _common_regions(name, box, self._dst, source):
            target, origin = _same_shape(want, have)
            if target.data_ptr() != origin.data_ptr() or target.stride() != origin.stride():
                targets.append(target)
                sources.append(origin)

    # -- running ---------------------------------------------------------------------------------------------------

    def run(self, deadline: Deadline) -> None:
        """Move the bytes once; all ranks must be known to be here, since weights are read in place without asking.

        Raises:
            RefitTimeout: The deadline expired; names the peer that was waited for.
            TransportError: A peer was lost.
            VerifyError: Landed bytes differ from those sent; names tensor, box and peer.
        """
        self.network_done = time.perf_counter()
        copy_all(*self._copies)
        self._move(deadline)
        self._pull(deadline)
        for transport in {id(link.transport): link.transport for link in self._links.values()}.values():
            transport.settle(deadline)
        if self._verify != "none":
            self._compare(deadline)

    def _pull(self, deadline: Deadline) -> None:
        """Read from the memory of others, tell them, and wait until all who read from here have told this rank."""
        told = []
        for pull in self._pulls:
            copy_all(*pull.copies)
            told.append((pull.link.transport, pull.link.transport.post_send(pull.link.peer, _empty())))
        for peer in self._lent_to:
            link = self._links[peer]
            done = link.transport.post_recv(link.peer, 0)
            link.transport.wait(done, deadline)
            link.transport.release(done)
        for transport, ticket in told:
            transport.wait(ticket, deadline)

    def _move(self, deadline: Deadline) -> None:
        """Carry out sends and receives in the order of rounds."""
        if self._in_batches:
            self._move_in_batches(deadline)
        else:
            self._move_ahead(deadline)
        for slot in (*self._send_slots, *self._receive_slots):
            slot.tickets.clear()

    def _move_in_batches(self, deadline: Deadline) -> None:
        """Post a round's send and receive together, and unpack a round while the next one is under way.

        Waits order the current stream and do not block the host, so packing, moving and unpacking of neighbouring
        rounds overlap on the device. No GPU has run this.
        """
        before: list[tuple[_Receive, Ticket]] = []
        for _, operations in groupby(self._order, key=lambda op: op.when):
            now: list[tuple[_Receive, Ticket]] = []
            mine = list(operations)
            taken = [receive.slot for receive, _ in before if receive.slot is not None]
            if any(op.forwards if isinstance(op, _Send) else op.slot in taken for op in mine):
                for receive, ticket in before:
                    self._finish(receive, ticket, deadline)
                before = []
            for op in mine:
                if isinstance(op, _Send):
                    self._pack(op, deadline)
            with ExitStack() as stack:
                for transport in {id(op.link.transport): op.link.transport for op in mine}.values():
                    stack.enter_context(transport.batch())
                for op in mine:
                    transport = op.link.transport
                    if isinstance(op, _Receive):
                        self._drain(op.slot, deadline)
                        now.append((op, transport.post_recv(op.link.peer, op.nbytes, op.into)))
                    else:
                        self._post(op)
            for receive, ticket in before:
                self._finish(receive, ticket, deadline)
            before = now
        for receive, ticket in before:
            self._finish(receive, ticket, deadline)

    def _move_ahead(self, deadline: Deadline) -> None:
        """Send and receive one after the other, with as many receives posted ahead as there are slots.

        Buckets for the network are posted some rounds before their own, since posting does not wait: a link then has
        something to carry while this rank waits for a bucket that is late. The order within a pair stays.
        """
        ahead = max(1, self.schedule.size.depth)
        tickets: dict[int, Ticket] = {}
        posted = done = 0
        open_sends: deque[tuple[_Send, Ticket]] = deque()
        for op in self._order:
            while posted < len(self._receives) and posted < done + ahead:
                receive = self._receives[posted]
                if receive.after >= op.when:
                    break
                self._drain(receive.slot, deadline)
                tickets[posted] = receive.link.transport.post_recv(receive.link.peer, receive.nbytes, receive.into)
                posted += 1
            if isinstance(op, _Send):
                self._pack(op, deadline)
                while (
                    self._early_rounds
                    and len(open_sends) >= self.schedule.size.depth
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

    def _pack(self, op: _Send, deadline: Deadline) -> None:
        """Fill the operation's slot, once what was sent from it before has left."""
        if op.slot is not None and op.pack is not None:
            self._drain(op.slot, deadline)
            copy_all(*op.pack)

    def _drain(self, slot: _Slot | None, deadline: Deadline) -> None:
        """Wait until nobody reads a slot any more."""
        if slot is None:
            return
        for transport, ticket in slot.tickets:
            transport.wait(ticket, deadline)
        slot.tickets.clear()

    def _post(self, op: _Send) -> tuple[Transport, Ticket]:
        with self._context("sending", op):
            posted = (op.link.transport, op.link.transport.post_send(op.link.peer, op.payload))
        if op.slot is not None:
            op.slot.tickets.append(posted)
        return posted

    def _finish(self, op: _Receive, ticket: Ticket, deadline: Deadline) -> None:
        transport = op.link.transport
        with self._context("receiving", op):
            shown = transport.wait(ticket, deadline)
        if op.when[1] == 0:
            self.network_done = time.perf_counter()
        if op.regions:
            assert shown is not None
            at = shown.data_ptr()
            if at not in op.shown:
                op.shown[at] = _wire_copies(op.regions, shown, int(shown.storage_offset()), pack=False)
            copy_all(*op.shown[at])
        transport.release(ticket)

    @contextmanager
    def _context(self, doing: str, op: _Send | _Receive) -> Iterator[None]:
        """Say in a transport's error which bucket, round and tensor it was about."""
        try:
            yield
        except TransportError as error:
            tensor = self.plan.specs[op.bucket.items[0][0]].name
            where = (
                f"It was {doing} bucket {op.bucket.index} of stream {op.bucket.stream}, which begins with {tensor!r}, "
                f"in round {(op.due if isinstance(op, _Send) else op.when)[0] + 1} of {self.schedule.rounds}."
            )
            raise type(error)(f"{error.message} {where}", **{**error.facts, "tensor": tensor}) from error

    # -- verifying -------------------------------------------------------------------------------------------------

    def _compile_checks(self) -> tuple[list[_Check], list[_Check]]:
        """What this rank sent, from its source or handed on, and what it received, by peer."""
        peers = {peer for route in self.plan.routes for edge in route.edges if self.rank in edge for peer in edge}
        sent, received = [], []
        for peer in sorted(peers - {self.rank}):
            for forwarded in (False, True):
                memory = self._dst if forwarded else self._src
                sent.append(_Check(peer, self._edge_items(self.rank, peer, forwarded=forwarded), memory))
                received.append(_Check(peer, self._edge_items(peer, self.rank, forwarded=forwarded), self._dst))
        return [check for check in sent if check.items], [check for check in received if check.items]

    def _compare(self, deadline: Deadline) -> None:
        """Exchange sums over every item: the sender's of its own memory, the receiver's of what has landed."""
        sent, received = self._checks
        inbox = []
        for check in received:
            link = self._links[check.peer]
            buffer = torch.empty(8 * len(check.items), dtype=torch.uint8, device=self._device)
            inbox.append((check, buffer, link, link.transport.post_recv(link.peer, buffer.numel(), buffer)))
        outbox = []
        staged = 0
        for check in sent:
            link = self._links[check.peer]
            payload = self._sums(check).view(torch.uint8)
            if link.transport.sends_from == "staging":
                assert self._send_arena is not None
                payload = self._send_arena[staged : staged + payload.numel()].copy_(payload)
                staged += align(payload.numel())
            outbox.append((link.transport, link.transport.post_send(link.peer, payload)))
        faults = []
        for check, buffer, link, ticket in inbox:
            link.transport.wait(ticket, deadline)
            link.transport.release(ticket)
            faults += self._differences(check, buffer.view(torch.int64))
        for transport, ticket in outbox:
            transport.wait(ticket, deadline)
        if faults:
            raise VerifyError("\n".join(faults[:20]), rank=self.rank, faults=tuple(faults))

    def _sums(self, check: _Check) -> torch.Tensor:
        sums = torch.zeros(len(check.items), dtype=torch.int64, device=self._device)
        for at, (tensor, box) in enumerate(check.items):
            spec = self.plan.specs[tensor]
            sums[at] = box_sum(box, spec, check.memory, self._verify)
        return sums

    def _differences(self, check: _Check, theirs: torch.Tensor) -> list[str]:
        ours = self._sums(check)
        faults = []
        for at in torch.nonzero(ours != theirs).flatten().tolist():
            tensor, box = check.items[at]
            spec = self.plan.specs[tensor]
            kept = sum(region.box.numel for region in self._dst.regions(spec.name, box))
            if kept == box.numel:  # what is not kept (a whole tensor sent to all) is not compared
                faults.append(
                    f"{spec.name!r}: {box} from {self.plan.rank_name(check.peer)} to "
                    f"{self.plan.rank_name(self.rank)} does not hold the bytes sent ({self._verify} differs). "
                    f"The destination is torn: refit again."
                )
        return faults


_NOT_ONE_RUN: list[Region] = []


def align(nbytes: int) -> int:
    """Round a slot's size up so that the next slot begins at a multiple of 16 bytes."""
    return -(-nbytes // 16) * 16


def _empty() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _wire_copies(placed: Sequence[tuple[Box, int, Region]], wire: torch.Tensor, base: int, *, pack: bool) -> Copies:
    """Copies between regions and a bucket that begins at byte ``base`` of the wire memory's storage."""
    storage = wire.untyped_storage()
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for outer, offset, region in placed:
        local, remote = region.pair(outer, storage, base + offset)
        targets.append(remote if pack else local)
        sources.append(local if pack else remote)
    return targets, sources


def _common_regions(name: str, box: Box, a: BoundMemory, b: BoundMemory) -> Iterator[tuple[Region, Region]]:
    """Regions of two memories that hold the same boxes and together what both hold of ``box``."""
    for mine in a.regions(name, box):
        for theirs in b.regions(name, mine.box):
            if theirs.box == mine.box:
                yield mine, theirs
            else:
                yield from _common_regions(name, theirs.box, a, b)


def _same_shape(want: Region, have: Region) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of two regions of one box as words of equal size and shape."""
    word = min(aligned_word(want.itemsize, want.offset_nbytes), aligned_word(have.itemsize, have.offset_nbytes))
    a, b = want.words(word), have.words(word)
    if a.shape == b.shape:
        return a, b
    return _refined(a, b)


def _refined(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split dims of both views until their shapes agree: each shape is a refinement of the same box.

    Raises:
        BindingError: The two shapes cut one dim in ways that no common grid refines.
    """
    a, b = a.squeeze(), b.squeeze()
    left, right = list(a.shape), list(b.shape)
    shape: list[int] = []
    while left or right:
        step = min(left[-1], right[-1])
        if left[-1] % step or right[-1] % step:
            raise BindingError(
                f"Views of shape {tuple(a.shape)} and {tuple(b.shape)} interleave one box in ways that have no "
                f"common grid. Describe one of them by more pieces."
            )
        shape.insert(0, step)
        for sizes in (left, right):
            sizes[-1] //= step
            if sizes[-1] == 1:
                sizes.pop()
    return a.view(shape), b.view(shape)
