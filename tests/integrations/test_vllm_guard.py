"""A model whose weights may be of two versions does not run."""

from __future__ import annotations

import pytest
import torch

from reshard.errors import InstallError
from reshard.integrations.vllm.guard import Guard


def test_a_model_behind_a_shut_guard_runs_again_when_it_is_opened():
    model = torch.nn.Linear(2, 2)
    guard = Guard(model)
    guard.open()
    guard.shut("rank 1 has no room.")
    guard.shut("rank 1 still has no room.")
    with pytest.raises(InstallError, match=r"partly of another: rank 1 still has no room\."):
        model(torch.zeros(2))
    guard.open()
    assert model(torch.zeros(2)).shape == (2,)
    assert guard.reason == ""
