"""Membership: who takes part, agreed over a store by exact keys, without a coordinator and in any order of arrival.

Members meet in *attempts*, numbered upwards. Each writes its name into the current one and then waits for its word;
whoever finds that all who are expected are there sets it::

    comers += 1, comer/i = me     all there?  word = "formed" + the roster      one name twice?  word = "over"

A formed attempt is an epoch. Someone who comes to an attempt whose word is set (a restarted process, or a survivor of
an epoch that failed) ends it, which wakes all who wait at its gates, and goes on to the next. So nobody has to be told
who died: whoever is alive comes again. One name that comes with two marks may be a dead process and its successor; if
both come again to the next attempt, they are two processes, and everyone is told.

After the first epoch not all have to come: a source that wants to refit some destination worlds waits for these alone.
Members of the others keep the seat that they had in the last epoch, under the mark that they had there, and take it
whenever they come. One who was restarted in between has another mark, and so ends that epoch too.

One who cannot go on before all are there sets the word "refused" for a version: those who came for it are told at once.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from reshard.errors import MembershipError, PeerError
from reshard.refit.gate import wake_gates
from reshard.transports.waiting import wait_for_key

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

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

    needs: tuple[str, ...] | None = None
    """The destination worlds that it waits for; None for all."""

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
        self._epoch = 0
        self._version: int | None = None
        self.left = ""
        """Why this process comes to no meeting any more; another thread may set it."""

    @property
    def expected(self) -> tuple[Member, ...]:
        return tuple(Member(world, rank) for world, size in self._expect.items() for rank in range(size))

    def meet(self, deadline: Deadline, *, needs: tuple[str, ...] | None = None, version: int | None = None) -> Roster:
        """Wait until all expected members are here, or those who are needed and have met before.

        Args:
            deadline: For them to come.
            needs: The destination worlds that this process waits for; None for all. What the source needs counts.
            version: What it comes for; None to join.

        Raises:
            MembershipError: At the deadline, naming who is missing, there twice, or was not expected; at once where
                two processes are one member, or expectations differ.
            PeerError: At once, where a member has said that it cannot go on to this version.
        """
        self._store.set("expect", json.dumps(self._expect))
        self._me, self._version = replace(self._me, needs=needs), version
        self._seen: set[Member] = set()
        while True:
            if self.left:
                raise MembershipError(f"Session {self._session!r}: {self._me.member} has left: {self.left}.")
            attempt = self._current_attempt()
            self._hear_refusals(attempt)
            roster = self._attend(attempt, deadline)
            if roster is not None:
                self._epoch = roster.epoch
                return roster

    def refuse(self, version: int | None, message: str) -> None:
        """Tell those who wait, and those who come until this member comes again, that it cannot go on to a version.

        Args:
            version: As ``meet``.
            message: What they are told.
        """
        facts = {"version": version, "member": str(self._me.member), "mark": self._me.mark, "message": message}
        while True:
            attempt = self._current_attempt()
            word = self._set_word(attempt, "refused", **facts)
            if word.get("mark") == self._me.mark:
                self._store.set(self._refused_key(str(self._me.member)), str(attempt))
                self._store.set("last failure", message)
                return

    def come_again(self) -> None:
        """Take back what this member has refused."""
        self._store.set(self._refused_key(str(self._me.member)), "")

    def _refused_key(self, member: str) -> str:
        return f"refused/{member}"

    def end(self, epoch: int, reason: str) -> None:
        """Say that an epoch is over, and wake all who wait at its gates."""
        wake_gates(self._store, epoch, reason)

    def _current_attempt(self) -> int:
        """The number of the attempt that has no word yet, or of an epoch where this process has a seat to take."""
        number = int(self._store.compare_set("attempt", "", "1"))
        while True:
            word = self._word(number)
            if word is None or self._has_seat(number, word):
                return number
            if word["kind"] == "formed":
                self.end(number, f"{self._me.member} ({self._me.where}) came to meet the members anew")
            number = int(self._store.compare_set("attempt", str(number), str(number + 1)))

    def _word(self, attempt: int) -> dict[str, Any] | None:
        key = f"{attempt}/word"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _has_seat(self, number: int, word: Mapping[str, Any]) -> bool:
        """Whether an epoch was formed in this process's absence, counts on it, and is not over."""
        if number <= self._epoch or word["kind"] != "formed" or self._row not in word["members"]:
            return False
        return not self._store.check([f"{number}/over"])

    @property
    def _row(self) -> list[Any]:
        return [self._me.world, self._me.rank, self._me.mark]

    def _words_before(self, attempt: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """The attempts before one with their words, backwards to the last that was formed."""
        for number in range(attempt - 1, 0, -1):
            word = self._word(number)
            if word is not None:
                yield number, word
                if word["kind"] == "formed":
                    return

    def _last_formed(self, attempt: int) -> dict[str, Any] | None:
        return next((word for _, word in self._words_before(attempt) if word["kind"] == "formed"), None)

    def _hear_refusals(self, attempt: int) -> None:
        """Raise what a member has said since the last epoch, unless it has come again.

        Raises:
            PeerError: As ``meet``.
        """
        for number, word in self._words_before(attempt):
            if word["kind"] == "refused":
                key = self._refused_key(word["member"])
                if self._store.check([key]) and self._store.get(key).decode() == str(number):
                    self._hear(number, word)

    def _hear(self, attempt: int, word: Mapping[str, Any]) -> None:
        """Raise what a member has said, once a member that came for the same version."""
        me = str(self._me.member)
        if (
            word["version"] == self._version
            and word["member"] != me
            and self._store.add(f"{attempt}/told/{me}", 1) == 1
        ):
            raise PeerError(word["message"], member=word["member"])

    def _set_word(self, attempt: int, kind: str, **facts: Any) -> dict[str, Any]:
        """Set the word unless another was first; what it is now."""
        said = self._store.compare_set(f"{attempt}/word", "", json.dumps({"kind": kind, **facts}))
        word: dict[str, Any] = json.loads(said)
        return word

    def _attend(self, attempt: int, deadline: Deadline) -> Roster | None:
        """Take part in one attempt: its roster, or None if it came to nothing and there is another one."""
        word = self._word(attempt) or self._wait_for_word(attempt, deadline)
        if word["kind"] == "failed":
            raise MembershipError(word["message"], **word["facts"])
        if word["kind"] in ("over", "refused"):
            if word["kind"] == "refused":
                self._hear(attempt, word)
            self._comers(attempt)  # who was there is remembered
            if deadline.expired:
                raise self._absence(attempt, deadline)
            return None
        members = tuple(Member(world, rank) for world, rank, _ in word["members"])
        if self._row not in word["members"]:
            return None  # formed with another process of this name; meeting again shows which is alive
        return Roster(attempt, word["source"], members)

    def _wait_for_word(self, attempt: int, deadline: Deadline) -> dict[str, Any]:
        """Come to an attempt, and wait for what becomes of it."""
        self._check_expectation(attempt)
        index = self._store.add(f"{attempt}/comers", 1) - 1
        self._store.set(f"{attempt}/comer/{index}", json.dumps(asdict(self._me)))
        self._judge(attempt, self._comers(attempt))
        try:
            in_time = wait_for_key(self._store, f"{attempt}/word", deadline)
        except (KeyboardInterrupt, SystemExit):
            with suppress(RuntimeError):  # the store is lost too
                self._set_word(attempt, "over", reason=f"{self._me.member} was interrupted")
            raise
        if not in_time:
            self._give_up(attempt, deadline)
        word = self._word(attempt)
        assert word is not None
        return word

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
        comers = [_comer(self._store.get(key)) for key in keys if self._store.check([key])]
        self._seen.update(comer.member for comer in comers)
        return comers

    def _suspects(self, attempt: int) -> dict[Member, set[str]]:
        """The marks with which a name came twice to one attempt, since the last epoch."""
        suspects: dict[Member, set[str]] = {}
        for _, word in self._words_before(attempt):
            for world, rank, marks in word.get("doubled", ()):
                suspects.setdefault(Member(world, rank), set()).update(marks)
        return suspects

    def _judge(self, attempt: int, comers: Sequence[Comer]) -> None:
        """Set the word if it can be told."""
        marks: dict[Member, dict[str, str]] = {}
        for comer in comers:
            marks.setdefault(comer.member, {})[comer.mark] = comer.where
        doubled = {member: known for member, known in marks.items() if len(known) > 1}
        if doubled:
            suspects = self._suspects(attempt)
            proven = {m: known for m, known in doubled.items() if len(suspects.get(m, set()) & set(known)) > 1}
            if proven:
                listed = "; ".join(f"{m} is {' and '.join(sorted(w.values()))}" for m, w in sorted(proven.items()))
                self._fail(attempt, f"there twice: {listed}", duplicate=[str(m) for m in sorted(proven)])
            else:
                rows = [[m.world, m.rank, sorted(known)] for m, known in sorted(doubled.items())]
                self._set_word(attempt, "over", reason="one name came with two marks", doubled=rows)
        elif (seats := self._seats(attempt, comers)) is not None:
            roles = {comer.world: comer.role for comer in comers}
            mixed = [c for c in comers if roles[c.world] != c.role]
            sources = sorted(world for world, role in roles.items() if role == "source")
            if mixed or len(sources) != 1 or len(roles) < 2:
                said = ", ".join(f"{world} ({role})" for world, role in sorted(roles.items()))
                self._fail(attempt, f"one world is the source and the others are destinations, but there are {said}")
                return
            order = sorted(seats, key=lambda m: (m.world != sources[0], m))
            rows = [[m.world, m.rank, seats[m]] for m in order]
            self._set_word(attempt, "formed", source=sources[0], members=rows)

    def _seats(self, attempt: int, comers: Sequence[Comer]) -> dict[Member, str] | None:
        """By member its mark, of those who have come and those who keep their seats; None while someone must come."""
        seats = {comer.member: comer.mark for comer in comers}
        absent = {member.world for member in self.expected if member not in seats}
        if not absent:
            return seats
        last = self._last_formed(attempt)
        if last is None or absent & self._needed(last, comers):
            return None
        kept = {Member(world, rank): mark for world, rank, mark in last["members"]}
        return {**kept, **seats}

    def _needed(self, last: Mapping[str, Any], comers: Sequence[Comer]) -> set[str]:
        """The worlds that must come, by what ranks of the source need; ``last`` is the word of the last epoch."""
        needs = [comer.needs for comer in comers if comer.world == last["source"]]
        if None in needs:
            return set(self._expect)
        return {last["source"]}.union(*(some for some in needs if some is not None))

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
        comers = self._comers(attempt)
        here, last, worlds = {comer.member for comer in comers}, self._last_formed(attempt), set(self._expect)
        if last is not None:
            worlds = {self._me.world, *(self._me.needs or ())} | self._needed(last, [*comers, self._me])
        awaited = [member for member in self.expected if member.world in worlds]
        missing = [str(member) for member in awaited if member not in self._seen]
        left = [str(member) for member in awaited if member in self._seen - here]
        numbers = sorted([attempt, *(number for number, _ in self._words_before(attempt))])
        keys = [f"{n}/refusal/{i}" for n in numbers for i in range(self._store.add(f"{n}/refused", 0))]
        refused = [self._store.get(key).decode() for key in keys if self._store.check([key])]
        lines = [f"missing: {', '.join(missing)}"] if missing else []
        lines += [f"gave up before: {', '.join(left)}"] if left else []
        lines += [f"not expected: {line}" for line in refused]
        if self._store.check(["last failure"]):
            lines.append(f"an attempt before failed since {self._store.get('last failure').decode()}")
        return MembershipError(
            f"Session {self._session!r}: {self._me.member} waited {deadline.seconds:g} s for "
            f"{_worlds({world: self._expect[world] for world in worlds if world in self._expect})}; "
            f"{'; '.join(lines)}. Look why they did not call connect (or, after a failure, refit); calling again is "
            f"safe.",
            missing=tuple(missing),
            unexpected=tuple(refused),
        )


def _comer(text: bytes) -> Comer:
    data = json.loads(text)
    needs = data.get("needs")
    return Comer(**{**data, "needs": None if needs is None else tuple(needs)})


def _worlds(expect: Mapping[str, int]) -> str:
    return ", ".join(f"{world} x {size}" for world, size in sorted(expect.items()))
