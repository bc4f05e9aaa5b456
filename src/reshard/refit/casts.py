"""Casts: in which dtype each tensor crosses the wire, where the two sides declare different ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from reshard.layouts.dtype import ITEMSIZE

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.layouts.manifest import Manifest
    from reshard.layouts.piece import TensorSpec

CASTABLE = frozenset({"float16", "bfloat16", "float32", "float64"})
"""Dtypes whose values mean the same without a scale. Integers and fp8 are payload: they travel as they are or not."""


@dataclass(frozen=True, order=True)
class Cast:
    """A tensor whose two sides declare different dtypes."""

    tensor: str
    world: str
    """The destination world that declares ``dst``; empty where there is one."""

    src: str
    dst: str
    where: str
    """``"source"``: before the wire; ``"destination"``: after it, since the source's dtype is the narrower one."""


@dataclass(frozen=True)
class Wire:
    """One form in which a source tensor travels: its name in the plan, and its dtype."""

    name: str
    dtype: str


@dataclass(frozen=True)
class Settled:
    """Both sides in the dtypes of the wire."""

    src: Manifest
    dst: tuple[Manifest, ...]
    casts: tuple[Cast, ...]
    forms: Mapping[str, tuple[Wire, ...]]
    """By source tensor that travels otherwise than under its own name in its own dtype: all its forms."""

    wanted: tuple[Mapping[str, Wire], ...]
    """The same by destination and tensor: the one form that it takes."""

    @property
    def cast_at(self) -> dict[str, str]:
        """By tensor as it travels that a side holds in another dtype: ``"source"`` or ``"destination"``."""
        forms = {(name, form.dtype): form.name for name, rows in self.forms.items() for form in rows}
        wires = [(cast.src if cast.where == "destination" else cast.dst) for cast in self.casts]
        return {
            forms.get((cast.tensor, wire), cast.tensor): cast.where
            for cast, wire in zip(self.casts, wires, strict=True)
        }


def wire_dtype(src: str, dst: str) -> str | None:
    """The dtype in which a tensor travels: the narrower one, the destination's if both are as wide; None if no cast.

    >>> wire_dtype("float32", "bfloat16"), wire_dtype("bfloat16", "float32"), wire_dtype("float16", "bfloat16")
    ('bfloat16', 'bfloat16', 'bfloat16')
    >>> wire_dtype("int64", "int64"), wire_dtype("int64", "int32")
    ('int64', None)
    """
    if src == dst:
        return src
    if src not in CASTABLE or dst not in CASTABLE:
        return None
    return dst if ITEMSIZE[dst] <= ITEMSIZE[src] else src


def settle_dtypes(src: Manifest, dst: Sequence[Manifest], worlds: Sequence[str]) -> Settled:
    """Bring both sides to the dtypes in which their tensors travel.

    A tensor that two destination worlds want in two dtypes travels as two, ``name (bfloat16)`` and so on. Where no
    cast is possible both sides stay as they are, and the comparison that follows names the tensor.
    """
    held = {entry.spec.name: entry.spec for entry in src.entries}
    dtypes: dict[str, set[str]] = {}
    casts: list[Cast] = []
    for manifest, world in zip(dst, worlds, strict=True):
        for entry in manifest.entries:
            name, theirs = entry.spec.name, held.get(entry.spec.name)
            wire = None if theirs is None else wire_dtype(theirs.dtype, entry.spec.dtype)
            if wire is None or theirs is None:
                continue
            dtypes.setdefault(name, set()).add(wire)
            if theirs.dtype != entry.spec.dtype:
                where = "destination" if wire == theirs.dtype else "source"
                casts.append(Cast(name, world, theirs.dtype, entry.spec.dtype, where))
    forms: dict[str, tuple[Wire, ...]] = {}
    for name, found in dtypes.items():
        if len(found) > 1:
            forms[name] = tuple(Wire(f"{name} ({dtype})", dtype) for dtype in sorted(found))
        elif found != {held[name].dtype}:
            forms[name] = (Wire(name, next(iter(found))),)
    wanted: list[dict[str, Wire]] = []
    settled: list[Manifest] = []
    for manifest in dst:
        mine: dict[str, Wire] = {}
        entries = []
        for entry in manifest.entries:
            name, theirs = entry.spec.name, held.get(entry.spec.name)
            wire = None if theirs is None else wire_dtype(theirs.dtype, entry.spec.dtype)
            form = next((f for f in forms.get(name, ()) if f.dtype == wire), None)
            if form is None and wire is not None:
                form = Wire(name, wire)
            if form is not None and form != Wire(name, entry.spec.dtype):
                mine[name] = form
            entries.append(entry if form is None else replace(entry, spec=_as(entry.spec, form)))
        wanted.append(mine)
        settled.append(replace(manifest, entries=tuple(entries)))
    source = tuple(
        replace(entry, spec=_as(entry.spec, form))
        for entry in src.entries
        for form in forms.get(entry.spec.name, (Wire(entry.spec.name, entry.spec.dtype),))
    )
    return Settled(replace(src, entries=source), tuple(settled), tuple(sorted(set(casts))), forms, tuple(wanted))


def _as(spec: TensorSpec, form: Wire) -> TensorSpec:
    return replace(spec, name=form.name, dtype=form.dtype)
