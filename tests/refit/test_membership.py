"""Membership: who meets whom, in any order of arrival, and who is named when it cannot be."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist
from tests.refit.sessions import error_of

from reshard.errors import MembershipError, PeerError, RefitTimeout
from reshard.refit import membership
from reshard.refit.gate import EpochOver, Gate, wake_gates
from reshard.refit.membership import Comer, Member, Register
from reshard.testing.processes import threads
from reshard.transports.base import Deadline

EXPECT = {"trainer": 1, "gen1": 1, "gen0": 2}


def register(store, world, rank, mark="first", role=None, expect=EXPECT):
    role = role or ("source" if world == "trainer" else "destination")
    return Register(dist.PrefixStore("s", store), Comer(world, rank, role, mark, f"host pid {mark}"), expect, "default")


def meet_all(who, seconds=2.0):
    """The roster, or the error, of each comer, all at once; ``who`` lists the arguments of ``register``."""

    def body(ctx):
        given = who[ctx.rank]
        comer = register(ctx.store, *given) if isinstance(given, tuple) else register(ctx.store, **given)
        roster = []
        error = error_of(lambda: roster.append(comer.meet(Deadline(seconds))))
        return error or roster[0]

    return threads(len(who), body)


ALL = [("trainer", 0), ("gen0", 0), ("gen0", 1), ("gen1", 0)]


def test_nobody_counts_on_a_member_that_was_interrupted_as_it_waited(monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    store, expect = dist.HashStore(), {"trainer": 1, "gen0": 1}
    with monkeypatch.context() as patched:
        patched.setattr(membership, "wait_for_key", interrupt)
        with pytest.raises(KeyboardInterrupt):
            register(store, "trainer", 0, expect=expect).meet(Deadline(1.0))
    with pytest.raises(MembershipError) as caught:
        register(store, "gen0", 0, expect=expect).meet(Deadline(0.1))
    assert caught.value.missing == ("trainer rank 0",)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2]])
def test_members_meet_in_any_order_and_agree_on_the_roster(order):
    rosters = meet_all([ALL[at] for at in order])
    assert len(set(rosters)) == 1
    roster = rosters[0]
    assert (roster.epoch, roster.source) == (1, "trainer")
    assert roster.members == (Member("trainer", 0), Member("gen0", 0), Member("gen0", 1), Member("gen1", 0))
    assert roster.of_worlds(["gen1"]) == (Member("trainer", 0), Member("gen1", 0))
    assert roster.destinations == ("gen0", "gen1")


def test_TH_04_two_processes_under_one_name_are_told_on_every_side():
    for error in meet_all([*ALL[:3], ("gen0", 1, "second")], seconds=1.0):
        assert isinstance(error, MembershipError)
        assert "there twice: gen0 rank 1 is host pid first and host pid second" in error.message


def test_TH_04_a_second_process_that_comes_after_all_have_met_is_told_when_they_meet_again():
    def body(ctx):
        if ctx.rank == 4:
            ctx.store.wait(["met"], timedelta(seconds=10))
            comer = register(ctx.store, "gen0", 1, "second")
        else:
            comer = register(ctx.store, *ALL[ctx.rank])
            assert comer.meet(Deadline(10.0)).epoch == 1
            ctx.store.set("met", "yes")
            # the second one has ended the epoch; who is there twice meets first, or others begin with one of the two
            twice = ALL[ctx.rank] == ("gen0", 1)
            ctx.store.wait(["s/2/comer/0" if twice else "s/3/comer/1"], timedelta(seconds=10))
        return error_of(lambda: comer.meet(Deadline(5.0)))

    for error in threads(5, body):
        assert "there twice: gen0 rank 1" in error.message


def test_TH_04_a_member_that_nobody_expects_is_refused_at_once_and_named_at_the_deadline():
    told = meet_all([*ALL[:3], ("gen0", 7)], seconds=3.0)
    assert "gen0 rank 7 (host pid first) is not expected" in told[3].message
    for error in told[:3]:
        assert error.missing == ("gen1 rank 0",)
        assert any("gen0 rank 7" in line for line in error.unexpected)


def test_TH_04_a_member_with_other_expectations_is_named():
    other = {"world": "gen1", "rank": 0, "expect": {**EXPECT, "gen0": 3}}
    told = meet_all([*ALL[:3], other], seconds=3.0)
    assert all(isinstance(error, MembershipError) for error in told)
    assert any("gen0 x 3" in error.message and "gen0 x 2" in error.message for error in told)


def test_two_sources_are_refused():
    told = meet_all([ALL[0], ALL[1], ALL[2], {"world": "gen1", "rank": 0, "role": "source"}])
    assert all("one world is the source" in error.message for error in told)


def test_a_process_that_died_before_all_came_is_replaced_by_its_successor():
    """The dead one's name is in the attempt still; nobody can know that it is dead, and nobody needs to."""
    store = dist.HashStore()
    dead = error_of(lambda: register(store, "gen0", 1, "dead").meet(Deadline(0.05)))
    assert isinstance(dead, MembershipError)
    half = register(store, "gen0", 1, "killed")
    dist.PrefixStore("s", store).compare_set("attempt", "", "1")
    attempt = half._current_attempt()
    half._check_expectation(attempt)
    half._store.add(f"{attempt}/comers", 1)
    half._store.set(
        f"{attempt}/comer/0", '{"world": "gen0", "rank": 1, "role": "destination", "mark": "killed", "where": "x"}'
    )

    def body(ctx):
        if ALL[ctx.rank] != ("gen0", 1):  # or they begin with the dead one, and are met by its successor later
            store.wait([f"s/{attempt}/comer/1"], timedelta(seconds=20))
        return register(store, *ALL[ctx.rank], "alive").meet(Deadline(20.0))

    rosters = threads(4, body)
    assert len(set(rosters)) == 1


