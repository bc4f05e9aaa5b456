"""Cases of sessions over time: waiting for a version, a replica that comes late, and tensors that a hook keeps."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
from tests.refit.sessions import NAMES, Rank, error_of, run

import reshard
from reshard.errors import BindingError, MembershipError, PeerError, RefitTimeout, ReshardError, VersionError
from reshard.refit.compiled import CompiledRefit
from reshard.testing.processes import threads

PAIR = {"trainer": 1, "gen0": 1}


def bring(me, session, tensors, **options):
    (session.offer if me.is_source else session.accept)(tensors, **options)


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


@pytest.mark.parametrize("waiting", [False, True], ids=["they call nothing", "they wait for the next version"])
def test_MF_03_a_replica_that_was_restarted_catches_up_without_the_others_and_is_not_ready_before(waiting):
    """C comes back with nothing; A and B serve on, and are met in their old place by the next version."""
    fleet = {"trainer": 1, "a": 1, "b": 1, "c": 1}
    caught_up = threading.Event()

    def ready(session):
        return {m.world: m.not_ready for m in session.status() if m.role == "destination"}

    with reshard.serve_store() as store:

        def body(ctx):
            world = list(fleet)[ctx.rank]
            me = Rank(world, 0, 1)
            session = me.connect(str(store), fleet)
            me.train(5)
            session.refit(5)
            if world == "c":  # it is lost, and a new one comes in its place with nothing
                session.close()
                me = Rank(world, 0, 1)
                session = me.connect(str(store), fleet)
                assert me.is_poison()
                assert ready(session) == {"a": "", "b": "", "c": "at no version, the newest is 5"}
            if world in ("trainer", "c"):
                report = session.refit(5, to=["c"])
                assert (report.epoch, report.to) == (2, ("c",))
                assert set(ready(session).values()) == {""}
                assert me.is_version(5)
                caught_up.set()
            elif not waiting:
                assert caught_up.wait(20)
                assert me.is_version(5)
                assert session.epoch == 1
            me.train(6)
            report = session.refit(6)
            assert me.is_version(6)
            told = set(ready(session).values())
            session.close()
            return told, report.epoch

        assert threads(4, body, timeout=60) == [({""}, 2)] * 4, "nobody had to meet anew"


def test_MF_03_a_fleet_goes_on_without_a_replica_that_is_lost():
    """What waits for it names it; a refit to the others does not wait, and brings those who wait at the gate along."""
    fleet = {"trainer": 1, "a": 2, "c": 1}

    def body(me, address):
        session = me.connect(address, fleet)
        me.train(1)
        session.refit(1)
        if me.world == "c":
            return session.close()
        me.train(2)
        missed = error_of(lambda: session.refit(2, timeout=timedelta(seconds=1)))
        assert isinstance(missed, ReshardError)
        error = error_of(lambda: session.refit(2, timeout=timedelta(seconds=2)))
        assert isinstance(error, MembershipError if me.is_source else (MembershipError, RefitTimeout))
        assert "c rank 0" in error.message
        report = session.refit(2, to=["a"])
        assert me.is_version(2)
        lost = next(member for member in session.status() if member.world == "c")
        assert lost.not_ready == ("at version 1, the newest is 2" if lost.role else "at no version, the newest is 2")
        return report.to

    assert run(fleet, body, connect=False) == [("a",)] * 3 + [None]


@pytest.mark.parametrize("kept", ["the tensor", "a view of it", "nothing"])
@pytest.mark.parametrize("hook", ["loaders", "install"])
def test_TA_06_debug_mode_names_what_a_hook_keeps_beyond_its_life_on_all_ranks(hook, kept):
    of = {"the tensor": lambda tensor: tensor, "a view of it": lambda tensor: tensor[2:], "nothing": torch.clone}[kept]

    def body(me, session):
        held = []

        def load(name, tensor):
            assert tensor.tolist() == [1.0] * 4
            if name == "t1":
                held.append(of(tensor))

        def install(landed):
            for piece, tensor in landed.pieces:
                load(piece.name, tensor)

        tensors = {f"t{at}": torch.ones(4) if me.is_source else torch.zeros(4) for at in range(3)}
        hooks = {"loaders": {"*": load}} if hook == "loaders" else {"install": install}
        bring(me, session, tensors, **({} if me.is_source else {**hooks, "debug": True}))
        session.refit(1)
        error = error_of(lambda: session.refit(2))
        if kept == "nothing":
            assert error is None
            return
        assert isinstance(error, BindingError)
        assert "gen0 rank 0 cannot take part: somebody keeps 't1' as the last refit handed it out" in error.message
        assert me.is_source or session.serving.version == 1
        held.clear()
        session.refit(2)

    run(PAIR, body)


@pytest.mark.parametrize("hooked", [False, True])
def test_MO_03_an_expert_map_that_changes_between_plan_and_commit_fails_the_refit_and_is_planned_anew(hooked):
    """Expert e has the value 10 * version + e; the map changes while the bytes of version 2 are on their way."""
    moving = threading.Event()

    def body(me, session):
        slot_map, slots = [2, 0, 3, 1], torch.full((4, 2), -7.0)
        experts = {f"experts.{e}": torch.zeros(2) for e in range(4)}

        def accept():
            views = [(f"experts.{e}", (2,), (0,), slots[at]) for at, e in enumerate(slot_map)]
            places = {f"experts.{e}": at for at, e in enumerate(slot_map)}

            def install(landed):
                for piece, tensor in landed.pieces:
                    slots[places[piece.name]] = tensor

            hooks = {"install": install} if hooked else {}
            session.accept(reshard.Manifest.from_views(views), depends_on=lambda: slot_map, **hooks)

        def bring_version(version):
            for e in range(4):
                experts[f"experts.{e}"].fill_(10 * version + e)
            session.refit(version)

        if me.is_source:
            session.offer(experts)
        else:
            accept()
            move = CompiledRefit.move

            def rebalanced(compiled, *args, **options):
                moved = move(compiled, *args, **options)
                if session.serving.version == 1 and not moving.is_set() and compiled.live:
                    moving.set()
                    slot_map[:] = [3, 1, 0, 2]
                return moved

            CompiledRefit.move = rebalanced
        try:
            bring_version(1)
            error = error_of(lambda: bring_version(2))
            assert moving.is_set()
        finally:
            if not me.is_source:
                CompiledRefit.move = move
        assert isinstance(error, PeerError if me.is_source else BindingError)
        assert "gen0 rank 0 cannot commit: what the places of its tensors depend on" in error.message
        assert me.is_source or slots[:, 0].tolist() == [12.0, 10.0, 13.0, 11.0], "as the old map had them"
        error = error_of(lambda: bring_version(2))
        assert isinstance(error, BindingError)
        assert "gen0 rank 0 cannot take part: what the places of its tensors depend on" in error.message
        if not me.is_source:
            accept()
        bring_version(2)
        assert me.is_source or slots[:, 0].tolist() == [23.0, 21.0, 20.0, 22.0]

    run(PAIR, body)


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
