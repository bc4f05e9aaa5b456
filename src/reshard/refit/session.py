"""Session: what a user holds: offer or accept, refit again and again, close."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, overload

from reshard.errors import ConfigError
from reshard.refit.accept import make_acceptance
from reshard.refit.call import Asked, make_asked
from reshard.refit.calls import Calls
from reshard.refit.handed import Handed
from reshard.refit.kept import Kept
from reshard.refit.landed import Hooks
from reshard.refit.metrics import Metrics
from reshard.refit.names import matching
from reshard.refit.offers import frozen, make_offer
from reshard.refit.options import check_timeout
from reshard.refit.progress import ProgressLine, Watch
from reshard.refit.room import nbytes_beside
from reshard.refit.snapshot import Snapshot
from reshard.refit.status import read_status
from reshard.refit.timeline import to_perfetto
from reshard.transports.base import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import timedelta
    from pathlib import Path

    from reshard.layouts.piece import TensorSpec
    from reshard.refit.collective import Work
    from reshard.refit.landed import Committed, Install, Installed, Loader
    from reshard.refit.leases import Lease
    from reshard.refit.machine import Serving
    from reshard.refit.names import Rename
    from reshard.refit.offers import Offer
    from reshard.refit.report import RefitReport
    from reshard.refit.runner import Runner
    from reshard.refit.status import MemberStatus
    from reshard.refit.windowed import WindowedRefit


class Session:
    """One rank's part in a session; made by ``connect``."""

    def __init__(self, runner: Runner, *, progress: bool = False) -> None:
        self._runner = runner
        me = runner.setup.me
        self.metrics = Metrics(runner.setup.session, me.world, me.rank)
        """What Prometheus can be told of this rank: ``text()``, ``write(file)``, ``register()``."""
        self._watch = Watch(runner) if progress else None
        self._offer: Offer | None = None
        self._snapshot: Snapshot | None = None
        self._calls = Calls(runner.setup.session)
        self._pid = os.getpid()
        self._kept = Kept()
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
        self._runner.declined = ""
        self._offer = make_offer(model, world=self._runner.setup.me.world, rename=rename)
        self._snapshot = None
        self._runner.epochs.offer(tuple(entry.spec for entry in self._offer.manifest.entries))

    def offered(self, timeout: timedelta | None = None) -> tuple[TensorSpec, ...]:
        """Say what the source world offers, once all of its ranks have; for engines that learn from it what they want.

        Args:
            timeout: For the source to offer; the session's if not given.

        Returns:
            Names, global shapes and dtypes, merged over the source's ranks, in plan order.

        Raises:
            ConfigError: This world is the source.
            RefitTimeout: Ranks of the source have offered nothing by the deadline; they are named.
            ManifestError: Two ranks offer different shapes or dtypes under one name.
            TransportError: The store is lost.
        """
        self._check_open()
        self._check_role("destination", "offered", "offer")
        return self._runner.epochs.offered(Deadline.after(check_timeout(timeout, self._runner.setup.timeout)))

    def accept(
        self,
        model_or_manifest: Any,
        *,
        groups: Mapping[str, str] | Callable[[str], str] | None = None,
        rename: Rename | None = None,
        installed: Installed | None = None,
        install: Install | None = None,
        committed: Committed | None = None,
        loaders: Mapping[str, Loader] | None = None,
        depends_on: Callable[[], object] | None = None,
        debug: bool = False,
    ) -> None:
        """Say where this rank of a destination wants its weights; their addresses never change.

        Args:
            model_or_manifest: A module, tensors by name, or a Manifest (``Manifest.from_views`` for fused buffers).
            groups: Install group by the model's name, or a function that gives it. Groups are planned in their order.
            rename: As ``offer``.
            installed: Called as ``installed(group, version)`` after the live weights of a group are the new ones, in
                order of groups: for what is derived from weights. An error in it fails the refit.
            install: Takes what has landed, one install group at a time in their order, once all ranks have verified.
                Bytes land in memory of the session, so the manifest needs no live memory. It may block as long as
                ``Landed.timeout_seconds``. An error in it leaves the rank torn, unless it comes from the first hook
                that is called and has an attribute ``untouched`` that is True: nothing was written then, and the old
                version serves.
            committed: Called as ``committed(version)`` after the last group of this rank, before other ranks are
                waited for.
            loaders: By pattern of names as both sides use them, for tensors that a loader does more with than to move
                them: each is taken whole, and given to ``loader(name, tensor)`` after the other tensors of its
                install group. The tensor is the session's, and what lands next writes it again: the next refit, or
                with ``commit="in-place"`` the rest of this one. A pattern that matches nothing of what is accepted is
                looked for among what the source offers, and waits for it. All ranks of a world give the same.
            depends_on: Gives what the places of the tensors depend on, such as an engine's expert map. If that has
                changed when a refit begins, or before it commits, it fails on all ranks until ``accept`` is called
                again, and the old version serves.
            debug: Hand copies to loaders and to ``install``, and fail the refit that would write the tensor again while
                somebody holds one of them, or a view of it: without ``debug`` it would be overwritten under the holder.

        Raises:
            ConfigError: This world is the source; or ``install`` in a session whose commit is in place.
            ManifestError, LayoutError: What cannot be described.
        """
        self._check_role("destination", "accept", "offer")
        self._runner.declined = ""
        hooks = Hooks(install, installed, committed, loaders)
        setup = self._runner.setup
        offer = make_acceptance(model_or_manifest, setup, hooks, rename=rename, groups=groups, offered=self.offered)
        as_of = None if depends_on is None else frozen(depends_on())
        self._offer = replace(offer, depends_on=depends_on, as_of=as_of, handed=Handed() if debug else None)
        self._kept.forget()

    def decline(self, reason: str) -> None:
        """Say why this rank cannot take part: its refits then fail on all ranks, with this reason, before they begin.

        For an engine that cannot say what it wants. The next ``offer`` or ``accept`` takes it back.
        """
        self._runner.declined = reason

    @property
    def landing_nbytes(self) -> int:
        """Bytes beside the live weights in which refits of this rank land, known before the first one.

        They are kept between refits. With ``commit="in-place"`` it is the room for tensors that go whole, a few at a
        time: at most half of ``staging_nbytes``, or the largest of them if that is more. With ``"staged"`` all of them,
        and all else, land beside the live weights; what is cast as it goes live lands in its wire's dtype, and takes
        less than said.
        """
        if self._offer is None or not self._runner.state.writes:
            return 0
        beside = nbytes_beside(self._offer.manifest, self._offer.rooms) if self._runner.state.staged else 0
        return self._offer.room_nbytes + beside

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
            to: Destination worlds; all if not given. Those that are not named need not call, nor be there.
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
        self._calls.check_outside("refit", "Call refit again after it has returned.")
        if snapshot:
            self._calls.settle()  # they may still read the copies of the last snapshot
            self._take_snapshot()
        asked = self._asked(version, names, to, allow_rollback, snapshot=snapshot)
        deadline_after = check_timeout(timeout, self._runner.setup.timeout)
        make = self._calls.make_beside if async_op else self._calls.make
        return make(lambda: self._refit(asked, deadline_after))

    def _take_snapshot(self) -> None:
        if self._offer is None or self._runner.state.writes:
            return
        if self._snapshot is None:
            self._snapshot = Snapshot(self._offer)
        self._snapshot.take()

    def _asked(self, version: int, names: Any, to: Any, allow_rollback: bool, *, snapshot: bool) -> Asked:
        offer = self._snapshot.offer if snapshot and self._snapshot is not None else self._offer
        me, worlds = self._runner.setup.me, self._runner.epochs.destinations
        return make_asked(me, worlds, offer, version=version, names=names, to=to, allow_rollback=allow_rollback)

    def _refit(self, asked: Asked, timeout: timedelta) -> RefitReport:
        partial = False
        if asked.names is not None and asked.offer is not None:
            every = asked.offer.manifest.names
            partial = len(matching(every, asked.names)) < len(every)
        try:
            with ProgressLine(self._watch) if self._watch is not None else contextlib.nullcontext():
                report = self._runner.refit(asked, Deadline.after(timeout), partial=partial)
        except BaseException as error:
            self.metrics.failed(error, self.serving)
            raise
        self.metrics.refitted(report, self.serving)
        return report

    def wait_for(self, version: int, timeout: timedelta | None = None) -> int:
        """Wait until the source has called ``refit`` for a version, or serves it already.

        For an engine that does not know what comes next: ``session.refit(session.wait_for(7))``. Nothing is moved, and
        nobody has to answer.

        Args:
            version: The least one that will do.
            timeout: The session's if not given.

        Returns:
            Which version it is.

        Raises:
            RefitTimeout: The source has not come to it; ``published`` is the last version that it has, None for none.
            TransportError: The store is lost.
        """
        self._check_open()
        return self._runner.epochs.wait_for(version, Deadline.after(check_timeout(timeout, self._runner.setup.timeout)))

    # -- after the commit ---------------------------------------------------------------------------------------------

    def _after_commit(self, compiled: WindowedRefit, version: int) -> None:
        """Keep what ``verify`` compares with."""
        if self._offer is not None and self._runner.setup.options.verify == "fingerprint" and self._runner.state.writes:
            self._kept.keep(self._offer, compiled, version)

    def verify(self) -> dict[str, int | None]:
        """Say which version each tensor on this rank is, from its bytes as they are now.

        Returns:
            By tensor: the version whose fingerprint it has; None where it was changed since, or never refitted.

        Raises:
            ConfigError: The session keeps no fingerprints, or hands what has landed to an install hook.
        """
        return self._kept.versions(self._offer, self._runner.setup.options.verify)

    def lease(
        self,
        holder: str = "",
        *,
        version: int | None = None,
        in_flight: bool = False,
        timeout: timedelta | None = None,
    ) -> Lease:
        """Hold the version that this rank serves while a request reads it: ``with session.lease() as lease: ...``.

        No rank of the session commits before the leases of all ranks have ended, so one on one rank of an engine holds
        the whole engine; a refit that waits for one until its deadline fails, names the holder, and changes nothing.
        From when a commit waits until its refit is over no lease is given. Any thread may call it.

        Args:
            holder: Who reads, for messages; the thread's name if not given.
            version: Which version it must be, as for the next turn of a conversation; any if not given.
            in_flight: Let commits go on meanwhile: ``lease.versions`` then says from which to which one was read.
            timeout: For a commit that is under way; the session's if not given.

        Raises:
            ConfigError: This world is the source; or bytes land in the live weights, and ``in_flight`` is not given.
            VersionError: This rank serves no version, or not that one any more, or is torn.
            RefitTimeout: A commit was still under way at the deadline.
        """
        self._check_open()
        self._check_role("destination", "lease", "offer")
        if not in_flight and not self._runner.state.staged:
            raise ConfigError(
                "lease() cannot hold a version in a session with commit='in-place', which writes to the live weights "
                "while it moves. Open it with commit='staged', or take leases with in_flight=True."
            )
        deadline = Deadline.after(check_timeout(timeout, self._runner.setup.timeout))
        holder = holder or threading.current_thread().name
        return self._runner.leases.take(holder, deadline, version=version, in_flight=in_flight)

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
        store = self._runner.epochs.store
        if store is not None:
            try:
                return read_status(store)
            except RuntimeError:
                pass
        return (self._runner.status,)

    def abandon(self, reason: str) -> None:
        """From another thread: let a call that waits end with an error as soon as the members meet anew.

        For a process that joins again in the place of this session: what waits here waits for members that are gone.
        """
        self._runner.epochs.abandon(reason)

    def close(self) -> None:
        """Leave: give back connections and staging. The live weights stay as they are.

        A refit that is under way ends first, by its deadline at the latest. In a fork it does nothing.

        Raises:
            ConfigError: A hook called it; the refit that called the hook goes on.
        """
        if self._pid != os.getpid():
            return  # the connections are those of the process that connected
        self._calls.check_outside("close", "It needs what close gives back: call close after refit has returned.")
        if self._watch is not None:
            self._watch.close()
        self._calls.close()
        self._runner.close()

    def _check_open(self) -> None:
        if self._runner.state.phase.value == "closed":
            raise ConfigError(f"Session {self._runner.setup.session!r} is closed here; connect again.")
        if self._pid != os.getpid():
            raise ConfigError(
                f"Session {self._runner.setup.session!r} was opened by process {self._pid}, and this is its fork "
                f"{os.getpid()}: both would speak over the same connections. Connect where refits are called."
            )

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
