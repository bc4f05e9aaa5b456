"""Epochs: the store at which a session's members meet, and what this rank holds of one epoch: its roster and scopes."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from reshard.errors import ReshardError, TransportError
from reshard.refit.call import Scope
from reshard.refit.gate import Gate, refusal
from reshard.refit.group import Group
from reshard.refit.membership import Member, Register
from reshard.refit.offered import publish, read_offered, say_mark
from reshard.refit.options import whole_number
from reshard.refit.status import SESSIONS, prefix_of, wait_until_published
from reshard.refit.store import make_group, open_store, prefixed
from reshard.transports.base import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch.distributed as dist

    from reshard.layouts.piece import TensorSpec
    from reshard.refit.call import Asked, Setup
    from reshard.refit.membership import Roster

_MOMENT_SECONDS = 2.0
"""For a store to be found by one who only wants to leave word of a failure there."""


class Epochs:
    """One rank's place in the membership of a session.

    Args:
        setup: What the session was opened with.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._store: dist.Store | None = None
        self._own_part: dist.Store | None = None
        """The session's part of it: one object, since each at which somebody waits takes a connection."""
        self._register: Register | None = None
        self._scopes: dict[tuple[str, ...], Scope] = {}
        self._specs: tuple[TensorSpec, ...] | None = None
        self.roster: Roster | None = None
        """The members of this epoch; None between two."""
        self.destinations: tuple[str, ...] = ()
        """The destination worlds, known since the members met first."""
        self.source = ""
        """The source world, likewise."""

    # -- the store ---------------------------------------------------------------------------------------------------

    def open(self, deadline: Deadline) -> bool:
        """Find the store; whether it had to be opened."""
        setup = self._setup
        if self._store is not None:
            return False
        whole = open_store(setup.store, deadline) if isinstance(setup.store, str) else setup.store
        self._store = whole
        self._own_part = prefixed(whole, prefix_of(setup.session))
        self._register = Register(self._part(), setup.me, setup.expect, setup.session)
        index = whole.add(SESSIONS, 1) - 1
        whole.set(f"{SESSIONS}/{index}", setup.session)
        if setup.me.role == "source":
            say_mark(self._part(), setup.me)
            self._publish()
        return True

    def forget_store(self) -> None:
        """Open it anew the next time."""
        self._store = self._own_part = None

    def _part(self) -> dist.Store:
        """The session's part of the store."""
        assert self._own_part is not None
        return self._own_part

    @property
    def store(self) -> dist.Store | None:
        """The session's part of the store; None while there is none."""
        return self._own_part

    @property
    def is_lost(self) -> bool:
        """Whether the store no longer answers."""
        if self._store is None:
            return False
        try:
            self._store.check(["reshard"])
        except RuntimeError:
            return True
        return False

    def lost_store(self, error: RuntimeError) -> TransportError:
        """The error that says so."""
        where = f" {self._setup.store}" if isinstance(self._setup.store, str) else ""
        return TransportError(
            f"{self._setup.me.member} lost the store{where}: {error}. "
            f"The process that serves it must run; served again at the same address, it is found again."
        )

    # -- what the source offers --------------------------------------------------------------------------------------

    def offer(self, specs: tuple[TensorSpec, ...]) -> None:
        """Tell all members what this rank of the source offers, now or as soon as the store is there."""
        self._specs = specs
        if self._store is not None:
            quietly(self._publish)  # a store that is lost is told of by the next refit

    def _publish(self) -> None:
        if self._specs is not None:
            publish(self._part(), self._setup.me, self._specs)

    def offered(self, deadline: Deadline) -> tuple[TensorSpec, ...]:
        """What the source world offers."""
        members = [Member(self.source, rank) for rank in range(self._setup.expect[self.source])]
        if self._store is None:
            raise TransportError(f"{self._setup.me.member} has lost the store; call refit, which finds it again.")
        try:
            return read_offered(self._part(), members, deadline)
        except RuntimeError as error:
            raise self.lost_store(error) from error

    def wait_for(self, version: int, deadline: Deadline) -> int:
        """Wait until the source has come to a version, or a later one: which one it is."""
        version = whole_number("version", version)
        try:
            return wait_until_published(self.store, self._setup.session, version, deadline)
        except RuntimeError as error:
            raise self.lost_store(error) from error

    # -- an epoch ----------------------------------------------------------------------------------------------------

    def meet(self, deadline: Deadline, asked: Asked | None = None) -> int:
        """Meet all members, or those whom a call of ``refit`` needs; the number of the epoch."""
        assert self._register is not None
        needs, version = (None, None) if asked is None else (asked.to, asked.version)
        self.roster = self._register.meet(deadline, needs=needs, version=version)
        self.destinations, self.source = self.roster.destinations, self.roster.source
        return self.roster.epoch

    def abandon(self, reason: str) -> None:
        """Come to no meeting any more; another thread may call it."""
        if self._register is not None:
            self._register.left = reason

    def scope(self, worlds: tuple[str, ...]) -> Scope:
        """The members of these worlds in this epoch, joined at the first refit to them."""
        if worlds in self._scopes:
            return self._scopes[worlds]
        assert self.roster is not None
        setup, epoch = self._setup, self.roster.epoch
        members = self.roster.of_worlds(worlds)
        names = tuple(str(member) for member in members)
        rank, label = members.index(setup.me.member), "+".join(worlds)
        store = prefixed(self._part(), f"{epoch}/group/{label}")
        process_group = make_group(store, rank, len(members), setup.device, setup.timeout)
        gate = Gate(self._part(), epoch, label, rank, names)
        scope = Scope(names, rank, gate, process_group, Group.of(process_group, setup.timeout))
        self._scopes[worlds] = scope
        return scope

    def refuse(self, version: int | None, why: str, deadline: Deadline) -> None:
        """Tell those who wait for this rank, or come, to be brought to a version, or to join, that it cannot go on.

        Args:
            version: Which; None for those who join.
            why: The reason.
            deadline: Of the call. A store that was not opened yet is given a moment of it.
        """
        said = f"{self._setup.me.member} failed: {why.rstrip('.')}."
        if self.roster is not None and version is not None:
            self._end(refusal(version, said))
            return
        quietly(lambda: self._refuse_to_meet(version, said, deadline))

    def _refuse_to_meet(self, version: int | None, said: str, deadline: Deadline) -> None:
        self.open(Deadline(min(_MOMENT_SECONDS, deadline.remaining())))
        assert self._register is not None
        self._register.refuse(version, said)

    def come_again(self, deadline: Deadline) -> None:
        """Take back what this rank has refused, before others are asked to come on its behalf."""
        if self.roster is None:
            self.open(deadline)
            assert self._register is not None
            self._register.come_again()

    def fail(self, why: str) -> None:
        """End the epoch, and wake all who wait at its gates."""
        self._end(f"{self._setup.me.member} failed: {why}")

    def _end(self, reason: str) -> None:
        register, roster = self._register, self.roster
        if register is not None and roster is not None:
            quietly(lambda: register.end(roster.epoch, reason))

    def leave(self, reason: str) -> None:
        """Give back connections and staging."""
        for scope in self._scopes.values():
            scope.compiled.clear()
            quietly(lambda scope=scope: scope.group.abort(reason))  # type: ignore[misc]
            quietly(scope.group.close)
        self._scopes.clear()
        self.roster = None


def quietly(call: Callable[[], None]) -> None:
    """Carry out what may fail without changing what is told: the failure that led here is the one to know of."""
    with contextlib.suppress(RuntimeError, ReshardError, OSError):
        call()
