"""Manifest: all that one world holds or wants, by rules where there are rules and by explicit pieces where not.

A rank makes a manifest of what it knows (``from_torch``, ``from_views``): rules name all ranks of their mesh, explicit
pieces name only ``HERE``, the rank that publishes. ``merge`` turns the manifests of all ranks of a world into the one
that is planned with. Tensors come in plan order: by install group, then by name, numbers by value; the order in which
a rank registered them does not matter.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from reshard.errors import ManifestError
from reshard.layouts.bound import BoundPiece, bind_shards, binding_of, find_aliases
from reshard.layouts.box import Box
from reshard.layouts.dtensors import entry_of_dtensor, is_dtensor, named_tensors, number_in_meshes, rank_in_mesh
from reshard.layouts.dtype import dtype_name
from reshard.layouts.given import box_of_view, check_boxes, check_dense
from reshard.layouts.holding import HERE, Entry, Holding, Pieces, Rule, holding_from_json
from reshard.layouts.piece import Piece, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from reshard.layouts.layout import Layout


@dataclass(frozen=True)
class Manifest:
    """What one world holds or wants.

    Args:
        entries: The tensors in plan order.
        world: The world's name; two manifests of equal name count the same processes.
        size: How many ranks the world has.
        aliases: (name, first name) for names that are one memory on every rank that has both.
        local: This rank's pieces and where they lie; not compared, never sent.
    """

    entries: tuple[Entry, ...]
    world: str = "world"
    size: int = 0
    aliases: tuple[tuple[str, str], ...] = ()
    local: tuple[BoundPiece, ...] = field(default=(), compare=False, repr=False)
    unread: tuple[tuple[str, int, Any], ...] = field(default=(), compare=False, repr=False)
    """(name, rank in the mesh, local tensor) where the placements have several readings and only all ranks decide."""
    here: int | None = field(default=None, compare=False, repr=False)
    """The number that the DTensors' meshes give this process; None where there is no DTensor."""
    owner: Any = field(default=None, compare=False, repr=False)
    """The module that the tensors were read from, so that a parameter which it has replaced since can be found."""

    def __post_init__(self) -> None:
        names: dict[str, int] = {}
        for entry in self.entries:
            names[entry.spec.name] = names.get(entry.spec.name, 0) + 1
        twice = [name for name, count in names.items() if count > 1]
        if twice:
            raise ManifestError(f"{twice[0]!r} is declared {names[twice[0]]} times in one manifest; a name is unique.")
        object.__setattr__(self, "entries", tuple(sorted(self.entries, key=lambda e: e.spec.order)))
        distinct = {id(holding): holding for entry in self.entries for holding in entry.holdings}  # tensors share them
        highest = max((max(holding.ranks, default=-1) for holding in distinct.values()), default=-1)
        object.__setattr__(self, "size", max(self.size, highest + 1))

    # -- making one ------------------------------------------------------------------------------------------------

    @classmethod
    def from_layouts(cls, layouts: Mapping[str, Layout], *, world: str = "world", size: int = 0) -> Manifest:
        """A manifest by rules: one layout for each name."""
        return cls(
            tuple(
                Entry(
                    TensorSpec(name, layout.shape, layout.dtype, layout.granule),
                    (Rule(layout.mesh, layout.placement, layout.split),),
                )
                for name, layout in layouts.items()
            ),
            world,
            size,
        )

    @classmethod
    def from_pieces(
        cls,
        tensors: Iterable[TensorSpec],
        pieces: Mapping[int, Iterable[Piece]],
        *,
        world: str = "world",
        size: int = 0,
    ) -> Manifest:
        """A manifest by explicit pieces: what each rank holds, in boxes given by hand.

        Raises:
            ManifestError: A piece of an undeclared tensor, outside its tensor, or two of one rank that overlap.
        """
        specs = {spec.name: spec for spec in tensors}
        held: dict[str, dict[int, list[Box]]] = {name: {} for name in specs}
        for rank, given in sorted(pieces.items()):
            for piece in given:
                if piece.name not in specs:
                    raise ManifestError(f"Rank {rank} has a piece of {piece.name!r}, whose shape nobody declared.")
                held[piece.name].setdefault(rank, []).append(piece.box)
        entries = []
        for name, spec in specs.items():
            for rank, boxes in held[name].items():
                check_boxes(spec, rank, boxes)
            ranks = tuple((rank, tuple(sorted(boxes))) for rank, boxes in held[name].items())
            entries.append(Entry(spec, (Pieces(ranks),)))
        return cls(tuple(entries), world, max(size, max(pieces, default=-1) + 1))

    @classmethod
    def from_views(
        cls,
        views: Iterable[tuple[str, Sequence[int], Sequence[int] | Box, Any]],
        *,
        world: str = "world",
        groups: Mapping[str, str] | None = None,
        granules: Mapping[str, Sequence[int]] | None = None,
    ) -> Manifest:
        """What this rank holds or wants, as views of its own memory.

        Args:
            views: (name, global shape, start, view): the view holds the box that begins at ``start`` and has the
                view's shape. Where the view has more dims than the tensor (rows of one tensor interleaved with
                others'), give the Box instead of its start; the view's dims then refine the box's.
            world: The world's name.
            groups: Install group by tensor name.
            granules: Cut granule by tensor name.

        Raises:
            ManifestError: A view that is not dense or does not fit its tensor, two shapes or dtypes for one name,
                overlapping boxes.
        """
        groups, granules = groups or {}, granules or {}
        specs: dict[str, TensorSpec] = {}
        boxes: dict[str, list[Box]] = {}
        bound: list[BoundPiece] = []
        for name, shape, at, view in views:
            check_dense(name, view)
            spec = TensorSpec(
                name, tuple(shape), dtype_name(view.dtype), tuple(granules.get(name, ())), groups.get(name, "")
            )
            if specs.setdefault(name, spec) != spec:
                raise ManifestError(
                    f"{name!r} is declared as {specs[name].dtype}{list(specs[name].shape)} and as "
                    f"{spec.dtype}{list(spec.shape)} on one rank. One name is one tensor: give its global shape."
                )
            boxes.setdefault(name, [])
            if 0 in tuple(view.shape):
                continue
            box = box_of_view(spec, at, tuple(view.shape))
            boxes[name].append(box)
            bound.append(BoundPiece(Piece(name, box), binding_of(view), view))
        for name, held in boxes.items():
            check_boxes(specs[name], HERE, held)
        entries = [Entry(specs[n], (Pieces(((HERE, tuple(sorted(held))),)),)) for n, held in boxes.items()]
        return cls(tuple(entries), world, 0, find_aliases(bound), tuple(bound))

    @classmethod
    def from_torch(
        cls,
        model: Any,
        *,
        world: str = "world",
        groups: Mapping[str, str] | None = None,
        granules: Mapping[str, Sequence[int]] | None = None,
    ) -> Manifest:
        """What this rank holds of a model: DTensors by rule, plain tensors as replicas of their publishers.

        Args:
            model: A module (its ``state_dict()``: parameters and persistent buffers), or tensors by name.
            world: The world's name. Rank numbers are those of the DTensors' meshes.
            groups: Install group by tensor name.
            granules: Cut granule by tensor name.

        Raises:
            LayoutError: A ``Partial`` placement; a local tensor whose shape no reading of its placements gives.
            ManifestError: What is not a dense tensor with a name.
        """
        groups, granules = groups or {}, granules or {}
        named = named_tensors(model)
        entries: list[Entry] = []
        bound: list[BoundPiece] = []
        unread: list[tuple[str, int, Any]] = []
        for name, tensor in named.items():
            granule = tuple(granules.get(name, ()))
            spec = TensorSpec(name, tuple(tensor.shape), dtype_name(tensor.dtype), granule, groups.get(name, ""))
            if not is_dtensor(tensor):
                box = Box.whole(spec.shape)
                boxes = () if box is None else (box,)
                entries.append(Entry(spec, (Pieces(((HERE, boxes),)),)))
                bound.extend(BoundPiece(Piece(name, b), binding_of(tensor), tensor.detach()) for b in boxes)
                continue
            entry, layouts = entry_of_dtensor(spec, tensor)
            entries.append(entry)
            me, local = rank_in_mesh(tensor.device_mesh), tensor.detach().to_local()
            if me is not None and len(layouts) == 1 and all(entry.fits):
                bound.extend(bind_shards(name, layouts[0], me, local))
            elif me is not None:
                unread.append((name, me, local))
        owner = model if hasattr(model, "state_dict") else None
        return cls(
            tuple(entries), world, 0, find_aliases(bound), tuple(bound), tuple(unread), number_in_meshes(named), owner
        )

    # -- reading it ------------------------------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(entry.spec.name for entry in self.entries)

    @property
    def nbytes(self) -> int:
        """Bytes of one copy of every tensor."""
        return sum(entry.spec.nbytes for entry in self.entries)

    def entry(self, name: str) -> Entry:
        """The entry of ``name``; KeyError where there is none."""
        return {e.spec.name: e for e in self.entries}[name]

    def select(self, names: Iterable[str]) -> Manifest:
        """The manifest of some of the tensors, with what this rank has of them."""
        wanted = set(names)
        return replace(
            self,
            entries=tuple(e for e in self.entries if e.spec.name in wanted),
            aliases=tuple(pair for pair in self.aliases if pair[0] in wanted and pair[1] in wanted),
            local=tuple(b for b in self.local if b.piece.name in wanted),
            unread=tuple(row for row in self.unread if row[0] in wanted),
        )

    def renumber(self, to: Mapping[int, int], *, world: str | None = None, size: int = 0) -> Manifest:
        """The manifest with rank r called ``to[r]``."""
        seen: dict[int, Holding] = {}  # by identity: hashing the boxes of many ranks for every tensor is slow
        known: dict[Holding, Holding] = {}

        def again(holding: Holding) -> Holding:
            if id(holding) not in seen:
                if holding not in known:
                    known[holding] = holding.renumber(to)
                seen[id(holding)] = known[holding]
            return seen[id(holding)]

        entries = tuple(replace(e, holdings=tuple(again(h) for h in e.holdings)) for e in self.entries)
        return replace(self, entries=entries, world=self.world if world is None else world, size=size)

    @property
    def digest(self) -> str:
        """SHA-256 over the manifest's JSON: equal for equal manifests on every rank."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    # -- JSON ------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Compact plain data: holdings once in a table, a row a tensor; memory is left out."""
        table: dict[Holding, int] = {}
        seen: dict[int, int] = {}  # by identity first, as in renumber

        def number(holding: Holding) -> int:
            if id(holding) not in seen:
                seen[id(holding)] = table.setdefault(holding, len(table))
            return seen[id(holding)]

        def index(holdings: Sequence[Holding]) -> list[int]:
            return [number(holding) for holding in holdings]

        rows = [
            [
                e.spec.name,
                list(e.spec.shape),
                e.spec.dtype,
                list(e.spec.granule),
                e.spec.group,
                index(e.holdings),
                index(e.alternatives),
                list(e.fits),
            ]
            for e in self.entries
        ]
        return {
            "format": "reshard-manifest-1",
            "world": self.world,
            "size": self.size,
            "holdings": [holding.to_json() for holding in table],
            "tensors": rows,
            "aliases": [list(pair) for pair in self.aliases],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Manifest:
        """Read back what ``to_json`` wrote.

        Raises:
            ManifestError: The data is of another format.
        """
        if data.get("format") != "reshard-manifest-1":
            raise ManifestError(f"This is not a manifest: its format is {data.get('format')!r}.")
        table = [holding_from_json(h) for h in data["holdings"]]
        entries = tuple(
            Entry(
                _spec(name, tuple(shape), dtype, tuple(granule), group),
                tuple(table[i] for i in holdings),
                tuple(table[i] for i in alternatives),
                tuple(fits),
            )
            for name, shape, dtype, granule, group, holdings, alternatives, fits in data["tensors"]
        )
        return cls(entries, data["world"], data["size"], tuple((a, b) for a, b in data["aliases"]))


@lru_cache(maxsize=1 << 17)
def _spec(name: str, shape: tuple[int, ...], dtype: str, granule: tuple[int, ...], group: str) -> TensorSpec:
    """One object for what many ranks declare alike, so that comparing them takes little time."""
    return TensorSpec(name, shape, dtype, granule, group)


def find_rebound(part: Manifest) -> str | None:
    """The name of a tensor that the module has replaced since the manifest was made, or None.

    Writing to a replaced tensor would go nowhere, without an error.
    """
    if part.owner is None:
        return None
    now: dict[str, Any] = {}
    for named in (part.owner.named_parameters, part.owner.named_buffers):
        now.update(named(remove_duplicate=False))
    for bound in part.local:
        tensor = now.get(bound.piece.name)
        if tensor is None:
            continue  # the state dict calls it otherwise than the module does
        local = tensor.detach().to_local() if is_dtensor(tensor) else tensor
        if local.untyped_storage().data_ptr() != bound.binding.buffer:
            return bound.piece.name
    return None
