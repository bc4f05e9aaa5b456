from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from reshard.demo.trainer import Held
from reshard.demo.usual_way import FORMS, UsualWay
from reshard.layouts.box import Box
from reshard.testing.processes import threads

TIMEOUT = timedelta(seconds=20)
SHAPES = {"a": (10, 6), "norm": (7,), "large": (40, 8), "b": (9, 5)}
FULL = {
    name: torch.arange(torch.Size(shape).numel()).reshape(shape).to(torch.bfloat16) + index
    for index, (name, shape) in enumerate(SHAPES.items())
}
SOURCES, SIZE = 3, 5


def held_by(rank):
    """Rows of the matrices in uneven thirds, the last of 'b' empty; the norm whole on every rank."""
    for name, cuts in {"a": (0, 4, 8, 10), "large": (0, 14, 28, 40), "b": (0, 5, 9, 9)}.items():
        lo, hi = cuts[rank : rank + 2]
        box = Box((lo, 0), (hi, SHAPES[name][1])) if lo < hi else None
        yield Held(name, SHAPES[name], box, FULL[name][lo:hi].clone())
    yield Held("norm", SHAPES["norm"], Box((0,), (7,)), FULL["norm"].clone())


def wanted_by(rank):
    """Rank 3 wants columns fused into one buffer, rank 4 rows; both want the norm, and rank 4 only a part of 'b'."""
    nan = float("nan")
    norm = torch.full((7,), nan, dtype=torch.bfloat16)
    if rank == 3:
        fused = torch.full((50, 4), nan, dtype=torch.bfloat16)
        return [
            ("a", SHAPES["a"], (0, 2), fused[:10]),
            ("large", SHAPES["large"], (0, 4), fused[10:]),
            ("norm", SHAPES["norm"], (0,), norm),
        ]
    rows = torch.full((25, 8), nan, dtype=torch.bfloat16)
    part = torch.full((3, 2), nan, dtype=torch.bfloat16)
    return [
        ("large", SHAPES["large"], (10, 0), rows),
        ("norm", SHAPES["norm"], (0,), norm),
        ("b", SHAPES["b"], (4, 1), part),
    ]


@pytest.mark.parametrize("bucket_nbytes", [1, 300, 1 << 20])  # a parameter each, several buckets, one
def test_every_form_brings_what_a_dense_copy_would(bucket_nbytes):
    def rank(context):
        is_source = context.rank < SOURCES
        held = list(held_by(context.rank)) if is_source else []
        views = [] if is_source else wanted_by(context.rank)
        usual = UsualWay(
            context.store, context.rank, SOURCES, SIZE, TIMEOUT, held=held, views=views, bucket_nbytes=bucket_nbytes
        )
        for form in FORMS:
            for *_, view in views:
                view.fill_(float("nan"))
            usual.run(form)
            for name, _, start, view in views:
                dense = FULL[name][tuple(slice(lo, lo + n) for lo, n in zip(start, view.shape, strict=True))]
                assert torch.equal(view, dense), (form, name)
        return len(views)

    assert threads(SIZE, rank) == [0, 0, 0, 3, 3]


def test_a_single_source_rank_has_nobody_to_gather_from():
    def rank(context):
        views = [] if context.rank == 0 else [("a", SHAPES["a"], (0, 0), torch.zeros(10, 6, dtype=torch.bfloat16))]
        held = [Held("a", SHAPES["a"], Box((0, 0), (10, 6)), FULL["a"].clone())] if context.rank == 0 else []
        usual = UsualWay(context.store, context.rank, 1, 2, TIMEOUT, held=held, views=views)
        for form in FORMS:
            for *_, view in views:
                view.zero_()
            usual.run(form)
            assert all(torch.equal(view, FULL["a"]) for *_, view in views)

    threads(2, rank)
