"""vLLM engines as the destination worlds of a session, for ``connect(..., engines=VLLMServers(...))``.

The first rank of the source world alone talks to the engines, to all of them at the same time. It tells their workers
to join the session and to receive a version in the background, and when every byte has landed everywhere it pauses,
lets them install, and resumes.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from reshard.errors import ConfigError, RefitTimeout, ReshardError
from reshard.integrations.vllm.control import ClientControl, HTTPControl, OfflineControl
from reshard.integrations.vllm.drive import EngineDrive
from reshard.integrations.vllm.routes import Routes
from reshard.transports.base import Deadline

if TYPE_CHECKING:
    from collections.abc import Callable

    from reshard.integrations.vllm.control import EngineControl
    from reshard.refit.engines import SessionFacts

PauseMode: TypeAlias = Literal["keep", "wait", "abort"]
_MODES = ("keep", "wait", "abort")
_GRACE_SECONDS = 1.0
"""After a deadline, for a call that is about to say so itself."""

_RETURN_SECONDS = 30.0
"""For leading engines back to whole weights when a refit has failed, though its time is over."""

_log = logging.getLogger("reshard.vllm")


class EngineFleet:
    """Some engines, driven through refits side by side; an ``Engines`` for ``connect``.

    Args:
        controls: How each is reached, by the name of its world.
        pause: What happens to requests that run at the pause.
        clear_cache: Whether what was computed with the old weights is forgotten at the pause.
        check: Whether each worker holds what it has learned of its model's loaders against a real load of random
            weights, of one layer of each kind, before it joins.
        whole: Tensors that travel whole and go through the model's loader: patterns of names, each with the reason.
    """

    def __init__(
        self,
        controls: Mapping[str, EngineControl],
        *,
        pause: PauseMode = "keep",
        clear_cache: bool = True,
        check: bool = True,
        whole: Mapping[str, str] | None = None,
    ) -> None:
        if pause not in _MODES:
            raise ConfigError(f"pause={pause!r} is unknown; use one of {', '.join(map(repr, _MODES))}.")
        if not controls:
            raise ConfigError("No engine was given; name at least one.")
        told = {"check": check, "whole": dict(whole or {})}
        self._drives = {
            name: EngineDrive(name, control, pause=pause, clear_cache=clear_cache, told=told)
            for name, control in controls.items()
        }
        self._under_way: tuple[EngineDrive, ...] = ()
        self._mark = ""
        """Of the source, drawn when it connects: whoever waits for one before it waits in vain."""

    @property
    def worlds(self) -> tuple[str, ...]:
        """The engines' names: the destination worlds that they are."""
        return tuple(self._drives)

    @property
    def serves(self) -> str:
        """What each engine answers requests with, in one line."""
        return "; ".join(drive.serves for drive in self._drives.values())

    @property
    def seconds(self) -> dict[str, dict[str, float]]:
        """By engine and phase, what the last refit took.

        A pause is ``pausing`` + ``installing`` + ``finishing`` + ``resuming``, and waits for other engines and ranks
        in between. ``installing`` is split into ``calling`` (the way to the workers and back), and of the slowest
        worker ``waiting`` (for groups to be handed over), ``opening``, ``copying`` and ``processing``.
        """
        return {drive.name: dict(drive.seconds) for drive in self._drives.values()}

    # -- what a session asks of its engines ---------------------------------------------------------------------------

    def begin(self, facts: SessionFacts, version: int | None, deadline: Deadline) -> None:
        """Bring the engines into the session, and let their workers receive a version in the background.

        Raises:
            ConfigError: An engine is no world of the session.
            ReshardError: An engine could not be told; the message names it, the phase and its answer.
        """
        unknown = sorted(set(self._drives) - set(facts.expect))
        if unknown:
            worlds = ", ".join(repr(world) for world in facts.expect if world != facts.source)
            raise ConfigError(
                f"No world of the session is called {', '.join(map(repr, unknown))} as these engines are; its "
                f"destination worlds are {worlds}. Give each engine the name of its world: VLLMServers({{world: url}})."
            )
        self._under_way = tuple(self._drives[world] for world in facts.to if world in self._drives)
        if version is None:
            self._mark = uuid.uuid4().hex
        self._together("beginning", lambda drive: drive.begin(facts, self._mark, version, deadline), deadline)

    def commit(self, version: int, deadline: Deadline) -> None:
        """Pause all engines of the refit, and when all are paused let their workers install.

        Raises:
            ReshardError: An engine could not be paused, so that none was told to install; or one could not install.
        """
        del version  # the drives have it since ``begin``
        self._together("pausing", lambda drive: drive.pause(deadline), deadline)
        self._together("installing", lambda drive: drive.install(deadline), deadline)

    def done(self, version: int) -> dict[str, float]:
        """Label the new weights, and let requests go on.

        Returns:
            By engine: the seconds for which it was paused.

        Raises:
            ReshardError: An engine could not be told; it has the new weights all the same.
        """
        del version
        deadline = Deadline(_RETURN_SECONDS)
        self._together("finishing", lambda drive: drive.finish(deadline), deadline)
        seconds = {drive.name: drive.pause_seconds for drive in self._under_way}
        self._under_way = ()
        return seconds

    def failed(self, version: int, error: BaseException) -> str:
        """Bring every engine back to whole weights: the old ones, or, where it has installed, the new ones.

        An engine that failed within its install stays paused, so that nothing is answered from mixed weights.

        Returns:
            What each engine does now.
        """
        del version, error  # how far each engine came is known here
        drives, self._under_way = self._under_way, ()
        if not drives:
            return ""
        deadline = Deadline(_RETURN_SECONDS)
        untold = _side_by_side(drives, "leaving the refit", lambda drive: drive.give_up(deadline), deadline)
        for one in untold:
            _log.warning("%s", one.message)
        said = "".join(f" {one.message}" for one in untold)
        return f"Engines: {'; '.join(drive.serves for drive in drives)}.{said}"

    def _together(self, doing: str, call: Callable[[EngineDrive], None], deadline: Deadline) -> None:
        """Do the same with all engines of the refit; the first error, with what the others say, is raised."""
        errors = _side_by_side(self._under_way, doing, call, deadline)
        if not errors:
            return
        first, others = errors[0], "".join(f" And {error.message}" for error in errors[1:])
        raise type(first)(f"{first.message}{others}", **first.facts) from first


