"""Commands: what the state machine asks the runner to do; each that is awaited answers with an event."""

from __future__ import annotations

from enum import Enum


class Command(Enum):
    """One effect. Those in ``AWAITED`` end with an event that is fed back; the others only happen.

    The commands to engines do nothing but on the first rank of a source that was given some. What fails in them is fed
    back too, in place of the commands after it.
    """

    BEGIN = "have the engines join and receive"
    MEET = "meet all members in a new epoch"
    GATHER = "wait for all ranks to call, and compare what they ask for"
    PLAN = "agree on a plan and bind it to memory, unless that is done"
    MOVE = "move the bytes, and verify them"
    AWAIT_LANDED = "wait until all ranks have verified"
    DRAIN = "wait until no rank holds a lease"
    COMMIT = "bring the landed bytes into the live weights, or have the engines do so"
    AWAIT_COMMITTED = "wait until all ranks serve the new version"
    RESUME = "let the engines go on"
    END_EPOCH = "tell the others, and give back what belongs to the epoch"
    RETURN = "hand the result to the caller"
    RAISE = "hand the error to the caller"
    LEAVE = "leave the session"


AWAITED = frozenset(
    {
        Command.MEET,
        Command.GATHER,
        Command.PLAN,
        Command.MOVE,
        Command.AWAIT_LANDED,
        Command.DRAIN,
        Command.COMMIT,
        Command.AWAIT_COMMITTED,
    }
)


TO_ENGINES = frozenset({Command.BEGIN, Command.RESUME})
