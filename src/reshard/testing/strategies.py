"""Random meshes, layouts, pieces and bindings for property tests; needs hypothesis.

Sizes are small on purpose: what can go wrong with shards (uneven, empty, replicated, strided, overlapping) goes wrong
with ten rows as with ten thousand.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING

import torch
from hypothesis import strategies as st

from reshard.layouts.bound import BoundPiece, binding_of
from reshard.layouts.box import Box
from reshard.layouts.holding import Entry, Pieces, Rule
from reshard.layouts.layout import Layout
from reshard.layouts.manifest import Manifest
from reshard.layouts.mesh import Mesh
from reshard.layouts.piece import Piece, TensorSpec
from reshard.layouts.placement import SPLITS, Strided
from reshard.testing.oracle import Memory, contiguous_memory, dense
from reshard.topology.topology import Domain, Port, Topology

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DTYPES = ("bfloat16", "float32", "uint8", "int64", "float8_e4m3fn", "complex128")
"""One dtype of every size, and one that few kernels know."""

Drawn = st.DrawFn


@st.composite
def shapes(draw: Drawn, *, max_dims: int = 4, max_size: int = 9) -> tuple[int, ...]:
    """Shapes of 0 to ``max_dims`` dims; sizes of 0 and 1 are among them."""
    return tuple(draw(st.lists(st.integers(0, max_size), max_size=max_dims)))


@st.composite
def boxes(draw: Drawn, shape: Sequence[int]) -> Box:
    """A box inside a shape that has at least one element."""
    edges = [sorted(draw(st.lists(st.integers(0, n), min_size=2, max_size=2, unique=True))) for n in shape]
    return Box(tuple(lo for lo, _ in edges), tuple(hi for _, hi in edges))


@st.composite
def meshes(draw: Drawn, *, world: int = 8) -> Mesh:
    """Meshes of one to three axes over any ranks of a world, in any order; axes of size 1 are among them."""
    sizes: list[int] = []
    for _ in range(draw(st.integers(1, 3))):
        sizes.append(draw(st.integers(1, max(1, min(4, world // prod(sizes))))))
    ranks = draw(st.permutations(range(world)))[: prod(sizes)]
    return Mesh(zip(("x", "y", "z"), sizes, strict=False), ranks)


@st.composite
def layouts(draw: Drawn, shape: Sequence[int], dtype: str, *, world: int = 8) -> Layout:
    """Layouts of a tensor: any split rule, several axes on one dim in any order, strided steps, replicas."""
    mesh = draw(meshes(world=world))
    steps: list[list[str | Strided]] = [[] for _ in shape]
    for axis in draw(st.permutations(mesh.names)):
        dim = draw(st.none() | st.integers(0, len(shape) - 1)) if shape else None
        if dim is not None:
            factor = draw(st.sampled_from((1, 1, 2, 3)))
            steps[dim].append(axis if factor == 1 else Strided(axis, factor))
    splits = [split for split in SPLITS if split != "even" or _divides(shape, mesh, steps)]
    return Layout(shape, dtype, mesh, [tuple(entry) for entry in steps], draw(st.sampled_from(splits)))


def _divides(shape: Sequence[int], mesh: Mesh, steps: Sequence[Sequence[str | Strided]]) -> bool:
    for size, entry in zip(shape, steps, strict=True):
        left = size
        for step in entry:
            axis, factor = (step.axis, step.factor) if isinstance(step, Strided) else (step, 1)
            if left % (mesh.axis_size(axis) * factor):
                return False
            left //= mesh.axis_size(axis)
    return True


@st.composite
def partitions(draw: Drawn, shape: Sequence[int], *, max_cuts: int = 4) -> list[Box]:
    """Disjoint boxes that make up a whole tensor, cut by hand: no grid, no rule."""
    whole = Box.whole(shape)
    parts = [] if whole is None else [whole]
    for _ in range(draw(st.integers(0, max_cuts)) if parts and shape else 0):
        at = draw(st.integers(0, len(parts) - 1))
        dim = draw(st.integers(0, len(shape) - 1))
        box = parts[at]
        if box.shape[dim] < 2:
            continue
        edge = draw(st.integers(box.start[dim] + 1, box.stop[dim] - 1))
        parts[at : at + 1] = [
            Box(box.start, (*box.stop[:dim], edge, *box.stop[dim + 1 :])),
            Box((*box.start[:dim], edge, *box.start[dim + 1 :]), box.stop),
        ]
    return parts


@st.composite
def source_pieces(draw: Drawn, shape: Sequence[int], *, world: int = 8) -> dict[int, list[Box]]:
    """Boxes by rank that cover a tensor: uneven, some held by several ranks, and ranks that cut it in other ways."""
    held: dict[int, list[Box]] = {}
    for box in draw(partitions(shape)):
        for rank in draw(st.sets(st.integers(0, world - 1), min_size=1, max_size=3)):
            held.setdefault(rank, []).append(box)
    for rank in range(world):  # holders whose boxes overlap those of others without being equal to them
        if rank not in held and draw(st.booleans()):
            parts = draw(partitions(shape))
            held[rank] = [box for box in parts if draw(st.booleans())]
    return held


@st.composite
def wanted_pieces(draw: Drawn, shape: Sequence[int], *, world: int = 8) -> dict[int, list[Box]]:
    """Boxes by rank that need not cover a tensor; ranks that want nothing are among them."""
    wanted: dict[int, list[Box]] = {}
    for rank in range(world):
        if draw(st.booleans()):
            wanted[rank] = [box for box in draw(partitions(shape)) if draw(st.booleans())]
    return wanted


# -- memory --------------------------------------------------------------------------------------------------------


@st.composite
def memories(draw: Drawn, pieces: Sequence[Piece], dtypes: Mapping[str, str]) -> Memory:
    """Memory for the pieces of one rank: apart or fused into one buffer; plain, strided, transposed or interleaved."""
    bound: list[BoundPiece] = []
    buffers: list[torch.Tensor] = []
    for run in _runs(pieces, draw(st.booleans())):
        plans = [(piece, getattr(torch, dtypes[piece.name]), draw(_bindings(piece.box.shape))) for piece in run]
        align = max(kind.itemsize for _, kind, _ in plans)
        starts, at = [], 0
        for _, kind, plan in plans:
            starts.append(at)
            at += -(-plan.span * kind.itemsize // align) * align
        buffer = torch.zeros(at, dtype=torch.uint8)
        buffers.append(buffer)
        for (piece, kind, plan), start in zip(plans, starts, strict=True):
            base = start // kind.itemsize + plan.offset
            view = buffer.view(kind).as_strided(plan.shape, plan.strides, base)
            bound.append(BoundPiece(piece, binding_of(view), view))
    return Memory(tuple(bound), tuple(buffers))


def _runs(pieces: Sequence[Piece], fused: bool) -> list[list[Piece]]:
    return [list(pieces)] if fused and pieces else [[piece] for piece in pieces]


@dataclass(frozen=True)
class _BindingPlan:
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    span: int
    """Elements of the buffer that this piece and its gaps take."""


@st.composite
def _bindings(draw: Drawn, shape: tuple[int, ...]) -> _BindingPlan:
    """A way to lay a box out: its dims in any memory order, with gaps, and dims split in two that lie apart."""
    dims: list[int] = []
    for size in shape:
        divisors = [d for d in range(2, size) if size % d == 0]
        split = draw(st.sampled_from([0, 0, *divisors]))
        dims += [size // split, split] if split else [size]
    order = draw(st.permutations(range(len(dims)))) if draw(st.booleans()) else list(range(len(dims)))
    strides = [0] * len(dims)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step *= dims[dim] + draw(st.sampled_from((0, 0, 0, 1, 2)))
    offset = draw(st.sampled_from((0, 0, 1, 3)))
    reach = sum((n - 1) * s for n, s in zip(dims, strides, strict=True)) + 1
    return _BindingPlan(tuple(dims), tuple(strides), offset, offset + max(reach, step))


# -- whole cases ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Side:
    """One world of a case: its manifest and the boxes of each rank."""

    manifest: Manifest
    pieces: dict[int, list[Piece]]


@dataclass(frozen=True)
class Case:
    """Two worlds that hold and want the same tensors, with the dense copies and each rank's memory."""

    src: Manifest
    dst: Manifest
    whole: dict[str, torch.Tensor] = field(repr=False)
    src_memory: dict[int, Memory] = field(repr=False)
    """By rank of the source world."""

    dst_memory: dict[int, Memory] = field(repr=False)
    """By rank of the destination world."""