class VLLMServers(EngineFleet):
    """vLLM servers, over HTTP.

    They need ``VLLM_SERVER_DEV_MODE=1`` in their environment and ``--weight-transfer-config '{"backend": "reshard"}'``.

    Args:
        urls: ``http://host:port`` of each, by the name of its world; worlds are called ``engine0``, ``engine1``, ...
            where only the addresses are given, and ``engine`` where there is one.
        pause: What happens at the pause to requests that run: ``"keep"`` freezes them and they go on with the new
            weights, ``"wait"`` lets them end first, ``"abort"`` ends them by name.
        clear_cache: Whether the prefix cache is forgotten at the pause. Without that, a prompt whose beginning was
            seen before is answered from what the old weights made of it.
        timeout: For each call over HTTP (``"wait"`` takes as long as the longest request that runs).
        headers: Sent with every call.
        check: Whether each worker holds what it has learned of its model's loaders against a real load of random
            weights, of one layer of each kind, before it joins.
        whole: Tensors that travel whole and go through the model's loader: patterns of names, each with the reason.

    Raises:
        ConfigError: An argument that cannot be right.
    """

    def __init__(
        self,
        urls: str | Sequence[str] | Mapping[str, str],
        *,
        pause: PauseMode = "keep",
        clear_cache: bool = True,
        timeout: timedelta = timedelta(seconds=300),
        headers: Mapping[str, str] | None = None,
        check: bool = True,
        whole: Mapping[str, str] | None = None,
    ) -> None:
        routes = {n: Routes(url, timeout.total_seconds(), headers) for n, url in _named(urls).items()}
        controls = {name: HTTPControl(route) for name, route in routes.items()}
        super().__init__(controls, pause=pause, clear_cache=clear_cache, check=check, whole=whole)


class VLLMOffline(EngineFleet):
    """An ``LLM`` of the trainer's first rank's own process, which generates nothing while ``refit`` runs.

    Args:
        llm: ``vllm.LLM(..., weight_transfer_config={"backend": "reshard"})``.
        world: Its world's name.
        clear_cache: As ``VLLMServers``, as are the next two.
    """

    def __init__(
        self,
        llm: Any,
        *,
        world: str = "engine",
        clear_cache: bool = True,
        check: bool = True,
        whole: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__({world: OfflineControl(llm)}, clear_cache=clear_cache, check=check, whole=whole)


class VLLMClient(EngineFleet):
    """An engine behind vLLM's own weight-sync client (HTTP, Ray, or one of yours), which can neither pause nor resume.

    Args:
        client: What has the four methods of ``VLLMWeightSyncClient``.
        world: The engine's world.
    """

    def __init__(self, client: Any, *, world: str = "engine") -> None:
        super().__init__({world: ClientControl(client)})


def _named(urls: str | Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    if isinstance(urls, Mapping):
        return dict(urls)
    listed = [urls] if isinstance(urls, str) else list(urls)
    doubled = sorted({url for url in listed if listed.count(url) > 1})
    if doubled:
        raise ConfigError(f"{doubled[0]!r} is given twice; name each server once.")
    return {"engine" if len(listed) == 1 else f"engine{i}": url for i, url in enumerate(listed)}


def _side_by_side(
    drives: Sequence[EngineDrive], doing: str, call: Callable[[EngineDrive], None], deadline: Deadline
) -> list[ReshardError]:
    """Do the same with several engines at the same time; the errors of those that failed, in the engines' order.

    A call that outlasts the deadline is left to itself: its thread ends when its connection does.
    """
    errors: dict[EngineDrive, ReshardError] = {}

    def run(drive: EngineDrive) -> None:
        try:
            call(drive)
        except ReshardError as error:
            errors[drive] = error
        except Exception as error:
            told = ReshardError(f"{drive} while {doing}: {type(error).__name__}: {error}", engine=drive.name)
            told.__cause__ = error
            errors[drive] = told

    threads = {
        drive: threading.Thread(target=run, args=(drive,), name=f"reshard-{drive.name}", daemon=True)
        for drive in drives
    }
    for thread in threads.values():
        thread.start()
    for drive, thread in threads.items():
        thread.join(deadline.remaining() + _GRACE_SECONDS)
        if thread.is_alive() and drive not in errors:
            errors[drive] = RefitTimeout(
                f"{drive} while {doing}: no end after {deadline.seconds:.3g} s.", engine=drive.name
            )
    return [errors[drive] for drive in drives if drive in errors]
