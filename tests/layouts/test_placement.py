"""Split rules and steps: which rows each place gets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reshard.errors import LayoutError
from reshard.layouts.placement import Strided, apply_step, cut, normalize_steps, take


@given(st.integers(0, 200), st.integers(1, 17))
def test_ceil_cuts_as_torch_chunk_does(total, parts):
    chunks = [chunk.tolist() for chunk in torch.arange(total).chunk(parts)]
    ours = [list(range(*cut(total, parts, index, "ceil"))) for index in range(parts)]
    assert [rows for rows in ours if rows] == [rows for rows in chunks if rows]
    assert all(not rows for rows in ours[len(chunks) :]), "only the last may be empty"


@given(st.integers(0, 200), st.integers(1, 17))
def test_balanced_cuts_as_torch_tensor_split_does(total, parts):
    ours = [list(range(*cut(total, parts, index, "balanced"))) for index in range(parts)]
    assert ours == [rows.tolist() for rows in torch.arange(total).tensor_split(parts)]


@given(st.integers(0, 12), st.integers(1, 12))
def test_all_rules_agree_where_the_size_divides(rows, parts):
    for index in range(parts):
        assert {cut(rows * parts, parts, index, rule) for rule in ("even", "ceil", "balanced")} == {
            (index * rows, index * rows + rows)
        }


@pytest.mark.parametrize("split", ["ceil", "balanced"])
@given(data=st.data())
def test_the_places_of_a_step_share_the_rows_without_a_gap(data, split):
    total, parts = data.draw(st.integers(0, 40)), data.draw(st.integers(1, 5))
    factor = data.draw(st.integers(1, 4))
    rows = data.draw(st.sampled_from((((0, total),), ((0, total // 2), (total // 2 + 3, total + 3)))))
    rows = tuple((lo, hi) for lo, hi in rows if lo < hi)
    given_rows = [row for lo, hi in rows for row in range(lo, hi)]
    for step in ("x", Strided("x", factor)):
        got = [
            row
            for index in range(parts)
            for lo, hi in apply_step(rows, step, parts, index, split)
            for row in range(lo, hi)
        ]
        assert sorted(got) == given_rows


@given(st.integers(0, 30), st.integers(1, 4), st.integers(1, 4))
def test_a_strided_step_keeps_the_same_part_of_every_run(total, factor, parts):
    rows = ((0, total),) if total else ()
    for index in range(parts):
        expected = []
        for run in torch.arange(total).chunk(factor):
            chunks = run.chunk(parts)
            expected += chunks[index].tolist() if index < len(chunks) else []
        got = [row for lo, hi in apply_step(rows, Strided("x", factor), parts, index, "ceil") for row in range(lo, hi)]
        assert got == expected


def test_taking_a_part_reads_the_intervals_as_one_string():
    assert take([(0, 2), (4, 6)], 1, 3) == ((1, 2), (4, 5))
    assert take([(0, 2), (2, 6)], 1, 3) == ((1, 3),), "intervals that touch become one"


@pytest.mark.parametrize(
    ("entry", "steps"),
    [
        (None, ()),
        ("tp", ("tp",)),
        (Strided("dp", 2), (Strided("dp", 2),)),
        (["tp", "dp"], ("tp", "dp")),  # a list, outermost first
    ],
)
def test_an_entry_may_be_written_short(entry, steps):
    assert normalize_steps(entry) == steps


def test_what_is_no_step_is_refused_with_what_is_one():
    with pytest.raises(LayoutError, match=r"3 is not a step of a placement\. Use an axis name, Strided"):
        normalize_steps(("tp", 3))
