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


@pytest.fixture(autouse=True)
def _groups_end():
    """Give back what the library keeps for the groups of a test."""
    yield
    from reshard.refit.group import _GROUPS

    for _, group in list(_GROUPS.values()):
        group.close()
