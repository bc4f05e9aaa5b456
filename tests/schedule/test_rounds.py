"""Rounds: matchings, as few as the busiest rank allows."""

from __future__ import annotations

import random

import pytest

from reshard.schedule.rounds import RoundBlock, busiest, colour_rounds


def random_counts(seed):
    dice = random.Random(seed)
    senders, receivers = range(dice.randint(1, 9)), range(dice.randint(1, 9))
    first_receiver = dice.choice((0, 100))  # 0: ranks both send and receive
    most = dice.choice((1, 3, 50, 10_000))
    return {
        (a, first_receiver + b): dice.randint(0, most)
        for a in senders
        for b in receivers
        if a != first_receiver + b and dice.random() < 0.7
    }


@pytest.mark.parametrize("seed", range(200))
def test_there_are_as_many_rounds_as_the_busiest_rank_has_buckets(seed):
    counts = random_counts(seed)
    blocks = colour_rounds(counts)
    assert sum(block.repeat for block in blocks) == busiest(counts)
    placed = {}
    first = 0
    for block in blocks:
        assert block.first == first
        first += block.repeat
        senders, receivers = zip(*block.pairs, strict=True)
        assert len(set(senders)) == len(senders), "a rank sends twice in a round"
        assert len(set(receivers)) == len(receivers), "a rank receives twice in a round"
        for pair in block.pairs:
            placed[pair] = placed.get(pair, 0) + block.repeat
    assert placed == {pair: count for pair, count in counts.items() if count}


@pytest.mark.parametrize("seed", range(20))
def test_equal_counts_in_another_order_give_equal_rounds(seed):
    counts = random_counts(seed)
    shuffled = list(counts.items())
    random.Random(seed + 1).shuffle(shuffled)
    assert colour_rounds(dict(shuffled)) == colour_rounds(counts)


def test_many_rounds_of_equal_pairs_are_one_block():
    assert colour_rounds({(0, 2): 1000, (1, 3): 1000}) == (RoundBlock(0, 1000, ((0, 2), (1, 3))),)


def test_no_buckets_need_no_rounds():
    assert colour_rounds({}) == ()
    assert colour_rounds({(0, 1): 0}) == ()
    assert busiest({}) == 0


@pytest.mark.parametrize("ranks", [128, 1024])
def test_many_ranks_of_equal_degree_are_matched_in_full(ranks):
    dice = random.Random(ranks)
    counts = {}
    for _ in range(2):
        receivers = list(range(ranks, 2 * ranks))
        dice.shuffle(receivers)
        for pair in zip(range(ranks), receivers, strict=True):
            counts[pair] = counts.get(pair, 0) + 1
    blocks = colour_rounds(counts)
    assert sum(block.repeat for block in blocks) == 2
    assert all(len(block.pairs) == ranks for block in blocks)


def test_the_busiest_may_be_a_receiver():
    assert busiest({(0, 9): 2, (1, 9): 3, (0, 8): 1}) == 5
