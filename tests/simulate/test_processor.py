"""Cores that are shared out: times worked out by hand."""

import pytest

from reshard.simulate.processor import Clock, Processor, Thread


def finished(cores, work):
    """When each (start, seconds) is done."""
    clock, done = Clock(), {}
    processor = Processor(clock, cores)
    for at, (start, seconds) in enumerate(work):
        clock.at(start, lambda at=at, seconds=seconds: processor.work(seconds, lambda: done.update({at: clock.now})))
    clock.run()
    return [done[at] for at in range(len(work))]


@pytest.mark.parametrize(
    ("cores", "work", "done"),
    [
        (2, [(0, 1), (0, 1)], [1, 1]),  # a core for each
        (1, [(0, 1), (0, 1)], [2, 2]),  # half a core for each
        (2, [(0, 1), (0, 1), (0, 1)], [1.5, 1.5, 1.5]),  # two thirds for each
        (1, [(0, 1), (0.5, 1)], [1.5, 2]),  # alone, then half, then alone again
        (1, [(0, 1), (5, 1)], [1, 6]),  # one after the other
        (float("inf"), [(0, 1), (0, 1), (0, 1)], [1, 1, 1]),
        (0.5, [(0, 1)], [2]),  # a part of a core
    ],
)
def test_who_works_at_once_gets_an_equal_part_of_the_cores(cores, work, done):
    assert finished(cores, work) == pytest.approx(done)


def test_work_is_added_up_and_work_of_no_length_ends_at_once():
    clock, order = Clock(), []
    processor = Processor(clock, 1)
    processor.work(1.0, lambda: order.append("long"))
    processor.work(0.0, lambda: order.append(f"none at {clock.now}"))
    clock.run()
    assert order == ["none at 0.0", "long"]
    assert processor.busy_seconds == 1.0


def test_a_thread_does_one_piece_after_the_other_though_cores_are_idle():
    clock, done = Clock(), []
    thread = Thread(Processor(clock, 8))
    for name in "abc":
        thread.work(1.0, lambda name=name: done.append((name, clock.now)))
    clock.run()
    assert done == [("a", 1.0), ("b", 2.0), ("c", 3.0)]
