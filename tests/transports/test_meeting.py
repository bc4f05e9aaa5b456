"""Ranks exchange small values over a store, and a rank that is silent or fails is named."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from reshard.errors import (
    ConfigError,
    DigestError,
    EnvironmentNotSupported,
    PeerError,
    RefitTimeout,
    TransportError,
)
from reshard.testing.processes import threads
from reshard.transports.base import Deadline
from reshard.transports.meeting import Meeting, store_of


def meeting_of(context, scope="meeting", store=None):
    store = context.store if store is None else store
    return Meeting(store, context.rank, context.size, scope=scope, timeout=timedelta(seconds=10))


def exchange_thrice(context):
    meeting = meeting_of(context)
    return [meeting.exchange(label, f"{label}{context.rank}".encode()) for label in "abc"]


def test_every_rank_gets_what_every_rank_gave_in_rank_order(pool):
    want = [[f"{label}{rank}".encode() for rank in range(4)] for label in "abc"]
    assert pool.run(exchange_thrice) == [want] * 4
    assert threads(5, exchange_thrice)[2][0] == [b"a0", b"a1", b"a2", b"a3", b"a4"]


@pytest.mark.parametrize("extended", [True, False])
def test_the_store_does_not_grow(extended, tmp_path):
    store = dist.HashStore()

    class Plain:
        """A store that has the oldest methods only."""

        def __getattr__(self, name):
            if name in ("has_extended_api", "multi_get", "multi_set"):
                raise AttributeError(name)
            return getattr(store, name)

    def scenario(context):
        meeting = meeting_of(context, store=store if extended else Plain())
        for number in range(200):
            assert meeting.exchange("x", b"%d" % number) == [b"%d" % number] * 3

    threads(3, scenario)
    # 1,000 keys were set; each rank leaves fewer than 32 of old calls, and those of the last two
    assert store.num_keys() <= 3 * 32 + 2 * (3 + 2)


def test_a_file_store_will_do(tmp_path):
    def scenario(context):
        return meeting_of(context, store=dist.FileStore(str(tmp_path / "store"), 2)).exchange("x", b"%d" % context.rank)

    assert threads(2, scenario) == [[b"0", b"1"]] * 2


def test_payloads_may_be_large_or_empty_and_hold_any_byte(pool):
    assert pool.run(exchange_large, ranks=2) == [True, True]


def exchange_large(context):
    payload = bytes(range(256)) * 20_000 if context.rank else b""
    return meeting_of(context).exchange("x", payload) == [b"", bytes(range(256)) * 20_000]


def test_silent_ranks_are_all_named_at_the_deadline_even_to_the_late_one():
    def scenario(context):
        meeting = meeting_of(context)
        if context.rank in (1, 3):
            context.store.wait(["expired"])
        start = time.monotonic()
        with pytest.raises(RefitTimeout, match="ranks 1, 3 in vain") as caught:
            meeting.exchange("plan", b"", Deadline(0.3) if context.rank == 0 else Deadline(10))
        assert caught.value.facts["ranks"] == (1, 3)
        assert time.monotonic() - start < 3
        context.store.set("expired", "")
        with pytest.raises(TransportError, match=r"is over and cannot go on to 'commit'.*Use a new scope"):
            meeting.exchange("commit", b"")

    threads(4, scenario)


def test_a_failure_reaches_every_rank_and_the_meeting_goes_on():
    def scenario(context):
        meeting = meeting_of(context)
        if context.rank == 1:
            meeting.fail("plan", "no 'q.weight' here")
        else:
            with pytest.raises(PeerError, match=r"Rank 1 failed at 'plan': no 'q.weight' here") as caught:
                meeting.exchange("plan", b"")
            assert (caught.value.facts["rank"], caught.value.facts["cause"]) == (1, "no 'q.weight' here")
        return meeting.exchange("next", b"%d" % context.rank)

    assert threads(3, scenario) == [[b"0", b"1", b"2"]] * 3


def test_a_failure_is_told_although_another_rank_is_silent():
    def scenario(context):
        meeting = meeting_of(context)
        if context.rank == 1:
            meeting.fail("plan", "broken")
        elif context.rank == 0:
            start = time.monotonic()
            with pytest.raises(PeerError, match="broken"):
                meeting.exchange("plan", b"")
            assert time.monotonic() - start < 5
            context.store.set("told", "")
        else:
            context.store.wait(["told"])
            with pytest.raises(PeerError, match="broken"):
                meeting.exchange("plan", b"")

    threads(3, scenario)


def test_ranks_at_different_labels_are_told_so():
    def scenario(context):
        label = "plan" if context.rank else "commit"
        with pytest.raises(TransportError, match=r"Rank . is at '(plan|commit)' of meeting 'meeting', rank"):
            meeting_of(context).exchange(label, b"")

    threads(2, scenario)


def test_a_meeting_of_one_rank_needs_no_store():
    meeting = Meeting(None, 0, 1, scope="alone", timeout=timedelta(seconds=1))
    assert meeting.exchange("x", b"mine") == [b"mine"]
    with pytest.raises(ConfigError):
        Meeting(None, 1, 1, scope="alone", timeout=timedelta(seconds=1))


def test_a_store_whose_host_is_gone_is_an_error_and_not_a_hang():
    host = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    guest = dist.TCPStore("127.0.0.1", host.port, None, is_master=False, wait_for_workers=False)
    meeting = Meeting(guest, 0, 2, scope="x", timeout=timedelta(seconds=5))
    del host
    with pytest.raises(TransportError, match="lost the store at 'plan'"):
        meeting.exchange("plan", b"")


def test_the_store_of_a_group_is_found():
    def scenario(context):
        group = context.process_group("any")
        try:
            store = store_of(group)
        except EnvironmentNotSupported:
            assert not hasattr(group, "get_group_store")  # an older torch does not tell for unregistered groups
            return "given"
        store.set(f"from {context.rank}", "given")
        return store.get(f"from {1 - context.rank}").decode()

    assert threads(2, scenario) == ["given", "given"]


# -- agreeing: one value for all ---------------------------------------------------------------------------------------


def test_ranks_that_say_the_same_go_on_and_may_exchange_in_between():
    def scenario(context):
        meeting = meeting_of(context)
        for number in range(50):
            meeting.agree("run", bytes([number, 0, 255]))
        assert meeting.exchange("x", b"%d" % context.rank) == [b"0", b"1", b"2"]
        meeting.agree("run", b"")

    threads(3, scenario)


def test_a_rank_that_says_something_else_is_named_on_every_rank_and_the_meeting_goes_on():
    def scenario(context):
        meeting = meeting_of(context)
        with pytest.raises(DigestError) as caught:
            meeting.agree("run", b"two" if context.rank == 2 else b"one")
        meeting.agree("run", b"three")
        return caught.value.ranks

    ranks = threads(3, scenario)
    assert len(set(ranks)) == 1
    assert 2 in ranks[0]


def test_a_rank_that_does_not_come_to_agree_is_named_by_the_others():
    def scenario(context):
        if context.rank == 1:
            return (1,)
        with pytest.raises(RefitTimeout) as caught:
            meeting_of(context).agree("run", b"v", Deadline(1.0))
        return caught.value.ranks

    assert threads(3, scenario) == [(1,)] * 3


def test_a_rank_that_comes_to_agree_after_another_has_given_up_does_not_go_on_either():
    def scenario(context):
        meeting = meeting_of(context)
        if context.rank == 1:
            context.store.wait(["given up"])
        with pytest.raises(RefitTimeout):
            meeting.agree("landed", b"v", Deadline(0.3 if context.rank == 0 else 10.0))
        context.store.set("given up", "")

    threads(3, scenario)


def test_agreeing_and_exchanging_do_not_meet():
    def scenario(context):
        meeting = meeting_of(context)
        call, label = (meeting.agree, "run") if context.rank == 0 else (meeting.exchange, "call")
        with pytest.raises(TransportError, match="Every rank must make the same calls"):
            call(label, b"v")

    threads(2, scenario)


def test_a_rank_that_fails_to_agree_is_heard_at_once():
    def scenario(context):
        meeting = meeting_of(context)
        if context.rank == 1:
            meeting.fail("run", "no memory")
        else:
            with pytest.raises(PeerError, match="no memory"):
                meeting.agree("run", b"v", Deadline(20.0))
        meeting.agree("run", b"w")

    threads(3, scenario)
