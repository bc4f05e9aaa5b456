"""Tensor specs: what both sides must agree on, and the order of plans."""

from __future__ import annotations

import pytest
import torch

from reshard.errors import LayoutError
from reshard.layouts.piece import TensorSpec, natural_key


def test_names_sort_by_the_value_of_their_numbers():
    names = ["layers.10.w", "layers.2.w", "lm_head", "layers.2.b", "embed"]
    assert sorted(names, key=natural_key) == ["embed", "layers.2.b", "layers.2.w", "layers.10.w", "lm_head"]


def test_a_group_comes_before_a_name_in_plan_order():
    specs = [TensorSpec(n, (1,), "int8", group=g) for n, g in (("a", "layer 10"), ("b", "layer 2"), ("c", "layer 2"))]
    assert [spec.name for spec in sorted(specs, key=lambda s: s.order)] == ["b", "c", "a"]


def test_names_that_differ_only_in_leading_zeros_keep_one_order():
    assert natural_key("layers.01") != natural_key("layers.1")


def test_a_spec_takes_torch_dtypes_and_counts_bytes():
    spec = TensorSpec("w", [3, 5], torch.bfloat16)
    assert (spec.shape, spec.dtype, spec.nbytes) == ((3, 5), "bfloat16", 30)


def test_a_granule_of_single_elements_is_no_granule():
    assert TensorSpec("w", (4, 4), "int8", (1, 1)) == TensorSpec("w", (4, 4), "int8")


@pytest.mark.parametrize(
    ("shape", "granule", "message"),
    [
        ((4, -1), (), r"'w': shape \(4, -1\) has a negative size"),
        ((4, 4), (2,), r"'w': granule \(2,\) needs one positive size for each dim of \(4, 4\)"),
        ((4,), (0,), r"'w': granule \(0,\) needs one positive size"),
    ],
)
def test_a_spec_that_cannot_be_is_refused(shape, granule, message):
    with pytest.raises(LayoutError, match=message):
        TensorSpec("w", shape, "int8", granule)
