"""Checks: sums of what was sent and of what has landed, exchanged and compared after a run.

A sender sums its own memory. Only what it casts as it packs a bucket it sums there: it is in the cache then, and needs
no second cast. So such tensors are compared by the portions in which they travel, the others by whole boxes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from reshard.errors import VerifyError
from reshard.layouts.bound import BoundPiece, binding_of
from reshard.layouts.piece import Piece
from reshard.transports.operations import Receive, Send, align, key_of
from reshard.transports.verify import BoxSum, Verify
from reshard.transports.views import BoundMemory

if TYPE_CHECKING:
    from collections.abc import Container, Iterator, Mapping, Sequence

    from reshard.layouts.box import Box
    from reshard.plan.plan import Plan
    from reshard.plan.strings import Item
    from reshard.transports.base import Deadline
    from reshard.transports.operations import Link

_Sums = dict[tuple[int, "Box", bool], torch.Tensor]
"""By tensor, box, and whether of the very bits that travelled."""


@dataclass(frozen=True)
class _Check:
    """What is summed here and at a peer."""

    peer: int
    items: list[tuple[int, Box, BoundMemory]]
    """Tensor, box, and where it lies here."""

    as_sent: bool = False
    """Whether both sides sum the very bits that travelled, even of what was cast."""

    sums: dict[int, BoxSum] = field(default_factory=dict)
    """By place among the items; made when first wanted."""


class Checks:
    """What one rank compares with its peers after a run.

    Args:
        plan: What moved.
        rank: This rank.
        src: Where its source pieces lie.
        dst: Where its destination pieces lie.
        links: Its links.
        order: Its messages.
        verify: ``"sum"`` or ``"fingerprint"``.
        casts: By tensor that a side holds in another dtype than that in which it travels: ``"source"`` or
            ``"destination"``.
        in_place: Peers that read this rank's memory in place, or whose memory it reads.
        send_arena: Staging for sums, where a transport sends from staging only.
        device: Where the weights lie.
    """

    def __init__(
        self,
        plan: Plan,
        rank: int,
        src: BoundMemory,
        dst: BoundMemory,
        links: Mapping[int, Link],
        order: Sequence[Send | Receive],
        verify: Verify,
        *,
        casts: Mapping[str, str],
        in_place: tuple[Container[int], Container[int]],
        send_arena: torch.Tensor | None,
        device: torch.device | str,
    ) -> None:
        self._plan = plan
        self._rank = rank
        self._src = src
        self._dst = dst
        self._links = links
        self._verify: Verify = verify
        self._casts = casts
        self._lent_to, self._borrowed = in_place
        self._send_arena = send_arena
        self._device = device
        self._checks = self._compile(sorted(order, key=lambda op: key_of(op.bucket)))
        packs = [op for op in order if isinstance(op, Send) and op.pack is not None and not op.forwards]
        self._in_slots = {id(op): list(self._in_slot(op)) for op in packs}
        self._packed: _Sums = {}
        self._made: dict[int, dict[int, dict[Box, torch.Tensor]]] = {}

    def _compile(self, order: Sequence[Send | Receive]) -> tuple[list[_Check], list[_Check]]:
        """What this rank sent, from its source or handed on, and what it received, by peer."""
        peers = {peer for route in self._plan.routes for edge in route.edges if self._rank in edge for peer in edge}
        sent, received = [], []
        for peer in sorted(peers - {self._rank}):
            for forwarded in (False, True):
                memory = self._dst if forwarded else self._src
                sent.append(_Check(peer, self._whole(self._rank, peer, forwarded, memory)))
                received.append(_Check(peer, self._whole(peer, self._rank, forwarded, self._dst)))
            mine = [op for op in order if op.peer == peer]
            sends = [(op, self._dst if op.forwards else self._src) for op in mine if isinstance(op, Send)]
            items = [(*item, memory) for op, memory in sends for item in self._portions(op)]
            sent.append(_Check(peer, items, as_sent=True))
            items = [(*item, self._dst) for op in mine if isinstance(op, Receive) for item in self._portions(op)]
            received.append(_Check(peer, items, as_sent=True))
        return [check for check in sent if check.items], [check for check in received if check.items]

    def _whole(
        self, sender: int, receiver: int, forwarded: bool, memory: BoundMemory
    ) -> list[tuple[int, Box, BoundMemory]]:
        """What is compared by whole boxes of an edge: all that is read in place, else what is not cast for the wire."""
        in_place = not forwarded and (receiver in self._lent_to if sender == self._rank else sender in self._borrowed)
        items = edge_items(self._plan, sender, receiver, forwarded=forwarded)
        return [(*item, memory) for item in items if in_place or not self._is_cast_for_the_wire(item[0])]

    def _portions(self, op: Send | Receive) -> Iterator[Item]:
        """What of a bucket is compared by itself: what was cast for the wire."""
        return (item for item in op.bucket.items if self._is_cast_for_the_wire(item[0]))

    def _is_cast_for_the_wire(self, tensor: int) -> bool:
        return self._casts.get(self._plan.specs[tensor].name) == "source"

    def _in_slot(self, op: Send) -> Iterator[tuple[int, Box, BoxSum | torch.Tensor]]:
        """Tensor, box, and the sum of what a send casts into its slot; the bytes alone where no element can lie."""
        at = 0
        for tensor, box in op.bucket.items:
            spec = self._plan.specs[tensor]
            stop = at + box.numel * spec.itemsize
            if self._is_cast_for_the_wire(tensor):
                part = op.payload[at:stop]
                fits = int(part.storage_offset()) % spec.itemsize == 0
                yield tensor, box, self._sum_of(tensor, box, part) if fits else part
            at = stop

    def _sum_of(self, tensor: int, box: Box, part: torch.Tensor) -> BoxSum:
        """The sum of a box that lies end to end in bytes."""
        spec = self._plan.specs[tensor]
        view = part.view(getattr(torch, spec.dtype)).view(box.shape)
        memory = BoundMemory([BoundPiece(Piece(spec.name, box), binding_of(view), view)])
        return BoxSum(box, spec, memory, self._verify)

    def packed(self, op: Send) -> None:
        """Sum what a send has just cast into its slot, while it is in the cache."""
        for tensor, box, made in self._in_slots.get(id(op), ()):
            made = made if isinstance(made, BoxSum) else self._sum_of(tensor, box, made.clone())
            bits, values = made.both() if self._verify == "fingerprint" else (made(), None)
            self._packed[tensor, box, True] = bits
            if values is not None:
                self._made.setdefault(tensor, {}).setdefault(op.bucket.stream, {})[box] = values

    def begin(self) -> None:
        """Forget what an earlier run has summed."""
        self._packed, self._made = {}, {}

    @property
    def made(self) -> dict[int, list[dict[Box, int]]]:
        """By tensor and stream: the fingerprints of the boxes that the last run cast as it packed them."""
        return {
            tensor: [{box: int(value) for box, value in row.items()} for row in rows.values()]
            for tensor, rows in self._made.items()
        }

    def compare(self, deadline: Deadline) -> None:
        """Exchange sums over every item: the sender's of its own memory, the receiver's of what has landed."""
        sent, received = self._checks
        known = self._packed  # and what goes to several peers is summed once
        self._packed = {}
        inbox = []
        for check in received:
            link = self._links[check.peer]
            buffer = torch.empty(8 * len(check.items), dtype=torch.uint8, device=self._device)
            inbox.append((check, buffer, link, link.transport.post_recv(link.peer, buffer.numel(), buffer)))
        outbox = []
        staged = 0
        for check in sent:
            link = self._links[check.peer]
            payload = self._sums(check, known).view(torch.uint8)
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
            raise VerifyError("\n".join(faults[:20]), rank=self._rank, faults=tuple(faults))

    def _sums(self, check: _Check, known: _Sums) -> torch.Tensor:
        sums = []
        for at, (tensor, box, memory) in enumerate(check.items):
            key = tensor, box, check.as_sent
            if key not in known:
                if at not in check.sums:
                    spec = self._plan.specs[tensor]
                    cast = spec.name in self._casts and not check.as_sent
                    check.sums[at] = BoxSum(box, spec, memory, self._verify, cast=cast)
                known[key] = check.sums[at]()
            sums.append(known[key])
        return torch.stack(sums).to(self._device)

    def _differences(self, check: _Check, theirs: torch.Tensor) -> list[str]:
        ours = self._sums(check, {})
        faults = []
        for at in torch.nonzero(ours != theirs).flatten().tolist():
            tensor, box, _ = check.items[at]
            spec = self._plan.specs[tensor]
            kept = sum(region.box.numel for region in self._dst.regions(spec, box))
            if kept == box.numel:  # what is not kept (a whole tensor sent to all) is not compared
                faults.append(
                    f"{spec.name!r}: {box} from {self._plan.rank_name(check.peer)} to "
                    f"{self._plan.rank_name(self._rank)} does not hold the bytes sent ({self._verify} differs). "
                    f"The destination is torn: refit again."
                )
        return faults


def edge_items(plan: Plan, sender: int, receiver: int, *, forwarded: bool) -> list[Item]:
    """Everything that goes over an edge, whole boxes where buckets would have cut them.

    Args:
        plan: The plan.
        sender: The rank at its start.
        receiver: The rank at its end.
        forwarded: What the sender hands on; otherwise what it holds as a source.
    """
    items = [
        item
        for route in plan.routes
        if (sender, receiver) in route.edges and sender != receiver
        if bool(plan.classes[route.route_class].holders >> sender & 1) != forwarded
        for item in plan.route_items(route)
    ]
    return sorted(items, key=lambda item: (item[0], item[1].start))
