"""Program: one rank's part of a schedule, bound to its memory and its transports, compiled once and run many times.

Compiling finds where every box lies, decides which buckets need a staging copy and which slot each uses, and makes
every view that a copy needs. Running then only posts, waits and copies: no allocation, no lookup by name.

What one rank does in a run, once all ranks are known to be here::

    copies within this rank
    in order of rounds:  pack + send  |  wait + unpack    (receives are posted ahead; see ``Mover``)
    reads from the memory of others                       (one-copy links: the source lies in shared memory)
    tells them that it has read, and waits for those who read from here
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from reshard.errors import BindingError
from reshard.transports.checks import Checks, edge_items
from reshard.transports.copies import common_regions, same_shape, wire_copies
from reshard.transports.mover import Mover
from reshard.transports.operations import Account, Link, Pull, Receive, Send, Slot, align, key_of
from reshard.transports.views import BoundMemory, Region, copy_all, merged_run

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from reshard.layouts.box import Box
    from reshard.plan.plan import Plan
    from reshard.schedule.bucket import Bucket
    from reshard.schedule.schedule import Operation, Schedule
    from reshard.transports.base import Deadline
    from reshard.transports.operations import Copies, When
    from reshard.transports.verify import Verify


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
        links[op.peer].transport.lands == "caller" or whole or key_of(op.bucket) in handed_on
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


def _handed_on(operations: Sequence[Operation]) -> dict[tuple[int, int], When]:
    """The buckets that this rank hands on, each with the step in which it does so for the last time."""
    return {key_of(op.bucket): (op.round, op.step) for op in operations if op.kind == "send" and op.forwarded}


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
        self._landed: dict[tuple[int, int], Slot | None] = {}
        in_batches = any(link.transport.groups_posts for link in links.values())
        self._early_rounds = 0 if in_batches else schedule.early_rounds
        self._lands_whole = self.plan.strategy == "gather-broadcast"
        in_place = _InPlace(self._borrowed, self._lent_to)
        operations = [op for op in schedule.for_rank(rank) if not in_place.covers(op)]
        order = self._compile(operations)
        self.account = Account()
        self._mover = Mover(schedule, order, in_batches=in_batches, account=self.account)
        self._copies = self._compile_copies()
        self._pulls = [self._compile_pull(peer) for peer in sorted(self._borrowed)]
        self._checks = (
            Checks(self.plan, rank, src, dst, links, verify, send_arena=send_arena, device=device)
            if verify != "none"
            else None
        )
        self.sent_nbytes = sum(op.payload.numel() for op in order if isinstance(op, Send))
        self.received_nbytes = sum(op.nbytes for op in order if isinstance(op, Receive))
        self.pulled_nbytes = sum(t.numel() * t.element_size() for pull in self._pulls for t in pull.copies[0])
        self.local_nbytes = sum(t.numel() * t.element_size() for t in self._copies[0])

    # -- compiling -------------------------------------------------------------------------------------------------

    def _slots(self, arena: torch.Tensor | None) -> list[Slot]:
        if arena is None:
            return []
        slot = align(self.schedule.size.slot_nbytes)
        return [Slot(arena, k * slot) for k in range(arena.numel() // slot)]

    def _compile(self, operations: Sequence[Operation]) -> list[Send | Receive]:
        """Bind operations to memory, in the order in which they are carried out.

        Some sends are posted before their own round: those over the network that need no packing. Everything that
        waits for an operation is carried out after that one's own round, and only such waits exist. So of all messages
        that have not come, the one of the least round and step can always move on, whatever was posted early.
        """
        last_use = _handed_on(operations)
        receives = {
            at: self._compile_receive(op, last_use.get(key_of(op.bucket)))
            for at, op in enumerate(operations)
            if op.kind == "recv"
        }
        order: list[Send | Receive] = []
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
        return sorted(order, key=lambda op: (op.when, isinstance(op, Receive)))

    def _compile_send(self, op: Operation) -> Send:
        """Send from where the bytes are: the weights, the slot in which they came, or a slot they are packed into."""
        bucket, link, due = op.bucket, self._links[op.peer], (op.round, op.step)
        slot = self._landed.get(key_of(bucket)) if op.forwarded else None
        if slot is not None:
            return Send(op.peer, link, self._slot_memory(slot, bucket.nbytes), bucket, slot, None, due, due, True)
        memory = self._dst if op.forwarded else self._src
        if link.transport.sends_from == "anywhere":
            run = merged_run(self._one_region_an_item(bucket, memory))
            if run is not None:
                return Send(op.peer, link, run, bucket, None, None, due, due, op.forwarded)
        slot, packed = self._slot_to_pack(bucket)
        payload = self._slot_memory(slot, bucket.nbytes)
        pack = None if packed else self._pack_views(bucket, slot, memory)
        return Send(op.peer, link, payload, bucket, slot, pack, due, due, op.forwarded)

    def _slot_to_pack(self, bucket: Bucket) -> tuple[Slot, bool]:
        """A slot for a bucket, the least recently used; or the one that holds it still."""
        slot = next((slot for slot in self._send_slots if slot.holds == key_of(bucket)), None)
        packed = slot is not None
        slot = slot or self._send_slots[0]
        slot.holds = key_of(bucket)
        self._send_slots.remove(slot)
        self._send_slots.append(slot)
        return slot, packed

    def _slot_memory(self, slot: Slot, nbytes: int) -> torch.Tensor:
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

    def _pack_views(self, bucket: Bucket, slot: Slot, memory: BoundMemory) -> Copies:
        base = int(slot.arena.storage_offset()) + slot.offset
        return wire_copies(self._placed(bucket, memory), slot.arena, base, pack=True)

    def _placed(self, bucket: Bucket, memory: BoundMemory) -> list[tuple[Box, int, Region]]:
        """(item's box, its offset in the bucket, region) for what of the bucket lies in ``memory``."""
        placed: list[tuple[Box, int, Region]] = []
        at = 0
        for tensor, box in bucket.items:
            spec = self.plan.specs[tensor]
            placed.extend((box, at, region) for region in memory.regions(spec.name, box))
            at += box.numel * spec.itemsize
        return placed

    def _compile_receive(self, op: Operation, last_use: When | None) -> Receive:
        bucket, link = op.bucket, self._links[op.peer]
        placed = self._placed(bucket, self._dst)
        receive = Receive(op.peer, link, bucket, bucket.nbytes, None, None, placed, (op.round, op.step))
        complete = len(placed) == len(bucket.items) and sum(r.nbytes for _, _, r in placed) == bucket.nbytes
        run = merged_run([region for _, _, region in placed]) if complete else None
        if last_use is not None and self._hold(receive, last_use):
            self._landed[key_of(bucket)] = receive.slot
        elif run is not None and not self._lands_whole:  # the usual way lands whole tensors, then takes its part
            receive.into, receive.regions = run, []
        elif link.transport.lands == "caller" or self._lands_whole:
            self._hold(receive, (op.round, op.step))
        return receive

    def _hold(self, receive: Receive, last_use: When) -> bool:
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

    def _compile_pull(self, peer: int) -> Pull:
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for tensor, box in edge_items(self.plan, peer, self.rank, forwarded=False):
            self._pair_up(tensor, box, self._borrowed[peer], targets, sources)
        return Pull(peer, self._links[peer], (targets, sources))

    def _pair_up(
        self, tensor: int, box: Box, source: BoundMemory, targets: list[torch.Tensor], sources: list[torch.Tensor]
    ) -> None:
        """Add the copies that bring ``box`` from a source memory of this machine into this rank's destination."""
        name = self.plan.specs[tensor].name
        self._check_found(tensor, box, source.regions(name, box))
        for want, have in common_regions(name, box, self._dst, source):
            target, origin = same_shape(want, have)
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
        account = self.account
        account.network_done, account.landed_nbytes = time.perf_counter(), 0
        copy_all(*self._copies)
        if account.recorder is not None and self._copies[0]:
            account.recorder.note("copy", account.network_done, self.local_nbytes)
        account.landed_nbytes = self.local_nbytes
        self._mover.move(deadline)
        self._pull(deadline)
        for transport in {id(link.transport): link.transport for link in self._links.values()}.values():
            transport.settle(deadline)
        if self._checks is not None:
            self._checks.compare(deadline)

    def _pull(self, deadline: Deadline) -> None:
        """Read from the memory of others, tell them, and wait until all who read from here have told this rank."""
        told = []
        for pull in self._pulls:
            began = time.perf_counter()
            copy_all(*pull.copies)
            nbytes = sum(target.numel() * target.element_size() for target in pull.copies[0])
            if self.account.recorder is not None:
                self.account.recorder.note("copy", began, nbytes, pull.peer)
            self.account.landed_nbytes += nbytes
            told.append((pull.link.transport, pull.link.transport.post_send(pull.link.peer, _empty())))
        for peer in self._lent_to:
            link = self._links[peer]
            done = link.transport.post_recv(link.peer, 0)
            link.transport.wait(done, deadline)
            link.transport.release(done)
        for transport, ticket in told:
            transport.wait(ticket, deadline)


_NOT_ONE_RUN: list[Region] = []


def _empty() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)
