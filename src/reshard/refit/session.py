"""Session: what a user holds: connect, offer or accept, refit again and again, close."""

from __future__ import annotations

import json
import os
import socket
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from reshard.errors import ConfigError
from reshard.refit import fingerprints
from reshard.refit.call import Asked, Setup
from reshard.refit.collective import Work
from reshard.refit.compiled import DEFAULT_TIMEOUT, make_options
from reshard.refit.journal import Journal
from reshard.refit.membership import Comer
from reshard.refit.names import matching
from reshard.refit.offers import make_offer
from reshard.refit.runner import Runner
from reshard.refit.snapshot import Snapshot
from reshard.refit.status import read_status
from reshard.refit.store import ServedStore
from reshard.refit.timeline import to_perfetto
from reshard.transports.base import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import timedelta
    from pathlib import Path

    import torch.distributed as dist

    from reshard.layouts.manifest import BoundPiece
    from reshard.refit.compiled import CompiledRefit
    from reshard.refit.machine import Serving
    from reshard.refit.membership import Role
    from reshard.refit.names import Rename
    from reshard.refit.offers import Offer
    from reshard.refit.report import RefitReport
    from reshard.refit.status import MemberStatus
    from reshard.topology.topology import Topology

Commit = Literal["staged", "in-place"]
_COMMITS = ("staged", "in-place")
_KEPT_VERSIONS = 4
"""Versions whose fingerprints are remembered, to say which one a tensor is."""


def connect(
    store: str | ServedStore | dist.Store,
    *,
    role: Role,
    world: str,
    rank: int | None = None,
    world_size: int | None = None,
    expect: Mapping[str, int],
    session: str = "default",
    device: torch.device | str | None = None,
    staging_nbytes: int | str = "512MiB",
    commit: Commit = "staged",
    verify: str = "sum",
    strategy: str = "reshard",
    transport: str = "auto",
    topology: Topology | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    events: str | Path | None = None,
) -> Session:
    """Join a session: one source world and any number of destination worlds, launched by whatever launched them.

    Every process of every world calls it, in any order. No default process group is needed or touched.

    Args:
        store: Where all meet: the address that ``serve_store`` gave, or any torch store that all share.
        role: ``"source"`` for the world that has the weights, ``"destination"`` for one that needs them.
        world: This world's name.
        rank: This process's number in its world; from torchrun's or Slurm's environment if not given.
        world_size: Processes of this world; from there too. It must be what ``expect`` says.
        expect: Processes of each world, by name; the same on all members.
        session: Several sessions can share a store.
        device: Where the weights lie; the CPU if not given.
        staging_nbytes: The most staging memory of this rank; the least of all ranks' limits counts.
        commit: ``"staged"``: bytes land beside the live weights, which change when all ranks have them (room for one
            copy of this rank's own weights). ``"in-place"``: a failure in between leaves the rank torn.
        verify: ``"none"``, ``"sum"``, or ``"fingerprint"``, which also keeps what ``Session.verify`` compares with.
        strategy: As ``compile_refit``.
        transport: As ``compile_refit``.
        topology: As ``compile_refit``; ranks count the source world first, then destination worlds by name.
        timeout: For all members to come, and for each later call that is given no other.
        events: A file to which this rank appends its events, one line of JSON each.

    Raises:
        ConfigError: An argument that cannot be right.
        MembershipError: Members are missing at the deadline, there twice, or not expected; all are named.
        TransportError: Nobody serves the store.
    """
    rank = _from_environment("rank", rank, "RANK", "SLURM_PROCID")
    size = _from_environment("world_size", world_size, "WORLD_SIZE", "SLURM_NTASKS", default=expect.get(world))
    if role not in ("source", "destination"):
        raise ConfigError(f"role={role!r} is unknown; a world is a 'source' or a 'destination'.")
    if commit not in _COMMITS:
        raise ConfigError(f"commit={commit!r} is unknown; use one of {', '.join(_COMMITS)}.")
    if size != expect.get(world, size):
        raise ConfigError(
            f"World {world!r} has {size} processes here (world_size), and expect= says {expect[world]}. Correct one."
        )
    options = make_options(
        strategy=strategy, transport=transport, verify=verify, staging_nbytes=staging_nbytes, casts=True, commit=commit
    )
    me = Comer(world, rank, role, uuid.uuid4().hex, f"{socket.gethostname()} pid {os.getpid()}")
    setup = Setup(
        session,
        str(store) if isinstance(store, str | ServedStore) else store,
        me,
        dict(expect),
        options,
        torch.device(device or "cpu"),
        timeout,
        topology,
    )
    runner = Runner(setup, Journal(session, str(me.member), events))
    runner.join(Deadline.after(timeout))
    return Session(runner)


