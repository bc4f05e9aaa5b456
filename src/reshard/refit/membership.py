"""Membership: who takes part, agreed over a store by exact keys, without a coordinator and in any order of arrival.

Members meet in *attempts*, numbered upwards. Each writes its name into the current one and then waits for its word;
whoever finds that all who are expected are there sets it::

    comers += 1, comer/i = me     all there?  word = "formed" + the roster      one name twice?  word = "over"

A formed attempt is an epoch. Someone who comes to an attempt whose word is set (a restarted process, or a survivor of
an epoch that failed) ends it, which wakes all who wait at its gates, and goes on to the next. So nobody has to be told
who died: whoever is alive comes again. One name that comes with two marks may be a dead process and its successor; if
both come again to the next attempt, they are two processes, and everyone is told.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from reshard.errors import MembershipError
from reshard.refit.gate import wake_gates

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch.distributed as dist

    from reshard.transports.base import Deadline

Role = Literal["source", "destination"]


@dataclass(frozen=True, order=True)
class Member:
    """A rank of a world."""

    world: str
    rank: int

    def __str__(self) -> str:
        return f"{self.world} rank {self.rank}"


@dataclass(frozen=True)
class Comer:
    """A process that says it is a member."""

    world: str
    rank: int
    role: str
    mark: str
    """Drawn anew by each process, so that a restarted one can be told from the one before."""

    where: str
    """Host and process id, for people."""

    @property
    def member(self) -> Member:
        return Member(self.world, self.rank)


@dataclass(frozen=True)
class Roster:
    """The members of one epoch in the order of their ranks: the source world, then destination worlds by name."""

    epoch: int
    source: str
    members: tuple[Member, ...]

    def of_worlds(self, worlds: Sequence[str]) -> tuple[Member, ...]:
        """The members of the source and of some destination worlds."""
        return tuple(m for m in self.members if m.world == self.source or m.world in worlds)

    @property
    def destinations(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(m.world for m in self.members if m.world != self.source))


class Register:
    """One process at the meeting place of a session.

    Args:
        store: All members' store, or their part of it.
        me: Who this process is.
        expect: How many ranks each world has.
        session: Its name, for messages.
    """

    def __init__(self, store: dist.Store, me: Comer, expect: Mapping[str, int], session: str) -> None:
        self._store = store
        self._me = me
        self._expect = dict(sorted(expect.items()))
        self._session = session
        self._suspects: dict[Member, set[str]] = {}
        self.left = ""
        """Why this process comes to no meeting any more; another thread may set it."""

    @property
    def expected(self) -> tuple[Member, ...]:
        return tuple(Member(world, rank) for world, size in self._expect.items() for rank in range(size))

    def meet(self, deadline: Deadline) -> Roster:
        """Wait until all expected members are here.

        Raises:
            MembershipError: At the deadline, naming who is missing, there twice, or was not expected; at once where
                two processes are one member, or expectations differ.
        """
        self._store.set("expect", json.dumps(self._expect))
        self._seen: set[Member] = set()
        while True:
            if self.left:
                raise MembershipError(f"Session {self._session!r}: {self._me.member} has left: {self.left}.")
            attempt = self._current_attempt()
            roster = self._attend(attempt, deadline)
            if roster is not None:
                return roster

    def end(self, epoch: int, reason: str) -> None:
        """Say that an epoch is over, and wake all who wait at its gates."""
        wake_gates(self._store, epoch, reason)

    def _current_attempt(self) -> int:
        """The number of the attempt that has no word yet."""
        number = int(self._store.compare_set("attempt", "", "1"))
        while True:
            word = self._word(number)
            if word is None:
                return number
            if word["kind"] == "formed":
                self.end(number, f"{self._me.member} ({self._me.where}) came to meet the members anew")
            number = int(self._store.compare_set("attempt", str(number), str(number + 1)))

    def _word(self, attempt: int) -> dict[str, Any] | None:
        key = f"{attempt}/word"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _set_word(self, attempt: int, kind: str, **facts: Any) -> dict[str, Any]:
        """Set the word unless another was first; what it is now."""
        said = self._store.compare_set(f"{attempt}/word", "", json.dumps({"kind": kind, **facts}))
        word: dict[str, Any] = json.loads(said)
        return word

    def _attend(self, attempt: int, deadline: Deadline) -> Roster | None:
        """Take part in one attempt: its roster, or None if it came to nothing and there is another one."""
        self._check_expectation(attempt)
        index = self._store.add(f"{attempt}/comers", 1) - 1
        self._store.set(f"{attempt}/comer/{index}", json.dumps(asdict(self._me)))
        self._judge(attempt, self._comers(attempt))
        try:
            self._store.wait([f"{attempt}/word"], timedelta(seconds=max(0.001, deadline.remaining())))
        except RuntimeError:
            if not self._store.check([f"{attempt}/word"]):
                self._give_up(attempt, deadline)
        word = self._word(attempt)
        assert word is not None
        if word["kind"] == "failed":
            raise MembershipError(word["message"], **word["facts"])
        if word["kind"] == "over":
            for world, rank, marks in word.get("doubled", ()):
                self._suspects.setdefault(Member(world, rank), set()).update(marks)
            if deadline.expired:
                raise self._absence(attempt, deadline)
            return None
        members = tuple(Member(world, rank) for world, rank, _ in word["members"])
        if [self._me.world, self._me.rank, self._me.mark] not in word["members"]:
            return None  # formed with another process of this name; meeting again shows which is alive
        return Roster(attempt, word["source"], members)

    def _check_expectation(self, attempt: int) -> None:
        """Refuse at once to come where others expect other members, and leave word of it.

        Raises:
            MembershipError: Expectations differ, or this member is in nobody's.
        """
        mine = json.dumps(self._expect)
        first = json.loads(self._store.compare_set(f"{attempt}/expect", "", mine))
        me = self._me
        if first != self._expect:
            why = f"{me.member} ({me.where}) expects {_worlds(self._expect)}, the first to come {_worlds(first)}"
        elif me.rank not in range(first.get(me.world, 0)):
            why = f"{me.member} ({me.where}) is not expected: {_worlds(first)}"
        else:
            return
        index = self._store.add(f"{attempt}/refused", 1) - 1
        self._store.set(f"{attempt}/refusal/{index}", why)
        raise MembershipError(
            f"Session {self._session!r}: {why}. All members pass the same expect=, and each is one of its ranks.",
            unexpected=(str(me.member),),
        )

    def _comers(self, attempt: int) -> list[Comer]:
        """All who have come by now; whoever sets its name last sees all."""
        keys = [f"{attempt}/comer/{i}" for i in range(self._store.add(f"{attempt}/comers", 0))]
        comers = [Comer(**json.loads(self._store.get(key))) for key in keys if self._store.check([key])]
        self._seen.update(comer.member for comer in comers)
        return comers

    def _judge(self, attempt: int, comers: Sequence[Comer]) -> None:
        """Set the word if it can be told."""
        marks: dict[Member, dict[str, str]] = {}
        for comer in comers:
            marks.setdefault(comer.member, {})[comer.mark] = comer.where
        doubled = {member: known for member, known in marks.items() if len(known) > 1}
        if doubled:
            proven = {m: known for m, known in doubled.items() if len(self._suspects.get(m, set()) & set(known)) > 1}
            if proven:
                listed = "; ".join(f"{m} is {' and '.join(sorted(w.values()))}" for m, w in sorted(proven.items()))
                self._fail(attempt, f"there twice: {listed}", duplicate=[str(m) for m in sorted(proven)])
            else:
                rows = [[m.world, m.rank, sorted(known)] for m, known in sorted(doubled.items())]
                self._set_word(attempt, "over", reason="one name came with two marks", doubled=rows)
        elif all(member in marks for member in self.expected):
            roles = {comer.world: comer.role for comer in comers}
            mixed = [c for c in comers if roles[c.world] != c.role]
            sources = sorted(world for world, role in roles.items() if role == "source")
            if mixed or len(sources) != 1 or len(roles) < 2:
                said = ", ".join(f"{world} ({role})" for world, role in sorted(roles.items()))
                self._fail(attempt, f"one world is the source and the others are destinations, but there are {said}")
                return
            order = sorted(marks, key=lambda m: (m.world != sources[0], m))
            rows = [[m.world, m.rank, next(iter(marks[m]))] for m in order]
            self._set_word(attempt, "formed", source=sources[0], members=rows)

    def _fail(self, attempt: int, what: str, **facts: Any) -> None:
        message = f"Session {self._session!r} cannot begin: {what}. Stop those that should not be there."
        self._set_word(attempt, "failed", message=message, facts=facts)
        self._store.set("last failure", what)

    def _give_up(self, attempt: int, deadline: Deadline) -> None:
        """Leave an attempt at the deadline, so that nobody counts on this process any longer.

        Raises:
            MembershipError: Naming the missing, unless all came at the last moment.
        """
        error = self._absence(attempt, deadline)
        word = self._set_word(attempt, "over", reason=f"{self._me.member} gave up")
        if word["kind"] == "over":
            raise error

    def _absence(self, attempt: int, deadline: Deadline) -> MembershipError:
        here = {comer.member for comer in self._comers(attempt)}
        missing = [str(member) for member in self.expected if member not in self._seen]
        left = [str(member) for member in self.expected if member in self._seen - here]
        keys = [f"{n}/refusal/{i}" for n in (attempt - 1, attempt) for i in range(self._store.add(f"{n}/refused", 0))]
        refused = [self._store.get(key).decode() for key in keys if self._store.check([key])]
        lines = [f"missing: {', '.join(missing)}"] if missing else []
        lines += [f"gave up before: {', '.join(left)}"] if left else []
        lines += [f"not expected: {line}" for line in refused]
        if self._store.check(["last failure"]):
            lines.append(f"an attempt before failed since {self._store.get('last failure').decode()}")
        return MembershipError(
            f"Session {self._session!r}: {self._me.member} waited {deadline.seconds:g} s for {_worlds(self._expect)}; "
            f"{'; '.join(lines)}. Look why they did not call connect (or, after a failure, refit); calling again is "
            f"safe.",
            missing=tuple(missing),
            unexpected=tuple(refused),
        )


def _worlds(expect: Mapping[str, int]) -> str:
    return ", ".join(f"{world} x {size}" for world, size in sorted(expect.items()))
