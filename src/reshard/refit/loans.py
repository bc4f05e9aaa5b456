"""Loans: which ranks read others' source memory where it lies, and which memory that is.

Within one host a receiver may read the sender's weights in place: one copy an element. A sender lends them if they lie
in shared memory, and a pair uses the loan if both reached each other and the receiver hands none of it on.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from reshard.layouts.bound import BoundPiece, binding_of
from reshard.layouts.box import Box
from reshard.layouts.piece import Piece
from reshard.transports.base import Loan
from reshard.transports.views import BoundMemory

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from reshard.plan.plan import Plan
    from reshard.transports.operations import Link


class Loans:
    """The loans of one rank, given and taken.

    Args:
        rank: This rank.
        plan: What moves.
        links: How it reaches its peers.
        sources: Its source pieces as others read them.
        clashing: Whether its own destination would overwrite what it lends.
        cast: The tensors that are cast at the source: whoever reads them in place has to.
        verify: Whether both sides sum what moved.
    """

    def __init__(
        self,
        rank: int,
        plan: Plan,
        links: Mapping[int, Link],
        sources: Sequence[BoundPiece],
        *,
        clashing: bool,
        cast: Container[str] = (),
        verify: bool = False,
    ) -> None:
        self._rank = rank
        self._plan = plan
        self._links = links
        self._sources = sources
        self._clashing = clashing
        self._cast = cast
        self._verify = verify
        self.borrowed: dict[int, BoundMemory] = {}
        """By sender: the memory that this rank reads in place."""
        self.lent_to: tuple[int, ...] = ()
        """Who reads this rank's."""
        self.why: dict[int, str] = {}
        """By rank: why it lends, or does not."""

    def offer(self) -> dict[str, Any]:
        """What this rank tells the others: whom it reaches in shared memory, and what it lends."""
        shared = sorted(peer for peer, link in self._links.items() if link.transport.lends)
        loans, why = self._lend(shared)
        return {"shared": shared, "loans": loans, "why": why}

    def match(self, told: Sequence[Mapping[str, Any]]) -> None:
        """Take up the loans of those that see each other on an edge, from what all ranks told."""
        self.why = {rank: row["why"] for rank, row in enumerate(told)}
        lent_to = []
        for sender, receiver in sorted(self._pairs_in_place()):
            if told[sender]["loans"] is None or receiver not in told[sender]["shared"]:
                continue
            if sender not in told[receiver]["shared"]:
                continue
            if sender == self._rank:
                lent_to.append(receiver)
            elif receiver == self._rank:
                self.borrowed[sender] = self._borrow(sender, told[sender]["loans"])
        self.lent_to = tuple(sorted(lent_to))

    def _lend(self, shared: Sequence[int]) -> tuple[list[Any] | None, str]:
        if not shared:
            return None, "no rank shares memory with it"
        if not self._sources:
            return None, "it has no source tensor"
        if self._plan.strategy == "gather-broadcast":
            return None, "whole tensors are landed first and cut afterwards"
        if self._clashing:
            return None, "its source and destination share memory"
        private = next((b for b in self._sources if not b.view.is_shared()), None)
        if private is not None:
            return None, f"its {private.piece.name!r} lies in private memory (share_memory_ moves it)"
        if self._packs_cheaper(shared):
            return None, "it casts most of what it sends, and that is cheaper done once, as it is packed"
        transport = self._links[shared[0]].transport
        loans = transport.lend([bound.view for bound in self._sources])
        rows = [
            [b.piece.name, list(b.piece.box.start), list(b.piece.box.stop), loan.to_json(), *_geometry(b)]
            for b, loan in zip(self._sources, loans, strict=True)
        ]
        return rows, "its weights lie in shared memory"

    def _packs_cheaper(self, shared: Sequence[int]) -> bool:
        """Whether casts would be made so often in place that a second copy costs less.

        Each reader makes them again, and the sums of a verification too; when they are packed, one does for all.
        """
        specs = self._plan.specs
        rows = [row for row in self._plan.for_rank(self._rank).sends if row[0] in shared]
        cast = [(tensor, box) for _, tensor, box in rows if specs[tensor].name in self._cast]
        nbytes = sum(box.numel * specs[tensor].itemsize for _, tensor, box in rows)
        if 2 * sum(box.numel * specs[tensor].itemsize for tensor, box in cast) <= nbytes:
            return False
        return self._verify or len(cast) > 2 * len(set(cast))

    def _pairs_in_place(self) -> set[tuple[int, int]]:
        """The pairs whose receiver may read the sender's weights where they lie, if these are lent.

        The sender holds the bytes as a source, and the receiver hands none of them on: it would have to read first.
        """
        pairs: set[tuple[int, int]] = set()
        handed_on: set[tuple[int, int]] = set()
        for route in self._plan.routes:
            senders = {sender for sender, _ in route.edges}
            for sender, receiver in route.edges:
                if sender != receiver and self._plan.classes[route.route_class].holders >> sender & 1:
                    pairs.add((sender, receiver))
                    if receiver in senders:
                        handed_on.add((sender, receiver))
        return pairs - handed_on

    def _borrow(self, sender: int, rows: Sequence[Any]) -> BoundMemory:
        wanted = self._wanted_from[sender]
        pieces = []
        for name, start, stop, loan_json, dtype, shape, strides in rows:
            if name not in wanted:
                continue
            loan = Loan.from_json(loan_json)
            memory = self._links[sender].transport.borrow(self._links[sender].peer, loan)
            view = torch.empty(0, dtype=getattr(torch, dtype)).set_(
                memory.untyped_storage(),
                loan.offset_nbytes // getattr(torch, dtype).itemsize,
                tuple(shape),
                tuple(strides),
            )
            pieces.append(BoundPiece(Piece(name, Box(tuple(start), tuple(stop))), binding_of(view), view))
        return BoundMemory(pieces)

    @cached_property
    def _wanted_from(self) -> dict[int, set[str]]:
        """By sender: the names of the tensors that this rank receives a part of."""
        wanted: dict[int, set[str]] = {}
        for sender, tensor, _ in self._plan.for_rank(self._rank).receives:
            wanted.setdefault(sender, set()).add(self._plan.specs[tensor].name)
        return wanted


def _geometry(bound: BoundPiece) -> tuple[str, list[int], list[int]]:
    view = bound.view
    return str(view.dtype).removeprefix("torch."), list(view.shape), list(view.stride())
