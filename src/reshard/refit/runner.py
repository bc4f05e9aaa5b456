"""Runner: the one loop of a session, which feeds events to the state machine and carries its commands out."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from reshard.errors import BindingError, InstallError, MembershipError, ReshardError, VersionError
from reshard.refit import events as ev
from reshard.refit import fingerprints
from reshard.refit.call import Asked, Current, Scope, Setup, declare, make_report
from reshard.refit.commands import AWAITED, TO_ENGINES, Command
from reshard.refit.compile import compile_windows
from reshard.refit.drive import make_drive
from reshard.refit.epochs import Epochs, quietly
from reshard.refit.faults import MOVED, fault_of
from reshard.refit.fleet import Request, check_fingerprints, check_requests
from reshard.refit.gate import EpochOver
from reshard.refit.install import Installation
from reshard.refit.leases import Leases
from reshard.refit.machine import Phase, State, check_invariants, step
from reshard.refit.names import matching
from reshard.refit.status import MemberStatus, write_status
from reshard.refit.telling import Place, error_for_caller, text_of
from reshard.refit.windowed import WindowedRefit
from reshard.transports.base import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable

    from reshard.refit.journal import Journal
    from reshard.refit.offers import Offer
    from reshard.refit.report import RefitReport

_KEPT_REFITS = 8
"""Compiled refits kept in an epoch: one for each choice of worlds and names."""
_TELL_SECONDS = 1.0
"""Of a call's time: for others to be told who holds a lease, before they are only told of a silent rank."""
_HAVE_LANDED = (Phase.MOVING, Phase.LANDED, Phase.DRAINING, Phase.COMMITTING, Phase.CONFIRMING)


