"""Patterns and classes: tensors of one kind are cut once, and bytes of one fate are one string."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.layouts.layout import Layout
from reshard.layouts.manifest import Manifest
from reshard.layouts.mesh import Mesh
from reshard.plan.plan import STRATEGIES, plan_refit
from reshard.testing.strategies import cases

ROWS, COLUMNS = (("x",),), (None, "x")
TWO, FOUR = Mesh({"x": 2}, [0, 1]), Mesh({"x": 4}, [2, 3, 4, 5])


def plan_of(tensors):
    """A plan of tensors given as name: (shape, source placement, destination placement)."""
    src = {name: Layout(shape, "bfloat16", TWO, before) for name, (shape, before, _) in tensors.items()}
    dst = {name: Layout(shape, "bfloat16", FOUR, after) for name, (shape, _, after) in tensors.items()}
    return plan_refit(Manifest.from_layouts(src), Manifest.from_layouts(dst))


def test_layers_of_equal_shape_and_layout_are_one_pattern():
    plan = plan_of({f"layers.{at}.w": ((8, 8), ("x",), COLUMNS) for at in range(40)})
    (pattern,) = plan.patterns
    assert pattern.tensors == tuple(range(40))
    assert len(plan.classes) == 8, "two sources times four destinations"
    assert all(cls.nbytes == 40 * 4 * 2 * 2 for cls in plan.classes)


@pytest.mark.parametrize(
    ("shape", "before", "after"),
    [
        ((8, 4), ("x",), ("x",)),  # another shape
        ((8, 8), (None, "x"), ("x",)),  # other holders
        ((8, 8), ("x",), ()),  # other needers
    ],
)
def test_what_differs_in_shape_or_ranks_is_another_pattern(shape, before, after):
    assert len(plan_of({"a": ((8, 8), ("x",), ("x",)), "b": (shape, before, after)}).patterns) == 2


def test_bytes_of_different_tensors_with_the_same_fate_are_one_string():
    plan = plan_of({"a": ((8, 8), ("x",), ()), "b": ((6, 2), ("x",), ())})
    assert [(cls.holders, cls.needers, cls.nbytes) for cls in plan.classes] == [
        (0b01, 0b111100, 64 + 12),
        (0b10, 0b111100, 64 + 12),
    ]
    assert [tensor for tensor, _ in plan.string(0).items] == [0, 1]


@settings(max_examples=60)
@given(cases(odd_memory=False), st.sampled_from(STRATEGIES))
def test_a_string_lists_its_items_in_plan_order_and_counts_their_bytes(case, strategy):
    plan = plan_refit(case.src, case.dst, strategy=strategy)
    for at, cls in enumerate(plan.classes):
        items = plan.string(at).items
        assert items == sorted(items, key=lambda item: (item[0], item[1].start))
        assert plan.string(at).nbytes == cls.nbytes
        assert cls.needers & ~cls.audience == 0
