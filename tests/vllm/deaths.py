"""Refits of live servers that end in the middle: a trainer is killed, and a server answers with what it has, or not."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path

from tests.vllm import servers as vllm_servers
from tests.vllm.holds import HOLDS
from tests.vllm.live import PROMPTS, Counter, Trainer, write_model

import reshard


@contextmanager
def held_server(folder, *, tp):
    """(trainer, server, what it answers with each kind of weights); installs in the server can be held."""
    specs = write_model(folder)
    with reshard.serve_store() as store, vllm_servers.started(folder, folder, [tp], more=HOLDS) as (server,):
        trainer = Trainer(str(store), specs, {"engine": (server.url, tp)})
        known = {}
        for kind in (0, 1):
            trainer.run([Counter.next(kind)])
            known[kind] = answers_of(server)
        assert known[0] != known[1]
        yield trainer, server, known


def answers_of(server):
    return [server.generate(prompt) for prompt in PROMPTS]


def answers_nothing(server, seconds=2.0):
    """A request that is not answered; it goes on."""
    stream = server.stream(PROMPTS[0], 6)
    time.sleep(seconds)
    assert stream.tokens == []
    return stream


def check_serves(server, known, version):
    assert server.get("/weight_info") == {"weight_version": str(version)}
    assert server.get("/is_paused") == {"is_paused": False}
    assert answers_of(server) == known[version % 2]


def kill_self(*_args, **_options):
    os.kill(os.getpid(), signal.SIGKILL)


def refit_and_be_killed(trainer, version, where):
    """A process that is both ranks of a trainer, and is killed: at that point, or when a file of that name is there."""
    from reshard.integrations.vllm.drive import EngineDrive
    from reshard.refit.compiled import CompiledRefit
    from reshard.transports import mover

    if where == "moving":
        move = CompiledRefit.move
        mover.Mover._post = kill_self  # at the first bucket that is sent; memory that is lent is not
        CompiledRefit.move = lambda *args, **options: (move(*args, **options), kill_self())
    elif where == "before the pause":
        EngineDrive.pause = kill_self
    elif where == "before the install":
        EngineDrive.install = kill_self
    elif where == "after the install":
        EngineDrive.finish = kill_self
    else:

        def watch():
            while not Path(where).exists():
                time.sleep(0.01)
            kill_self()

        threading.Thread(target=watch, daemon=True).start()
    trainer.run([version])


def lose_trainer(trainer, version, where):
    """Let a process begin a refit and be killed in it."""
    process = multiprocessing.get_context("spawn").Process(
        target=refit_and_be_killed, args=(trainer, version, where), daemon=True
    )
    process.start()
    process.join(200)
    assert process.exitcode == -signal.SIGKILL
