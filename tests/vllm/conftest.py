"""Tests of the vLLM plug-in are skipped where vLLM is not installed; where it has to be, a skip counts as a failure."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from multiprocessing import forkserver, resource_tracker

import pytest

REQUIRED = os.environ.get("RESHARD_VLLM_REQUIRED") == "1"
_ADOPT_ORPHANS = 36  # of prctl: a process whose parent has died becomes a child of this one


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_left():
    """When a file's tests are over, no process that they began is left, nor one whose parent has died meanwhile."""
    from tests.vllm.engines import descendants, wait_for_end_of

    ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, 1)
    before = set(descendants())
    yield
    stay = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}  # Python's own
    wait_for_end_of(set(descendants()) - before - stay)


def pytest_runtest_setup():
    """Skip without vLLM."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """Let what had to run not pass by being skipped."""
    report = yield
    if REQUIRED and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, though RESHARD_VLLM_REQUIRED=1: {report.longrepr}"
    return report
