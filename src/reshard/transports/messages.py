"""Messages: one rank's sends and receives bound to its memory and to slots of staging, in the order in which they go.

A send leaves from where the bytes are: the weights, the slot in which they came, or a slot that they are packed into,
and cast on the way where the weights have another dtype than the wire.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from reshard.errors import BindingError
from reshard.transports.copies import wire_copies
from reshard.transports.operations import Receive, Send, Slot, align, key_of
from reshard.transports.staging import handed_on
from reshard.transports.views import BoundMemory, Region, merged_run

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from reshard.layouts.box import Box
    from reshard.plan.plan import Plan
    from reshard.schedule.bucket import Bucket
    from reshard.schedule.schedule import Operation, Schedule
    from reshard.transports.copies import Copies
    from reshard.transports.operations import Link, When


class Messages:
    """The messages of one rank.

    Args:
        schedule: The schedule, equal on all ranks.
        rank: This rank in the plan's numbers.
        src: Where this rank's source pieces lie.
        dst: Where its destination pieces lie.
        links: How each peer is reached.
        send_arena: Staging for packed buckets, uint8; None where nothing is packed.
        receive_arena: Staging for transports that land bytes in the caller's memory; None where there is none.
        early_rounds: How many rounds before its own a bucket may be posted that needs no packing.
        device: Where messages lie; what lies elsewhere is packed and unpacked.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        src: BoundMemory,
        dst: BoundMemory,
        links: Mapping[int, Link],
        *,
        send_arena: torch.Tensor | None,
        receive_arena: torch.Tensor | None,
        early_rounds: int,
        device: torch.device | str,
    ) -> None:
        self.schedule = schedule
        self.plan: Plan = schedule.plan
        self.rank = rank
        self._src = src
        self._dst = dst
        self._links = links
        self._kind_of_device = torch.device(device).type
        self._send_slots = self._slots(send_arena)
        self._receive_slots = self._slots(receive_arena)
        self._landed: dict[tuple[int, int], Slot | None] = {}
        self._early_rounds = early_rounds
        self._lands_whole = self.plan.strategy == "gather-broadcast"

    def _slots(self, arena: torch.Tensor | None) -> list[Slot]:
        if arena is None:
            return []
        slot = align(self.schedule.size.slot_nbytes)
        return [Slot(arena, k * slot) for k in range(arena.numel() // slot)]

    def compile(self, operations: Sequence[Operation]) -> list[Send | Receive]:
        """Bind operations to memory, in the order in which they are carried out.

        Some sends are posted before their own round: those over the network that need no packing. Everything that
        waits for an operation is carried out after that one's own round, and only such waits exist. So of all messages
        that have not come, the one of the least round and step can always move on, whatever was posted early.
        """
        last_use = handed_on(operations)
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
            run = self._message_in(self._one_region_an_item(bucket, memory))
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
            regions = list(memory.regions(self.plan.specs[tensor], box))
            check_found(self.plan, self.rank, tensor, box, regions)
            found.extend(regions if len(regions) == 1 else [])
        return found if len(found) == len(bucket.items) else _NOT_ONE_RUN

    def _message_in(self, regions: Sequence[Region]) -> torch.Tensor | None:
        """The regions as one message where they lie; None where it is made, or taken apart, in staging."""
        run = merged_run(regions)
        return run if run is not None and run.device.type == self._kind_of_device else None

    def _pack_views(self, bucket: Bucket, slot: Slot, memory: BoundMemory) -> Copies:
        base = int(slot.arena.storage_offset()) + slot.offset
        return wire_copies(self._placed(bucket, memory), slot.arena, base, pack=True)

    def _placed(self, bucket: Bucket, memory: BoundMemory) -> list[tuple[Box, int, Region]]:
        """(item's box, its offset in the bucket, region) for what of the bucket lies in ``memory``."""
        placed: list[tuple[Box, int, Region]] = []
        at = 0
        for tensor, box in bucket.items:
            spec = self.plan.specs[tensor]
            placed.extend((box, at, region) for region in memory.regions(spec, box))
            at += box.numel * spec.itemsize
        return placed

    def _compile_receive(self, op: Operation, last_use: When | None) -> Receive:
        bucket, link = op.bucket, self._links[op.peer]
        placed = self._placed(bucket, self._dst)
        receive = Receive(op.peer, link, bucket, bucket.nbytes, None, None, placed, (op.round, op.step))
        complete = len(placed) == len(bucket.items) and sum(r.nbytes for _, _, r in placed) == bucket.nbytes
        run = self._message_in([region for _, _, region in placed]) if complete else None
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


def check_found(plan: Plan, rank: int, tensor: int, box: Box, regions: Iterable[Region]) -> None:
    """Check that a box lies whole in the memory of the rank that is said to hold it.

    Raises:
        BindingError: A part of it does not.
    """
    have = sum(region.box.numel for region in regions)
    if have != box.numel:
        name = plan.specs[tensor].name
        raise BindingError(
            f"{name!r}: {plan.rank_name(rank)} declared that it holds {box}, but only {have} of its "
            f"{box.numel} elements lie in the memory it gave. The tensors must be those that were declared.",
            tensor=name,
            rank=rank,
            box=box,
        )


_NOT_ONE_RUN: list[Region] = []
