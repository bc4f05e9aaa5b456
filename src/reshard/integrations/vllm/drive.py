"""Drive: one engine through one refit, phase by phase, and back to serving whole weights when something fails.

    begin    look (once), init, start, update(receive)     its workers receive in the background; requests go on
    pause    pause                                          when all bytes have landed everywhere
    install  update(install)                                each worker brings them to life; some milliseconds
    finish   finish(version), resume                        the new weights, whole, under their version
    give_up  whatever leads back to whole weights, or a pause that stays

What an engine serves is known from how far it came: before ``install`` the old weights, after it the new ones. Where it
failed within, its workers say whether any of them has written: if none has, it goes on with the old weights, and if
one has, or nobody answers, it stays paused until a refit completes.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING

from reshard.errors import ConfigError, PeerError, RefitTimeout, ReshardError
from reshard.integrations.vllm.workers import NOTHING_WRITTEN, UPDATE_OPEN

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from reshard.integrations.vllm.control import EngineControl
    from reshard.refit.engines import SessionFacts
    from reshard.transports.base import Deadline

_SUPPORTED = ((0, 30), (0, 33))
"""The first and the last release whose routes are known."""

_NOT_ACTIVE = "without a matching start"
"""In what it says of the end of one that it has dropped itself, because a call within failed."""

_WAITS = (
    " With pause='wait' a server has paused when the longest of the requests that run has ended. Use pause='keep' or "
    "'abort', or a longer timeout."
)


class Stage(Enum):
    """How far an engine has come in the refit under way."""

    SERVING = "serving"
    RECEIVING = "receiving"
    PAUSED = "paused"
    INSTALLING = "installing"
    INSTALLED = "installed"
    LABELLED = "labelled"


class EngineDrive:
    """One engine of a session.

    Args:
        name: Its world.
        control: How it is reached.
        pause: ``"keep"``, ``"wait"`` or ``"abort"``.
        clear_cache: Whether what was computed with the old weights is forgotten at the pause.
        told: What its workers are told besides the session: more of ``WorkerFacts``.
    """

    def __init__(
        self,
        name: str,
        control: EngineControl,
        *,
        pause: str,
        clear_cache: bool,
        told: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self._told = dict(told or {})
        self._control = control
        self._pause = pause
        self._clear_cache = clear_cache
        self._stage = Stage.SERVING
        self._label: str | None = None
        self._mixed = ""
        """Why nobody knows that its weights are whole; empty while they are."""
        self._looked = False
        self._target: int | None = None
        self._is_partial = False
        """Whether the refit under way brings only some of the tensors, so that it cannot mend a mix."""
        self._paused_at: float | None = None
        self.pause_seconds = 0.0
        """How long it was paused in the refit under way, or the last one."""
        self.seconds: dict[str, float] = {}
        """By phase of that refit; of ``installing``, what its slowest worker did: ``waiting`` for groups to be handed
        over, ``opening``, ``copying`` and ``processing`` them; the rest, ``calling``, is the way to the worker."""

    def __str__(self) -> str:
        return f"engine {self.name!r} ({self._control.where})"

    @property
    def serves(self) -> str:
        """What its requests are answered with."""
        label = "the weights it had" if self._label is None else f"version {self._label}"
        if self._mixed:
            return f"{self.name} stays paused, {self._mixed}, until a refit completes"
        return f"{self.name} {'is paused with' if self._paused_at is not None else 'serves'} {label}"

    # -- phases -------------------------------------------------------------------------------------------------------

    def begin(self, facts: SessionFacts, mark: str, version: int | None, deadline: Deadline) -> None:
        """Bring every worker into the session, and let it receive a version in the background.

        Args:
            facts: The session, and what is asked of it.
            mark: Of the trainer; the workers join anew for another one.
            version: Which weights; None if they are only to join.
            deadline: For all of it.
        """
        self._target, self.pause_seconds, self.seconds = version, 0.0, {}
        self._is_partial = facts.names is not None
        with self._phase("reading its state", "reading"):
            self._look(facts.expect[self.name], deadline)
        with self._phase("joining the session", "joining"):
            # each time: an engine that was restarted needs it, and one that knows it does nothing
            self._join({**facts.for_world(self.name), **self._told, "trainer": mark}, deadline)
        if version is None:
            return
        with self._phase(f"starting version {version}", "starting"):
            self._control.start(deadline)
            self._stage = Stage.RECEIVING
            self._control.update({"action": "receive", "version": version, **facts.asked}, deadline)

    def _look(self, size: int, deadline: Deadline) -> None:
        if self._looked:
            return
        facts = self._control.look(deadline)
        release = tuple(int(part) for part in (facts.vllm or "").split(".")[:2] if part.isdigit())
        if len(release) == 2 and not _SUPPORTED[0] <= release <= _SUPPORTED[1]:
            raise ConfigError(
                f"it runs vLLM {facts.vllm}; the routes of {_text(_SUPPORTED[0])} to {_text(_SUPPORTED[1])} are known "
                f"here. Install one of these."
            )
        if facts.world_size is not None and facts.world_size != size:
            raise ConfigError(
                f"it has {facts.world_size} workers (tensor x pipeline x data parallel), and the session expects "
                f"{size}. Pass expect={{..., {self.name!r}: {facts.world_size}}} on all members."
            )
        self._label = facts.weight_version
        if facts.paused is False:  # never was, or was started anew, or somebody else resumed it
            self._paused_at, self._mixed = None, ""
        elif facts.paused and self._paused_at is None:
            self._paused_at = time.perf_counter()
            self._mixed = "as this trainer found it"  # a trainer before may have failed in the middle of an install
        self._looked = True

    def _join(self, told: Mapping[str, Any], deadline: Deadline) -> None:
        """Let the workers join; an update that a trainer before has left open is ended."""
        try:
            self._control.init(told, deadline)
        except ReshardError as error:
            if UPDATE_OPEN not in error.message:
                raise
            self._end_update(deadline)

    def _end_update(self, deadline: Deadline) -> None:
        """Let the workers give up what they received, if vLLM has not ended the update itself."""
        try:
            self._control.finish(None, deadline)
        except PeerError as error:
            if _NOT_ACTIVE not in error.message:
                raise

    def pause(self, deadline: Deadline) -> None:
        """Stop what generates, so that no step sees half of the new weights."""
        # Of requests that a pause has kept, none may go on now: "wait" would let them, on weights that may be torn.
        mode = self._pause if self._paused_at is None else "keep"
        with self._phase(f"pausing (mode {mode!r})", "pausing"):
            self._paused_at = time.perf_counter()  # from the call on: a call without an answer may have paused it
            self._stage = Stage.PAUSED
            try:
                self._control.pause(mode, deadline, clear_cache=self._clear_cache)
            except RefitTimeout as error:
                raise RefitTimeout(f"{error.message}{_WAITS if mode == 'wait' else ''}", **error.facts) from error

    def install(self, deadline: Deadline) -> None:
        """Let every worker bring to life what it has received."""
        with self._phase(f"installing version {self._target}", "installing"):
            self._stage = Stage.INSTALLING
            try:
                self._control.update({"action": "install", "version": self._target}, deadline)
            except ReshardError as error:
                if NOTHING_WRITTEN in error.message:
                    self._stage = Stage.PAUSED
                raise
            self._stage = Stage.INSTALLED
            if not self._is_partial:
                self._mixed = ""

    def finish(self, deadline: Deadline) -> None:
        """Label the new weights, and let requests go on if the weights are whole."""
        label = str(self._target)
        with self._phase(f"finishing version {label}", "finishing"):
            if self._stage is not Stage.LABELLED:
                self._control.finish(label, deadline)
            self._label, self._stage = label, Stage.LABELLED
        if not self._mixed:
            self._resume(deadline)
        self._stage = Stage.SERVING
        self._split_install(deadline)

    def _split_install(self, deadline: Deadline) -> None:
        """Ask the workers what their install took, step by step; whoever cannot say fails nothing."""
        try:
            told = self._control.install_seconds(deadline)
        except ReshardError:
            return
        slowest = max(told, key=lambda steps: sum(steps.values()), default={})
        if slowest:
            calling = self.seconds.get("installing", 0.0) - sum(slowest.values())
            self.seconds |= {"calling": max(0.0, calling), **slowest}

    def _resume(self, deadline: Deadline) -> None:
        if self._paused_at is None:
            return
        with self._phase("resuming", "resuming"):
            self._control.resume(deadline)
            self.pause_seconds = time.perf_counter() - self._paused_at
            self._paused_at = None

    def give_up(self, deadline: Deadline) -> None:
        """Leave the refit under way: back to the weights that are whole, or paused where none are.

        Raises:
            ReshardError: It could not be told; what it does then is in ``serves``.
        """
        self._looked = False  # it may be another process by the next time
        if self._stage in (Stage.INSTALLED, Stage.LABELLED):
            self.finish(deadline)
            return
        stage, self._stage = self._stage, Stage.SERVING
        if stage is Stage.INSTALLING:
            self._mixed = f"its weights may be a mix of {self._label or 'what it had'} and {self._target}"
        try:
            if stage is not Stage.SERVING:
                with self._phase("leaving the refit", "leaving"):
                    self._end_update(deadline)
        finally:
            if not self._mixed:
                self._resume(deadline)

    @contextmanager
    def _phase(self, doing: str, name: str) -> Iterator[None]:
        """Count the seconds of a phase, and say in which engine and phase an error happened."""
        began = time.perf_counter()
        try:
            yield
        except ReshardError as error:
            facts = {**error.facts, "engine": self.name, "engine_phase": name}
            told = type(error)(f"{self} while {doing}: {error.message}", **facts)
            raise told from error
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began


def _text(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
