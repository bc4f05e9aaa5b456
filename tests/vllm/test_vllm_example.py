"""The example of a refit over HTTP runs as it says."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.vllm.engines import wait_for_end_of
from tests.vllm.servers import members_of

pytestmark = pytest.mark.timeout(600)

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "vllm_refit.py"


def test_a_server_says_what_the_trainer_has_learned():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PORT": port}
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