@st.composite
def sides(draw: Drawn, specs: Sequence[TensorSpec], *, name: str, world: int, wants: bool) -> Side:
    """A world: each tensor by a layout or by explicit pieces; a destination may leave tensors out."""
    entries: list[Entry] = []
    held: dict[int, list[Piece]] = {}
    for spec in specs:
        if wants and len(specs) > 1 and draw(st.integers(0, 4)) == 0:
            continue
        if draw(st.booleans()):
            layout = draw(layouts(spec.shape, spec.dtype, world=world))
            rule = Rule(layout.mesh, layout.placement, layout.split)
            entries.append(Entry(spec, (rule,)))
            by_rank = {rank: list(layout.boxes(rank)) for rank in layout.mesh.ranks}
        else:
            by_rank = draw((wanted_pieces if wants else source_pieces)(spec.shape, world=world))
            rows = tuple((rank, tuple(sorted(boxes))) for rank, boxes in sorted(by_rank.items()))
            entries.append(Entry(spec, (Pieces(rows),)))
        for rank, mine in by_rank.items():
            held.setdefault(rank, []).extend(Piece(spec.name, box) for box in mine)
    return Side(Manifest(tuple(entries), name, world), held)


@st.composite
def cases(draw: Drawn, *, world: int = 6, max_tensors: int = 3, odd_memory: bool = True) -> Case:
    """Two worlds, which may be the same processes, and their memory.

    Args:
        draw: Given by hypothesis.
        world: Ranks of each world, at most.
        max_tensors: Tensors, at most.
        odd_memory: Whether pieces may lie strided, transposed, fused or interleaved.
    """
    count = draw(st.integers(1, max_tensors))
    specs = [
        TensorSpec(f"layers.{at}.w", draw(shapes(max_dims=3 if at else 4)), draw(st.sampled_from(DTYPES)))
        for at in range(count)
    ]
    names = draw(st.sampled_from((("trainer", "generator"), ("world", "world"))))
    src = draw(sides(specs, name=names[0], world=world, wants=False))
    dst = draw(sides(specs, name=names[1], world=world, wants=True))
    dtypes = {spec.name: spec.dtype for spec in specs}
    memory = []
    for side in (src, dst):
        by_rank = {}
        for rank, pieces in side.pieces.items():
            plain = not odd_memory or draw(st.booleans())
            by_rank[rank] = contiguous_memory(pieces, dtypes) if plain else draw(memories(pieces, dtypes))
        memory.append(by_rank)
    whole = {spec.name: dense(spec.shape, spec.dtype, seed=at) for at, spec in enumerate(specs)}
    return Case(src.manifest, dst.manifest, whole, *memory)


@st.composite
def topologies(draw: Drawn, size: int) -> Topology:
    """Topologies of ``size`` ranks: domains of any sizes over any ranks, ports of one rank or of a whole domain."""
    ranks = draw(st.permutations(range(size)))
    domains: list[Domain] = []
    ports: list[Port] = []
    while ranks:
        count = draw(st.integers(1, 4))
        mine, ranks = ranks[:count], ranks[count:]
        domains.append(Domain(f"domain {len(domains)}", tuple(sorted(mine)), draw(st.sampled_from((100, 1000)))))
        shared = draw(st.booleans())
        for group in [mine] if shared else [[rank] for rank in mine]:
            rate = draw(st.sampled_from((50, 100)))
            ports.append(Port(f"port {len(ports)}", tuple(sorted(group)), rate, draw(st.sampled_from((50, 100)))))
    return Topology("drawn", tuple(domains), tuple(ports))
