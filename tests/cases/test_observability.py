"""OB-03: nothing is called a success that moved nothing, or that reached only some."""

from __future__ import annotations

import threading

import pytest
import torch
from tests.cases.dense import TIMEOUT, arange, refit, refused_refit

import reshard
from reshard.errors import ManifestError, PeerError, ReshardError, VerifyError
from reshard.layouts.manifest import Manifest
from reshard.testing.processes import threads
from reshard.transports import mover


def nan(*shape):
    return torch.full(shape, float("nan"))


def test_OB_03_a_refit_in_which_no_name_matches_is_an_error_on_every_rank():
    target = nan(8)

    def declare(rank):
        side = Manifest.from_torch({"model.w": target} if rank else {"w": arange(8)})
        return (None, side) if rank else (side, None)

    assert all(isinstance(error, ManifestError) for error in refused_refit(2, declare))
    assert target.isnan().all()


def test_OB_03_a_refit_in_which_nobody_wants_an_element_is_an_error_on_every_rank():
    """Every destination declares the tensor, and all their pieces are empty: a mistake in the caller's arithmetic."""

    def declare(rank):
        if rank:
            return None, Manifest.from_views([("w", (8,), (0,), nan(0))])
        return Manifest.from_torch({"w": arange(8)}), None

    for error in refused_refit(3, declare):
        assert isinstance(error, ManifestError)


def test_OB_03_a_model_without_elements_is_refitted_without_a_message(transport):
    """Nothing to move is right where there is nothing."""
    told = refit(
        2,
        lambda rank: (
            (None, Manifest.from_torch({"w": torch.empty(0, 5)}))
            if rank
            else (Manifest.from_torch({"w": torch.empty(0, 5)}), None)
        ),
        transport=transport,
    )
    assert [report.wire_nbytes for report, _ in told] == [0, 0]


@pytest.mark.parametrize("verify", ["sum", "fingerprint"])
def test_OB_03_bytes_that_reach_one_of_two_replicas_are_an_error_on_every_rank(transport, monkeypatch, verify):
    """The second replica's last copies are lost."""
    carry_out = mover.carry_out
    landed = {rank: nan(2 * 64)[::2] for rank in (1, 2)}

    def lossy(copies):
        if threading.current_thread().name != "rank 2":
            carry_out(copies)

    monkeypatch.setattr(mover, "carry_out", lossy)

    def body(ctx):
        side = {"dst": Manifest.from_torch({"w": landed[ctx.rank]})} if ctx.rank else {}
        side = side or {"src": Manifest.from_torch({"w": arange(64)})}
        group = ctx.process_group("lossy")
        compiled = reshard.compile_refit(group, **side, transport=transport, verify=verify, timeout=TIMEOUT)
        with pytest.raises(ReshardError) as caught:
            compiled.run(TIMEOUT)
        return caught.value

    told = threads(3, body)
    assert isinstance(told[2], VerifyError)
    assert "'w'" in told[2].message
    assert all(isinstance(told[rank], PeerError) and told[rank].rank == 2 for rank in (0, 1))
