from __future__ import annotations

import multiprocessing
import os

import pytest
from tests.demo import jobs

from reshard.demo.launch import Job, RankFailed, run_jobs
from reshard.errors import LayoutError, RefitTimeout

HANGING = Job("rank 9", jobs.hang, ())


@pytest.fixture(autouse=True)
def _nobody_is_left():
    before = set(multiprocessing.active_children())  # pools of other tests live on between tests
    yield
    assert set(multiprocessing.active_children()) <= before


def run(*jobs, timeout=60.0, **options):
    said = []
    return run_jobs(jobs, timeout=timeout, progress=said.append, **options), said


def test_results_come_in_the_order_of_the_jobs_and_what_is_said_aloud_is_heard(capfd):
    results, said = run(*(Job(f"rank {i}", jobs.add, (i, 10)) for i in range(3)))
    assert results == [10, 11, 12]
    assert sorted(said) == [f"adding {i} and 10" for i in range(3)]
    assert capfd.readouterr().out == ""


def test_processes_have_the_variables_and_this_one_does_not(monkeypatch):
    monkeypatch.setenv("DEMO_HERE", "kept")
    variables = {"DEMO_THERE": "yes", "DEMO_HERE": "other"}
    results, _ = run(*(Job(name, jobs.read_variable, (name,)) for name in variables), environment=variables)
    assert results == ["yes", "other"]
    assert ("DEMO_THERE" in os.environ, os.environ["DEMO_HERE"]) == (False, "kept")


def test_an_error_of_ours_arrives_as_it_was_raised_and_ends_the_others():
    with pytest.raises(LayoutError, match="3 rows cannot be cut") as caught:
        run(HANGING, Job("rank 1", jobs.refuse, ()))
    assert caught.value.tensor == "w"
    assert "in rank 1, while looking at the layout" in caught.value.__notes__[0]


def test_an_error_that_only_blames_a_peer_gives_way_to_the_cause():
    with pytest.raises(LayoutError):
        run(Job("rank 0", jobs.lose_peer, ()), Job("rank 1", jobs.refuse, ()))


def test_a_foreign_error_comes_with_its_traceback_and_log():
    with pytest.raises(RankFailed, match=r"(?s)rank 1: ValueError.*in fail.*a last word"):
        run(HANGING, Job("rank 1", jobs.fail, ()))


def test_a_process_that_dies_is_named_with_what_it_was_doing():
    with pytest.raises(RankFailed, match="rank 1: The process died with exit code 3 while dying"):
        run(HANGING, Job("rank 1", jobs.die, ()))


def test_the_deadline_names_who_was_silent():
    with pytest.raises(RefitTimeout, match=r"not done after 2 s; still at work: rank 9 \((starting|hanging)\)"):
        run(HANGING, timeout=2.0)
