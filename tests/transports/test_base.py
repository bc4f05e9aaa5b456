"""The small values of the protocol."""

from __future__ import annotations

import json
from datetime import timedelta

import pytest
import torch

from reshard.errors import ConfigError, TransportError
from reshard.testing.processes import threads
from reshard.transports.base import Deadline, Loan
from reshard.transports.memory import MemoryTransport
from reshard.transports.torch_p2p import TorchP2PTransport


def test_a_deadline_counts_down_and_never_below_zero():
    assert Deadline.after(timedelta(minutes=1)).remaining() == pytest.approx(60, abs=1)
    assert Deadline.after(2.5).seconds == 2.5
    assert Deadline(0).remaining() == 0
    assert Deadline(0).expired
    assert not Deadline(60).expired


def test_a_loan_survives_json():
    loan = Loan(lender=3, storage=1, storage_nbytes=1 << 40, offset_nbytes=7)
    assert Loan.from_json(json.loads(json.dumps(loan.to_json()))) == loan


@pytest.mark.parametrize(
    "payload",
    [
        torch.zeros(4, dtype=torch.bfloat16),  # a typed tensor: bytes must be asked for
        torch.zeros(2, 2, dtype=torch.uint8),  # more than one dim
        torch.zeros(8, dtype=torch.uint8)[::2],  # not contiguous
    ],
)
def test_a_message_that_is_not_contiguous_bytes_is_refused(payload):
    transport = MemoryTransport.world(2)[0]
    with pytest.raises(ConfigError, match="a message must be a contiguous uint8 tensor of one dim"):
        transport.post_send(1, payload)
    with pytest.raises(ConfigError, match="the message has 5 bytes and 'into' has 4"):
        transport.post_recv(1, 5, torch.zeros(4, dtype=torch.uint8))


def test_a_transport_that_cannot_lend_says_so():
    def scenario(context):
        with TorchP2PTransport(context.process_group("p2p")) as transport:
            with pytest.raises(TransportError, match="'torch_p2p' cannot lend memory"):
                transport.lend([torch.zeros(1)])
            with pytest.raises(TransportError, match="'torch_p2p' cannot borrow memory of rank 0"):
                transport.borrow(0, Loan(0, 0, 4, 0))

    threads(2, scenario)
