"""The benchmark of refits runs with a tiny model, and every way brings the weights."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.vllm.engines import wait_for_end_of
from tests.vllm.servers import members_of

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]
BENCHMARK = ROOT / "benchmarks" / "vllm_refit.py"


def run(*arguments):
    """(exit status, what it printed, what it said besides)."""
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        [sys.executable, str(BENCHMARK), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        start_new_session=True,
    )
    try:
        printed, said = process.communicate(timeout=500)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    wait_for_end_of(members_of(process.pid))
    return process.returncode, printed, said


def test_the_ways_are_compared_in_one_run_and_each_of_them_brings_the_weights():
    status, printed, said = run("--smoke", "--repeat", "1", "--json")
    assert status == 0, said[-6000:]
    report = json.loads(printed)
    assert set(report["ways"]) == {"reshard", "full tensors, packed", "full tensors, one by one", "checkpoint folder"}
    assert report["kinds_differ"]  # so that a way that brings nothing is seen
    for way in report["ways"].values():
        assert way["answers_are_right"]
        assert 0 < way["pause_seconds"] < way["seconds"]
    assert report["ways"]["reshard"]["answers_are_right_as_left"]


def test_its_help_names_the_ways():
    status, printed, said = run("--help")
    assert status == 0, said
    assert "checkpoint folder" in printed
