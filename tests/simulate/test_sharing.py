"""Connections that share ends, against times worked out by hand; and that nothing of a rate is lost or used twice."""

import random

import pytest

from reshard.simulate.links import End
from reshard.simulate.processor import Clock
from reshard.simulate.sharing import Sharing


def ends_of(messages):
    """When each message is through: (at, pair, ends, nbytes)."""
    clock = Clock()
    sharing, through = Sharing(clock), {}

    def begin(number, pair, ends, nbytes):
        sharing.send(pair, ends, nbytes, lambda span: through.__setitem__(number, span))

    for number, (at, *message) in enumerate(messages):
        clock.at(at, lambda number=number, message=message: begin(number, *message))
    clock.run()
    return [through[number] for number in range(len(messages))]


def test_two_connections_over_one_port_have_half_its_rate_each():
    port, others = End(8), [End(100), End(100)]
    assert ends_of([(0, (0, at), (port, other), 8) for at, other in enumerate(others)]) == [(0, 2.0), (0, 2.0)]


def test_messages_of_one_pair_go_one_after_the_other():
    port, other = End(8), End(100)
    assert ends_of([(0, (0, 1), (port, other), 8)] * 2) == [(0, 1.0), (1.0, 2.0)]


def test_who_comes_later_takes_its_part_from_then_on():
    port, others = End(8), [End(100), End(100)]
    assert ends_of([(0, (0, 0), (port, others[0]), 8), (0.5, (0, 1), (port, others[1]), 2)]) == [(0, 1.25), (0.5, 1.0)]


def test_what_a_slow_receiver_leaves_over_goes_to_the_others():
    port, slow, fast = End(8), End(2), End(100)
    assert ends_of([(0, (0, 1), (port, slow), 2), (0, (0, 2), (port, fast), 6)]) == [(0, 1.0), (0, 1.0)]


@pytest.mark.parametrize("seed", range(20))
def test_an_end_carries_its_rate_while_something_waits_there_and_never_more(seed):
    r = random.Random(seed)
    out, into = [End(r.randint(1, 9)) for _ in range(3)], [End(100) for _ in range(4)]
    messages = [(0, (a := r.randrange(3), b := r.randrange(4)), (out[a], into[b]), r.randint(1, 50)) for _ in range(30)]
    spans = ends_of(messages)
    for number, end in enumerate(out):  # all are there from the start, and no receiver is the limit
        mine = [(nbytes, span) for (_, pair, _, nbytes), span in zip(messages, spans, strict=True) if pair[0] == number]
        assert max(stop for _, (_, stop) in mine) == pytest.approx(sum(n for n, _ in mine) / end.bytes_per_second)
