"""Runner: the one loop of a session, which feeds events to the state machine and carries its commands out."""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING

from reshard.errors import MembershipError, ReshardError, TransportError, VersionError
from reshard.layouts.manifest import find_rebound
from reshard.refit import events as ev
from reshard.refit import fingerprints
from reshard.refit.agreement import Declared
from reshard.refit.call import Asked, Current, Scope, Setup, make_report
from reshard.refit.commands import AWAITED, Command
from reshard.refit.compiled import compile_declared
from reshard.refit.fleet import Request, check_fingerprints, check_requests
from reshard.refit.gate import EpochOver, Gate
from reshard.refit.group import Group
from reshard.refit.machine import Phase, State, check_invariants, step
from reshard.refit.membership import Register
from reshard.refit.names import matching
from reshard.refit.status import SESSIONS, MemberStatus, prefix_of, write_status
from reshard.refit.store import make_group, open_store, prefixed
from reshard.refit.telling import Place, error_for_caller, text_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist

    from reshard.refit.compiled import CompiledRefit
    from reshard.refit.journal import Journal
    from reshard.refit.membership import Roster
    from reshard.refit.offers import Offer
    from reshard.refit.report import RefitReport
    from reshard.transports.base import Deadline

_KEPT_REFITS = 8
"""Compiled refits kept in an epoch: one for each choice of worlds and names."""


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
        self.on_commit: Callable[[CompiledRefit, int], None] | None = None
        self.roster: Roster | None = None
        """The members of this epoch; None between two."""
        self.destinations: tuple[str, ...] = ()
        """The destination worlds, known since the members met first."""
        self._store: dist.Store | None = None
        self._register: Register | None = None
        self._scopes: dict[tuple[str, ...], Scope] = {}
        self._current: Current | None = None
        self._deadline: Deadline
        self._error = ""
        self._planned_with: Offer | None = None

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
            return ev.Failed(self._lost_store(error) if self._is_lost() else error)
        except BaseException as error:  # an interrupt too: others must hear of it
            return ev.Failed(error)
        finally:
            if self._current is not None:
                spent = self._current.phases.get(phase, 0.0) + time.perf_counter() - began
                self._current.phases[phase] = spent

    def _do(self, command: Command, cause: ev.Event, before: State) -> None:
        if command is Command.END_EPOCH:
            self._end_epoch(cause)
        elif command is Command.RAISE:
            assert isinstance(cause, ev.Failed | ev.Refused)
            raise self._told(cause, before)
        elif command is Command.RETURN:
            self._error = ""
            if self._current is not None:
                self._current.report = make_report(self.setup, self.state, self._current)
        elif command is Command.LEAVE:
            self._leave("it left the session")

    # -- effects -----------------------------------------------------------------------------------------------------

    def _meet(self) -> ev.Event:
        setup = self.setup
        if self._store is None:
            whole = open_store(setup.store, self._deadline) if isinstance(setup.store, str) else setup.store
            self._store = whole
            self._register = Register(self._part(), setup.me, setup.expect, setup.session)
            self._announce(whole)
            self._say()
        assert self._register is not None
        self.roster = self._register.meet(self._deadline)
        self.destinations = self.roster.destinations
        return ev.Met(self.roster.epoch)

    def _gather(self) -> ev.Event:
        current, asked = self._now, self._now.asked
        scope = current.scope = self._scope(asked.to)
        serving = self.state.serving if self.state.writes else None
        fresh = asked.offer is not self._planned_with
        names = () if asked.offer is None else asked.offer.manifest.names
        matched = tuple(bool(matching(names, [pattern])) for pattern in asked.names or ())
        request = Request(
            asked.version, asked.to, asked.names, asked.allow_rollback, serving, fresh, matched, self._fault()
        )
        if asked.names in scope.compiled:
            scope.compiled[asked.names].take()  # before anybody can know that all are here, and read in place
        told = scope.gate.gather(json.dumps(request.to_json()), current.deadline)
        current.requests = tuple(Request.from_json(json.loads(row)) for row in told)
        try:
            check_requests(current.requests, scope.members)
        except ReshardError as error:
            return ev.Refused(error)
        if any(row.fresh for row in current.requests):
            scope.compiled.clear()
        self._planned_with = asked.offer
        return ev.Gathered()

    def _fault(self) -> str:
        """What keeps this rank from taking part, told to all before anything begins."""
        offer = self._now.asked.offer
        verb = "accepted" if self.state.writes else "offered"
        if offer is None:
            call = "accept" if self.state.writes else "offer"
            return f"it has {verb} nothing: call session.{call} before refit"
        name = find_rebound(offer.original)
        if name is not None:
            return (
                f"its module holds another tensor as {name!r} than when it was {verb}, so the bytes would go astray; "
                f"call session.{'accept' if self.state.writes else 'offer'} again, or update parameters in place "
                f"(param.data.copy_)"
            )
        return ""

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
        if self.setup.options.verify == "fingerprint":
            share = fingerprints.of_share(compiled.plan, scope.rank, compiled.sources)
            told = scope.group.meeting.exchange("fingerprints", json.dumps(share).encode(), current.deadline)
            current.prints = fingerprints.add_up(json.loads(part) for part in told)
            if not asked.allow_rollback and any(row.serves_whole(asked.version) for row in current.requests):
                return self._compare_with_served(current, scope)
        return ev.Planned()

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

    def _compile(self, scope: Scope, asked: Asked, deadline: Deadline) -> CompiledRefit:
        offer, setup = asked.offer, self.setup
        assert offer is not None
        manifest = offer.manifest
        if asked.names is not None:
            manifest = manifest.select(matching(manifest.names, asked.names))
        src, dst = (None, manifest) if self.state.writes else (manifest, None)
        declared = Declared(src, dst, setup.options, setup.me.world, setup.me.rank)
        return compile_declared(scope.group, declared, setup.topology, deadline)

    def _move(self) -> ev.Event:
        compiled = self._now.compiled
        assert compiled is not None
        self._now.moved = compiled.move(self._now.deadline, self._now.started, taken=True)
        return ev.Moved()

    def _await_landed(self) -> ev.Event:
        self._now_scope.group.meeting.agree("landed", self._word, self._now.deadline)
        return ev.AllLanded()

    def _commit(self) -> ev.Event:
        compiled = self._now.compiled
        assert compiled is not None
        if self.state.staged:
            compiled.commit()
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

    # -- an epoch ----------------------------------------------------------------------------------------------------

    def _scope(self, worlds: tuple[str, ...]) -> Scope:
        """The members of these worlds in this epoch, joined at the first refit to them."""
        if worlds in self._scopes:
            return self._scopes[worlds]
        assert self.roster is not None
        members = self.roster.of_worlds(worlds)
        names = tuple(str(member) for member in members)
        rank, epoch, timeout = members.index(self.setup.me.member), self.roster.epoch, self.setup.timeout
        label = "+".join(worlds)
        store = prefixed(self._part(), f"{epoch}/group/{label}")
        process_group = make_group(store, rank, len(members), self.setup.device, timeout)
        gate = Gate(self._part(), epoch, label, rank, names)
        scope = Scope(names, rank, gate, process_group, Group.of(process_group, timeout))
        self._scopes[worlds] = scope
        return scope

    def _end_epoch(self, cause: ev.Event) -> None:
        """Tell whoever waits for this rank, and give back connections and staging."""
        reason = cause.reason if isinstance(cause, ev.Outdated) else text_of(getattr(cause, "error", None))
        current = self._current
        if current is not None and current.scope is not None and isinstance(cause, ev.Failed):
            _quietly(lambda: self._now_scope.group.meeting.fail("refit", reason))
        if self.roster is not None and self._register is not None and isinstance(cause, ev.Failed):
            epoch = self.roster.epoch
            told = f"{self.setup.me.member} failed: {reason}"
            _quietly(lambda: None if self._register is None else self._register.end(epoch, told))
        self._leave(reason)
        if self._is_lost() and isinstance(self.setup.store, str):
            self._store = None  # connect anew: its host may be back by then

    def _leave(self, reason: str) -> None:
        for scope in self._scopes.values():
            scope.compiled.clear()
            _quietly(lambda scope=scope: scope.group.abort(reason))  # type: ignore[misc]
            _quietly(scope.group.close)
        self._scopes.clear()
        self.roster = None
        if self.state.phase is Phase.CLOSED:
            self._store = None

    def _is_lost(self) -> bool:
        """Whether the store no longer answers."""
        if self._store is None:
            return False
        try:
            self._store.check(["reshard"])
        except RuntimeError:
            return True
        return False

    def _lost_store(self, error: RuntimeError) -> TransportError:
        where = f" {self.setup.store}" if isinstance(self.setup.store, str) else ""
        return TransportError(
            f"{self.setup.me.member} lost the store{where}: {error}. "
            f"The process that serves it must run; served again at the same address, it is found again."
        )

    # -- what others and the caller see --------------------------------------------------------------------------------

    def _part(self) -> dist.Store:
        """The session's part of the store."""
        assert self._store is not None
        return prefixed(self._store, prefix_of(self.setup.session))

    @property
    def store(self) -> dist.Store | None:
        """The session's part of the store; None while there is none."""
        return None if self._store is None else self._part()

    def _announce(self, whole: dist.Store) -> None:
        index = whole.add(SESSIONS, 1) - 1
        whole.set(f"{SESSIONS}/{index}", self.setup.session)

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
        )

    def _say(self) -> None:
        if self._store is not None:
            _quietly(lambda: write_status(self._part(), self.status))

    def _told(self, cause: ev.Failed | ev.Refused, before: State) -> BaseException:
        """The error for the caller."""
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
        told = error_for_caller(cause.error, place, self.state, began=isinstance(cause, ev.Failed))
        self._error = f"{type(told).__name__}: {told.message}"
        self._say()
        self.journal.failed(told)
        return told


_EFFECTS: dict[Command, Callable[[Runner], ev.Event]] = {
    Command.MEET: Runner._meet,
    Command.GATHER: Runner._gather,
    Command.PLAN: Runner._plan,
    Command.MOVE: Runner._move,
    Command.AWAIT_LANDED: Runner._await_landed,
    Command.COMMIT: Runner._commit,
    Command.AWAIT_COMMITTED: Runner._await_committed,
}


def _quietly(call: Callable[[], None]) -> None:
    """Carry out what may fail without changing what is told: the failure that led here is the one to know of."""
    with contextlib.suppress(RuntimeError, ReshardError, OSError):
        call()
