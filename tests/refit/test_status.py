"""Status: who waits for whom and who is not ready, from what each member says; and the verb that shows it."""

from __future__ import annotations

import json

from click.testing import CliRunner
from tests.refit.sessions import run

from reshard.cli.main import main
from reshard.cli.status import lines_of
from reshard.refit.status import MemberStatus, compare

READY = {"role": "destination", "phase": "ready", "version": 5, "since": 100.0, "epoch": 1}


def test_a_member_in_a_refit_waits_for_those_who_are_not_as_far():
    going = {"role": "destination", "target": 6, "to": ("gen0",), "version": 5, "epoch": 1, "since": 100.0}
    members = [
        MemberStatus("trainer", 0, **{**going, "role": "source", "phase": "gathering"}),
        MemberStatus("gen0", 0, **{**going, "phase": "gathering"}),
        MemberStatus("gen0", 1, **READY),
        MemberStatus("gen1", 0, **READY),  # has no part in it
    ]
    assert [m.waiting_for for m in compare(members)] == [("gen0 rank 1",), ("gen0 rank 1",), (), ()]


def test_who_meets_waits_for_those_who_have_not_come():
    members = [MemberStatus("trainer", 0, "source", phase="meeting"), MemberStatus("gen0", 0)]
    assert [m.waiting_for for m in compare(members)] == [("gen0 rank 0",), ()]


def test_MF_03_a_replica_that_serves_less_than_the_newest_is_not_ready_and_says_why():
    members = [
        MemberStatus("gen0", 0, **READY),
        MemberStatus("gen1", 0, **{**READY, "version": None}),
        MemberStatus("gen2", 0, **{**READY, "version": 4}),
        MemberStatus("gen3", 0, **{**READY, "torn": True}),
        MemberStatus("trainer", 0, "source", phase="ready"),
    ]
    assert [m.not_ready for m in compare(members)] == [
        "",
        "at no version, the newest is 5",
        "at version 4, the newest is 5",
        "torn: a refit failed half-way; before it, it served version 5",
        "",
    ]


def test_the_table_is_the_same_for_the_same_status():
    members = compare([MemberStatus("trainer", 0, "source", phase="meeting", since=97.0), MemberStatus("gen0", 0)])
    assert lines_of("default", members, 100.0) == [
        "session 'default', epoch 0",
        "member          version  phase         for  waits for    where",
        "trainer rank 0  -        meeting       3 s  gen0 rank 0  -",
        "gen0 rank 0     -        not here yet  -    -            -",
        "gen0 rank 0 is not ready: at no version",
    ]


def test_the_verb_shows_a_running_session_from_another_process():
    shown = {}

    def body(me, session):
        me.train(3)
        session.refit(3)
        if me.is_source:
            address = session._runner.setup.store
            shown["text"] = CliRunner().invoke(main, ["status", address])
            shown["json"] = CliRunner().invoke(main, ["status", address, "--json"])
            shown["other"] = CliRunner().invoke(main, ["status", address, "--session", "nobody"])
        return [(m.name, m.version, m.phase) for m in session.status()]

    run({"trainer": 1, "gen0": 2}, body)
    assert shown["text"].exit_code == 0, shown["text"].output
    assert "gen0 rank 1" in shown["text"].stdout
    assert shown["json"].exit_code == 0, shown["json"].output + str(shown["json"].exception)
    rows = json.loads(shown["json"].stdout)["default"]
    assert {(row["world"], row["rank"], row["version"]) for row in rows if row["role"] == "destination"} == {
        ("gen0", 0, 3),
        ("gen0", 1, 3),
    }
    assert shown["other"].exit_code == 2
    assert "No session 'nobody' has met" in shown["other"].stderr
