"""Program: one rank's part of a schedule, bound to its memory and its transports, compiled once and run many times.

Compiling finds where every box lies, decides which buckets need a staging copy and which slot each uses, and makes
every view that a copy needs. Running then only posts, waits and copies: no lookup by name, and nothing kept beside the
weights but slots. Where a side's memory has another dtype than the wire, the copy into or out of a slot casts, or the
one between two ranks' memory does.

What one rank does in a run, once all ranks are known to be here::

    copies within this rank
    in order of rounds:  pack + send  |  wait + unpack    (receives are posted ahead; see ``Mover``)
    reads from the memory of others                       (one-copy links: the source lies in shared memory)
    tells them that it has read, and waits for those who read from here
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from reshard.transports.checks import Checks, edge_items
from reshard.transports.copies import Copies, add_local, carry_out, common_regions
from reshard.transports.messages import Messages, check_found
from reshard.transports.mover import Mover
from reshard.transports.operations import Account, Link, Pull, Receive, Send
from reshard.transports.staging import InPlace

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.layouts.box import Box
    from reshard.plan.plan import Plan
    from reshard.schedule.schedule import Schedule
    from reshard.transports.base import Deadline
    from reshard.transports.verify import Verify
    from reshard.transports.views import BoundMemory


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
        casts: By tensor that a side holds in another dtype than that in which it travels: ``"source"`` or
            ``"destination"``.
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
        casts: Mapping[str, str] | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self.plan: Plan = schedule.plan
        self.rank = rank
        self._src = src
        self._dst = dst
        self._links = links
        self._lent_to = tuple(lent_to)
        self._borrowed = dict(borrowed or {})
        in_batches = any(link.transport.groups_posts for link in links.values())
        early_rounds = 0 if in_batches else schedule.early_rounds
        messages = Messages(
            schedule,
            rank,
            src,
            dst,
            links,
            send_arena=send_arena,
            receive_arena=receive_arena,
            early_rounds=early_rounds,
            device=device,
        )
        in_place = InPlace(self._borrowed, self._lent_to)
        order = messages.compile([op for op in schedule.for_rank(rank) if not in_place.covers(op)])
        self.account = Account()
        self._checks = None
        if verify != "none":
            self._checks = Checks(
                self.plan,
                rank,
                src,
                dst,
                links,
                order,
                verify,
                casts=casts or {},
                in_place=(self._lent_to, self._borrowed),
                send_arena=send_arena,
                device=device,
            )
        self._mover = Mover(
            schedule,
            order,
            in_batches=in_batches,
            early_rounds=early_rounds,
            account=self.account,
            packed=None if self._checks is None else self._checks.packed,
        )
        self._copies = self._compile_copies()
        self._pulls = [self._compile_pull(peer) for peer in sorted(self._borrowed)]
        self.sent_nbytes = sum(op.payload.numel() for op in order if isinstance(op, Send))
        self.received_nbytes = sum(op.nbytes for op in order if isinstance(op, Receive))
        self.pulled_nbytes = sum(pull.copies.nbytes for pull in self._pulls)
        self.local_nbytes = self._copies.nbytes

    # -- compiling -------------------------------------------------------------------------------------------------

    def _compile_copies(self) -> Copies:
        copies = Copies()
        for route in self.plan.routes:
            if (self.rank, self.rank) in route.edges:
                for tensor, box in self.plan.route_items(route):
                    self._pair_up(tensor, box, self._src, copies)
        return copies

    def _compile_pull(self, peer: int) -> Pull:
        copies = Copies()
        for tensor, box in edge_items(self.plan, peer, self.rank, forwarded=False):
            self._pair_up(tensor, box, self._borrowed[peer], copies)
        return Pull(peer, self._links[peer], copies)

    def _pair_up(self, tensor: int, box: Box, source: BoundMemory, copies: Copies) -> None:
        """Add the copies that bring ``box`` from a source memory of this machine into this rank's destination."""
        spec = self.plan.specs[tensor]
        check_found(self.plan, self.rank, tensor, box, source.regions(spec, box))
        for want, have in common_regions(spec, box, self._dst, source):
            add_local(copies, want, have)

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
        if self._checks is not None:
            self._checks.begin()
        carry_out(self._copies)
        if account.recorder is not None and self._copies:
            account.recorder.note("copy", account.network_done, self.local_nbytes)
        account.landed_nbytes = self.local_nbytes
        self._mover.move(deadline)
        self._pull(deadline)
        for transport in {id(link.transport): link.transport for link in self._links.values()}.values():
            transport.settle(deadline)
        if self._checks is not None:
            self._checks.compare(deadline)

    @property
    def made_fingerprints(self) -> dict[int, list[dict[Box, int]]]:
        """As ``Checks.made``; empty where nothing is compared."""
        return {} if self._checks is None else self._checks.made

    def _pull(self, deadline: Deadline) -> None:
        """Read from the memory of others, tell them, and wait until all who read from here have told this rank."""
        told = []
        for pull in self._pulls:
            began = time.perf_counter()
            carry_out(pull.copies)
            if self.account.recorder is not None:
                self.account.recorder.note("copy", began, pull.copies.nbytes, pull.peer)
            self.account.landed_nbytes += pull.copies.nbytes
            told.append((pull.link.transport, pull.link.transport.post_send(pull.link.peer, _empty())))
        for peer in self._lent_to:
            link = self._links[peer]
            done = link.transport.post_recv(link.peer, 0)
            link.transport.wait(done, deadline)
            link.transport.release(done)
        for transport, ticket in told:
            transport.wait(ticket, deadline)


def _empty() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)
