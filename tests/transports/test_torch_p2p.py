"""The transport over a torch process group keeps every promise on gloo, between threads and between processes."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch

from reshard.errors import ConfigError
from reshard.testing.processes import threads
from reshard.testing.transport_suite import ProcessTransportSuite, TransportSuite, in_processes, in_threads
from reshard.transports.base import Deadline
from reshard.transports.torch_p2p import TorchP2PTransport


def make_gloo(context):
    return TorchP2PTransport(context.process_group("p2p"))


class TestGlooBetweenThreads(TransportSuite):
    sees_sizes = False

    @pytest.fixture
    def world(self):
        return in_threads(make_gloo)


class TestGlooBetweenProcesses(ProcessTransportSuite):
    sees_sizes = False

    @pytest.fixture
    def world(self, pool):
        return in_processes(pool, make_gloo)


def test_a_receive_without_memory_is_refused():
    def scenario(context):
        with make_gloo(context) as transport, pytest.raises(ConfigError, match="needs 'into'"):
            transport.post_recv(1 - context.rank, 5)

    threads(2, scenario)


def test_closing_leaves_the_group_to_the_caller():
    def scenario(context):
        group = context.process_group("mine")
        TorchP2PTransport(group).close()
        sent, got = torch.tensor([context.rank]), torch.tensor([7])
        works = [group.send([sent], 1 - context.rank, 0), group.recv([got], 1 - context.rank, 0)]
        for work in works:
            work.wait()
        return int(got)

    assert threads(2, scenario) == [1, 0]


def test_a_transport_that_is_forgotten_leaves_no_thread_behind():
    def waiting():
        return {thread for thread in threading.enumerate() if thread.name.startswith("reshard waits for")}

    def scenario(context):
        transport = make_gloo(context)
        memory = torch.zeros(4, dtype=torch.uint8)
        peer = 1 - context.rank
        tickets = [transport.post_send(peer, memory), transport.post_recv(peer, 4, memory.clone())]
        for ticket in tickets:
            transport.wait(ticket, Deadline(20))

    before = waiting()
    threads(2, scenario)
    gc.collect()
    expiry = time.monotonic() + 10
    while waiting() - before and time.monotonic() < expiry:
        time.sleep(0.01)
    assert waiting() - before == set()
