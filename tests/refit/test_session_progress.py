"""Progress: one line while a refit runs, which says the phase, what has landed, and who is waited for."""

from __future__ import annotations

import io
import time
from datetime import timedelta

from rich.console import Console
from tests.refit.sessions import error_of, run

from reshard.errors import RefitTimeout
from reshard.refit import progress
from reshard.refit.progress import Look, ProgressLine, Watch, line_of

EXPECT = {"trainer": 1, "gen0": 2}


def test_the_line_names_three_of_those_waited_for_and_counts_the_rest():
    waits = [f"gen0 rank {rank}" for rank in range(6)]
    assert line_of(Look("trainer rank 0", "gathering", 3), 12.0, waits) == (
        "trainer rank 0: version 3, gathering, 12 s, waits for gen0 rank 0, gen0 rank 1, gen0 rank 2 and 3 more"
    )
    assert line_of(Look("gen0 rank 0", "meeting", None), 1.0) == "gen0 rank 0: meeting, 1 s"


class Told:
    """Stands for a watch."""

    def look(self):
        return Look("gen0 rank 0", "moving", 4, 1 << 20, 2 << 20)

    def waits_for(self):
        return ("trainer rank 0",)


def test_where_each_line_stays_they_are_written_now_and_then_and_stop_with_the_refit():
    out = io.StringIO()
    with ProgressLine(Told(), Console(file=out, width=40), every=0.05):
        time.sleep(0.4)
    lines = out.getvalue().splitlines()
    assert 2 <= len(lines) <= 8
    assert {line.split(" landed")[0] for line in lines} == {"gen0 rank 0: version 4, moving, 1 MiB of 2 MiB"}
    time.sleep(0.15)
    assert out.getvalue().splitlines() == lines


def test_in_a_terminal_the_line_is_redrawn_in_place_and_gone_afterwards():
    out = io.StringIO()
    with ProgressLine(Told(), Console(file=out, force_terminal=True, width=200)):
        time.sleep(0.8)
    shown = out.getvalue()
    assert "1 MiB of 2 MiB landed" in shown
    assert "\x1b[2K" in shown[shown.rindex("landed") :], "erased after it was drawn last"


def test_a_watch_sees_from_another_thread_whom_a_refit_waits_for_and_what_has_landed():
    def body(me, session):
        watch = Watch(session._runner)
        me.train(1)
        session.refit(1)
        assert watch.look() == Look(f"{me.world} rank {me.rank}", "ready", None)
        if (me.world, me.rank) == ("gen0", 1):
            time.sleep(1.0)
            session.refit(2)
            return None
        work = session.refit(2, async_op=True)
        seen, waits = [], []
        while not work.is_completed():
            seen.append(watch.look())
            waits.append(watch.waits_for())
            time.sleep(0.05)
        work.wait()
        watch.close()
        return seen, waits

    for seen, waits in run(EXPECT, body)[:2]:
        assert any(look.phase == "gathering" and look.version == 2 for look in seen)
        assert ("gen0 rank 1",) in waits


def test_what_has_landed_is_told_while_it_moves_and_is_all_at_the_end():
    def body(me, session):
        looks = []
        watch = Watch(session._runner)

        def installed(group, version):
            looks.append(watch.look())

        if not me.is_source:
            session.accept(me.manifest, installed=installed)
        me.train(1)
        session.refit(1)
        return looks

    for looks in run(EXPECT, body)[1:]:
        assert {(look.phase, look.landed_nbytes) for look in looks} == {("committing", 3 * 12 * 12 * 4)}
        assert {look.total_nbytes for look in looks} == {3 * 12 * 12 * 4}


def test_a_session_that_was_opened_with_progress_shows_it_on_stderr(monkeypatch, capfd):
    monkeypatch.setattr(progress, "_LINE_SECONDS", 0.1)
    monkeypatch.setattr(ProgressLine.__init__, "__kwdefaults__", {"every": 0.1})

    def body(me, session):
        me.train(1)
        session.refit(1)
        if me.is_source:
            return None
        error = error_of(lambda: session.refit(2, timeout=timedelta(seconds=1)))
        return type(error)

    assert RefitTimeout in run(EXPECT, body, progress=True)
    shown = capfd.readouterr()
    assert "version 2, gathering" in shown.err
    assert "waits for trainer rank 0" in shown.err
    assert "gathering" not in shown.out
