"""Member: one worker of an engine as a rank of a session; it joins and receives in a thread beside the requests."""

from __future__ import annotations

import logging
import queue
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from reshard.errors import ConfigError
from reshard.integrations.vllm.groups import check_all_written, group_names, taken_whole
from reshard.integrations.vllm.handover import Handover
from reshard.integrations.vllm.install import Installer
from reshard.integrations.vllm.tracing import check_layers, trace_model
from reshard.layouts.box import Box
from reshard.layouts.piece import Piece
from reshard.refit.connect import connect
from reshard.refit.names import matching
from reshard.topology.topology import Topology
from reshard.units import format_nbytes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from reshard.integrations.traced import LoadTrace
    from reshard.integrations.vllm.facts import WorkerFacts
    from reshard.refit.landed import Landed
    from reshard.refit.report import RefitReport
    from reshard.refit.session import Session

_SERVED_LONGER = 10.0
"""Seconds for which the worker waits beyond the session's own deadline, whose error says more."""
_CLOSE_SECONDS = 5.0
"""For giving back connections when the engine stops."""

log = logging.getLogger("reshard.vllm")


class Member:
    """One worker in a session.

    Args:
        facts: The session.
        rank: This worker's rank in the engine's world.
        model: Its model.
        vllm_config: Its configuration.
        device: Where the weights lie.
    """

    def __init__(
        self,
        facts: WorkerFacts,
        rank: int,
        model: torch.nn.Module,
        vllm_config: Any,
        device: torch.device,
    ) -> None:
        self.facts = facts
        self._rank = rank
        self._model = model
        self._vllm_config = vllm_config
        self._device = device
        self._session: Session | None = None
        self._installer: Installer | None = None
        self._trace: LoadTrace | None = None
        self._receiving: tuple[int, dict[str, Any], Handover] | None = None
        self._now: Handover | None = None
        """Of the refit that runs in the background."""
        self._held: Landed | None = None
        """The group that has landed last."""
        self._epoch = -1
        self.report: RefitReport | None = None
        """Of the last refit that completed."""
        self.wrote = False
        """Whether the last ``install`` has written to the model."""
        self.is_whole = False
        """Whether it has written all of the model."""
        self.seconds: dict[str, float] = {}
        """Of the last ``install``: all of it, its waits for groups, and what the groups took, step by step."""
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="reshard-member", daemon=True)
        self._thread.start()
        self._work.put(self._join_early)

    # -- what the worker's own thread calls ---------------------------------------------------------------------------

    def receive(self, version: int, **asked: Any) -> None:
        """Begin to receive a version in the background; returns at once. Asked again while it comes, it does nothing.

        Args:
            version: Which weights.
            asked: Further arguments of ``Session.refit``, as the source passes them.
        """
        now = self._receiving
        if now is not None and now[:2] == (version, asked) and not now[2].is_over:
            return
        self.leave(f"version {version} was asked for anew")
        handover = Handover()
        self._receiving = version, asked, handover
        self._work.put(lambda: self._refit(version, asked, handover))

    def install(self, version: int) -> None:
        """Install a version as soon as it has landed on all ranks, and return when this rank has it.

        Raises:
            ConfigError: Another version, or none, is being received.
            ReshardError: The refit failed; the message says what this rank serves.
        """
        self.wrote, self.is_whole, self.seconds = False, False, {}
        if self._receiving is None or self._receiving[0] != version:
            known = "none" if self._receiving is None else f"version {self._receiving[0]}"
            raise ConfigError(
                f"Version {version} is to be installed, and {known} is being received. Send "
                f'{{"action": "receive", "version": {version}}} first.'
            )
        handover = self._receiving[2]
        if self._installer is not None:
            self._installer.seconds.clear()
        began = time.perf_counter()
        try:
            handover.serve(self._install, self.facts.timeout_seconds + _SERVED_LONGER)
        finally:
            self.wrote = handover.touched or handover.installed > 0
            if self._installer is not None:
                self.is_whole = handover.installed == len(self._installer.groups)
                steps = self._installer.seconds
                self.seconds = {"waiting": time.perf_counter() - began - sum(steps.values()), **steps}
            handover.leave("the worker has stopped waiting for it")
            self._receiving = None

    def leave(self, reason: str) -> None:
        """Give up the version that is being received, if there is one."""
        if self._receiving is not None:
            self._receiving[2].leave(reason)
            self._receiving = None

    def close(self) -> None:
        """Leave the session; the weights stay as they are."""
        self.leave("the engine stops")
        if self._session is not None:
            self._session.abandon("its worker leaves, or joins anew")
        self._work.put(self._close)
        self._work.put(None)
        self._thread.join(_CLOSE_SECONDS)

    def _install(self, landed: Landed) -> None:
        assert self._installer is not None
        self._installer.install(landed.group, landed.pieces)

    @property
    def world_size(self) -> int:
        """How many workers the engine has."""
        return self.facts.expect[self.facts.world]

    @property
    def trace(self) -> LoadTrace | None:
        """Where this rank's pieces lie; None before the model is traced."""
        return self._trace

    # -- the thread beside the requests -------------------------------------------------------------------------------

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def _join_early(self) -> None:
        try:
            self._read_model(self._join())
        except Exception as error:  # the first refit tries again, and tells whoever waits for it
            log.warning("rank %d of %s is not ready yet: %s", self._rank, self.facts.world, error)

    def _join(self) -> Session:
        facts = self.facts
        if self._session is None:
            self._session = connect(
                facts.address,
                role="destination",
                world=facts.world,
                rank=self._rank,
                world_size=facts.expect[facts.world],
                expect=facts.expect,
                session=facts.session,
                device=self._device,
                staging_nbytes=facts.staging_nbytes,
                commit="staged",
                verify=facts.verify,
                strategy=facts.strategy,
                transport=facts.transport,
                topology=None if facts.topology is None else Topology.from_json(facts.topology),
                timeout=facts.timeout,
                routes=facts.routes,
            )
        return self._session

    def _read_model(self, session: Session) -> None:
        """Learn where the pieces of what the source offers lie, unless that is known."""
        epoch = session.epoch
        if self._installer is not None and epoch == self._epoch:
            return
        offered = session.offered(self.facts.timeout)
        if self._trace is None or self._trace.tensors != offered:
            began = time.perf_counter()
            trace = taken_whole(trace_model(self._model, offered), self.facts.whole)
            check_all_written(trace, self._model)
            traced = time.perf_counter()
            if self.facts.check:
                check_layers(trace, self._model)
            checked = time.perf_counter()
            installer = Installer(self._model, self._vllm_config, trace)
            session.accept(
                trace.manifest(world=self.facts.world, groups=group_names(installer.groups)),
                install=self._take,
                loaders={one.name: self._take_whole for one in trace.opaque},
                committed=self._say_installed,
            )
            self._trace, self._installer = trace, installer
            log.info(
                "rank %d of %s: %s; traced in %.3f s, checked in %.3f s",
                self._rank,
                self.facts.world,
                _summary(trace),
                traced - began,
                checked - traced,
            )
        self._epoch = epoch

    def _refit(self, version: int, asked: Mapping[str, Any], handover: Handover) -> None:
        self._now = handover
        error: BaseException | None = None
        try:
            session = self._join()
            session.decline(self._fault(session, asked.get("names")))
            self.report = session.refit(version, **asked)
        except Exception as raised:
            error = raised
            log.warning("rank %d of %s: %s", self._rank, self.facts.world, raised)
        finally:
            self._now, self._held = None, None
            handover.end(error)

    def _fault(self, session: Session, names: Sequence[str] | None) -> str:
        """Why this rank cannot take part in a refit; empty if it can."""
        try:
            self._read_model(session)
        except Exception as error:
            return f"its model cannot be refitted: {error}"
        assert self._installer is not None
        for group in self._installer.groups if names is not None else ():
            chosen = matching(group.tensors, names or ())
            left = sorted(set(group.tensors) - set(chosen))
            if chosen and left:
                return (
                    f"names= has {chosen[0]!r} and not {left[0]!r} of install group {group.name!r}, which "
                    f"vLLM processes as a whole"
                )
        return ""

    def _take(self, landed: Landed) -> None:
        """Hand a group over, or keep it until its whole tensors are here too."""
        self._held = landed
        self._hand_over_if_complete()

    def _take_whole(self, name: str, tensor: torch.Tensor) -> None:
        assert self._held is not None
        whole = tuple((Piece(name, box), tensor) for box in [Box.whole(tuple(tensor.shape))] if box is not None)
        self._held = replace(self._held, pieces=(*self._held.pieces, *whole))
        self._hand_over_if_complete()

    def _hand_over_if_complete(self) -> None:
        assert self._held is not None
        assert self._now is not None
        assert self._installer is not None
        here = {piece.name for piece, _ in self._held.pieces}
        if here.issuperset(self._installer.group(self._held.group).whole):
            self._now.give(self._held)

    def _say_installed(self, version: int) -> None:
        del version
        if self._now is not None:
            self._now.end(None)

    def _close(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None


def _summary(trace: LoadTrace) -> str:
    whole = "".join(f"; {one.name!r} whole: {one.reason}" for one in trace.opaque)
    return (
        f"{len(trace.pieces)} pieces, {format_nbytes(trace.direct_nbytes)} direct and "
        f"{format_nbytes(trace.whole_nbytes)} whole{whole}"
    )
