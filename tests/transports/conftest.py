"""Real processes for the tests of transports, started once."""

from __future__ import annotations

import pytest

from reshard.testing.processes import ProcessPool

pytest.register_assert_rewrite("reshard.testing.transport_suite")  # so that a failed promise shows its values


@pytest.fixture(scope="session")
def pool():
    with ProcessPool(4) as processes:
        yield processes
