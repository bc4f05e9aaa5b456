"""What all cases share: both transports of one host, and real processes where a case needs them."""

from __future__ import annotations

import pytest

from reshard.testing.processes import ProcessPool


@pytest.fixture(params=["torch_p2p", "shm"])
def transport(request):
    """Each transport on which ranks of one host can meet."""
    return request.param


@pytest.fixture(scope="session")
def pool():
    """Six real processes, kept from test to test."""
    with ProcessPool(6) as processes:
        yield processes
