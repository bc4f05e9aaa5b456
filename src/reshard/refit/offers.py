"""Offers: what a rank offers or accepts, brought to a manifest under the names that both sides use."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from reshard.layouts.manifest import Manifest
from reshard.refit.landed import Hooks
from reshard.refit.names import renamed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from reshard.refit.handed import Handed
    from reshard.refit.names import Rename
    from reshard.refit.whole import Whole


@dataclass(frozen=True, eq=False)
class Offer:
    """What one rank brings to the refits of a session."""

    original: Manifest
    """Under the names that the model uses, so that a replaced parameter can be found."""

    manifest: Manifest
    renamed: Mapping[str, str]
    """By new name: the model's own, where they differ."""

    hooks: Hooks = field(default_factory=Hooks)
    """Whom a destination calls when it commits."""

    whole: tuple[Whole, ...] = ()
    """What a destination takes whole, though it keeps pieces of it or hands it on."""

    depends_on: Callable[[], object] | None = None
    """Gives what the places of its pieces depend on, such as an expert map."""

    as_of: object = None
    """What that was when the rank accepted, as ``frozen`` keeps it."""

    handed: Handed | None = None
    """In debug mode: the copies that loaders and the install hook are given in place of the session's memory."""

    rooms: tuple[Any, ...] = ()
    """Memory of the session that some pieces are bound to: nobody reads it before the commit."""

    @property
    def has_moved(self) -> bool:
        """Whether what its places depend on has changed since."""
        return self.depends_on is not None and frozen(self.depends_on()) != self.as_of

    @property
    def room_nbytes(self) -> int:
        """Bytes of that memory."""
        return sum(room.numel() * room.element_size() for room in self.rooms)

    @property
    def left_out(self) -> tuple[str, ...]:
        """The model's names that a rule leaves out."""
        kept = {self.renamed.get(name, name) for name in self.manifest.names}
        return tuple(name for name in self.original.names if name not in kept)


def make_offer(
    what: Any,
    *,
    world: str,
    rename: Rename | None = None,
    groups: Mapping[str, str] | Callable[[str], str] | None = None,
) -> Offer:
    """Read a model, named tensors, or a manifest.

    Args:
        what: A module, tensors by name, or a Manifest, which is taken as it is.
        world: The world's name.
        rename: Rules for names; torch's wrappers are taken off in any case.
        groups: Install group by name (of the model), or a function that gives it.

    Raises:
        ManifestError, LayoutError: What cannot be described.
    """
    original = what if isinstance(what, Manifest) else Manifest.from_torch(what, world=world)
    if groups is not None:
        original = _grouped(original, groups)
    manifest, changed = renamed(original, rename)
    return Offer(original, manifest, changed)


def frozen(value: Any) -> Any:
    """A value that later changes of the original do not reach, and that compares as a whole.

    >>> slots = [2, 0]
    >>> kept = frozen({"layer 0": slots})
    >>> slots[0] = 1
    >>> kept
    {'layer 0': [2, 0]}
    """
    if hasattr(value, "tolist"):  # a tensor or an array
        return value.tolist()
    if isinstance(value, dict):
        return {key: frozen(one) for key, one in value.items()}
    return [frozen(one) for one in value] if isinstance(value, list | tuple) else copy.deepcopy(value)


def _grouped(manifest: Manifest, groups: Mapping[str, str] | Callable[[str], str]) -> Manifest:
    """The manifest with other install groups; tensors that ``groups`` does not name keep their own."""

    def group_of(name: str, own: str) -> str:
        return groups(name) if callable(groups) else groups.get(name, own)

    entries = (replace(e, spec=replace(e.spec, group=group_of(e.spec.name, e.spec.group))) for e in manifest.entries)
    return replace(manifest, entries=tuple(entries))
