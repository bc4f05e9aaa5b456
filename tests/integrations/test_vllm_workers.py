"""An error on any worker of an engine is raised on the last one alone."""

from __future__ import annotations

import pytest

from reshard.errors import InstallError, PeerError
from reshard.integrations.vllm.workers import Said, raise_if_last

FINE, FAILED = Said("", False, False, True), Said("out of memory", True, False, True)


def test_only_the_last_worker_raises_whoever_failed():
    error = InstallError("out of memory", untouched=False)
    for said, own in [((FAILED, FINE, FINE), 0), ((FINE, FAILED, FAILED), 1)]:
        for rank in (0, 1):
            raise_if_last(rank, said, error if rank == own else None)
        with pytest.raises(PeerError, match=f"Worker {own}: out of memory"):
            raise_if_last(2, said, None)


def test_the_last_worker_raises_its_own_error_as_it_is_with_what_all_agree_on():
    with pytest.raises(InstallError, match=r"out of memory Nobody wrote\.") as raised:
        raise_if_last(1, (FINE, FAILED), InstallError("out of memory", untouched=True), " Nobody wrote.")
    assert raised.value.facts == {"untouched": True}
    with pytest.raises(PeerError, match="MemoryError: no room"):
        raise_if_last(0, (FAILED,), MemoryError("no room"))


def test_what_a_worker_says_travels_as_plain_data():
    assert Said(*FAILED.row) == FAILED
