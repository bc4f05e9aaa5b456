"""The state machine: every path to its end, with no process, no clock and no tensor."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from reshard.errors import ReshardError
from reshard.refit import events as ev
from reshard.refit.commands import AWAITED, Command
from reshard.refit.machine import TABLE, Phase, Serving, State, check_invariants, diagram, step

ERROR = ReshardError("lost")
GOOD = (ev.Gathered(), ev.Planned(), ev.Moved(), ev.AllLanded(), ev.Committed(), ev.AllCommitted())


def run(state, *events):
    """The state after the events, and all commands on the way; invariants are checked after each."""
    done = []
    for event in events:
        state, commands = step(state, event)
        check_invariants(state)
        done += commands
    return state, done


def ready(*, writes=True, staged=True, version=None):
    state, _ = run(State(writes, staged), ev.Joined(), ev.Met(1))
    return replace(state, serving=Serving(version) if writes else Serving())


def test_a_refit_goes_through_all_its_phases_in_order():
    state, commands = run(ready(version=41), ev.Called(42), *GOOD)
    assert commands == [
        Command.BEGIN,
        Command.GATHER,
        Command.PLAN,
        Command.MOVE,
        Command.AWAIT_LANDED,
        Command.COMMIT,
        Command.AWAIT_COMMITTED,
        Command.RESUME,
        Command.RETURN,
    ]
    assert state == replace(ready(), serving=Serving(42))


@pytest.mark.parametrize("at", range(6), ids=["gathering", "planning", "moving", "landed", "committing", "confirming"])
@pytest.mark.parametrize(("writes", "staged"), [(True, True), (True, False), (False, True), (False, False)])
def test_after_a_failure_a_rank_serves_the_old_version_or_the_new_one_or_says_that_it_is_torn(at, writes, staged):
    state, commands = run(ready(writes=writes, staged=staged, version=41), ev.Called(42), *GOOD[:at], ev.Failed(ERROR))
    assert (state.phase, state.target) == (Phase.APART, None)
    assert commands[-2:] == [Command.END_EPOCH, Command.RAISE]
    torn = writes and (at == 4 or (at in (2, 3) and not staged))
    if not writes:
        assert state.serving in (Serving(), Serving(42))
    elif at == 5:
        assert state.serving == Serving(42)
    else:
        assert state.serving == Serving(41, torn=torn)


def test_a_rank_whose_engine_failed_before_it_wrote_anything_goes_on_serving_the_old_version():
    failed = ev.Failed(ERROR, untouched=True)
    state, commands = run(ready(version=41), ev.Called(42), *GOOD[:4], failed)
    assert (state.phase, state.serving) == (Phase.APART, Serving(41))
    assert commands[-2:] == [Command.END_EPOCH, Command.RAISE]


@pytest.mark.parametrize("writes", [True, False])
def test_where_leases_are_taken_a_rank_commits_after_none_is_held_and_if_one_stays_nothing_has_changed(writes):
    landed = (ev.Called(42), *GOOD[:3], ev.AllLanded(leased=True))
    state, commands = run(ready(writes=writes, version=41), *landed, ev.Drained(), *GOOD[4:])
    assert commands[4:7] == [Command.AWAIT_LANDED, Command.DRAIN, Command.COMMIT]
    assert state == replace(ready(writes=writes), serving=Serving(42))
    state, commands = run(ready(writes=writes, version=41), *landed, ev.Failed(ERROR))
    assert (state.phase, state.serving) == (Phase.APART, Serving(41) if writes else Serving())
    assert commands[-2:] == [Command.END_EPOCH, Command.RAISE]


def test_engines_that_cannot_be_resumed_fail_a_refit_that_every_rank_serves():
    state, commands = run(ready(version=41), ev.Called(42), *GOOD, ev.Failed(ERROR))
    assert (state.phase, state.serving) == (Phase.APART, Serving(42))
    assert commands[-2:] == [Command.END_EPOCH, Command.RAISE]


def test_what_is_refused_changes_nothing_and_keeps_the_epoch():
    for before in ((), (ev.Gathered(),)):
        state, commands = run(ready(version=41), ev.Called(40), *before, ev.Refused(ERROR))
        assert state == ready(version=41)
        assert commands[-1] is Command.RAISE


def test_news_of_another_epoch_before_anything_began_is_no_error_to_the_caller():
    state, commands = run(ready(version=41), ev.Called(42), ev.Outdated("a trainer came"), ev.Met(2), *GOOD)
    assert Command.RAISE not in commands
    assert (state.epoch, state.serving) == (2, Serving(42))


def test_a_torn_rank_is_healed_by_the_next_whole_refit_and_not_by_one_of_some_tensors():
    torn, _ = run(ready(staged=False, version=41), ev.Called(42), *GOOD[:2], ev.Failed(ERROR))
    part, _ = run(torn, ev.Called(42, partial=True), ev.Met(2), *GOOD)
    assert part.serving == Serving(42, partial=True, torn=True)
    whole, _ = run(part, ev.Called(42), *GOOD)
    assert whole.serving == Serving(42)


def test_every_phase_that_awaits_an_answer_can_fail():
    for phase in {row.to for row in TABLE if set(row.commands) & AWAITED}:
        assert any(row.phase is phase and row.on is ev.Failed for row in TABLE), phase


def test_an_awaited_command_is_the_last_of_its_row_so_that_its_answer_is_the_next_event():
    assert all(not set(row.commands[:-1]) & AWAITED for row in TABLE)


def test_no_two_rows_hold_at_once():
    for phase in Phase:
        for kind in {row.on for row in TABLE}:
            rows = [row for row in TABLE if row.phase is phase and row.on is kind]
            guards = [row.guard for row in rows]
            assert len(rows) < 2 or sorted(guards) in (
                ["connecting", "refitting"],
                ["leases are taken", "no leases are taken"],
                ["has begun to write", "wrote nothing yet"],
                ["writes beside or nothing", "writes in place"],
            )


def test_what_cannot_happen_is_our_own_mistake():
    with pytest.raises(AssertionError, match="Moved cannot happen while ready"):
        step(ready(), ev.Moved())


@pytest.mark.parametrize("form", ["mermaid", "dot"])
def test_the_diagram_has_an_arrow_for_each_row(form):
    arrow = "-->" if form == "mermaid" else "->"
    lines = [line for line in diagram(form).splitlines() if arrow in line and "[*]" not in line]
    assert len(lines) == len(TABLE)


def test_the_diagram_in_the_docs_is_that_of_the_table():
    page = (Path(__file__).parents[2] / "docs" / "sessions.md").read_text("utf-8")
    assert diagram() in page, "draw it again: print(reshard.refit.machine.diagram())"
