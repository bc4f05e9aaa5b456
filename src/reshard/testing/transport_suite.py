"""What every transport promises, as tests: subclass `TransportSuite`, give it a `world`, and pytest does the rest.

>>> class TestMemoryTransport(TransportSuite):
...     @pytest.fixture
...     def world(self):
...         return in_memory

A world runs a scenario as n ranks, each with a transport of its own, and returns what the scenario returned on each
rank; scenarios are functions of `transport_exchanges` and `transport_failures`. A transport whose ranks are real
processes subclasses `ProcessTransportSuite`, which also kills ranks. One that lends memory adds `LendingSuite`.
"""

from __future__ import annotations

import os
import signal
import tempfile
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import pytest

from reshard.testing import transport_exchanges as exchanges
from reshard.testing import transport_failures as failures
from reshard.testing.processes import Died, ProcessPool, RankContext, threads
from reshard.testing.transport_exchanges import MIB, PATIENCE_SECONDS, POISON, expect, pattern, receive, take
from reshard.transports.memory import MemoryTransport

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    import torch

    from reshard.transports.base import Transport


class World(Protocol):
    """Runs `scenario(context, transport, *args)` on `size` ranks and returns the results in rank order."""

    def __call__(
        self, size: int, scenario: Callable[..., Any], *args: object, may_die: Collection[int] = ()
    ) -> list[Any]: ...


def in_memory(size: int, scenario: Callable[..., Any], *args: object, may_die: Collection[int] = ()) -> list[Any]:
    """Run a scenario over `MemoryTransport`, one thread a rank."""
    transports = MemoryTransport.world(size)
    return threads(size, lambda context: _play(context, lambda _: transports[context.rank], scenario, args))


def in_threads(make: Callable[[RankContext], Transport]) -> World:
    """Return a world whose ranks are threads; `make` builds one rank's transport."""

    def run(size: int, scenario: Callable[..., Any], *args: object, may_die: Collection[int] = ()) -> list[Any]:
        return threads(size, lambda context: _play(context, make, scenario, args))

    return run


def in_processes(pool: ProcessPool, make: Callable[[RankContext], Transport]) -> World:
    """Return a world whose ranks are the pool's processes; `make` and scenarios must be importable there."""

    def run(size: int, scenario: Callable[..., Any], *args: object, may_die: Collection[int] = ()) -> list[Any]:
        return pool.run(_play, make, scenario, args, ranks=size, may_die=may_die)

    return run


def _play(
    context: RankContext, make: Callable[[RankContext], Transport], scenario: Callable[..., Any], args: Sequence[object]
) -> Any:
    exchanges.meet(
        context, "start"
    )  # a process that is new takes a while to be there, which is no fault of a transport
    with make(context) as transport:
        return scenario(context, transport, *args)


