"""The example of a refit over HTTP runs as it says."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.vllm.engines import wait_for_end_of
from tests.vllm.servers import members_of

from reshard.testing.ports import free_port

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "vllm_refit.py"


def test_a_server_says_what_the_trainer_has_learned():
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PORT": str(free_port())}
    command = [sys.executable, str(EXAMPLE)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    try:
        printed, _ = process.communicate(timeout=500)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, printed[-6000:]
    wait_for_end_of(members_of(process.pid))  # of its group, the server included, nothing runs any more
    assert re.findall(r"^version (\d): paused [\d.]+ s, learned (\w+)$", printed, re.M) == [
        ("1", "True"),
        ("2", "True"),
    ]


def test_the_example_fits_on_one_screen():
    assert len(EXAMPLE.read_text("utf-8").splitlines()) <= 80