def test_a_source_meets_the_worlds_that_it_needs_and_the_others_keep_their_seats():
    """gen0 rank 1 is restarted; gen1 comes only after the epoch was formed without it, and does not end it."""
    here = [("trainer", 0), ("gen0", 0), ("gen0", 1)]

    def body(ctx):
        comer = register(ctx.store, *ALL[ctx.rank])
        assert comer.meet(Deadline(20.0)).epoch == 1
        if ALL[ctx.rank] == ("gen0", 1):
            comer = register(ctx.store, "gen0", 1, "successor")
        elif ALL[ctx.rank] == ("gen1", 0):
            ctx.store.wait(["s/2/word"], timedelta(seconds=20))
            return comer.meet(Deadline(20.0))
        else:
            ctx.store.wait(["s/2/comer/0"], timedelta(seconds=20))  # the successor has ended the first epoch
        return comer.meet(Deadline(20.0), needs=("gen0",) if ALL[ctx.rank] in here else None)

    rosters = threads(4, body)
    assert len(set(rosters)) == 1
    assert rosters[0].epoch == 2
    assert rosters[0].destinations == ("gen0", "gen1")


@pytest.mark.parametrize("restarted", [("gen1", 0), ("gen0", 0)])
def test_a_seat_is_not_taken_by_a_successor_nor_after_the_epoch_is_over(restarted):
    store = dist.HashStore()
    first = threads(4, lambda ctx: _met(register(store, *ALL[ctx.rank])))
    comers = dict(zip(ALL, first, strict=True))
    comers[restarted] = register(store, *restarted, "successor")

    def needs_gen0(ctx):
        name = [name for name in ALL if name[0] != "gen1"][ctx.rank]
        return comers[name].meet(Deadline(20.0), needs=("gen0",)).epoch

    assert threads(3, needs_gen0) == [2] * 3
    if restarted == ("gen0", 0):
        comers["trainer", 0].end(2, "a rank failed")

    def all_meet(ctx):
        if ALL[ctx.rank] != ("gen1", 0):
            store.wait(["s/3/comer/0"], timedelta(seconds=10))  # gen1 has come first
        return comers[ALL[ctx.rank]].meet(Deadline(20.0)).epoch

    assert threads(4, all_meet) == [3] * 4


def _met(comer):
    comer.meet(Deadline(20.0))
    return comer


