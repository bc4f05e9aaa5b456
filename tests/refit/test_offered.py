"""What a source offers, read by a destination before it says what it wants; all ranks threads."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
from tests.refit.sessions import NAMES, SHAPE, dense, error_of, run

import reshard
from reshard.errors import ConfigError, ManifestError, RefitTimeout
from reshard.layouts.piece import TensorSpec

ONE = {"trainer": 2, "gen0": 2}
SOON = timedelta(seconds=1)


def test_a_destination_learns_names_shapes_and_dtypes_and_accepts_by_them():
    def body(me, session):
        if me.is_source:
            me.train(1)
            session.refit(1)
            return
        specs = session.offered()
        assert specs == tuple(TensorSpec(name, SHAPE, "float32") for name in sorted(NAMES))
        mine = {spec.name: torch.zeros(spec.shape, dtype=torch.bfloat16) for spec in specs}
        session.accept(mine)
        session.refit(1)
        assert all(torch.equal(mine[name], dense(1, name).to(torch.bfloat16)) for name in NAMES)

    run(ONE, body)


def test_what_the_ranks_of_a_source_offer_is_merged_and_the_last_offer_counts():
    both = threading.Barrier(4)

    def body(me, session):
        if me.is_source:
            session.offer({"old": torch.zeros(3)})
            session.offer({f"stage{me.rank}.w": torch.zeros(4 + me.rank), "shared": torch.zeros(2, dtype=torch.int64)})
        both.wait(20)
        if me.is_source:
            return
        offered = {spec.name: (spec.shape, spec.dtype) for spec in session.offered()}
        assert offered == {
            "shared": ((2,), "int64"),
            "stage0.w": ((4,), "float32"),
            "stage1.w": ((5,), "float32"),
        }

    run(ONE, body)


def test_whoever_has_not_offered_is_named_at_the_deadline():
    def body(me, address):
        role = "source" if me.is_source else "destination"
        session = reshard.connect(address, role=role, world=me.world, rank=me.rank, expect=ONE)
        if me.is_source:
            if me.rank == 0:
                session.offer(me.manifest)
            return None
        return error_of(lambda: session.offered(SOON))

    for error in run(ONE, body, connect=False)[2:]:
        assert isinstance(error, RefitTimeout)
        assert error.message.startswith("trainer rank 1 offered nothing for 1 s.")
        assert error.members == ("trainer rank 1",)


def test_two_shapes_under_one_name_are_refused():
    def body(me, address):
        role = "source" if me.is_source else "destination"
        session = reshard.connect(address, role=role, world=me.world, rank=me.rank, expect=ONE)
        if me.is_source:
            session.offer({"w": torch.zeros(4 + me.rank)})
            return None
        return error_of(lambda: session.offered())

    for error in run(ONE, body, connect=False)[2:]:
        assert isinstance(error, ManifestError)
        assert "'w': trainer rank 0 offers float32 [4] and trainer rank 1 float32 [5]." in error.message


def test_a_source_does_not_ask_itself():
    def body(me, session):
        if me.is_source:
            with pytest.raises(ConfigError, match="'trainer' joined as source"):
                session.offered()

    run(ONE, body)


def test_a_trainer_that_was_restarted_is_not_taken_for_the_one_before():
    def trainer(address, names):
        return reshard.connect(address, role="source", world="trainer", rank=0, expect={"trainer": 1, "gen0": 1})

    def body(me, address):
        if me.is_source:
            first = trainer(address, NAMES)
            first.offer({"old": torch.zeros(1)})
            seen.wait(10)
            second = trainer(address, NAMES)
            second.offer({"new": torch.zeros(2)})
            second.refit(1)
            return
        options = {"role": "destination", "world": "gen0", "rank": 0, "expect": {"trainer": 1, "gen0": 1}}
        session = reshard.connect(address, **options)
        assert [spec.name for spec in session.offered()] == ["old"]
        session.accept(dict.fromkeys(["new"], torch.ones(2)))
        seen.set()
        session.refit(1)
        assert [spec.name for spec in session.offered()] == ["new"]

    seen = threading.Event()
    run({"trainer": 1, "gen0": 1}, body, connect=False)
