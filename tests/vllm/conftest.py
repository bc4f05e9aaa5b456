"""Tests of the vLLM plug-in are skipped where vLLM is not installed; where it has to be, a skip counts as a failure."""

from __future__ import annotations

import importlib.util
import os

import pytest

REQUIRED = os.environ.get("RESHARD_VLLM_REQUIRED") == "1"


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