def test_who_cannot_go_on_tells_those_who_wait_and_those_who_come_for_the_same_and_nobody_twice():
    def body(ctx):
        comer = register(ctx.store, *ALL[ctx.rank])
        comer.meet(Deadline(20.0))
        ctx.store.add("met", 1)
        if ctx.rank == 0:
            ctx.store.wait(["s/2/comer/0"], timedelta(seconds=20))  # gen0 rank 0 waits
            comer.refuse(7, "trainer rank 0 failed: the engines do not answer.")
            ctx.store.set("refused", "yes")
        elif ctx.rank == 1:
            while ctx.store.add("met", 0) < 4:
                pass
        else:
            ctx.store.wait(["refused"], timedelta(seconds=20))
        version = 8 if ALL[ctx.rank] == ("gen1", 0) else 7
        started = Deadline(20.0)
        error = None if ctx.rank == 0 else error_of(lambda: comer.meet(started, version=version))
        left = started.remaining()
        if error is not None or ctx.rank == 0:
            ctx.store.add("told", 1)
            while ctx.store.add("told", 0) < 3:
                pass
            assert comer.meet(Deadline(20.0), version=7).epoch == 3
        return error, left

    told = threads(4, body)
    for error, left in told[1:3]:
        assert isinstance(error, PeerError)
        assert error.message == "trainer rank 0 failed: the engines do not answer."
        assert error.member == "trainer rank 0"
        assert left > 15, "long before the deadline"
    assert told[3][0] is None, "it came for another version, and waits for the others"


def gates(ctx, epoch=1):
    return Gate(ctx.store, epoch, "gen0", ctx.rank, [f"member {rank}" for rank in range(ctx.size)])


def test_all_pass_a_gate_with_what_each_said_again_and_again():
    def body(ctx):
        gate = gates(ctx)
        return [gate.gather(f"{call} from {ctx.rank}", Deadline(10.0)) for call in range(5)]

    told = threads(3, body)
    assert told == [[[f"{call} from {rank}" for rank in range(3)] for call in range(5)]] * 3


def test_who_is_silent_at_a_gate_is_named_to_all_who_wait():
    def body(ctx):
        gate = gates(ctx)
        return None if ctx.rank == 1 else error_of(lambda: gate.gather("here", Deadline(0.3)))

    for error in threads(3, body)[::2]:
        assert isinstance(error, RefitTimeout)
        assert error.members == ["member 1"]


def test_who_comes_to_a_gate_of_an_epoch_that_is_over_hears_of_it_though_another_call_was_woken():
    """Who ends an epoch may wake a call that all pass in that moment; they look for the end at the next one."""
    store = dist.HashStore()
    gate = Gate(store, 1, "gen0", 0, ["a", "b"])
    store.set("1/over", "somebody came")
    with pytest.raises(EpochOver, match="somebody came"):
        gate.gather("here", Deadline(2.0))


@pytest.mark.parametrize("passed", [0, 2])
@pytest.mark.parametrize("early", [True, False])
def test_a_newcomer_wakes_those_who_wait_and_those_who_come_later(passed, early):
    def body(ctx):
        gate = Gate(ctx.store, 1, "gen0", ctx.rank, ["a", "b"]) if ctx.rank < 2 else None
        if gate is None:
            ctx.store.wait(["1 waits", "0 has passed"], timedelta(seconds=10))
            if not early:
                ctx.store.set("go", "yes")
            wake_gates(ctx.store, 1, "somebody came")
            ctx.store.set("go", "yes")
            return "woken"
        for call in range(passed):
            gate.gather(str(call), Deadline(10.0))
        ctx.store.set(f"{ctx.rank} has passed", "yes")
        if ctx.rank == 0:
            ctx.store.wait(["go"], timedelta(seconds=10))
        else:
            ctx.store.set("1 waits", "yes")
        try:
            gate.gather("and", Deadline(10.0))
        except EpochOver as over:
            return str(over)
        return "passed"

    told = threads(3, body)
    assert told[:2] == ["somebody came"] * 2 or (not early and told[:2] == ["passed"] * 2)
