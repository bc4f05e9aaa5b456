"""Machine: the state of a session on one rank, (state, event) -> (state, commands); no clock, no thread, no tensor.

The transitions are a table. It is what runs, what ``diagram`` draws and what the tests walk through; a pair of phase
and event that is not in it cannot happen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Literal, assert_never

from reshard.refit import events as ev
from reshard.refit.commands import Command as C

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reshard.refit.commands import Command


class Phase(Enum):
    """Where a session stands on one rank; the value is what people read."""

    APART = "apart"
    MEETING = "meeting"
    READY = "ready"
    GATHERING = "gathering"
    PLANNING = "planning"
    MOVING = "moving"
    LANDED = "landed"
    DRAINING = "draining"
    COMMITTING = "committing"
    CONFIRMING = "confirming"
    CLOSED = "closed"


@dataclass(frozen=True)
class Serving:
    """What the weights of this rank are."""

    version: int | None = None
    """The last version that was committed; None before the first."""

    partial: bool = False
    """Whether some tensors are older, since a refit named only the others."""

    torn: bool = False
    """Whether a refit failed after it began to write: old and new bytes may be mixed until one completes."""

    def __str__(self) -> str:
        if self.torn:
            return f"torn (was {'no version' if self.version is None else f'version {self.version}'})"
        if self.version is None:
            return "no version"
        return f"version {self.version}{' in part' if self.partial else ''}"


@dataclass(frozen=True)
class State:
    """Everything that decides what happens next on one rank."""

    writes: bool
    """Whether this rank has destination weights."""

    staged: bool
    """Whether bytes land beside them."""

    phase: Phase = Phase.APART
    epoch: int = 0
    """Which membership; grows whenever members meet anew."""

    target: int | None = None
    """The version of the refit that is under way."""

    partial: bool = False
    """Whether that refit names only some of the tensors."""

    serving: Serving = Serving()


Effect = Literal["", "start", "tear", "serve", "end", "meet"]
Guard = Literal[
    "",
    "connecting",
    "refitting",
    "writes in place",
    "writes beside or nothing",
    "has begun to write",
    "wrote nothing yet",
    "leases are taken",
    "no leases are taken",
]


@dataclass(frozen=True)
class Transition:
    """One row of the table: in ``phase``, on an event of type ``on``, if ``guard`` holds."""

    phase: Phase
    on: type[ev.Event]
    to: Phase
    commands: tuple[Command, ...]
    guard: Guard = ""
    effect: Effect = ""


P = Phase
_GIVE_UP = (C.END_EPOCH, C.RAISE)

TABLE: tuple[Transition, ...] = (
    Transition(P.APART, ev.Joined, P.MEETING, (C.BEGIN, C.MEET)),
    Transition(P.APART, ev.Called, P.MEETING, (C.BEGIN, C.MEET), effect="start"),
    Transition(P.READY, ev.Called, P.GATHERING, (C.BEGIN, C.GATHER), effect="start"),
    Transition(P.MEETING, ev.Met, P.READY, (C.RETURN,), "connecting", "meet"),
    Transition(P.MEETING, ev.Met, P.GATHERING, (C.GATHER,), "refitting", "meet"),
    Transition(P.GATHERING, ev.Outdated, P.MEETING, (C.END_EPOCH, C.MEET)),
    Transition(P.GATHERING, ev.Refused, P.READY, (C.RAISE,), effect="end"),
    Transition(P.GATHERING, ev.Gathered, P.PLANNING, (C.PLAN,)),
    Transition(P.PLANNING, ev.Refused, P.READY, (C.RAISE,), effect="end"),
    Transition(P.PLANNING, ev.Planned, P.MOVING, (C.MOVE,)),
    Transition(P.MOVING, ev.Moved, P.LANDED, (C.AWAIT_LANDED,)),
    Transition(P.LANDED, ev.AllLanded, P.COMMITTING, (C.COMMIT,), "no leases are taken"),
    Transition(P.LANDED, ev.AllLanded, P.DRAINING, (C.DRAIN,), "leases are taken"),
    Transition(P.DRAINING, ev.Drained, P.COMMITTING, (C.COMMIT,)),
    Transition(P.COMMITTING, ev.Committed, P.CONFIRMING, (C.AWAIT_COMMITTED,), effect="serve"),
    Transition(P.CONFIRMING, ev.AllCommitted, P.READY, (C.RESUME, C.RETURN), effect="end"),
    # what goes wrong
    Transition(P.MEETING, ev.Failed, P.APART, _GIVE_UP, effect="end"),
    Transition(P.GATHERING, ev.Failed, P.APART, _GIVE_UP, effect="end"),
    Transition(P.PLANNING, ev.Failed, P.APART, _GIVE_UP, effect="end"),
    Transition(P.MOVING, ev.Failed, P.APART, _GIVE_UP, "writes in place", "tear"),
    Transition(P.MOVING, ev.Failed, P.APART, _GIVE_UP, "writes beside or nothing", "end"),
    Transition(P.LANDED, ev.Failed, P.APART, _GIVE_UP, "writes in place", "tear"),
    Transition(P.LANDED, ev.Failed, P.APART, _GIVE_UP, "writes beside or nothing", "end"),
    Transition(P.DRAINING, ev.Failed, P.APART, _GIVE_UP, effect="end"),
    Transition(P.COMMITTING, ev.Failed, P.APART, _GIVE_UP, "has begun to write", "tear"),
    Transition(P.COMMITTING, ev.Failed, P.APART, _GIVE_UP, "wrote nothing yet", "end"),
    Transition(P.CONFIRMING, ev.Failed, P.APART, _GIVE_UP, effect="end"),
    Transition(P.READY, ev.Failed, P.APART, _GIVE_UP, effect="end"),
    Transition(P.APART, ev.Closed, P.CLOSED, (C.LEAVE,)),
    Transition(P.READY, ev.Closed, P.CLOSED, (C.LEAVE,)),
)


def step(state: State, event: ev.Event) -> tuple[State, tuple[Command, ...]]:
    """What follows from an event.

    Raises:
        AssertionError: The event cannot happen in this phase: a mistake of the runner.
    """
    for row in TABLE:
        if row.phase is state.phase and isinstance(event, row.on) and _holds(row.guard, state, event):
            return _apply(row.effect, replace(state, phase=row.to), event), row.commands
    raise AssertionError(f"{type(event).__name__} cannot happen while {state.phase.value}")


def _holds(guard: Guard, state: State, event: ev.Event) -> bool:
    match guard:
        case "":
            return True
        case "connecting":
            return state.target is None
        case "refitting":
            return state.target is not None
        case "writes in place":
            return state.writes and not state.staged
        case "writes beside or nothing":
            return state.staged or not state.writes
        case "has begun to write":
            return not (isinstance(event, ev.Failed) and event.untouched)
        case "wrote nothing yet":
            return isinstance(event, ev.Failed) and event.untouched
        case "leases are taken":
            return isinstance(event, ev.AllLanded) and event.leased
        case "no leases are taken":
            return isinstance(event, ev.AllLanded) and not event.leased
        case never:
            assert_never(never)


def _apply(effect: Effect, state: State, event: ev.Event) -> State:
    match effect:
        case "":
            return state
        case "start":
            assert isinstance(event, ev.Called)
            return replace(state, target=event.version, partial=event.partial)
        case "meet":
            assert isinstance(event, ev.Met)
            return replace(state, epoch=event.epoch)
        case "end":
            return replace(state, target=None, partial=False)
        case "tear":
            torn = replace(state.serving, torn=True) if state.writes else state.serving
            return replace(state, target=None, partial=False, serving=torn)
        case "serve":
            still_torn = state.partial and state.serving.torn  # only a refit of all tensors heals
            return replace(state, serving=Serving(state.target, state.partial, still_torn))
        case never:
            assert_never(never)


def check_invariants(state: State) -> None:
    """Check what holds in every state that ``step`` can reach.

    Raises:
        AssertionError: It does not.
    """
    quiet = state.phase in (P.APART, P.READY, P.CLOSED)
    assert not (quiet and state.target is not None), f"a refit is under way while {state.phase.value}"
    assert state.writes or not state.serving.torn, "a rank that writes nothing is torn"
    assert state.staged or state.phase is not P.DRAINING, "holds back what has landed in the live weights"
    assert state.phase in (P.APART, P.MEETING, P.CLOSED) or state.epoch > 0, "no epoch, and yet it has begun"
    assert not (state.phase is P.CONFIRMING and state.serving.version != state.target), (
        "confirms what it does not serve"
    )


def diagram(form: Literal["mermaid", "dot"] = "mermaid") -> str:
    """The table as a diagram: phases, and on each arrow the event, its guard and what is done.

    >>> diagram("dot").splitlines()[4]
    '    "meeting" -> "ready" [label="Met [connecting] / hand the result to the caller"];'
    """
    return "\n".join(_mermaid() if form == "mermaid" else _dot())


def _label(row: Transition) -> str:
    guard = f" [{row.guard}]" if row.guard else ""
    torn = "; now torn" if row.effect == "tear" else ""
    return f"{row.on.__name__}{guard} / {'; '.join(command.value for command in row.commands)}{torn}"


def _mermaid() -> Iterator[str]:
    yield "stateDiagram-v2"
    yield f"    [*] --> {P.APART.value}"
    for row in TABLE:
        yield f"    {row.phase.value} --> {row.to.value}: {_label(row)}"
    yield f"    {P.CLOSED.value} --> [*]"


def _dot() -> Iterator[str]:
    yield "digraph session {"
    for row in TABLE:
        yield f'    "{row.phase.value}" -> "{row.to.value}" [label="{_label(row)}"];'
    yield "}"
