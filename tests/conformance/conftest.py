"""Eight real processes for the layouts that are moved over gloo, started once."""

from __future__ import annotations

import pytest

from reshard.testing.processes import ProcessPool


@pytest.fixture(scope="package")
def eight_processes():
    with ProcessPool(8) as processes:
        yield processes
