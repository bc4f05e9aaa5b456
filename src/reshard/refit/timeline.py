"""Timeline: the events of a session as a trace that Perfetto opens: a track a member, a bar a phase."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_IDLE = ("ready", "apart", "closed")


def to_perfetto(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Bars from events of one or more members, as ``Session.events`` or its JSONL file has them.

    Phases in which nothing goes on are left out. Members' clocks are taken as they are: on several machines they must
    be in step for their tracks to line up.

    Args:
        events: In order of time for each member.

    Returns:
        The JSON of the Chrome trace format; times in microseconds.
    """
    rows: list[dict[str, Any]] = []
    tracks: dict[tuple[str, str], int] = {}
    last: dict[int, Mapping[str, Any]] = {}
    for event in events:
        key = (str(event["session"]), str(event["member"]))
        track = tracks.setdefault(key, len(tracks) + 1)
        before = last.get(track)
        if before is not None and before["to"] not in _IDLE:
            rows.append(_bar(before, event, track))
        if "error" in event:
            arguments = {"error": event["error"]}
            mark = {"name": event["event"], "ph": "i", "s": "t", "pid": 1, "tid": track, "ts": _us(event)}
            rows.append({**mark, "args": arguments})
        last[track] = event
    names = [
        {"name": "thread_name", "ph": "M", "pid": 1, "tid": track, "args": {"name": f"{member} ({session})"}}
        for (session, member), track in tracks.items()
    ]
    return {"traceEvents": [*names, *rows], "displayTimeUnit": "ms"}


def _bar(begin: Mapping[str, Any], end: Mapping[str, Any], track: int) -> dict[str, Any]:
    facts = {"version": begin["version"], "epoch": begin["epoch"], "ended by": end["event"]}
    return {
        "name": begin["to"],
        "ph": "X",
        "pid": 1,
        "tid": track,
        "ts": _us(begin),
        "dur": _us(end) - _us(begin),
        "args": facts,
    }


def _us(event: Mapping[str, Any]) -> int:
    return int(event["time"] * 1e6)
