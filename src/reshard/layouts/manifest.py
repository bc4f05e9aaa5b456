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
from typing import TYPE_CHECKING, Any

from reshard.errors import LayoutError, ManifestError
from reshard.layouts.binding import Binding
from reshard.layouts.box import Box
from reshard.layouts.dtype import dtype_name
from reshard.layouts.layout import Layout, replace_ranks, rule_from_json, rule_to_json
from reshard.layouts.piece import Piece, TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from reshard.layouts.mesh import Mesh
    from reshard.layouts.placement import Split, Steps

HERE = -1
"""Stands for the rank that publishes a manifest, until ``merge`` gives it its number."""


@dataclass(frozen=True)
class Rule:
    """Holders by rule: a mesh and a placement; with a tensor's shape it makes a Layout."""

    mesh: Mesh
    placement: tuple[Steps, ...]
    split: Split

    def layout(self, spec: TensorSpec) -> Layout:
        granule = spec.granule or None
        return Layout(spec.shape, spec.dtype, self.mesh, self.placement, self.split, granule, name=spec.name)

    def boxes(self, spec: TensorSpec) -> Iterator[tuple[Box, tuple[int, ...]]]:
        """Each distinct box with its holders."""
        return self.layout(spec).holders()

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.mesh.ranks

    def renumber(self, to: Mapping[int, int]) -> Rule:
        return replace(self, mesh=replace_ranks(self.mesh, to))

    def to_json(self) -> dict[str, Any]:
        return rule_to_json(self.mesh, self.placement, self.split)


@dataclass(frozen=True)
class Pieces:
    """Holders by explicit boxes: ``held`` lists (rank, boxes), by rank."""

    held: tuple[tuple[int, tuple[Box, ...]], ...]

    def boxes(self, spec: TensorSpec) -> Iterator[tuple[Box, tuple[int, ...]]]:
        """Each distinct box with its holders."""
        del spec
        by_box: dict[Box, list[int]] = {}
        for rank, boxes in self.held:
            for box in boxes:
                by_box.setdefault(box, []).append(rank)
        yield from ((box, tuple(ranks)) for box, ranks in by_box.items())

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(rank for rank, _ in self.held)

    def renumber(self, to: Mapping[int, int]) -> Pieces:
        missing = [r for r in self.ranks if r not in to]
        if missing:
            raise ManifestError(f"Rank {missing[0]} is not a rank of this world ({sorted(to)}).", rank=missing[0])
        return Pieces(tuple(sorted((to[rank], boxes) for rank, boxes in self.held)))

    def to_json(self) -> dict[str, Any]:
        return {"pieces": [[rank, [[list(b.start), list(b.stop)] for b in boxes]] for rank, boxes in self.held]}


Holding = Rule | Pieces


def _holding_from_json(data: Mapping[str, Any]) -> Holding:
    if "pieces" in data:
        return Pieces(tuple((rank, tuple(Box(tuple(a), tuple(b)) for a, b in boxes)) for rank, boxes in data["pieces"]))
    return Rule(*rule_from_json(data))


@dataclass(frozen=True)
class Entry:
    """One tensor of a manifest: what it is, who holds it, and what else its placements may mean.

    ``alternatives`` are further readings of the same placements where torch contradicts itself; ``fits`` says which of
    (the holding, the alternatives...) match what the publishing rank really holds. ``merge`` keeps the first reading
    that fits every rank.
    """

    spec: TensorSpec
    holdings: tuple[Holding, ...]
    alternatives: tuple[Holding, ...] = ()
    fits: tuple[bool, ...] = ()


