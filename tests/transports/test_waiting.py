"""A wait for a key ends with the key, at the deadline, with the store, and at once when the process is interrupted."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from reshard.transports.base import Deadline
from reshard.transports.waiting import wait_for_key

LONG = 20.0
"""What nothing here waits for: less than half of it shows that a wait has ended before its deadline."""


def a_host():
    return dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)


def a_guest(host):
    return dist.PrefixStore("part", dist.TCPStore("127.0.0.1", host.port, None, False, timedelta(seconds=LONG)))


def soon(call, *arguments):
    threading.Timer(0.2, call, arguments).start()
    return time.monotonic()


def open_here():
    """How many waiters and file descriptors this process has."""
    gc.collect()
    waiters = sum(thread.name == "reshard-waiter" for thread in threading.enumerate())
    return waiters, len(os.listdir("/proc/self/fd"))


def _waits(context):
    host = a_host()
    guest = a_guest(host)
    assert not wait_for_key(guest, "key", Deadline(0.2))
    began = soon(guest.set, "key", "")  # a wait does not keep other threads from the store
    assert wait_for_key(guest, "key", Deadline(LONG))
    return time.monotonic() - began


def test_a_wait_ends_with_the_key_and_at_the_deadline(pool):
    assert pool.run(_waits, ranks=1)[0] < LONG / 2


def _loses_its_store(context):
    hosts = [a_host()]
    guest = a_guest(hosts[0])
    began = soon(hosts.clear)
    with pytest.raises(RuntimeError):
        wait_for_key(guest, "key", Deadline(LONG))
    return time.monotonic() - began


def test_a_wait_ends_with_the_store(pool):
    assert pool.run(_loses_its_store, ranks=1)[0] < LONG / 2


def _is_interrupted(context, times):
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)  # as a worker of the pool has it
    host = a_host()
    before, seconds = open_here(), []
    for number in range(times):
        guest = a_guest(host)
        began = soon(os.kill, os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            wait_for_key(guest, f"first {number}", Deadline(LONG))
        seconds.append(time.monotonic() - began)
        soon(guest.set, f"second {number}", "")
        assert wait_for_key(guest, f"second {number}", Deadline(LONG))
        del guest
    signal.signal(signal.SIGINT, ignored)
    expiry = time.monotonic() + LONG
    while (after := open_here()) != before and time.monotonic() < expiry:
        time.sleep(0.05)  # a busy machine is slow to end threads
    return max(seconds), before, after


def test_an_interrupt_ends_a_wait_at_once_and_leaves_no_thread_and_no_connection(pool):
    seconds, before, after = pool.run(_is_interrupted, 3, ranks=1)[0]
    assert seconds < LONG / 4
    assert after == before


JOINS = f"""
import os, signal, threading, time
from datetime import timedelta
import reshard

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job in the background ignores it
store = reshard.serve_store()
began = time.monotonic() + 0.5
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    expect = {{"trainer": 1, "gen0": 1}}
    reshard.connect(store, role="source", world="trainer", rank=0, expect=expect, timeout=timedelta(seconds={LONG}))
finally:
    print(time.monotonic() - began)
"""


def test_a_program_that_is_interrupted_as_it_joins_ends_as_python_programs_do():
    done = subprocess.run([sys.executable, "-c", JOINS], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGINT, done.stderr
    assert float(done.stdout) < LONG / 4
    assert done.stderr.rstrip().endswith("KeyboardInterrupt"), done.stderr
    assert "terminate" not in done.stderr