class TransportSuite:
    """The promises that every transport keeps."""

    sees_sizes: ClassVar[bool] = True
    """Whether the transport refuses a message whose size is not the agreed one (gloo cannot)."""

    @pytest.fixture
    def world(self) -> World:
        raise NotImplementedError("a subclass of TransportSuite gives the fixture 'world'")

    def test_messages_of_a_pair_arrive_in_the_order_of_their_posts(self, world: World) -> None:
        assert world(2, exchanges.ordered, 60) == [None, list(range(60))]

    @pytest.mark.parametrize("nbytes", [0, 1, 4097, MIB, 9 * MIB])
    def test_a_message_of_any_size_arrives_bit_for_bit(self, world: World, nbytes: int) -> None:
        assert world(2, exchanges.one_message, nbytes) == [True, True]

    def test_many_messages_are_in_flight_in_both_directions(self, world: World) -> None:
        assert world(3, exchanges.crossing, 1500, 96) == [2 * 1500] * 3

    def test_large_messages_cross_each_other(self, world: World) -> None:
        assert world(2, exchanges.crossing, 6, 3 * MIB) == [6, 6]

    def test_tokens_beyond_any_buffer_can_be_posted_before_the_peer_looks(self, world: World) -> None:
        assert world(2, exchanges.unread_tokens, 3000) == [3000, 3000]

    def test_a_payload_is_what_was_sent_though_the_sender_reuses_its_memory(self, world: World) -> None:
        assert world(2, exchanges.reused_memory, 30, 70_001) == [None, [True] * 30]

    def test_bytes_shown_stay_valid_until_release_though_the_sender_goes_on(self, world: World) -> None:
        assert world(2, exchanges.held_bytes) == [None, (True, True, True)]

    def test_bytes_land_in_into_where_it_is_given(self, world: World) -> None:
        assert world(2, exchanges.into) == [None, (True, True)]

    def test_a_token_is_done_when_the_reader_has_released_it(self, world: World) -> None:
        assert world(2, exchanges.token) == [True, True]

    def test_sixteen_ranks_talk_to_each_other(self, world: World) -> None:
        size = 16 if world(1, exchanges.can_be_many) == [True] else 4
        assert world(size, exchanges.crossing, 3, 1000) == [3 * (size - 1)] * size

    @pytest.mark.parametrize("way", ["recv", "send"])
    def test_a_silent_peer_is_named_at_the_deadline(self, world: World, way: str) -> None:
        (kind, peer, seconds, after), told = world(2, failures.silent, way, 0.5)
        assert (kind, peer) == ("RefitTimeout", 1)
        assert 0.4 <= seconds <= 2.0
        assert after == "TransportError"  # the epoch has ended
        assert told == ("TransportError", 0)  # and the peer learns it long before its own deadline

    def test_a_peer_that_aborts_is_named_long_before_the_deadline(self, world: World) -> None:
        results = world(3, failures.aborting)
        assert [results[0][:2], results[2][:2]] == [("TransportError", 1)] * 2
        assert max(results[0][2], results[2][2]) < 5.0

    @pytest.mark.parametrize("way", ["recv", "send"])
    def test_a_peer_that_aborts_while_a_message_is_under_way_is_named_long_before_the_deadline(
        self, world: World, way: str
    ) -> None:
        told, _ = world(2, failures.aborting_half_way, way)
        assert told[:2] == ("TransportError", 1)
        assert told[2] < 5.0

    def test_an_abort_from_another_thread_ends_a_wait(self, world: World) -> None:
        (kind, seconds), _ = world(2, failures.aborted_from_outside)
        assert kind == "TransportError"
        assert seconds < 5.0

    def test_a_message_of_another_size_than_agreed_is_refused_with_both_sizes(self, world: World) -> None:
        if self.sees_sizes:
            sender, receiver = world(2, failures.wrong_size)
            assert sender == ("TransportError", 1, False)
            assert receiver == ("TransportError", 0, True)

    def test_the_staging_arena_is_replaced_only_when_nothing_is_in_flight(self, world: World) -> None:
        assert world(2, exchanges.staging) == [("TransportError", 20, 20, True), None]

    def test_posts_to_a_rank_that_is_not_reached_and_misuse_are_refused(self, world: World) -> None:
        assert world(2, failures.misuse) == [[True] * 5] * 2

    def test_close_can_be_called_twice_and_nothing_is_left_behind(self, world: World) -> None:
        counts = [world(3, exchanges.open_and_close) for _ in range(3)]
        assert counts[1] == counts[2]  # the first run may load and warm what stays for good
        assert not [name for name in os.listdir(tempfile.gettempdir()) if name.startswith("reshard-shm")]


class ProcessTransportSuite(TransportSuite):
    """The promises of a transport between processes: the death of one is seen by the others."""

    def test_a_peer_that_is_killed_is_named_within_seconds(self, world: World) -> None:
        first, killed, last = world(3, failures.killed, may_die={1})
        assert killed == Died(-signal.SIGKILL)
        assert [first[:2], last[:2]] == [("TransportError", 1)] * 2
        assert max(first[2], last[2]) < 5.0

    @pytest.mark.parametrize("way", ["recv", "send"])
    def test_a_peer_that_is_killed_while_a_message_is_under_way_is_named_within_seconds(
        self, world: World, way: str
    ) -> None:
        told, killed = world(2, failures.killed_half_way, way, may_die={1})
        assert killed == Died(-signal.SIGKILL)
        assert told[:2] == ("TransportError", 1)
        assert told[2] < 5.0

    def test_a_peer_that_is_killed_while_many_messages_are_in_flight_is_named(self, world: World) -> None:
        survivor, killed = world(2, failures.killed_in_traffic, may_die={1})
        assert killed == Died(-signal.SIGKILL)
        assert survivor == ("TransportError", 1)


class LendingSuite:
    """The promises of a transport that lends memory; combine it with `TransportSuite`."""

    prepare_loan: ClassVar[Callable[[Sequence[torch.Tensor]], object] | None] = None
    """Importable function that moves tensors, in place, to where they can be lent."""

    def test_a_reader_pulls_straight_out_of_lent_memory_again_and_again(self, world: World) -> None:
        assert world(3, exchanges.lending, type(self).prepare_loan) == [None, [True] * 6, [True] * 6]

    def test_a_loan_survives_json_and_tensors_of_one_storage_share_it(self, world: World) -> None:
        assert world(2, exchanges.loans_as_json, type(self).prepare_loan) == [True, True]


__all__ = [
    "MIB",
    "PATIENCE_SECONDS",
    "POISON",
    "LendingSuite",
    "ProcessTransportSuite",
    "TransportSuite",
    "World",
    "expect",
    "in_memory",
    "in_processes",
    "in_threads",
    "pattern",
    "receive",
    "take",
]
