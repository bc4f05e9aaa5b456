"""Layout: shape, dtype, mesh and placement of one tensor -> the boxes of every rank.

From torch's placements (one entry a mesh axis) to ours (one entry a tensor dim): a ``_StridedShard`` with split factor
f says "I was cut after axes whose sizes multiply to f", so the order in which the axes cut can be decoded. When sizes
do not divide, torch has two answers for the same placements (its own arithmetic, and what FSDP2 really holds);
``candidates_from_placements`` gives both, and what all ranks really hold decides (``manifest.merge``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, cast

from reshard.errors import LayoutError
from reshard.layouts.box import Box
from reshard.layouts.dtype import ITEMSIZE, dtype_name
from reshard.layouts.mesh import Mesh
from reshard.layouts.placement import SPLITS, Interval, Split, Steps, Strided, apply_step, axis_of, normalize_steps

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class Shard:
    """One box of a rank's local tensor: where it lies globally, and at which local index it starts."""

    box: Box
    local_start: tuple[int, ...]


@dataclass(frozen=True, init=False)
class Layout:
    """Who holds what of one tensor.

    Args:
        shape: Global shape ``[rows, ...]``; any number of dims, zero included.
        dtype: Torch's name of it, or the ``torch.dtype``.
        mesh: The ranks that hold the tensor; those outside hold nothing.
        placement: Per tensor dim None, an axis, ``Strided`` or a tuple of those, outermost first. Axes that no dim
            names hold replicas. Missing entries at the end mean None.
        split: ``"even"`` (must divide), ``"ceil"`` (torch.chunk) or ``"balanced"``.
        granule: Per dim the least run that a cut may make; ones if not given.

    Raises:
        LayoutError: Unknown or repeated axis, too many entries, a size the rule does not allow, a cut inside a granule.

    >>> layout = Layout((8, 8), "bfloat16", Mesh({"dp": 2, "tp": 4}), ("tp", None))
    >>> layout.boxes(5)
    (Box(start=(2, 0), stop=(4, 8)),)
    """

    shape: tuple[int, ...]
    dtype: str
    mesh: Mesh
    placement: tuple[Steps, ...]
    split: Split
    granule: tuple[int, ...]

    def __init__(
        self,
        shape: Sequence[int],
        dtype: object,
        mesh: Mesh,
        placement: Sequence[object] = (),
        split: Split = "even",
        granule: Sequence[int] | None = None,
        *,
        name: str = "tensor",
    ) -> None:
        dims = tuple(int(n) for n in shape)
        if len(placement) > len(dims):
            raise LayoutError(
                f"{name!r}: the placement has {len(placement)} entries for a tensor of {len(dims)} dims {dims}. "
                f"Give one entry a dim."
            )
        padded = (*placement, *([None] * (len(dims) - len(placement))))
        values = {
            "shape": dims,
            "dtype": dtype_name(dtype),
            "mesh": mesh,
            "placement": tuple(normalize_steps(entry) for entry in padded),
            "split": split,
            "granule": (1,) * len(dims) if granule is None else tuple(int(g) for g in granule),
        }
        for field, value in values.items():
            object.__setattr__(self, field, value)
        self._check(name)

    def _check(self, name: str) -> None:
        used = [axis_of(step) for steps in self.placement for step in steps]
        unknown = sorted(set(used) - set(self.mesh.names))
        if unknown:
            raise LayoutError(
                f"{name!r}: the placement names axis {unknown[0]!r}; the mesh has {self.mesh.names}. "
                f"Name one of these, or give the mesh that axis."
            )
        if len(set(used)) != len(used):
            twice = sorted(axis for axis in set(used) if used.count(axis) > 1)
            raise LayoutError(f"{name!r}: mesh axis {twice[0]!r} splits more than one dim; an axis splits one dim.")
        if self.split not in SPLITS:
            raise LayoutError(f"{name!r}: split rule {self.split!r} is unknown; use one of {SPLITS}.")
        if len(self.granule) != len(self.shape) or any(g < 1 for g in self.granule):
            raise LayoutError(f"{name!r}: granule {self.granule} needs one positive size for each dim of {self.shape}.")
        if self.split == "even":
            self._check_even(name)
        self._check_granule(name)

    def _check_even(self, name: str) -> None:
        for dim, steps in enumerate(self.placement):
            left = self.shape[dim]
            for step in steps:
                parts = self.mesh.axis_size(axis_of(step)) * (step.factor if isinstance(step, Strided) else 1)
                if left % parts:
                    raise LayoutError(
                        f"{name!r}: dim {dim} has {left} rows and mesh axis {axis_of(step)!r} (size "
                        f"{self.mesh.axis_size(axis_of(step))}) splits it, but the rule 'even' needs {left} to be "
                        f"divisible by {parts}. Use the rule 'ceil' or 'balanced', or another {axis_of(step)!r} size.",
                        tensor=name,
                        dim=dim,
                    )
                left //= self.mesh.axis_size(axis_of(step))

    def _check_granule(self, name: str) -> None:
        for dim, (granule, steps) in enumerate(zip(self.granule, self.placement, strict=True)):
            if granule == 1 or not steps:
                continue
            for intervals in self._rows_by_place[dim].values():
                for edge in {edge for interval in intervals for edge in interval}:
                    if edge % granule and edge != self.shape[dim]:
                        raise LayoutError(
                            f"{name!r}: a shard edge at index {edge} of dim {dim} cuts a block of {granule} "
                            f"(size {self.shape[dim]}, split by {[axis_of(s) for s in steps]}). Blocks travel whole: "
                            f"move the edge to a multiple of {granule}, or quantise again after the refit.",
                            tensor=name,
                            dim=dim,
                            edge=edge,
                            granule=granule,
                        )

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of one copy of the whole tensor."""
        return prod(self.shape) * self.itemsize

    @cached_property
    def _rows_by_place(self) -> tuple[dict[tuple[int, ...], tuple[Interval, ...]], ...]:
        """Per dim: the intervals held, by the coordinates on the axes that split it."""
        tables = []
        for size, steps in zip(self.shape, self.placement, strict=True):
            table = {}
            sizes = [self.mesh.axis_size(axis_of(step)) for step in steps]
            for place in product(*(range(n) for n in sizes)):
                rows: tuple[Interval, ...] = ((0, size),) if size else ()
                for step, parts, index in zip(steps, sizes, place, strict=True):
                    rows = apply_step(rows, step, parts, index, self.split)
                table[place] = rows
            tables.append(table)
        return tuple(tables)

    def _intervals(self, position: int) -> tuple[tuple[Interval, ...], ...]:
        """Per dim the intervals that the ``position``-th rank of the mesh holds."""
        at = dict(zip(self.mesh.names, self.mesh.place(position), strict=True))
        return tuple(
            table[tuple(at[axis_of(step)] for step in steps)]
            for table, steps in zip(self._rows_by_place, self.placement, strict=True)
        )

    def shards(self, rank: int) -> tuple[Shard, ...]:
        """The boxes of ``rank`` with their place in its local tensor; none where it holds nothing."""
        if rank not in self.mesh.ranks:
            return ()
        per_dim = []
        for intervals in self._intervals(self.mesh.ranks.index(rank)):
            at, entries = 0, []
            for lo, hi in intervals:
                entries.append((lo, hi, at))
                at += hi - lo
            per_dim.append(entries)
        return tuple(
            Shard(Box(tuple(e[0] for e in combo), tuple(e[1] for e in combo)), tuple(e[2] for e in combo))
            for combo in product(*per_dim)
        )

    def boxes(self, rank: int) -> tuple[Box, ...]:
        """The boxes that ``rank`` holds, in global coordinates."""
        return tuple(shard.box for shard in self.shards(rank))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the local tensor of ``rank``: its intervals put one after the other on each dim."""
        intervals = self._intervals(self.mesh.ranks.index(rank))
        return tuple(sum(hi - lo for lo, hi in rows) for rows in intervals)

    def holders(self) -> Iterator[tuple[Box, tuple[int, ...]]]:
        """Each distinct box with all ranks that hold it, in order of their first holder."""
        by_box: dict[Box, list[int]] = {}
        for position, rank in enumerate(self.mesh.ranks):
            for combo in product(*self._intervals(position)):
                box = Box(tuple(lo for lo, _ in combo), tuple(hi for _, hi in combo))
                by_box.setdefault(box, []).append(rank)
        yield from ((box, tuple(sorted(ranks))) for box, ranks in by_box.items())

    def with_mesh(self, mesh: Mesh) -> Layout:
        """The same placement on another mesh with the same axes."""
        return Layout(self.shape, self.dtype, mesh, self.placement, self.split, self.granule)

    # -- from torch ------------------------------------------------------------------------------------------------

    @classmethod
    def from_placements(
        cls,
        shape: Sequence[int],
        dtype: object,
        mesh: Mesh,
        placements: Sequence[object],
        *,
        granule: Sequence[int] | None = None,
        name: str = "tensor",
    ) -> Layout:
        """Turn torch's placements (one a mesh axis) into a layout; strided and uneven shards included.

        Placements are read by their attributes, so torch is not imported. Where torch contradicts itself this is what
        FSDP2 really holds; ``candidates_from_placements`` gives the other reading too.

        Raises:
            LayoutError: A ``Partial`` or unknown placement, a dim out of range, another number of entries than axes.
        """
        return cls.candidates_from_placements(shape, dtype, mesh, placements, granule=granule, name=name)[0]

    @classmethod
    def candidates_from_placements(
        cls,
        shape: Sequence[int],
        dtype: object,
        mesh: Mesh,
        placements: Sequence[object],
        *,
        granule: Sequence[int] | None = None,
        name: str = "tensor",
    ) -> tuple[Layout, ...]:
        """All readings of torch's placements that differ for this shape: what FSDP2 holds first, torch's own second."""
        dims = len(shape)
        parsed = _parse_placements(placements, mesh, dims, name)
        left_to_right: list[list[Any]] = [[] for _ in range(dims)]
        for (axis, size), entry in zip(mesh.axes, parsed, strict=True):
            if entry is None:
                continue
            dim, factor = entry
            left_to_right[dim].append(axis if factor == 1 else Strided(axis, factor))
            del size
        readings = [
            decoded
            for decoded in (_decode_order(mesh, parsed, dims), tuple(tuple(steps) for steps in left_to_right))
            if decoded is not None
        ]
        layouts = [cls(shape, dtype, mesh, reading, "ceil", granule, name=name) for reading in readings]
        if len(layouts) == 2 and layouts[0]._same_boxes(layouts[1]):
            layouts.pop()
        return tuple(layouts)

    def _same_boxes(self, other: Layout) -> bool:
        places = range(self.mesh.size)
        return all(self._intervals(place) == other._intervals(place) for place in places)

    @classmethod
    def from_dtensor(cls, tensor: Any, *, name: str = "tensor") -> Layout:
        """The layout of a DTensor, read by its attributes (mesh, placements, shape, dtype).

        Where torch contradicts itself (uneven strided shards) this is what FSDP2 really holds.

        Raises:
            LayoutError: A ``Partial`` or unknown placement.
        """
        return cls.candidates_from_dtensor(tensor, name=name)[0]

    @classmethod
    def candidates_from_dtensor(cls, tensor: Any, *, name: str = "tensor") -> tuple[Layout, ...]:
        """As ``from_dtensor``, with torch's own reading second where it differs."""
        mesh = mesh_from_device_mesh(tensor.device_mesh)
        return cls.candidates_from_placements(tuple(tensor.shape), tensor.dtype, mesh, tensor.placements, name=name)

    # -- JSON ------------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Plain lists and dicts that ``from_json`` reads back to an equal layout."""
        return {
            "shape": list(self.shape),
            "dtype": self.dtype,
            "granule": list(self.granule),
            **rule_to_json(self.mesh, self.placement, self.split),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Layout:
        mesh, placement, split = rule_from_json(data)
        return cls(data["shape"], data["dtype"], mesh, placement, split, data["granule"])


def rule_to_json(mesh: Mesh, placement: tuple[Steps, ...], split: Split) -> dict[str, Any]:
    """Mesh, placement and split rule as plain lists: a strided step is ``[axis, factor]``."""
    steps = [[[s.axis, s.factor] if isinstance(s, Strided) else s for s in entry] for entry in placement]
    return {"mesh": [list(a) for a in mesh.axes], "ranks": list(mesh.ranks), "placement": steps, "split": split}


def rule_from_json(data: Mapping[str, Any]) -> tuple[Mesh, tuple[Steps, ...], Split]:
    """Read back what ``rule_to_json`` wrote."""
    placement = tuple(tuple(s if isinstance(s, str) else Strided(*s) for s in entry) for entry in data["placement"])
    return Mesh((tuple(a) for a in data["mesh"]), data["ranks"]), placement, cast("Split", data["split"])


def mesh_from_device_mesh(device_mesh: Any) -> Mesh:
    """A torch DeviceMesh as a Mesh: its rank grid and its axis names (``dim0``, ``dim1`` where it has none)."""
    grid = device_mesh.mesh
    shape = tuple(grid.shape)
    names = getattr(device_mesh, "mesh_dim_names", None) or tuple(f"dim{i}" for i in range(len(shape)))
    return Mesh(zip(names, shape, strict=True), (int(r) for r in grid.flatten().tolist()))


def _parse_placements(placements: Sequence[object], mesh: Mesh, dims: int, name: str) -> list[tuple[int, int] | None]:
    """Per mesh axis None (replicate) or (tensor dim, split factor; 1 for a plain shard)."""
    if len(placements) != len(mesh.axes):
        raise LayoutError(
            f"{name!r}: {len(placements)} placements for a mesh of {len(mesh.axes)} axes {dict(mesh.axes)}. "
            f"Give one placement for each mesh axis."
        )
    parsed: list[tuple[int, int] | None] = []
    for (axis, _), placement in zip(mesh.axes, placements, strict=True):
        kind = type(placement).__name__
        if "Partial" in kind:
            raise LayoutError(
                f"{name!r}: placement {placement} on mesh axis {axis!r} holds partial sums, not values. "
                f"Reduce first: tensor.redistribute(placements=[Replicate() or Shard(...)]).",
                tensor=name,
                axis=axis,
            )
        dim = getattr(placement, "dim", None)
        if kind == "Replicate":
            parsed.append(None)
        elif kind in ("Shard", "_StridedShard") and isinstance(dim, int):
            if not -dims <= dim < dims:
                raise LayoutError(
                    f"{name!r}: placement {placement} on mesh axis {axis!r} splits dim {dim}, but the tensor has "
                    f"{dims} dims. A scalar can only be replicated.",
                    tensor=name,
                    axis=axis,
                )
            parsed.append((dim % dims, int(getattr(placement, "split_factor", 1) or 1)))
        else:
            raise LayoutError(
                f"{name!r}: placement {placement!r} on mesh axis {axis!r} is not one that reshard knows "
                f"(Shard, Replicate, _StridedShard). Describe the tensor by pieces instead (Manifest.from_views).",
                tensor=name,
                axis=axis,
            )
    return parsed


def _decode_order(mesh: Mesh, parsed: Sequence[tuple[int, int] | None], dims: int) -> tuple[Steps, ...] | None:
    """Per tensor dim the axes in the order in which they cut, or None where the split factors name no order.

    Axes are read from right to left; one with split factor f goes behind the axes already placed whose sizes multiply
    to f. Source: reproduces what FSDP2 holds in every configuration tried against torch 2.13 (3,240).
    """
    order: list[Steps] = []
    for dim in range(dims):
        placed: list[tuple[str, int]] = []
        for (axis, size), entry in reversed(list(zip(mesh.axes, parsed, strict=True))):
            if entry is None or entry[0] != dim:
                continue
            at, done = 0, 1
            while done < entry[1] and at < len(placed):
                done *= placed[at][1]
                at += 1
            if done != entry[1]:
                return None
            placed.insert(at, (axis, size))
        order.append(tuple(axis for axis, _ in placed))
    return tuple(order)


def replace_ranks(mesh: Mesh, to: Mapping[int, int]) -> Mesh:
    """The mesh with every rank r called ``to[r]``; LayoutError names a rank that has no new number."""
    missing = [r for r in mesh.ranks if r not in to]
    if missing:
        raise LayoutError(f"Mesh rank {missing[0]} is not a rank of this world ({sorted(to)}).", rank=missing[0])
    return Mesh(mesh.axes, (to[r] for r in mesh.ranks))
