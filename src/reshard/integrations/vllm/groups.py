"""Install groups: which parts of a model are brought to life one after the other, and which tensors each takes."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import prod
from typing import TYPE_CHECKING, Any, TypeVar

from reshard.errors import ManifestError
from reshard.integrations.traced import LoadTrace, Opaque
from reshard.layouts.piece import natural_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from reshard.integrations.traced import Fill, LocalCopy, Region, TracedPiece

Item = TypeVar("Item")


@dataclass(frozen=True)
class InstallGroup:
    """A part of a model that is taken out of service, filled and put back as one.

    Args:
        name: The module that holds all of it, as the model names it; ``""`` is the whole model.
        layers: The modules in it whose own tensors are written, by their names in the model.
        pieces: What lands in them, and where.
        fills: What always holds one number.
        copies: What equals a piece in another place.
        whole: Checkpoint tensors that come whole and go through the model's loader, since no pieces say where they go.
    """

    name: str
    layers: tuple[str, ...]
    pieces: tuple[TracedPiece, ...]
    fills: tuple[Fill, ...] = ()
    copies: tuple[LocalCopy, ...] = ()
    whole: tuple[str, ...] = ()

    @property
    def tensors(self) -> tuple[str, ...]:
        """The checkpoint tensors that it needs."""
        return tuple(dict.fromkeys((*(p.piece.name for p in self.pieces), *self.whole)))


def install_groups(trace: LoadTrace) -> tuple[InstallGroup, ...]:
    """Split what a trace found into the least parts that can be installed alone, in the order of their names.

    A part is a numbered layer (``model.layers.3``) or a module outside of all layers (the embedding, a norm, the
    head). Where a checkpoint tensor, or a local copy, is in two parts, the module that holds both is the group. Opaque
    tensors may go wherever the trace could not follow, so all such places are in one group; what the trace was not
    given may go anywhere in the model.
    """
    together = [[copy.source.buffer, copy.target.buffer] for copy in trace.copies]
    by_tensor = _grouped(trace.pieces, lambda piece: piece.piece.name)
    together += [[piece.region.buffer for piece in pieces] for pieces in by_tensor.values()]
    reached: list[str] = []
    if trace.opaque:
        reached = [region.buffer for region in trace.hidden]
        if any(one.is_unseen for one in trace.opaque) or not reached:
            reached = [buffer.name for buffer in trace.buffers]
        together.append(reached)
    group_of = _group_of_buffers([buffer.name for buffer in trace.buffers], together)
    pieces = _grouped(trace.pieces, lambda piece: group_of[piece.region.buffer])
    fills = _grouped(trace.fills, lambda fill: group_of[fill.region.buffer])
    copies = _grouped(trace.copies, lambda copy: group_of[copy.target.buffer])
    home = group_of[reached[0]] if reached else None
    groups = []
    for name in sorted({*pieces, *([] if home is None else [home])}, key=natural_key):
        written = {piece.region.buffer for piece in pieces[name]} | {fill.region.buffer for fill in fills[name]}
        written |= {copy.target.buffer for copy in copies[name]} | (set(reached) if name == home else set())
        layers = sorted({buffer.rpartition(".")[0] for buffer in written}, key=natural_key)
        whole = tuple(one.name for one in trace.opaque) if name == home else ()
        groups.append(
            InstallGroup(name, tuple(layers), tuple(pieces[name]), tuple(fills[name]), tuple(copies[name]), whole)
        )
    return tuple(groups)


def group_names(groups: Iterable[InstallGroup]) -> dict[str, str]:
    """The install group of each checkpoint tensor."""
    return {tensor: group.name for group in groups for tensor in group.tensors}


def one_of_each_kind(groups: Iterable[InstallGroup]) -> tuple[InstallGroup, ...]:
    """The first of all groups that differ in nothing but the numbers in their names, as the layers of a model do."""
    first: dict[object, InstallGroup] = {}
    for group in groups:
        first.setdefault(_kind(group), group)
    return tuple(first.values())


def _kind(group: InstallGroup) -> object:
    def unnumbered(name: str) -> str:
        return re.sub(r"[0-9]+", "#", name)

    def place(region: Region) -> object:
        return replace(region, buffer=unnumbered(region.buffer))

    return (
        tuple((unnumbered(p.piece.name), p.piece.box, place(p.region)) for p in group.pieces),
        tuple((place(fill.region), fill.value) for fill in group.fills),
        tuple((place(copy.source), place(copy.target)) for copy in group.copies),
        tuple(map(unnumbered, group.whole)),
    )


def part_of(trace: LoadTrace, group: InstallGroup) -> LoadTrace:
    """What a load of the group's tensors alone does."""
    tensors, layers = set(group.tensors), set(group.layers)
    return LoadTrace(
        tensors=tuple(spec for spec in trace.tensors if spec.name in tensors),
        buffers=tuple(buffer for buffer in trace.buffers if buffer.name.rpartition(".")[0] in layers),
        pieces=group.pieces,
        fills=group.fills,
        copies=group.copies,
        opaque=tuple(one for one in trace.opaque if one.name in tensors),
        hidden=tuple(region for region in trace.hidden if region.buffer.rpartition(".")[0] in layers),
        unused=(),
        aliases=(),
    )


