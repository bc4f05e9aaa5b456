"""The examples of sessions run as they say: each side under its own launcher, in either order."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from reshard.testing.ports import free_port

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples" / "sessions"


@contextlib.contextmanager
def started(*commands):
    """Start commands, each in a group of its own, so that all their processes are ended whatever happens."""
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(name, None)
    with contextlib.ExitStack() as stack:
        processes = []
        for command in commands:
            log = stack.enter_context(tempfile.TemporaryFile("w+"))
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
            stack.callback(end, process)
            processes.append((process, log))
        yield processes


def end(process):
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


def output_of(process, log, timeout=90):
    try:
        process.wait(timeout)
    finally:
        log.seek(0)
        text = log.read()
        if process.returncode:
            print(text[-6000:])
    assert process.returncode == 0
    return text


def torchrun(script, port, address):
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)]
    return [*run, str(EXAMPLES / script), address]


@pytest.mark.parametrize("first", ["trainer.py", "engine.py"])
def test_two_torchruns_meet_whichever_is_first(first):
    ports = [free_port() for _ in range(3)]
    scripts = sorted(["trainer.py", "engine.py"], key=lambda script: script != first)
    commands = [torchrun(script, port, f"127.0.0.1:{ports[2]}") for script, port in zip(scripts, ports, strict=False)]
    with started(*commands) as processes:
        printed = {script: output_of(*process) for script, process in zip(scripts, processes, strict=True)}
    whole = {int(v): float(s) for v, s in re.findall(r"rank 0: version (\d), q sums to (\S+),", printed["trainer.py"])}
    halves = re.findall(r"rank (\d): version (\d), its half of q sums to (-?\d+\.\d+)", printed["engine.py"])
    assert len(halves) == 6
    assert "4 tensors cast" in printed["trainer.py"]
    for version in (1, 2, 3):
        landed = sum(float(value) for _, of, value in halves if int(of) == version)
        assert landed == pytest.approx(whole[version], abs=1e-5)
    assert len(set(whole.values())) == 3


def test_actors_refit_as_the_program_tells_them():
    with started([sys.executable, str(EXAMPLES / "actors.py")]) as processes:
        printed = output_of(*processes[0])
    lines = [line.split(":")[0] + line.split(":")[1] for line in printed.splitlines()]
    assert lines == [
        "trainer rank 0 version 0 to large, small",
        "small rank 0 version 0 to large, small",
        "large rank 0 version 0 to large, small",
        "trainer rank 0 version 1 to small",
        "small rank 0 version 1 to small",
        "trainer rank 0 version 2 to large, small",
        "small rank 0 version 2 to large, small",
        "large rank 0 version 2 to large, small",
    ]


def test_every_example_of_a_session_is_run_here_and_fits_on_one_screen():
    assert {path.name for path in EXAMPLES.glob("*.py")} == {"trainer.py", "engine.py", "actors.py"}
    assert all(len(path.read_text("utf-8").splitlines()) <= 55 for path in EXAMPLES.glob("*.py"))
