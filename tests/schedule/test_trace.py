import json

import pytest

from reshard.errors import ConfigError
from reshard.schedule.trace import Trace, TraceEvent

SEND = TraceEvent(0, "send", 1, 0, 0.0, 0.5, 64)
RECV = TraceEvent(1, "recv", 0, 0, 0.25, 0.75, 64)
PACK = TraceEvent(0, "pack", None, None, 0.0, 0.125, 64)


def test_a_trace_survives_json():
    trace = Trace((RECV, SEND, PACK), "measured", "abc")
    assert Trace.from_json(json.loads(json.dumps(trace.to_json()))) == trace


def test_events_are_kept_by_their_start_whatever_order_they_came_in():
    assert Trace((RECV, SEND, PACK)).events == Trace((PACK, RECV, SEND)).events == (PACK, SEND, RECV)


def test_a_trace_ends_with_its_last_event():
    trace = Trace((RECV, SEND))
    assert (trace.seconds, trace.ranks, RECV.seconds) == (0.75, (0, 1), 0.5)
    assert Trace(()).seconds == 0.0


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ((0, "fly", 1, 0, 0.0, 1.0, 1), "use one of send, recv"),
        ((0, "send", 1, 0, 1.0, 0.5, 1), "does not end before it begins"),
        ((0, "send", 1, 0, 0.0, float("nan"), 1), "does not end before it begins"),
        ((0, "send", 1, 0, 0.0, 1.0, -1), "neither is negative"),
        ((-1, "send", 1, 0, 0.0, 1.0, 1), "neither is negative"),
    ],
)
def test_an_impossible_event_is_refused(event, message):
    with pytest.raises(ConfigError, match=message):
        TraceEvent(*event)


def test_other_json_is_no_trace():
    with pytest.raises(ConfigError, match="not a trace"):
        Trace.from_json({"format": "reshard-plan-1"})
    data = Trace((SEND, RECV)).to_json()
    data["events"]["rank"].pop()
    with pytest.raises(ConfigError, match="as long as each other"):
        Trace.from_json(data)
