"""The page of errors names every error, and its transcripts are what a session says today."""

from __future__ import annotations

import inspect
import os
import re
import signal
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from tests.refit.sessions import NAMES, Rank, error_of, ranks_of, run

import reshard
from reshard import errors
from reshard.errors import ManifestError, RefitTimeout, ReshardError, TransportError
from reshard.testing.processes import ProcessPool
from reshard.transports.shm import ShmTransport

PAGE = (Path(__file__).parents[2] / "docs" / "errors.md").read_text("utf-8")
EXPECT = {"trainer": 2, "gen0": 2}


def transcript(heading):
    """The block of text below a heading, in one line."""
    section = PAGE.split(f"## {heading}", 1)[1]
    return " ".join(re.search(r"```text\n(.*?)```", section, re.DOTALL)[1].split())


def said(error):
    return " ".join(f"{type(error).__name__}: {error.message}".split())


def test_every_error_has_a_row_with_what_it_means_and_what_to_do():
    public = {
        name
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, ReshardError) and kind is not ReshardError
    }
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in PAGE.splitlines() if line.startswith("| `")]
    assert {name.strip("`") for name, *_ in rows} == public
    assert all(meaning and way_out for _, meaning, way_out in rows)


def test_the_transcript_of_a_member_that_does_not_call_is_true():
    def body(me, session):
        me.train(1)
        session.refit(1)
        if (me.world, me.rank) == ("gen0", 1):
            return None
        return error_of(lambda: session.refit(2, timeout=timedelta(seconds=2)))

    error = run(EXPECT, body)[2]
    assert isinstance(error, RefitTimeout)
    # whoever is at the deadline first names the silent one, to all
    any_member = r"(trainer rank 0|trainer rank 1|gen0 rank 0) waited"
    assert re.sub(any_member, "X waited", said(error)) == re.sub(
        any_member, "X waited", transcript("A member does not call")
    )


def test_the_transcript_of_names_that_do_not_fit_is_true():
    def body(me, session):
        me.train(1)
        return error_of(lambda: session.refit(1))

    names = {"trainer": NAMES, "gen0": ("layers.0.w", "layers.1.weight", "head.w")}
    error = run({"trainer": 1, "gen0": 1}, body, names=names)[1]
    assert isinstance(error, ManifestError)
    assert said(error) == transcript("Names do not fit")


def _killed(ctx, address):
    torch.set_num_threads(1)
    me = Rank(*ranks_of(EXPECT, ctx.rank), 2)
    session = me.connect(address, EXPECT)
    me.train(1)
    session.refit(1)
    me.train(2)
    if ctx.rank == 0:
        ShmTransport.wait = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    error = error_of(lambda: session.refit(2, timeout=timedelta(seconds=10)))
    return error, me.is_source or me.is_version(1)


@pytest.mark.slow
def test_the_transcript_of_a_killed_trainer_is_true_as_far_as_it_does_not_depend_on_who_saw_it_first():
    with ProcessPool(4) as pool, reshard.serve_store() as store:
        results = pool.run(_killed, str(store), timeout=60, may_die={0})
    error, whole = results[2]
    assert isinstance(error, ReshardError)
    assert whole
    shown = transcript("A member was killed")
    assert shown.startswith(f"{TransportError.__name__}: Session 'default', refit to version 2, gen0 rank 0, ")
    for part in ("Session 'default', refit to version 2, gen0 rank 0", "trainer rank 0", "It serves version 1."):
        assert part in said(error)
        assert part in shown
    assert shown.split("It serves version 1.")[1] == said(error).split("It serves version 1.")[1]