class Runner:
    """One rank of a session.

    Args:
        setup: What it was opened with.
        journal: Where its events are noted.
    """

    def __init__(self, setup: Setup, journal: Journal) -> None:
        self.setup = setup
        self.journal = journal
        self.state = State(writes=setup.me.role == "destination", staged=setup.options.commit == "staged")
        self._kept_prints: dict[tuple[str, ...], dict[str, int]] = {}
        self.on_commit: Callable[[WindowedRefit, int], None] | None = None
        self.epochs = Epochs(setup)
        self._current: Current | None = None
        self._deadline: Deadline
        self._error = ""
        self._planned_with: Offer | None = None
        self.declined = ""
        """Why this rank cannot take part in refits; empty while it can."""
        self._drive = make_drive(setup)
        self.leases = Leases(lambda: self.state.serving)

    # -- the loop ----------------------------------------------------------------------------------------------------

    def join(self, deadline: Deadline) -> None:
        """Meet the members for the first time."""
        self._deadline = deadline
        self._run(ev.Joined())

    def refit(self, asked: Asked, deadline: Deadline, *, partial: bool) -> RefitReport:
        """Bring the destination worlds to a version."""
        self._deadline = deadline
        self._current = Current(asked, deadline, time.perf_counter())
        try:
            self._run(ev.Called(asked.version, partial))
            assert self._current.report is not None
            return self._current.report
        finally:
            self._current = None
            self.leases.open()

    def close(self) -> None:
        """Leave the session."""
        if self.state.phase in (Phase.APART, Phase.READY):
            self._run(ev.Closed())

    def _run(self, event: ev.Event) -> None:
        pending: ev.Event | None = event
        while pending is not None:
            cause, pending = pending, None
            before = self.state
            self.state, commands = step(self.state, cause)
            check_invariants(self.state)
            self.journal.note(cause, before, self.state)
            self._say()
            for command in commands:
                if command in AWAITED:
                    pending = self._await(command)
                elif command in TO_ENGINES:
                    pending = self._tell_engines(command)
                    if pending is not None:
                        break
                else:
                    self._do(command, cause, before)

    def _await(self, command: Command) -> ev.Event:
        """Carry out a command that takes time, and say what came of it."""
        began, phase = time.perf_counter(), self.state.phase.value
        try:
            return _EFFECTS[command](self)
        except EpochOver as over:
            return ev.Outdated(str(over))
        except RuntimeError as error:
            return ev.Failed(self.epochs.lost_store(error) if self.epochs.is_lost else error)
        except BaseException as error:  # an interrupt too: others must hear of it
            return ev.Failed(error, isinstance(error, InstallError) and bool(error.facts["untouched"]))
        finally:
            if self._current is not None:
                spent = self._current.phases.get(phase, 0.0) + time.perf_counter() - began
                self._current.phases[phase] = spent

    def _tell_engines(self, command: Command) -> ev.Failed | None:
        """Carry out a command to engines; what failed, if it did."""
        asked = None if self._current is None else self._current.asked
        try:
            if command is Command.RESUME:
                self._drive.done()
            elif self._drive.engines is not None:
                self.epochs.come_again(self._deadline)
                self._drive.begin(asked, self._deadline)
        except BaseException as error:
            if command is Command.BEGIN:  # others wait for this rank, or will come
                self.epochs.refuse(None if asked is None else asked.version, text_of(error), self._deadline)
            return ev.Failed(error)
        return None

    def _do(self, command: Command, cause: ev.Event, before: State) -> None:
        if command is Command.END_EPOCH:
            self._end_epoch(cause)
        elif command is Command.RAISE:
            assert isinstance(cause, ev.Failed | ev.Refused)
            raise self._told(cause, before)
        elif command is Command.RETURN:
            self._error = ""
            if self._current is not None:
                self._current.report = make_report(
                    self.setup, self.state, self._current, self._drive.pause_seconds, self._drive.engine_seconds
                )
                if (store := self.epochs.store) is not None:
                    self.journal.returned(store, self.state.epoch)
        elif command is Command.LEAVE:
            self.epochs.leave("it left the session")
            self.epochs.forget_store()

    # -- effects -----------------------------------------------------------------------------------------------------

    def _meet(self) -> ev.Event:
        if self.epochs.open(self._deadline):
            self._say()
        return ev.Met(self.epochs.meet(self._deadline, None if self._current is None else self._current.asked))

    def _gather(self) -> ev.Event:
        current, asked = self._now, self._now.asked
        scope = current.scope = self.epochs.scope(asked.to)
        serving = self.state.serving if self.state.writes else None
        fresh = asked.offer is not self._planned_with
        names = () if asked.offer is None else asked.offer.manifest.names
        matched = tuple(bool(matching(names, [pattern])) for pattern in asked.names or ())
        request = Request(
            asked.version,
            asked.to,
            asked.names,
            asked.allow_rollback,
            serving,
            fresh,
            matched,
            self.leases.used,
            self.declined or fault_of(asked.offer, writes=self.state.writes),
        )
        told = scope.gate.gather(json.dumps(request.to_json()), current.deadline, asked.version)
        current.requests = tuple(Request.from_json(json.loads(row)) for row in told)
        try:
            check_requests(current.requests, scope.members)
        except ReshardError as error:
            return ev.Refused(error)
        if any(row.fresh for row in current.requests):
            scope.compiled.clear()
        self._planned_with = asked.offer
        return ev.Gathered()

    def _plan(self) -> ev.Event:
        current, scope = self._now, self._now_scope
        asked = current.asked
        compiled = scope.compiled.pop(asked.names, None)
        if compiled is None:
            compiled = self._compile(scope, asked, current.deadline)
            while len(scope.compiled) >= _KEPT_REFITS:
                scope.compiled.pop(next(iter(scope.compiled)))
        scope.compiled[asked.names] = compiled  # last used, last dropped
        current.compiled = compiled
        keeps = self.setup.options.verify == "fingerprint" and not asked.allow_rollback
        if keeps and any(row.serves_whole(asked.version) for row in current.requests):
            self._find_prints(compiled, moved=False)
            return self._compare_with_served(current, scope)
        return ev.Planned()

    def _find_prints(self, compiled: WindowedRefit, *, moved: bool) -> None:
        """Add up the fingerprints of all ranks' shares."""
        share, meeting = json.dumps(compiled.fingerprints_of_share(moved=moved)).encode(), self._now_scope.group.meeting
        told = meeting.exchange("fingerprints", share, self._now.deadline)
        self._now.prints = fingerprints.add_up(json.loads(part) for part in told)

    def _compare_with_served(self, current: Current, scope: Scope) -> ev.Event:
        """Refuse to send other weights under a version that is served."""
        version, new = current.asked.version, current.prints or {}
        serves = current.requests[scope.rank].serves_whole(version)
        differing = [name for name, value in new.items() if serves and self._prints.get(name, value) != value]
        told = scope.group.meeting.exchange("same version", json.dumps(differing).encode(), current.deadline)
        try:
            check_fingerprints([json.loads(row) for row in told], scope.members, version)
        except VersionError as error:
            return ev.Refused(error)
        return ev.Planned()

    @property
    def _prints(self) -> dict[str, int]:
        """Fingerprints of what this rank serves; on the source, of what it sent to the same worlds last."""
        return self._kept_prints.setdefault(() if self.state.writes else self._now.asked.to, {})

    def _compile(self, scope: Scope, asked: Asked, deadline: Deadline) -> WindowedRefit:
        windows = compile_windows(scope.group, declare(self.setup, asked), self.setup.topology, deadline)
        return WindowedRefit(windows)

    def _move(self) -> ev.Event:
        current, compiled = self._now, self._now.compiled
        assert compiled is not None
        if self.state.writes and (offer := current.asked.offer) is not None:
            current.installation = Installation(compiled.windows, offer, current.asked.version, current.deadline)
            if not self.state.staged:
                self.leases.writes(current.asked.version)
        current.moved = compiled.move(current.deadline, current.started, self._empty_room)
        if self.setup.options.verify == "fingerprint" and current.prints is None:
            self._find_prints(compiled, moved=True)  # of what was summed as it was packed, without another pass
        return ev.Moved()

    def _empty_room(self, window: int) -> None:
        """Install what has landed while more is to come, as only happens in place."""
        self._check_places()
        if (installation := self._now.installation) is not None:
            installation.empty_room(window)

    def _await_landed(self) -> ev.Event:
        current, scope = self._now, self._now_scope
        self._check_places()
        if not current.requests[scope.rank].leases:  # what nobody could know of when the refit began ends before
            self._drain_own()
        scope.group.meeting.agree("landed", self._word, current.deadline)
        return ev.AllLanded(any(row.leases for row in current.requests))

    def _drain(self) -> ev.Event:
        self._drain_own()
        self._check_places()
        self._now_scope.group.meeting.agree("drained", self._word, self._now.deadline)
        return ev.Drained()

    def _check_places(self) -> None:
        """Refuse to commit to places that have moved since the refit was planned."""
        offer, me = self._now.asked.offer, str(self.setup.me.member)
        if offer is not None and offer.has_moved:
            raise BindingError(f"{me} cannot commit: {MOVED}.", member=me)

    def _drain_own(self) -> None:
        """Wait for this rank's leases, for less than the others wait for it, so that they are told who holds one."""
        left = self._now.deadline.remaining()
        self.leases.drain(self._now.asked.version, Deadline(left - min(0.1 * left, _TELL_SECONDS)))

    def _commit(self) -> ev.Event:
        compiled = self._now.compiled
        assert compiled is not None
        if (installation := self._now.installation) is not None:
            self.leases.writes(self._now.asked.version)
            installation.window(len(compiled.windows) - 1, staged=self.state.staged)
            installation.committed()
        self._drive.commit(self._now.deadline)
        if self._now.prints is not None:
            kept = self._prints
            self._now.unchanged = tuple(name for name, value in self._now.prints.items() if kept.get(name) == value)
            kept.update(self._now.prints)
        if self.on_commit is not None:
            self.on_commit(compiled, self._now.asked.version)
        return ev.Committed()

    def _await_committed(self) -> ev.Event:
        self._now_scope.group.meeting.agree("committed", self._word, self._now.deadline)
        return ev.AllCommitted()

    @property
    def _word(self) -> bytes:
        return str(self._now.asked.version).encode()

    @property
    def _now(self) -> Current:
        assert self._current is not None
        return self._current

    @property
    def _now_scope(self) -> Scope:
        assert self._now.scope is not None
        return self._now.scope

    def _end_epoch(self, cause: ev.Event) -> None:
        """Tell whoever waits for this rank, and give back connections and staging."""
        reason = cause.reason if isinstance(cause, ev.Outdated) else text_of(getattr(cause, "error", None))
        current = self._current
        if isinstance(cause, ev.Failed):
            if current is not None and current.scope is not None:
                quietly(lambda: self._now_scope.group.meeting.fail("refit", reason))
            self.epochs.fail(reason)
        self.epochs.leave(reason)
        if self.epochs.is_lost and isinstance(self.setup.store, str):
            self.epochs.forget_store()  # connect anew: its host may be back by then

    # -- what others and the caller see --------------------------------------------------------------------------------

    @property
    def landed_nbytes(self) -> tuple[int, int]:
        """Bytes that have landed here in the refit under way, and all that it brings; other threads may look."""
        current = self._current
        moving = self.state.phase in _HAVE_LANDED
        compiled = None if current is None or not moving else current.compiled
        return (0, 0) if compiled is None else compiled.landed_nbytes

    @property
    def status(self) -> MemberStatus:
        """This member as it is now."""
        state, me = self.state, self.setup.me
        return MemberStatus(
            me.world,
            me.rank,
            me.role,
            state.serving.version,
            state.serving.partial,
            state.serving.torn,
            state.phase.value,
            time.time(),
            state.epoch,
            state.target,
            () if self._current is None else self._current.asked.to,
            me.where,
            self._error,
            self.leases.holders if state.phase is Phase.DRAINING else (),
        )

    def _say(self) -> None:
        store = self.epochs.store
        if store is not None:
            quietly(lambda: write_status(store, self.status))

    def _told(self, cause: ev.Failed | ev.Refused, before: State) -> BaseException:
        """The error for the caller."""
        told = self._with_place(cause, before)
        untold = self._drive.failed(told)
        if untold and isinstance(told, ReshardError):
            told = type(told)(f"{told.message} {untold}", **told.facts)
            told.__cause__ = cause.error
        if told is not cause.error and isinstance(told, ReshardError):
            self._error = f"{type(told).__name__}: {told.message}"
            self._say()
            members = [f"{world} rank {rank}" for world, size in self.setup.expect.items() for rank in range(size)]
            self.journal.failed(told, self.epochs.store, members, before.epoch)
        return told

    def _with_place(self, cause: ev.Failed | ev.Refused, before: State) -> BaseException:
        current = self._current
        if not isinstance(cause.error, Exception):
            return cause.error  # an interrupt
        if current is None and isinstance(cause.error, MembershipError):
            return cause.error
        place = Place(
            self.setup.session,
            str(self.setup.me.member),
            before.phase,
            None if current is None else current.asked.version,
            () if current is None or current.scope is None else current.scope.members,
        )
        return error_for_caller(cause.error, place, self.state, began=isinstance(cause, ev.Failed))


_EFFECTS: dict[Command, Callable[[Runner], ev.Event]] = {
    Command.MEET: Runner._meet,
    Command.GATHER: Runner._gather,
    Command.PLAN: Runner._plan,
    Command.MOVE: Runner._move,
    Command.AWAIT_LANDED: Runner._await_landed,
    Command.DRAIN: Runner._drain,
    Command.COMMIT: Runner._commit,
    Command.AWAIT_COMMITTED: Runner._await_committed,
}