def taken_whole(trace: LoadTrace, patterns: Mapping[str, str]) -> LoadTrace:
    """The trace with some tensors declared opaque, by patterns of names, each with the reason.

    They then travel whole and go through the model's loader, as the user asks.
    """

    def reason(name: str) -> str | None:
        return next((why for pattern, why in patterns.items() if fnmatchcase(name, pattern)), None)

    asked = {p.piece.name: why for p in trace.pieces if (why := reason(p.piece.name)) is not None}
    return replace(
        trace,
        pieces=tuple(p for p in trace.pieces if p.piece.name not in asked),
        opaque=(*trace.opaque, *(Opaque(name, why) for name, why in asked.items())),
        hidden=(*trace.hidden, *(p.region for p in trace.pieces if p.piece.name in asked)),
    )


def check_all_written(trace: LoadTrace, model: Any) -> None:
    """Require that the offered tensors fill every parameter of the model.

    A layer is processed as a whole, so an element that nothing brings would be what memory happened to hold.

    Raises:
        ManifestError: Parameters of which some elements come from nowhere; the nearest offered names are given.
    """
    numel: defaultdict[str, int] = defaultdict(int)
    for region in (*(p.region for p in trace.pieces), *(f.region for f in trace.fills)):
        numel[region.buffer] += prod(region.shape)
    for copy in trace.copies:
        numel[copy.target.buffer] += prod(copy.target.shape)
    unknown = {region.buffer for region in trace.hidden}
    everything = any(one.is_unseen for one in trace.opaque)
    own = {name for name, _ in model.named_parameters()}  # under its first name, where a head is tied
    lacking = [
        (buffer.name, prod(buffer.shape) - numel[buffer.name])
        for buffer in trace.buffers
        if buffer.name in own and buffer.name not in unknown and numel[buffer.name] < prod(buffer.shape)
    ]
    if lacking and not everything:
        name, count = lacking[0]
        near = get_close_matches(name, [spec.name for spec in trace.tensors], n=3, cutoff=0.3)
        raise ManifestError(
            f"The engine's {name!r} has {count} elements that no offered tensor brings, and {len(lacking) - 1} more "
            f"parameters are like that. Nearest offered names: {', '.join(map(repr, near)) or 'none'}. Offer the whole "
            f"model, under the names of its checkpoint (rename= in session.offer).",
            tensor=name,
            tensors=tuple(one for one, _ in lacking),
        )


def _grouped(items: Iterable[Item], key: Callable[[Item], str]) -> defaultdict[str, list[Item]]:
    found: defaultdict[str, list[Item]] = defaultdict(list)
    for item in items:
        found[key(item)].append(item)
    return found


def _group_of_buffers(buffers: Iterable[str], together: Iterable[Iterable[str]]) -> dict[str, str]:
    """By buffer, the module that is opened for it: none lies in another, and what is together lies in one."""
    part_of = {buffer: _part_of(buffer) for buffer in buffers}
    modules = set(part_of.values())
    modules |= {_shared([part_of[buffer] for buffer in some]) for some in together}
    outermost: dict[str, str] = {}
    for part in set(part_of.values()):
        path = part.split(".")
        around = ("", *(".".join(path[: n + 1]) for n in range(len(path))))  # from the outside
        outermost[part] = next(module for module in around if module in modules)
    return {buffer: outermost[part] for buffer, part in part_of.items()}


def _part_of(buffer: str) -> str:
    """``model.layers.3.mlp.down_proj.weight`` -> ``model.layers.3``; ``model.norm.weight`` -> ``model.norm``."""
    path = buffer.split(".")[:-1]
    number = next((at for at, name in enumerate(path) if name.isdigit()), len(path) - 1)
    return ".".join(path[: number + 1])


def _shared(parts: list[str]) -> str:
    """The module that holds all of these."""
    paths = [part.split(".") if part else [] for part in parts]
    shared = []
    for names in zip(*paths, strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return ".".join(shared)
