"""The transport inside one process keeps every promise, and plays all ranks in one thread too."""

from __future__ import annotations

import pytest
import torch

from reshard.errors import RefitTimeout
from reshard.testing.transport_suite import LendingSuite, TransportSuite, in_memory
from reshard.transports.base import Deadline
from reshard.transports.memory import MemoryTransport


class TestMemoryTransport(LendingSuite, TransportSuite):
    @pytest.fixture
    def world(self):
        return in_memory


def test_one_thread_plays_all_ranks_in_lockstep():
    ranks = MemoryTransport.world(3)
    payloads = [torch.full((4,), rank.rank, dtype=torch.uint8) for rank in ranks]
    sends = [rank.post_send((rank.rank + 1) % 3, payloads[rank.rank]) for rank in ranks]
    recvs = [rank.post_recv((rank.rank - 1) % 3, 4) for rank in ranks]
    shown = [rank.wait(recv, Deadline(1)) for rank, recv in zip(ranks, recvs, strict=True)]
    assert [int(bytes_[0]) for bytes_ in shown] == [2, 0, 1]
    assert shown[1].data_ptr() == payloads[0].data_ptr()  # nothing is copied
    for rank, recv in zip(ranks, recvs, strict=True):
        rank.release(recv)
    assert [rank.wait(send, Deadline(1)) for rank, send in zip(ranks, sends, strict=True)] == [None] * 3


def test_a_send_that_nobody_releases_ends_at_the_deadline():
    first, second = MemoryTransport.world(2)
    send = first.post_send(1, torch.zeros(1, dtype=torch.uint8))
    second.wait(second.post_recv(0, 1), Deadline(1))
    with pytest.raises(RefitTimeout, match=r"Rank 0 \(memory\) waited 0.01 s for rank 1 in vain"):
        first.wait(send, Deadline(0.01))
