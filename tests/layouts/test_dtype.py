"""Dtypes by name: every dtype of the installed torch is known, with torch's own size."""

from __future__ import annotations

import pytest
import torch

from reshard.errors import LayoutError
from reshard.layouts.dtype import ITEMSIZE, dtype_name

TORCH_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_an_element_takes_as_many_bytes_as_in_torch(dtype):
    assert ITEMSIZE[dtype_name(dtype)] == dtype.itemsize


def test_a_name_with_and_without_torch_and_its_short_forms_are_one():
    assert {dtype_name(d) for d in (torch.bfloat16, "torch.bfloat16", "bfloat16", "BF16", "bf16")} == {"bfloat16"}
    assert {dtype_name(d) for d in (torch.half, "half", "fp16", "F16")} == {"float16"}


def test_an_unknown_dtype_is_refused_with_those_that_are_known():
    with pytest.raises(LayoutError, match=r"'float7' is not a dtype that reshard knows\. Known: bfloat16, "):
        dtype_name("float7")
