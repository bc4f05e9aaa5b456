"""Fifty refits between worlds that torchrun and plain processes launched, as a benchmark times them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.demo.tiny import make_model, write_folder

import reshard
from reshard.testing import endurance

PSS_TOLERANCE_KIB = 1024


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_engine_worlds_follow_a_trainer_of_torchrun_for_fifty_refits_and_keep_what_they_opened(tmp_path):
    """The program of ``benchmarks/session_endurance.py`` with a tiny model and real optimizer steps, without the times.

    The processes themselves compare every engine rank with a dense copy that was cast once, after each refit.
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(reshard.__file__).parents[1])}
    folder = write_folder(make_model("llama"), tmp_path / "model")
    told = endurance.run(folder, 50, look_at=(10, 50), timeout=280, environment=environment)
    assert [one.member for one in told] == [
        f"{world} rank {rank}" for world, size in endurance.EXPECT.items() for rank in range(size)
    ]
    for one in told:
        early, late = one.held[10], one.held[50]
        assert (early.descriptors, early.threads) == (late.descriptors, late.threads), one.member
        assert one.casts > 0
        is_trainer = one.member.startswith(endurance.TRAINER)
        # A trainer rank grows by some MiB here; whether by its training or by its session has not been told apart.
        # That a source without training does not grow is in test_session_endurance.py.
        assert is_trainer or late.pss_kib - early.pss_kib < PSS_TOLERANCE_KIB, one.member
        assert len(one.changed) == (50 if is_trainer else 0)
        assert all(count > 1000 for count in one.changed), "each step changes weights"
        assert (one.equal_nbytes > 0) != is_trainer
