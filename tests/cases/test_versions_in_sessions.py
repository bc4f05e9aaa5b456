"""Cases of sessions over time: waiting for a version, a replica that comes late, and tensors that a hook keeps."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
from tests.refit.sessions import NAMES, Rank, error_of, run

import reshard
from reshard.errors import RefitTimeout, VersionError
from reshard.testing.processes import threads

PAIR = {"trainer": 1, "gen0": 1}


def test_OD_06_after_a_restart_neither_side_waits_for_the_other_beyond_its_deadline():
    """The trainer publishes only after the engine has waited; the engine is told what there is, in time."""
    waited, resumed = threading.Event(), threading.Event()

    def body(me, session):
        me.train(6)
        session.refit(6)
        if me.is_source:
            assert waited.wait(20)
            me.train(7)  # as the checkpoint has it: no step was taken since
            resumed.set()
            session.refit(7)
            session.refit(7)
            me.train(9)
            return error_of(lambda: session.refit(7))
        started = time.monotonic()
        error = error_of(lambda: session.wait_for(7, timedelta(seconds=2)))
        assert isinstance(error, RefitTimeout)
        assert (error.version, error.published) == (7, 6)
        assert "the source has come to version 6" in error.message
        assert 2 <= time.monotonic() - started < 4
        assert session.wait_for(5) == 6, "what is there already is not waited for"
        waited.set()
        assert resumed.wait(20)
        assert session.wait_for(7) == 7
        session.refit(7)
        assert me.is_version(7)
        report = session.refit(session.wait_for(7))
        assert len(report.unchanged) == len(NAMES), "the same weights again are accepted"
        return error_of(lambda: session.refit(7))

    errors = run(PAIR, body, verify="fingerprint")
    assert all(isinstance(error, VersionError) for error in errors), "others under the same version are refused"


def test_MF_03_a_replica_that_comes_late_catches_up_without_the_others_and_is_not_ready_before():
    """C meets the trainer in a session of their own; A and B are not asked for anything until the next version."""
    fleet = {"trainer": 1, "a": 1, "b": 1, "c": 1}
    own = {"trainer": 1, "c": 1}
    up_to_date, caught_up = threading.Event(), threading.Event()

    def ready(session):
        return {m.world: m.not_ready for m in session.status() if m.role == "destination"}

    with reshard.serve_store() as store:

        def body(ctx):
            world = list(fleet)[ctx.rank]
            me = Rank(world, 0, 1)
            first = me.connect(str(store), fleet)
            me.train(5)
            first.refit(5)
            if world == "c":  # it is lost, and a new one comes in its place with nothing
                first.close()
                me = Rank(world, 0, 1)
                assert me.is_poison()
            if world in ("a", "b"):
                assert caught_up.wait(20), "meanwhile they serve and call nothing"
                assert me.is_version(5)
            else:
                with me.connect(str(store), own, session="c comes back") as between:
                    if world == "c":
                        assert ready(between)["c"] == "at no version"
                    between.refit(5)
                    if world == "c":
                        assert me.is_version(5)
                        assert ready(between)["c"] == ""
                        up_to_date.set()
                    else:
                        assert up_to_date.wait(20)
                        told = ready(first)
                        assert told["a"] == told["b"] == "", "they stayed ready"
                caught_up.set()
            session = me.connect(str(store), fleet) if world == "c" else first
            me.train(6)
            session.refit(6)
            assert me.is_version(6)
            told = set(ready(session).values())
            session.close()
            return told

        assert threads(4, body, timeout=60) == [{""}] * 4


def test_TA_06_tensors_that_a_hook_keeps_are_their_own_until_the_next_refit():
    """Four chunks through a small staging buffer: what was handed out first is not what came last."""
    numel, nbytes = 1 << 14, 1 << 16

    def body(me, session):
        if me.is_source:
            session.offer({f"t{at}": torch.full((numel,), float(at)) for at in range(4)})
            session.refit(1)
            return
        kept = {}
        session.accept({f"t{at}": torch.zeros(numel) for at in range(4)}, loaders={"*": kept.__setitem__})
        report = session.refit(1)
        assert report.staging_nbytes - report.copies_nbytes <= 2 * nbytes, "half of all of them at most"
        assert [kept[f"t{at}"].unique().tolist() for at in range(4)] == [[0.0], [1.0], [2.0], [3.0]]
        assert len({tensor.data_ptr() for tensor in kept.values()}) == 4

    run(PAIR, body, verify="none", staging_nbytes=2 * nbytes)


@pytest.mark.parametrize("published", [None, 3])
def test_OD_06_a_wait_for_what_was_never_published_says_what_there_is(published):
    def body(me, session):
        if published is not None:
            session.refit(published)
        if me.is_source:
            return
        error = error_of(lambda: session.wait_for(4, timedelta(seconds=0.2)))
        assert error.published == published

    run(PAIR, body)
