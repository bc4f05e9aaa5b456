"""Install: make what has landed live, one install group after the other, and call whom that concerns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard.errors import InstallError
from reshard.layouts.piece import Piece
from reshard.refit.faults import held_by_somebody
from reshard.refit.landed import Landed
from reshard.refit.landing import copy_bits
from reshard.refit.telling import text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reshard.layouts.bound import BoundPiece
    from reshard.refit.compiled import CompiledRefit
    from reshard.refit.offers import Offer
    from reshard.transports.base import Deadline


class Installation:
    """What one rank of a destination installs in one refit.

    Args:
        windows: What lands one after the other.
        offer: What the rank accepts, and whom it calls.
        version: Which weights these are.
        deadline: Of the call.
    """

    def __init__(self, windows: Sequence[CompiledRefit], offer: Offer, version: int, deadline: Deadline) -> None:
        self._windows = windows
        self._offer = offer
        self._version = version
        self._deadline = deadline
        self._whole = {one.name: one for one in offer.whole}
        self._pieces = [_by_name(window) for window in windows]
        self._names: list[dict[str, list[str]]] = [{} for _ in windows]
        """By window and install group: the tensors that land here, in their order."""
        self._complete: dict[str, int] = {}
        """By install group, in their order: the window after which it and all before it have landed."""
        self._line_up()
        self._done: list[str] = []
        self._wrote = False
        """Whether anything of the live weights may be the new version's."""

    def _line_up(self) -> None:
        window_of = {name: at for at, pieces in enumerate(self._pieces) for name in pieces}
        latest = 0
        for entry in self._offer.manifest.entries:
            name, group = entry.spec.name, entry.spec.group
            if name in window_of:
                self._names[window_of[name]].setdefault(group, []).append(name)
                latest = max(latest, window_of[name])
                self._complete[group] = latest

    def window(self, at: int, *, staged: bool) -> None:
        """Install what has landed in one window, and say so of the groups that are complete with it.

        Args:
            at: Its number; windows come in their order.
            staged: Whether what has landed is still beside the live weights.

        Raises:
            InstallError: A hook failed; the rank is torn unless the error says that it is untouched.
        """
        hooks = self._offer.hooks
        self._wrote = self._wrote or not staged
        for group, complete in self._complete.items():
            if group in self._done:
                continue
            if group in self._names[at]:
                self._install(group, at, staged=staged)
            if complete <= at:
                if hooks.installed is not None:
                    self._call("installed", hooks.installed, group, group, self._version)
                self._done.append(group)

    def empty_room(self, at: int) -> None:
        """As ``window``, for one whose room the next one needs.

        Raises:
            InstallError: As ``window``; or in debug mode somebody keeps what that room held.
        """
        self.window(at, staged=False)
        held = held_by_somebody(self._offer.handed)
        if held:
            raise InstallError(
                f"Somebody keeps {held} as a loader was given it, in memory that the next tensors of this refit land "
                f"in; keep a copy instead (tensor.clone()), or give more staging_nbytes.",
                group="",
                installed=tuple(self._done),
                untouched=False,
            )

    def committed(self) -> None:
        """Say that all is installed here.

        Raises:
            InstallError: The hook failed.
        """
        if self._offer.hooks.committed is not None:
            self._call("committed", self._offer.hooks.committed, "", self._version)

    def _install(self, group: str, at: int, *, staged: bool) -> None:
        """Install tensors of one group: first what the session moves itself, then the hooks' part."""
        names, pieces = self._names[at][group], self._pieces[at]
        hooks, loaders = self._offer.hooks, self._offer.hooks.loaders or {}
        if staged:
            self._windows[at].commit(names)
        tensors = {name: pieces[name][0].view for name in names if name in self._whole}  # whole is one piece
        cuts = [cut for name, tensor in tensors.items() for cut in self._whole[name].cuts(tensor)]
        copy_bits([live for live, _ in cuts], [landed for _, landed in cuts])
        self._wrote = self._wrote or (hooks.install is None and not all(name in loaders for name in names))
        if hooks.install is not None:
            landed = self._landed(group, names, pieces, tensors)
            if landed.pieces:
                self._call("install", hooks.install, group, landed)
        for name in names:
            if name in loaders:
                own = self._offer.renamed.get(name, name)
                self._call("loader", loaders[name], group, own, self._given(own, tensors[name]))

    def _landed(
        self,
        group: str,
        names: Sequence[str],
        pieces: Mapping[str, Sequence[BoundPiece]],
        tensors: Mapping[str, Any],
    ) -> Landed:
        found: list[tuple[Piece, Any]] = []
        for name in names:
            own = self._offer.renamed.get(name, name)
            if name in tensors:
                found += self._whole[name].landed(own, tensors[name])
            else:
                found += [(Piece(own, bound.piece.box), bound.view) for bound in pieces[name]]
        given = tuple((piece, self._given(piece.name, tensor)) for piece, tensor in found)
        return Landed(group, self._version, given, self._deadline.remaining())

    def _given(self, name: str, tensor: Any) -> Any:
        """What is handed out for memory of the session: that memory, or in debug mode a copy."""
        return tensor if self._offer.handed is None else self._offer.handed.copy(name, tensor)

    def _call(self, what: str, hook: Callable[..., Any], group: str, *arguments: Any) -> None:
        try:
            hook(*arguments)
            self._wrote = True
        except Exception as error:
            untouched = not self._wrote and getattr(error, "untouched", False) is True
            done = (
                f"after {len(self._done)} of {len(self._complete)} groups" if self._done else "before any other group"
            )
            where = f"on install group {group!r}, {done}" if what != "committed" else done
            state = " It says that it has written nothing." if untouched else ""
            raise InstallError(
                f"The {what} hook failed {where}: {text_of(error).rstrip('.')}.{state}",
                group=group,
                installed=tuple(self._done),
                untouched=untouched,
            ) from error


def _by_name(window: CompiledRefit) -> dict[str, list[BoundPiece]]:
    """By tensor of a window: its pieces where they landed, if the session has no live memory for them."""
    pieces: dict[str, list[BoundPiece]] = {}
    for bound in window.live:
        pieces.setdefault(bound.piece.name, []).append(bound)
    return pieces
