"""A compiled refit keeps the memory that it was compiled for, and refuses to run once that is elsewhere."""

from __future__ import annotations

import gc

import pytest
import torch
from tests.cases.dense import TIMEOUT
from tests.refit.sessions import error_of

import reshard
from reshard.errors import BindingError, PeerError
from reshard.testing.processes import threads


def compiled_for(ctx, tensor, owner=None):
    """Rank 0 holds ``w`` whole, the others want it; the whole of a module if one is given."""
    manifest = reshard.Manifest.from_torch(owner or {"w": tensor})
    sides = {"dst": manifest} if ctx.rank else {"src": manifest}
    return reshard.compile_refit(ctx.process_group("compiled"), timeout=TIMEOUT, **sides)


@pytest.mark.parametrize("who", [0, 1], ids=["source", "destination"])
@pytest.mark.parametrize("then", ["freed", "moved"])
def test_memory_that_was_freed_or_moved_since_is_named_on_all_ranks_before_a_byte_moves(who, then):
    def body(ctx):
        weight = torch.full((1000,), -7.0 if ctx.rank else 1.0)
        compiled = compiled_for(ctx, weight)
        compiled.run(TIMEOUT)
        kept = torch.ones(1000)  # takes the place that is freed
        if ctx.rank == who:
            weight.untyped_storage().resize_(0)
            if then == "moved":
                weight.untyped_storage().resize_(1 << 22)
        error = error_of(lambda: compiled.run(TIMEOUT))
        assert isinstance(error, BindingError if ctx.rank == who else PeerError)
        assert f"'w': the memory of rank {who} under this name was {then} since" in error.message
        assert ctx.rank == who or bool((weight == 1).all())
        assert bool((kept == 1).all())

    threads(3, body)


@pytest.mark.parametrize("who", [0, 1], ids=["source", "destination"])
def test_a_parameter_that_was_rebound_since_is_named_on_all_ranks(who):
    def body(ctx):
        module = torch.nn.Linear(4, 4)
        compiled = compiled_for(ctx, None, module)
        compiled.run(TIMEOUT)
        if ctx.rank == who:
            module.weight = torch.nn.Parameter(torch.zeros(4, 4))
        error = error_of(lambda: compiled.run(TIMEOUT))
        assert isinstance(error, BindingError if ctx.rank == who else PeerError)
        assert f"'weight': the module of rank {who} holds another tensor under this name" in error.message

    threads(2, body)


def test_tensors_that_the_caller_let_go_of_are_kept():
    def body(ctx):
        weight = torch.full((1000,), -7.0 if ctx.rank else 1.0)
        view = weight.view(10, 100)  # shows what is there
        compiled = compiled_for(ctx, weight)
        del weight
        gc.collect()
        for version in (1.0, 2.0):
            if ctx.rank == 0:
                view.fill_(version)
            compiled.run(TIMEOUT)
        return view.unique().tolist()

    assert threads(2, body) == [[2.0]] * 2
