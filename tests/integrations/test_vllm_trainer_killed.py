"""A trainer process is killed in a refit of servers: what they serve then, and how the next one takes them over."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from tests.integrations.test_vllm_servers import Server, refit, run_trainers
from tests.refit.sessions import Rank

import reshard
from reshard.integrations.vllm.drive import EngineDrive
from reshard.integrations.vllm.servers import VLLMServers
from reshard.refit.compiled import CompiledRefit

TIMEOUT = timedelta(seconds=20)
"""For which the workers' old sessions wait for the trainer that is dead, beside the new ones."""


def kill_self(*_args, **_options):
    os.kill(os.getpid(), signal.SIGKILL)


def refit_and_be_killed(address, urls, expect, version, where):
    """A process that is the trainer, and is killed: at that point, or when a file of that name is there."""
    torch.set_num_threads(1)
    move = CompiledRefit.move
    if where == "moving":
        CompiledRefit.move = lambda *args, **options: (move(*args, **options), kill_self())
    elif where in ("pause", "install", "finish"):
        setattr(EngineDrive, where, kill_self)  # when it comes to that phase
    else:

        def watch():
            while not Path(where).exists():
                time.sleep(0.01)
            kill_self()

        threading.Thread(target=watch, daemon=True).start()
    me = Rank("trainer", 0, 1)
    with me.connect(address, expect, engines=VLLMServers(urls), timeout=TIMEOUT) as session:
        refit(me, session, version)


def lose_trainer(store, servers, version, where):
    expect = {"trainer": 1, **{server.world: server.workers for server in servers}}
    urls = {server.world: server.url for server in servers}
    process = multiprocessing.get_context("spawn").Process(
        target=refit_and_be_killed, args=(str(store), urls, expect, version, str(where)), daemon=True
    )
    process.start()
    process.join(80)
    assert process.exitcode == -signal.SIGKILL


@pytest.fixture(scope="module")
def scene():
    """(store, servers, numbers of versions)."""
    with reshard.serve_store() as store, Server("gen0", 1) as one, Server("gen1", 2) as two:
        yield store, (one, two), itertools.count(1)


def bring(store, servers, version):
    """A trainer of one rank comes, takes over, and brings a version."""
    run_trainers(servers, lambda me, s, _: refit(me, s, version), trainers=1, address=str(store))
    for server in servers:
        assert server.is_version(version)
        assert (server.label, server.paused, server.active) == (str(version), False, False)


@pytest.mark.parametrize(
    ("where", "is_new", "paused"),
    [
        ("moving", False, False),
        ("pause", False, False),  # when all bytes have landed
        ("install", False, True),  # when all servers are paused
        ("finish", True, True),  # when all have installed
    ],
)
def test_killed_outside_of_the_install_servers_serve_one_version_whole_or_stand_still(where, is_new, paused, scene):
    store, servers, versions = scene
    old, lost, restarted = next(versions), next(versions), next(versions)
    bring(store, servers, old)
    lose_trainer(store, servers, lost, where)
    for server in servers:
        assert server.is_version(lost if is_new else old)
        assert (server.label, server.paused) == (str(old), paused)
    bring(store, servers, restarted)


@pytest.mark.parametrize("groups", [0, 1])
@pytest.mark.parametrize("held", [0, 1], ids=["one rank", "last of two ranks"])
def test_killed_in_the_install_a_server_ends_it_and_stands_still(groups, held, scene, tmp_path):
    store, servers, versions = scene
    old, lost, restarted = next(versions), next(versions), next(versions)
    bring(store, servers, old)
    worker, released = servers[held].ranks[-1], threading.Event()
    write, seen = worker._write, []

    def hold(landed):
        if len(seen) == groups:
            (tmp_path / "held").touch()
            assert released.wait(60)
        seen.append(landed.group)
        write(landed)

    worker._write = hold
    lose_trainer(store, servers, lost, tmp_path / "held")
    assert not servers[held].is_version(lost)
    assert all(server.paused for server in servers)
    released.set()
    expiry = time.monotonic() + 30
    while not all(server.is_version(lost) for server in servers):
        assert time.monotonic() < expiry
        time.sleep(0.01)
    assert [(server.label, server.paused) for server in servers] == [(str(old), True)] * 2
    worker._write = write
    bring(store, servers, restarted)