class Session:
    """One rank's part in a session; made by ``connect``."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._offer: Offer | None = None
        self._snapshot: Snapshot | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._last: Any = None
        self._known: dict[str, dict[int, int]] = {}
        self._committed: dict[str, list[BoundPiece]] = {}
        self._installed: Callable[[str, int], None] | None = None
        runner.on_commit = self._after_commit

    # -- what this rank has -------------------------------------------------------------------------------------------

    def offer(self, model: Any, *, rename: Rename | None = None) -> None:
        """Say what this rank of the source holds; read as it is at each refit.

        Args:
            model: A module, tensors by name (DTensors or plain ones), or a Manifest.
            rename: Rules from the model's names to the shared ones: ``{"model.": ""}`` for a beginning,
                ``{".base_layer.": "."}`` for a part, whole names, or a function. What torch's wrappers add to a name
                is taken off first.

        Raises:
            ConfigError: This world is a destination.
            ManifestError, LayoutError: What cannot be described.
        """
        self._check_role("source", "offer", "accept")
        self._offer = make_offer(model, world=self._runner.setup.me.world, rename=rename)
        self._snapshot = None

    def accept(
        self,
        model_or_manifest: Any,
        *,
        groups: Mapping[str, str] | Callable[[str], str] | None = None,
        rename: Rename | None = None,
        installed: Callable[[str, int], None] | None = None,
    ) -> None:
        """Say where this rank of a destination wants its weights; their addresses never change.

        Args:
            model_or_manifest: A module, tensors by name, or a Manifest (``Manifest.from_views`` for fused buffers).
            groups: Install group by the model's name, or a function that gives it. Groups are planned in their order.
            rename: As ``offer``.
            installed: Called as ``installed(group, version)`` after the live weights of a group are the new ones, in
                order of groups: for what is derived from weights. An error in it fails the refit.

        Raises:
            ConfigError: This world is the source.
            ManifestError, LayoutError: What cannot be described.
        """
        self._check_role("destination", "accept", "offer")
        self._installed = installed
        self._known.clear()  # of memory that it may no longer be
        self._committed.clear()
        world = self._runner.setup.me.world
        self._offer = make_offer(model_or_manifest, world=world, rename=rename, groups=groups)

    def _check_role(self, role: str, verb: str, other: str) -> None:
        me = self._runner.setup.me
        if me.role != role:
            raise ConfigError(f"World {me.world!r} joined as {me.role}: it calls {other}, not {verb}.")

    # -- refits -------------------------------------------------------------------------------------------------------

    @overload
    def refit(
        self,
        version: int,
        *,
        names: Sequence[str] | None = None,
        to: Sequence[str] | None = None,
        allow_rollback: bool = False,
        async_op: Literal[False] = False,
        snapshot: bool = False,
        timeout: timedelta | None = None,
    ) -> RefitReport: ...

    @overload
    def refit(
        self,
        version: int,
        *,
        names: Sequence[str] | None = None,
        to: Sequence[str] | None = None,
        allow_rollback: bool = False,
        async_op: Literal[True],
        snapshot: bool = False,
        timeout: timedelta | None = None,
    ) -> Work[RefitReport]: ...

    def refit(
        self,
        version: int,
        *,
        names: Sequence[str] | None = None,
        to: Sequence[str] | None = None,
        allow_rollback: bool = False,
        async_op: bool = False,
        snapshot: bool = False,
        timeout: timedelta | None = None,
    ) -> RefitReport | Work[RefitReport]:
        """Bring the destination worlds to what the source holds now, and call it ``version``.

        Every rank of the source and of the worlds named calls it with the same arguments. The first call plans; later
        ones only move bytes. After an error the next call meets anew: survivors go on in a new epoch together with
        processes that were restarted.

        Args:
            version: Which weights these are; grows with training. The version that is served may be sent again.
            names: Patterns of tensor names (``"layers.0.*"``); all tensors if not given.
            to: Destination worlds; all if not given.
            allow_rollback: Whether a lower version than the one served is right, and the same with other weights.
            async_op: Return at once and move in the background. The tensors of both sides are left alone until
                ``wait`` has returned.
            snapshot: Copy what this rank of the source holds before the call returns, so that a trainer may go on
                writing to it while the refit runs (memory for one more copy, kept). It has no effect on a destination.
            timeout: For the whole call; the session's if not given.

        Returns:
            What this rank did; or a handle whose ``wait`` gives it.

        Raises:
            VersionError: The version may not follow the one served; nothing was sent.
            ManifestError, LayoutError, CoverageError, ScheduleError: The sides do not fit; nothing was sent.
            DigestError: The ranks called with different arguments; nothing was sent.
            MembershipError: Members are missing at the deadline, though they were here before.
            RefitTimeout, TransportError, PeerError, VerifyError: It failed on the way. The message says what this rank
                serves now; with ``commit="staged"`` that is the old version, whole.
        """
        self._check_open()
        if snapshot:
            if self._last is not None and not self._last.done():
                self._last.exception()  # it may still read the copies of the last snapshot
            self._take_snapshot()
        asked = self._asked(version, names, to, allow_rollback, snapshot=snapshot)
        deadline_after = timeout or self._runner.setup.timeout
        if async_op:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, thread_name_prefix="reshard-session")
            self._last = self._thread.submit(self._refit, asked, deadline_after)
            return Work(self._last)
        if self._last is not None and not self._last.done():
            self._last.exception()  # those in the background come first
        return self._refit(asked, deadline_after)

    def _take_snapshot(self) -> None:
        if self._offer is None or self._runner.state.writes:
            return
        if self._snapshot is None:
            self._snapshot = Snapshot(self._offer)
        self._snapshot.take()

    def _asked(self, version: int, names: Any, to: Any, allow_rollback: bool, *, snapshot: bool) -> Asked:
        setup = self._runner.setup
        others = sorted(self._runner.destinations)
        chosen = others if to is None else sorted({to} if isinstance(to, str) else set(to))
        unknown = [world for world in chosen if world not in others]
        if unknown or not chosen:
            raise ConfigError(f"to={list(to)!r}: destination worlds are {', '.join(map(repr, others))}; name some.")
        if setup.me.role == "destination" and setup.me.world not in chosen:
            raise ConfigError(
                f"World {setup.me.world!r} has no part in a refit to {', '.join(map(repr, chosen))}; only the source "
                f"and the worlds named call it."
            )
        if version < 0:
            raise ConfigError(f"version={version}: versions count from 0.")
        patterns = None if names is None else (names,) if isinstance(names, str) else tuple(names)
        offer = self._snapshot.offer if snapshot and self._snapshot is not None else self._offer
        return Asked(version, tuple(chosen), patterns, allow_rollback, offer)

    def _refit(self, asked: Asked, timeout: timedelta) -> RefitReport:
        partial = False
        if asked.names is not None and asked.offer is not None:
            every = asked.offer.manifest.names
            partial = len(matching(every, asked.names)) < len(every)
        return self._runner.refit(asked, Deadline.after(timeout), partial=partial)

    # -- after the commit ---------------------------------------------------------------------------------------------

    def _after_commit(self, compiled: CompiledRefit, version: int) -> None:
        """Tell the engine, group by group, and keep what ``verify`` compares with."""
        if self._installed is not None:
            wanted = {bound.piece.name for bound in compiled.live}
            groups = dict.fromkeys(e.spec.group for e in self._entries if e.spec.name in wanted)
            for group in groups:
                self._installed(group, version)
        if self._runner.setup.options.verify != "fingerprint" or not self._runner.state.writes:
            return
        live: dict[str, list[BoundPiece]] = {}
        for bound in compiled.live:
            live.setdefault(bound.piece.name, []).append(bound)
        for name, value in self._fingerprints(live).items():
            known = self._known.setdefault(name, {})
            known.pop(version, None)
            known[version] = value
            while len(known) > _KEPT_VERSIONS:
                known.pop(next(iter(known)))
        self._committed.update(live)

    @property
    def _entries(self) -> Any:
        return () if self._offer is None else self._offer.manifest.entries

    def _fingerprints(self, live: Mapping[str, Sequence[BoundPiece]]) -> dict[str, int]:
        specs = {entry.spec.name: entry.spec for entry in self._entries}
        return fingerprints.of_pieces((bound for pieces in live.values() for bound in pieces), specs)

    def verify(self) -> dict[str, int | None]:
        """Say which version each tensor on this rank is, from its bytes as they are now.

        Returns:
            By tensor: the version whose fingerprint it has; None where it was changed since, or never refitted.

        Raises:
            ConfigError: The session keeps no fingerprints.
        """
        if self._runner.setup.options.verify != "fingerprint":
            raise ConfigError(
                f"This session was opened with verify={self._runner.setup.options.verify!r}, which keeps no "
                f"fingerprints. Open it with verify='fingerprint'."
            )
        now = self._fingerprints(self._committed)
        found: dict[str, int | None] = {}
        for name, known in self._known.items():
            same = [version for version, value in known.items() if value == now.get(name)]
            found[name] = same[-1] if same else None
        tied = () if self._offer is None else self._offer.manifest.aliases
        for name, first in tied:  # of two names for one memory one is written
            both = found.get(name, found.get(first))
            found.update({name: both, first: both})
        return {entry.spec.name: found.get(entry.spec.name) for entry in self._entries}

    # -- what is going on ---------------------------------------------------------------------------------------------

    @property
    def serving(self) -> Serving:
        """What the weights of this rank are."""
        return self._runner.state.serving

    @property
    def epoch(self) -> int:
        """Which membership this is; grows whenever members meet anew."""
        return self._runner.state.epoch

    @property
    def events(self) -> tuple[dict[str, Any], ...]:
        """The last 1,000 events of this rank, oldest first."""
        return self._runner.journal.events

    def write_trace(self, file: str | Path) -> None:
        """Write what this rank did, as far as its last events go, as a trace that Perfetto opens."""
        with open(file, "w", encoding="utf-8") as out:
            json.dump(to_perfetto(self.events), out)

    def status(self) -> tuple[MemberStatus, ...]:
        """What all members are doing; only this one where the store does not answer."""
        store = self._runner.store
        if store is not None:
            try:
                return read_status(store)
            except RuntimeError:
                pass
        return (self._runner.status,)

    def close(self) -> None:
        """Leave: give back connections and staging. The live weights stay as they are."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
            self._thread = None
        self._runner.close()

    def _check_open(self) -> None:
        if self._runner.state.phase.value == "closed":
            raise ConfigError(f"Session {self._runner.setup.session!r} is closed here; connect again.")

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _from_environment(what: str, given: int | None, *variables: str, default: int | None = None) -> int:
    """A number that launchers put into the environment."""
    if given is not None:
        return given
    for variable in variables:
        if os.environ.get(variable, "").isdigit():
            return int(os.environ[variable])
    if default is not None:
        return default
    raise ConfigError(f"{what}= was not given, and neither {' nor '.join(variables)} is in the environment.")


__all__ = ["Session", "connect"]
