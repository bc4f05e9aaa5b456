"""Install: make what has landed live, one install group after the other, and call whom that concerns."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from reshard.errors import InstallError
from reshard.layouts.piece import Piece
from reshard.refit.landed import Landed
from reshard.refit.landing import copy_bits
from reshard.refit.telling import text_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from reshard.layouts.bound import BoundPiece
    from reshard.refit.compiled import CompiledRefit
    from reshard.refit.offers import Offer
    from reshard.transports.base import Deadline


class Installation:
    """The commit of one rank of a destination.

    Args:
        compiled: The refit that has landed.
        offer: What the rank accepts, and whom it calls.
        version: Which weights these are.
        deadline: Of the call.
    """

    def __init__(self, compiled: CompiledRefit, offer: Offer, version: int, deadline: Deadline) -> None:
        self._compiled = compiled
        self._offer = offer
        self._version = version
        self._deadline = deadline
        self._done: list[str] = []
        self._wrote = False
        """Whether anything of the live weights may be the new version's."""

    @cached_property
    def groups(self) -> dict[str, list[str]]:
        """By install group, in their order: the names of its tensors that have landed here, in theirs."""
        groups: dict[str, list[str]] = {}
        for entry in self._offer.manifest.entries:
            if entry.spec.name in self._pieces:
                groups.setdefault(entry.spec.group, []).append(entry.spec.name)
        return groups

    def run(self, *, staged: bool) -> None:
        """Install all groups.

        Args:
            staged: Whether what has landed is still beside the live weights.

        Raises:
            InstallError: A hook failed; the rank is torn unless the error says that it is untouched.
        """
        hooks = self._offer.hooks
        whole = {one.name: one for one in self._offer.whole}
        loaders = hooks.loaders or {}
        self._wrote = not staged
        for group, names in self.groups.items():
            if staged:
                self._compiled.commit(names)
            cuts = [cut for name in names if name in whole for cut in whole[name].cuts]
            copy_bits([live for live, _ in cuts], [landed for _, landed in cuts])
            self._wrote = self._wrote or (hooks.install is None and not all(name in loaders for name in names))
            landed = self._landed(group, names)
            if hooks.install is not None and landed.pieces:
                self._call("install", hooks.install, group, landed)
            for name in names:
                if name in loaders:
                    own = self._offer.renamed.get(name, name)
                    self._call("loader", loaders[name], group, own, self._given(own, whole[name].tensor))
            if hooks.installed is not None:
                self._call("installed", hooks.installed, group, group, self._version)
            self._done.append(group)
        if hooks.committed is not None:
            self._call("committed", hooks.committed, "", self._version)

    def _landed(self, group: str, names: list[str]) -> Landed:
        whole = {one.name: one for one in self._offer.whole}
        pieces: list[tuple[Piece, Any]] = []
        for name in names:
            own = self._offer.renamed.get(name, name)
            if name in whole:
                pieces += whole[name].landed(own)
            else:
                pieces += [(Piece(own, bound.piece.box), bound.view) for bound in self._pieces[name]]
        given = tuple((piece, self._given(piece.name, tensor)) for piece, tensor in pieces)
        return Landed(group, self._version, given, self._deadline.remaining())

    def _given(self, name: str, tensor: Any) -> Any:
        """What is handed out for memory of the session: that memory, or in debug mode a copy."""
        return tensor if self._offer.handed is None else self._offer.handed.copy(name, tensor)

    @cached_property
    def _pieces(self) -> dict[str, list[BoundPiece]]:
        """By tensor: its pieces where they landed, if the session has no live memory for them."""
        pieces: dict[str, list[BoundPiece]] = {}
        for bound in self._compiled.live:
            pieces.setdefault(bound.piece.name, []).append(bound)
        return pieces

    def _call(self, what: str, hook: Callable[..., Any], group: str, *arguments: Any) -> None:
        try:
            hook(*arguments)
            self._wrote = True
        except Exception as error:
            untouched = not self._wrote and getattr(error, "untouched", False) is True
            done = f"after {len(self._done)} of {len(self.groups)} groups" if self._done else "before any other group"
            where = f"on install group {group!r}, {done}" if what != "committed" else done
            state = " It says that it has written nothing." if untouched else ""
            raise InstallError(
                f"The {what} hook failed {where}: {text_of(error).rstrip('.')}.{state}",
                group=group,
                installed=tuple(self._done),
                untouched=untouched,
            ) from error
