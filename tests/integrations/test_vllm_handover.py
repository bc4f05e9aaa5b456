"""Groups that have landed pass from one thread to another, and no end is waited for in vain."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from reshard.errors import InstallError, RefitTimeout, TransportError
from reshard.integrations.vllm.handover import Handover
from reshard.refit.landed import Landed


@pytest.fixture
def thread():
    with ThreadPoolExecutor(1) as one:
        yield one


def landed(group, seconds=20.0):
    return Landed(group, 7, (), seconds)


def test_groups_are_installed_in_their_order_by_the_thread_that_serves(thread):
    handover, seen = Handover(), []

    def receive():
        for group in "abc":
            handover.give(landed(group))
            seen.append(f"{group} is back")
        handover.end(None)

    receiving = thread.submit(receive)
    handover.serve(lambda one: seen.append(one.group), 20)
    receiving.result()
    assert seen == ["a", "a is back", "b", "b is back", "c", "c is back"]
    assert (handover.installed, handover.touched) == (3, False)


def test_an_install_that_fails_fails_the_refit_and_the_refits_error_is_what_the_worker_hears(thread):
    handover = Handover()

    def receive():
        try:
            handover.give(landed("a"))
        except ValueError as error:
            handover.end(TransportError(f"the refit failed: {error}"))

    def install(one):
        raise ValueError(f"no room for {one.group}")

    receiving = thread.submit(receive)
    with pytest.raises(TransportError, match="the refit failed: no room for a"):
        handover.serve(install, 20)
    receiving.result()
    assert (handover.installed, handover.touched) == (0, True)


def test_a_group_that_nobody_comes_for_is_untouched():
    with pytest.raises(InstallError, match=r"nobody told the worker to install within 0\.01 s") as failed:
        Handover().give(landed("a", 0.01))
    assert failed.value.untouched is True


def test_a_worker_that_leaves_wakes_whoever_waits_for_it(thread):
    handover = Handover()
    waiting = thread.submit(handover.give, landed("a"))
    handover.leave("it stops")
    with pytest.raises(InstallError, match="has landed, and it stops") as failed:
        waiting.result(20)
    assert failed.value.untouched is True


def test_a_worker_waits_no_longer_than_it_was_told():
    with pytest.raises(RefitTimeout, match=r"0\.01 s after this worker was told to install"):
        Handover().serve(lambda one: None, 0.01)


def test_a_refit_that_fails_before_anything_has_landed_is_heard_of():
    handover = Handover()
    handover.end(TransportError("the trainer is lost"))
    handover.end(None)
    with pytest.raises(TransportError, match="the trainer is lost"):
        handover.serve(lambda one: None, 20)
