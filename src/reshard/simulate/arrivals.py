"""Arrivals: what a rank does next that acts on whichever bucket comes first, as a real one does where it only relays.

The rules are those of the transports' mover, on operations in place of memory: which receives are posted, which send
goes next, and which slots what is handed on lies in until all of it has left.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reshard.schedule.schedule import Operation

OPEN_TO_ONE_PEER = 3
"""Sends that one peer may have open, as the mover has it."""

When = tuple[int, int]
"""Round and step."""

Key = tuple[int, int]
"""Stream and number of a bucket."""


def key_of(op: Operation) -> Key:
    return op.bucket.stream, op.bucket.index


def last_uses(operations: Sequence[Operation]) -> dict[Key, When]:
    """The buckets that a rank hands on, each with the step in which it does so for the last time."""
    return {key_of(op): (op.round, op.step) for op in operations if op.kind == "send" and op.forwarded}


@dataclass(eq=False)
class _Slot:
    """A place in staging memory: what came into it last, and how much that was sent from there is still leaving."""

    busy_until: When = (-1, 0)
    receive: Operation | None = None
    leaving: int = 0


def give_slots(
    operations: Sequence[Operation], depth: int, lands: Callable[[Operation], bool]
) -> tuple[dict[int, _Slot], set[Key]]:
    """Give receives the slots that they are compiled to.

    Args:
        operations: Of one rank, in order.
        depth: How many slots there are.
        lands: Whether a bucket lands where its boxes lie.

    Returns:
        The slot of each receive that needs one, by its place among the receives; and the buckets that stay in theirs
        until they are handed on. Others are packed again from where they have landed.
    """
    last_use = last_uses(operations)
    slots = [_Slot() for _ in range(depth)]
    given: dict[int, _Slot] = {}
    kept: set[Key] = set()
    for number, op in enumerate(op for op in operations if op.kind == "recv"):
        now = op.round, op.step
        free = [slot for slot in slots if slot.busy_until < now]
        until = last_use.get(key_of(op))
        if until is not None and free and (until <= now or len(free) > 1):
            kept.add(key_of(op))
        elif lands(op):
            continue
        else:
            until = now
        if free:
            given[number] = slot = min(free, key=lambda slot: slot.busy_until)
            slot.busy_until = until
    return given, kept


@dataclass
class Arrivals:
    """The choices of one rank, from its first operation to its last.

    Args:
        operations: Of the rank, in order.
        depth: Buckets in flight in each direction.
        slots: What ``give_slots`` gave.
    """

    operations: Sequence[Operation]
    depth: int
    slots: dict[int, _Slot]
    _receives: deque[tuple[Operation, _Slot | None]] = field(init=False)
    _to_post: dict[int, deque[Operation]] = field(init=False)
    _came: set[Key] = field(init=False, default_factory=set)
    _under_way: int = field(init=False, default=0)
    _open_receives: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        receives = [op for op in self.operations if op.kind == "recv"]
        sends = sorted((op for op in self.operations if op.kind == "send"), key=lambda op: (op.round, op.step))
        self._receives = deque((op, self.slots.get(number)) for number, op in enumerate(receives))
        self._to_post = {peer: deque(op for op in sends if op.peer == peer) for peer in {op.peer for op in sends}}
        self._open_to = dict.fromkeys(self._to_post, 0)
        held = {key_of(op): slot for op, slot in self._receives if slot is not None}
        self._slot_of = {key_of(op): held[key_of(op)] for op in sends if op.forwarded and key_of(op) in held}
        self._kept_for = Counter(key_of(op) for op in sends if key_of(op) in self._slot_of)

    @property
    def is_done(self) -> bool:
        return not (self._receives or self._to_post or self._under_way)

    def next_receive(self) -> Operation | None:
        """A receive to be posted now; None where slots or messages are to be waited for."""
        if not self._receives or self._open_receives >= 2 * self.depth:
            return None
        op, slot = self._receives[0]
        if slot is not None:
            before = slot.receive
            if before is not None:
                key = key_of(before)
                if key not in self._came or self._kept_for[key] or slot.leaving:
                    return None
            slot.receive = op
        self._receives.popleft()
        self._open_receives += 1
        self._under_way += 1
        return op

    def next_send(self) -> Operation | None:
        """A send to be posted now: the one that is due first of those whose bytes are here, few to each peer."""
        first = best = None
        is_full = sum(self._open_to.values()) >= self.depth
        for queue in self._to_post.values():
            op = queue[0]
            if first is None or _due(op) < _due(first):
                first = op
            if is_full or self._open_to[op.peer] >= OPEN_TO_ONE_PEER or (best is not None and _due(best) < _due(op)):
                continue
            if self._is_here(op):
                best = op
        chosen = first if first is not None and self._is_here(first) else best
        if chosen is None:
            return None
        queue = self._to_post[chosen.peer]
        queue.popleft()
        if not queue:
            del self._to_post[chosen.peer]
        self._open_to[chosen.peer] += 1
        self._under_way += 1
        slot = self._slot_of.get(key_of(chosen)) if chosen.forwarded else None
        if slot is not None:
            self._kept_for[key_of(chosen)] -= 1
            slot.leaving += 1
        return chosen

    def _is_here(self, op: Operation) -> bool:
        return not op.forwarded or key_of(op) in self._came

    def has_come(self, op: Operation) -> None:
        """A receive has landed and been unpacked."""
        self._came.add(key_of(op))
        self._open_receives -= 1
        self._under_way -= 1

    def has_left(self, op: Operation) -> None:
        """A send's memory is free again."""
        self._open_to[op.peer] -= 1
        self._under_way -= 1
        slot = self._slot_of.get(key_of(op)) if op.forwarded else None
        if slot is not None:
            slot.leaving -= 1


def _due(op: Operation) -> When:
    return op.round, op.step
