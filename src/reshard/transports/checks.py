"""Checks: sums of what was sent and of what has landed, exchanged and compared after a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from reshard.errors import VerifyError
from reshard.transports.operations import align
from reshard.transports.verify import Verify, box_sum

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.plan.plan import Plan
    from reshard.plan.strings import Item
    from reshard.transports.base import Deadline
    from reshard.transports.operations import Link
    from reshard.transports.views import BoundMemory


@dataclass(frozen=True)
class _Check:
    """Items whose sums are compared with a peer's, and where they lie here."""

    peer: int
    items: list[Item]
    memory: BoundMemory


class Checks:
    """What one rank compares with its peers after a run.

    Args:
        plan: What moved.
        rank: This rank.
        src: Where its source pieces lie.
        dst: Where its destination pieces lie.
        links: How each peer is reached.
        verify: ``"sum"`` or ``"fingerprint"``.
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
        verify: Verify,
        *,
        send_arena: torch.Tensor | None,
        device: torch.device | str,
    ) -> None:
        self._plan = plan
        self._rank = rank
        self._src = src
        self._dst = dst
        self._links = links
        self._verify: Verify = verify
        self._send_arena = send_arena
        self._device = device
        self._checks = self._compile()

    def _compile(self) -> tuple[list[_Check], list[_Check]]:
        """What this rank sent, from its source or handed on, and what it received, by peer."""
        peers = {peer for route in self._plan.routes for edge in route.edges if self._rank in edge for peer in edge}
        sent, received = [], []
        for peer in sorted(peers - {self._rank}):
            for forwarded in (False, True):
                memory = self._dst if forwarded else self._src
                sent.append(_Check(peer, edge_items(self._plan, self._rank, peer, forwarded=forwarded), memory))
                received.append(_Check(peer, edge_items(self._plan, peer, self._rank, forwarded=forwarded), self._dst))
        return [check for check in sent if check.items], [check for check in received if check.items]

    def compare(self, deadline: Deadline) -> None:
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
            raise VerifyError("\n".join(faults[:20]), rank=self._rank, faults=tuple(faults))

    def _sums(self, check: _Check) -> torch.Tensor:
        sums = torch.zeros(len(check.items), dtype=torch.int64, device=self._device)
        for at, (tensor, box) in enumerate(check.items):
            spec = self._plan.specs[tensor]
            sums[at] = box_sum(box, spec, check.memory, self._verify)
        return sums

    def _differences(self, check: _Check, theirs: torch.Tensor) -> list[str]:
        ours = self._sums(check)
        faults = []
        for at in torch.nonzero(ours != theirs).flatten().tolist():
            tensor, box = check.items[at]
            spec = self._plan.specs[tensor]
            kept = sum(region.box.numel for region in self._dst.regions(spec.name, box))
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