@dataclass(frozen=True)
class BoundPiece:
    """A piece of this rank, where it lies, and the view itself (an object with torch's tensor attributes)."""

    piece: Piece
    binding: Binding
    view: Any


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
        ranks = {r for entry in self.entries for holding in entry.holdings for r in holding.ranks}
        object.__setattr__(self, "size", max(self.size, max(ranks, default=-1) + 1))

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
                _check_boxes(spec, rank, boxes)
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
            ManifestError: A view that does not fit its tensor, two shapes or dtypes for one name, overlapping boxes.
        """
        groups, granules = groups or {}, granules or {}
        specs: dict[str, TensorSpec] = {}
        boxes: dict[str, list[Box]] = {}
        bound: list[BoundPiece] = []
        for name, shape, at, view in views:
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
            box = _box_of_view(spec, at, tuple(view.shape))
            boxes[name].append(box)
            bound.append(BoundPiece(Piece(name, box), binding_of(view), view))
        for name, held in boxes.items():
            _check_boxes(specs[name], HERE, held)
        entries = [Entry(specs[n], (Pieces(((HERE, tuple(sorted(held))),)),)) for n, held in boxes.items()]
        return cls(tuple(entries), world, 0, _aliases(bound), tuple(bound))

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
        """
        groups, granules = groups or {}, granules or {}
        named = _named_tensors(model)
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
            entry, layouts = _entry_of_dtensor(spec, tensor)
            entries.append(entry)
            me, local = rank_in_mesh(tensor.device_mesh), tensor.detach().to_local()
            if me is not None and len(layouts) == 1 and all(entry.fits):
                bound.extend(bind_shards(name, layouts[0], me, local))
            elif me is not None:
                unread.append((name, me, local))
        owner = model if hasattr(model, "state_dict") else None
        return cls(tuple(entries), world, 0, _aliases(bound), tuple(bound), tuple(unread), _number(named), owner)

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
        seen: dict[Holding, Holding] = {}

        def again(holding: Holding) -> Holding:
            if holding not in seen:
                seen[holding] = holding.renumber(to)
            return seen[holding]

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

        def index(holdings: Sequence[Holding]) -> list[int]:
            return [table.setdefault(holding, len(table)) for holding in holdings]

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
        table = [_holding_from_json(h) for h in data["holdings"]]
        entries = tuple(
            Entry(
                TensorSpec(name, tuple(shape), dtype, tuple(granule), group),
                tuple(table[i] for i in holdings),
                tuple(table[i] for i in alternatives),
                tuple(fits),
            )
            for name, shape, dtype, granule, group, holdings, alternatives, fits in data["tensors"]
        )
        return cls(entries, data["world"], data["size"], tuple((a, b) for a, b in data["aliases"]))


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


def merge(parts: Mapping[int, Manifest], *, world: str = "world", size: int = 0) -> Manifest:
    """The manifest of a world from what each of its ranks published.

    Args:
        parts: By rank; explicit pieces of ``HERE`` become that rank's.
        world: The world's name.
        size: How many ranks the world has.

    Raises:
        ManifestError: Two ranks declare one name with different shapes or dtypes.
        LayoutError: No reading of a tensor's placements fits what all ranks hold.
    """
    specs: dict[str, tuple[int, TensorSpec]] = {}
    rules: dict[str, dict[Holding, None]] = {}
    pieces: dict[str, dict[int, tuple[Box, ...]]] = {}
    readings: dict[str, tuple[tuple[Holding, ...], list[tuple[int, tuple[bool, ...]]]]] = {}
    for rank, part in sorted(parts.items()):
        for entry in part.entries:
            name = entry.spec.name
            first, spec = specs.setdefault(name, (rank, entry.spec))
            if spec != entry.spec:
                raise ManifestError(
                    f"{name!r}: rank {first} declares {_spec_text(spec)} and rank {rank} declares "
                    f"{_spec_text(entry.spec)}. All ranks of a world declare the global shape and the same dtype.",
                    tensor=name,
                    rank=rank,
                )
            if entry.alternatives or entry.fits:
                all_readings = (*entry.holdings, *entry.alternatives)
                readings.setdefault(name, (all_readings, []))[1].append((rank, entry.fits))
                continue
            for holding in entry.holdings:
                if isinstance(holding, Rule):
                    rules.setdefault(name, {})[holding] = None
                else:
                    for at, boxes in holding.held:
                        pieces.setdefault(name, {})[rank if at == HERE else at] = boxes
    for name, (candidates, votes) in readings.items():
        rules.setdefault(name, {})[_first_that_fits(name, candidates, votes)] = None
    entries = []
    for name, (_, spec) in specs.items():
        held = tuple(sorted(pieces.get(name, {}).items()))
        explicit: tuple[Holding, ...] = (Pieces(held),) if held else ()
        entries.append(Entry(spec, (*rules.get(name, {}), *explicit)))
    return Manifest(tuple(entries), world, size, _agreed_aliases(parts))


def _agreed_aliases(parts: Mapping[int, Manifest]) -> tuple[tuple[str, str], ...]:
    """Aliases that hold on every rank that has both names."""
    said: dict[tuple[str, str], int] = {}
    for part in parts.values():
        for pair in part.aliases:
            said[pair] = said.get(pair, 0) + 1
    names = [set(part.names) for part in parts.values()]
    both = {pair: sum(pair[0] in have and pair[1] in have for have in names) for pair in said}
    return tuple(sorted(pair for pair, count in said.items() if count == both[pair]))


