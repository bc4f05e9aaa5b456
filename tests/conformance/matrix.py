"""The layout matrix as layouts, and the same made uneven; what a rank of a process pool does with them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import reshard
from reshard.layouts.layout import Layout
from reshard.layouts.mesh import Mesh
from reshard.testing.oracle import check_landed, dense, local_shard, poisoned

if TYPE_CHECKING:
    import torch

    from reshard.testing.processes import RankContext

MATRIX = Path(__file__).parents[1] / "data" / "layout_matrix.json"


@dataclass(frozen=True)
class Row:
    """One row of the matrix."""

    number: int
    group: str
    world: int
    src: Layout
    dst: Layout
    local_shapes: tuple[tuple[int, ...], tuple[int, ...]]
    """Of source and destination, as the matrix says."""

    def __str__(self) -> str:
        return f"row {self.number} ({self.group}, {self.world} ranks, {self.src.dtype} {list(self.src.shape)})"


@lru_cache
def rows() -> tuple[Row, ...]:
    """All rows of the matrix."""
    return tuple(_row(number, data) for number, data in enumerate(json.loads(MATRIX.read_text())))


def _row(number, data):
    sides = [_layout(data["shape"], data["dtype"], data[side], "even") for side in ("src", "dst")]
    shapes = tuple(tuple(data[side]["local_shape"]) for side in ("src", "dst"))
    return Row(number, data["group"], data["world"], *sides, shapes)


def _layout(shape, dtype, side, split):
    mesh = Mesh(((f"axis{at}", size) for at, size in enumerate(side["mesh"])), range(*side["ranks"]))
    placement: list[tuple[str, ...]] = [()] * len(shape)
    for axis, code in zip(mesh.names, side["placements"], strict=True):
        if code != "R":
            placement[int(code[1:])] += (axis,)
    return Layout(shape, dtype, mesh, placement, split)


def uneven(row: Row) -> Row:
    """The row with a few elements less on each dim, so that no axis divides it."""
    counts = {size for side in (row.src, row.dst) for _, size in side.mesh.axes if size > 1}
    shape = []
    for size in row.src.shape:
        less = next(n for n in range(size - 1, 0, -1) if all(n % count for count in counts) or n == 1)
        shape.append(less)
    sides = [Layout(shape, side.dtype, side.mesh, side.placement, "ceil") for side in (row.src, row.dst)]
    return Row(row.number, row.group + ", uneven", row.world, *sides, ((), ()))


@lru_cache(maxsize=4)
def whole(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """The dense copy, made once for rows of equal shape."""
    return dense(shape, dtype)


def move_rows(context: RankContext, numbers: list[int], make_uneven: bool) -> None:
    """Carry out rows of the matrix over gloo, as one rank, and look at every element of what lands."""
    group = context.process_group("matrix")
    for number in numbers:
        row = uneven(rows()[number]) if make_uneven else rows()[number]
        dense_copy = whole(row.src.shape, row.src.dtype)
        is_src, is_dst = context.rank in row.src.mesh.ranks, context.rank in row.dst.mesh.ranks
        expected = local_shard(dense_copy, row.dst, context.rank) if is_dst else None
        dst = poisoned(expected) if expected is not None else None
        reshard.reshard(
            local_shard(dense_copy, row.src, context.rank) if is_src else None,
            dst,
            src_layout=row.src if is_src else None,
            dst_layout=row.dst if is_dst else None,
            group=group,
            transport="torch_p2p",
            staging_nbytes="4MiB",
            timeout=context.timeout,
        )
        if dst is not None and expected is not None:
            check_landed(dst, expected, f"{row}, rank {context.rank}")
