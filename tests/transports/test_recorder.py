"""What a real run is recorded as: events of all ranks on one line, in the form that the report reads."""

import time

from reshard.transports.recorder import Recorder, trace_of


def test_an_event_lasts_from_when_it_began_to_when_it_is_noted():
    recorder = Recorder()
    began = time.perf_counter()
    recorder.note("recv", began, 8, 3, 1)
    ((kind, peer, round_, start, stop, nbytes),) = recorder.rows
    assert (kind, peer, round_, start, nbytes) == ("recv", 3, 1, began, 8)
    assert began <= stop <= time.perf_counter()


def test_the_first_event_of_all_ranks_is_the_zero_of_the_trace():
    rows = {0: [("pack", None, 0, 105.0, 106.0, 8)], 1: [("recv", 0, 0, 104.5, 107.0, 8)]}
    trace = trace_of(rows, "measured", "digest")
    assert [(e.rank, e.kind, e.start_seconds, e.stop_seconds) for e in trace.events] == [
        (1, "recv", 0.0, 2.5),
        (0, "pack", 0.5, 1.5),
    ]
    assert (trace.origin, trace.plan_digest) == ("measured", "digest")
    assert trace_of({0: []}, "nothing").seconds == 0.0