def _first_that_fits(
    name: str, candidates: tuple[Holding, ...], votes: Sequence[tuple[int, tuple[bool, ...]]]
) -> Holding:
    for index, holding in enumerate(candidates):
        if all(fits[index] for _, fits in votes):
            return holding
    against = [rank for rank, fits in votes if not fits[0]]
    raise LayoutError(
        f"{name!r}: no reading of its placements gives the local shapes that the ranks hold (rank {against[0]} holds "
        f"another shape than its placement says). Describe the tensor by pieces (Manifest.from_views).",
        tensor=name,
        rank=against[0],
    )


def _spec_text(spec: TensorSpec) -> str:
    granule = f", granule {list(spec.granule)}" if spec.granule else ""
    group = f", group {spec.group!r}" if spec.group else ""
    return f"{spec.dtype} {list(spec.shape)}{granule}{group}"


def _check_boxes(spec: TensorSpec, rank: int, boxes: Sequence[Box]) -> None:
    whole = Box.whole(spec.shape)
    who = "this rank" if rank == HERE else f"rank {rank}"
    for box in boxes:
        if whole is None or box.ndim != len(spec.shape) or not whole.contains(box):
            raise ManifestError(
                f"{spec.name!r}: {who} has box {box}, which is not inside the tensor's shape {list(spec.shape)}. "
                f"If the rest is padding, leave it out of the piece.",
                tensor=spec.name,
                rank=rank,
                box=box,
            )
        _check_granule(spec, who, box)
    ordered = sorted(boxes)
    for index, box in enumerate(ordered):
        for other in ordered[index + 1 :]:
            if box.ndim and other.start[0] >= box.stop[0]:
                break
            if box.intersect(other) is not None:
                raise ManifestError(
                    f"{spec.name!r}: {who} has two pieces that overlap, {box} and {other}. Give each element once.",
                    tensor=spec.name,
                    rank=rank,
                )


def _check_granule(spec: TensorSpec, who: str, box: Box) -> None:
    for dim, granule in enumerate(spec.granule):
        for edge in (box.start[dim], box.stop[dim]):
            if edge % granule and edge != spec.shape[dim]:
                raise LayoutError(
                    f"{spec.name!r}: {who} has box {box}, whose edge {edge} on dim {dim} cuts a block of {granule}. "
                    f"Blocks travel whole: move the edge to a multiple of {granule}.",
                    tensor=spec.name,
                    dim=dim,
                    edge=edge,
                    granule=granule,
                )


def _box_of_view(spec: TensorSpec, at: Sequence[int] | Box, view_shape: tuple[int, ...]) -> Box:
    if isinstance(at, Box):
        if refine(at.shape, view_shape) is None:
            raise ManifestError(
                f"{spec.name!r}: a view of shape {list(view_shape)} cannot hold box {at} of shape {list(at.shape)}: "
                f"the view's dims must refine the box's, each box dim the product of a run of view dims.",
                tensor=spec.name,
            )
        return at
    if len(at) != len(view_shape) or len(at) != len(spec.shape):
        raise ManifestError(
            f"{spec.name!r}: start {tuple(at)} and a view of shape {list(view_shape)} for a tensor of shape "
            f"{list(spec.shape)}. Give one start index a dim; for an interleaved view give the Box instead.",
            tensor=spec.name,
        )
    return Box(tuple(at), tuple(lo + n for lo, n in zip(at, view_shape, strict=True)))


def refine(coarse: Sequence[int], fine: Sequence[int]) -> tuple[tuple[int, ...], ...] | None:
    """For each coarse dim the sizes of the fine dims whose product it is, in order; None where they do not fit.

    >>> refine((8, 3), (2, 4, 3)), refine((8, 3), (4, 6))
    (((2, 4), (3,)), None)
    """
    if tuple(coarse) == tuple(fine):
        return tuple((n,) for n in fine)
    groups: list[tuple[int, ...]] = []
    at = 0
    for size in coarse:
        run: list[int] = []
        product = 1
        while product < size or not run:
            if at == len(fine):
                return None
            product *= fine[at]
            run.append(fine[at])
            at += 1
        if product != size:
            return None
        groups.append(tuple(run))
    while at < len(fine) and groups and fine[at] == 1:
        groups[-1] = (*groups[-1], 1)
        at += 1
    return tuple(groups) if at == len(fine) else None


def binding_of(view: Any) -> Binding:
    """Where a tensor lies, read by its attributes: its storage, offset, shape and strides."""
    itemsize = view.element_size()
    return Binding(
        buffer=view.untyped_storage().data_ptr(),
        offset_nbytes=view.storage_offset() * itemsize,
        shape=tuple(view.shape),
        strides=tuple(view.stride()),
        itemsize=itemsize,
    )


def _aliases(bound: Sequence[BoundPiece]) -> tuple[tuple[str, str], ...]:
    """Names whose pieces are the same boxes in the same memory, each with the first name of that memory."""
    where: dict[str, list[tuple[Box, Binding]]] = {}
    for item in bound:
        where.setdefault(item.piece.name, []).append((item.piece.box, item.binding))
    first: dict[tuple[tuple[Box, Binding], ...], str] = {}
    pairs = []
    for name, places in sorted(where.items()):
        known = first.setdefault(tuple(sorted(places, key=lambda p: p[0])), name)
        if known != name:
            pairs.append((name, known))
    return tuple(pairs)


def _named_tensors(model: Any) -> dict[str, Any]:
    """The tensors of a module's state dict, or those given by name.

    Raises:
        ManifestError: Something that is not a tensor, other than the extra state that some modules keep.
    """
    named = dict(model.state_dict(keep_vars=True) if hasattr(model, "state_dict") else model)
    tensors = {name: value for name, value in named.items() if not name.endswith("_extra_state")}
    for name, value in tensors.items():
        if not (hasattr(value, "dtype") and hasattr(value, "shape")):
            raise ManifestError(
                f"{name!r} is a {type(value).__name__}, not a tensor. Give the tensors that are to travel, by name.",
                tensor=name,
            )
    return tensors


def _number(named: Mapping[str, Any]) -> int | None:
    """The number of this process in the meshes of its DTensors, which must be one and the same."""
    first: tuple[int, str] | None = None
    for name, tensor in named.items():
        here = rank_in_mesh(tensor.device_mesh) if is_dtensor(tensor) else None
        if here is None:
            continue
        first = first or (here, name)
        if here != first[0]:
            raise ManifestError(
                f"{first[1]!r} and {name!r} lie on meshes that number this process {first[0]} and {here}. Build all "
                f"meshes of a world over the same ranks.",
                tensors=(first[1], name),
            )
    return None if first is None else first[0]


def is_dtensor(tensor: Any) -> bool:
    """Whether an object has a DTensor's mesh and placements."""
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def _entry_of_dtensor(spec: TensorSpec, tensor: Any) -> tuple[Entry, tuple[Layout, ...]]:
    """The entry of a DTensor with every reading of its placements, and whether each fits this rank's local tensor."""
    layouts = Layout.candidates_from_dtensor(tensor, name=spec.name)
    shape = tuple(tensor.detach().to_local().shape)
    me = rank_in_mesh(tensor.device_mesh)
    fits = tuple(me is None or layout.local_shape(me) == shape for layout in layouts)
    readings = tuple(Rule(layout.mesh, layout.placement, layout.split) for layout in layouts)
    if fits == (True,):
        return Entry(spec, readings), layouts
    return Entry(spec, readings[:1], readings[1:], fits), layouts


def bind_shards(name: str, layout: Layout, rank: int, local: Any) -> list[BoundPiece]:
    """The pieces that ``rank`` holds under ``layout``, as views of its local tensor."""
    bound = []
    for shard in layout.shards(rank):
        view = local
        for dim, (lo, size) in enumerate(zip(shard.local_start, shard.box.shape, strict=True)):
            view = view.narrow(dim, lo, size)
        bound.append(BoundPiece(Piece(name, shard.box), binding_of(view), view))
    return bound


def bound_pieces(part: Manifest, merged: Manifest) -> tuple[BoundPiece, ...]:
    """This rank's pieces once ``merge`` has chosen the reading of every placement.

    Args:
        part: What this rank published, with its memory.
        merged: What ``merge`` made of all ranks' parts, in the rank numbers of the parts.
    """
    chosen = list(part.local)
    for name, me, local in part.unread:
        for holding in merged.entry(name).holdings:
            if isinstance(holding, Rule) and me in holding.ranks:
                chosen.extend(bind_shards(name, holding.layout(merged.entry(name).spec), me, local))
    return tuple(chosen)


def rank_in_mesh(device_mesh: Any) -> int | None:
    """The number that a DeviceMesh gives this process, or None where the process is not in it."""
    coordinate = device_mesh.get_coordinate()
    return None if coordinate is None else int(device_mesh.mesh[tuple(coordinate)])
