"""Control: what a trainer may ask of one vLLM engine, over HTTP, of an ``LLM`` in this process, or of vLLM's client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from reshard.errors import EnvironmentNotSupported, PeerError, ReshardError
from reshard.integrations.vllm.workers import SECONDS_METHOD

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from reshard.integrations.vllm.routes import Routes
    from reshard.transports.base import Deadline


@dataclass(frozen=True)
class EngineFacts:
    """What an engine says of itself; None where it cannot say."""

    vllm: str | None = None
    """Its release of vLLM."""

    world_size: int | None = None
    """Its workers: tensor times pipeline times data parallel."""

    weight_version: str | None = None
    """The label of the weights that it serves; vLLM calls those that it was started with ``default``."""

    paused: bool | None = None


class EngineControl(Protocol):
    """vLLM's four phases and what lies around them. Each call ends within its deadline, or raises one of our errors."""

    where: str
    """Where the engine is, for messages."""

    def look(self, deadline: Deadline) -> EngineFacts:
        """Ask what it is and whether it is well."""
        ...

    def init(self, init_info: Mapping[str, Any], deadline: Deadline) -> None:
        """Tell every worker which session it is in."""
        ...

    def start(self, deadline: Deadline) -> None:
        """Begin an update."""
        ...

    def update(self, update_info: Mapping[str, Any], deadline: Deadline) -> None:
        """Tell every worker what to do for it."""
        ...

    def finish(self, weight_version: str | None, deadline: Deadline) -> None:
        """End it, and label the weights."""
        ...

    def pause(self, mode: str, deadline: Deadline, *, clear_cache: bool) -> None:
        """Stop what generates."""
        ...

    def resume(self, deadline: Deadline) -> None:
        """Let it go on."""
        ...

    def install_seconds(self, deadline: Deadline) -> list[dict[str, float]]:
        """By worker and step, what the last install took; nothing where it cannot be asked."""
        ...


class HTTPControl:
    """A server, over its routes."""

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self.where = routes.url

    def look(self, deadline: Deadline) -> EngineFacts:
        routes = self._routes
        routes.get("/health", deadline)
        version = routes.get("/version", deadline)
        size = routes.get("/get_world_size", deadline, include_dp="true")
        weights = routes.get("/weight_info", deadline)
        paused = routes.get("/is_paused", deadline)
        return EngineFacts(
            vllm=version["version"],
            world_size=size["world_size"],
            weight_version=weights["weight_version"],
            paused=paused["is_paused"],
        )

    def init(self, init_info: Mapping[str, Any], deadline: Deadline) -> None:
        self._routes.post("/init_weight_transfer_engine", deadline, {"init_info": dict(init_info)})

    def start(self, deadline: Deadline) -> None:
        self._routes.post("/start_weight_update", deadline)

    def update(self, update_info: Mapping[str, Any], deadline: Deadline) -> None:
        self._routes.post("/update_weights", deadline, {"update_info": dict(update_info)})

    def finish(self, weight_version: str | None, deadline: Deadline) -> None:
        body = None if weight_version is None else {"weight_version": weight_version}
        self._routes.post("/finish_weight_update", deadline, body)

    def pause(self, mode: str, deadline: Deadline, *, clear_cache: bool) -> None:
        self._routes.post("/pause", deadline, mode=mode, clear_cache=str(clear_cache).lower())

    def resume(self, deadline: Deadline) -> None:
        self._routes.post("/resume", deadline)

    def install_seconds(self, deadline: Deadline) -> list[dict[str, float]]:
        answer = self._routes.post("/collective_rpc", deadline, {"method": SECONDS_METHOD})
        return [row for row in answer["results"] if isinstance(row, dict)]


class OfflineControl:
    """An ``LLM`` of this process. Nothing generates between its calls, so a pause only clears its prefix cache.

    Args:
        llm: A ``vllm.LLM`` (or what has its methods).
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.where = "LLM in this process"

    def look(self, deadline: Deadline) -> EngineFacts:
        del deadline
        parallel = self._llm.llm_engine.vllm_config.parallel_config
        if self._llm.llm_engine.vllm_config.weight_transfer_config is None:
            raise EnvironmentNotSupported(
                "this LLM was made without a weight transfer engine. Make it with "
                "LLM(..., weight_transfer_config={'backend': 'reshard'})."
            )
        return EngineFacts(
            world_size=parallel.world_size_across_dp,
            weight_version=self._ask("get_weight_version"),
            paused=False,
        )

    def init(self, init_info: Mapping[str, Any], deadline: Deadline) -> None:
        del deadline  # the workers have it in what they are told
        self._ask("init_weight_transfer_engine", {"init_info": dict(init_info)})

    def start(self, deadline: Deadline) -> None:
        del deadline
        self._ask("start_weight_update")

    def update(self, update_info: Mapping[str, Any], deadline: Deadline) -> None:
        del deadline
        self._ask("update_weights", {"update_info": dict(update_info)})

    def finish(self, weight_version: str | None, deadline: Deadline) -> None:
        del deadline
        self._ask("finish_weight_update", weight_version)

    def pause(self, mode: str, deadline: Deadline, *, clear_cache: bool) -> None:
        del mode, deadline
        if clear_cache:
            self._ask("reset_prefix_cache")

    def resume(self, deadline: Deadline) -> None:
        del deadline

    def install_seconds(self, deadline: Deadline) -> list[dict[str, float]]:
        del deadline
        return list(self._ask("collective_rpc", SECONDS_METHOD))

    def _ask(self, method: str, *arguments: Any) -> Any:
        return _told(f"LLM.{method}", getattr(self._llm, method), *arguments)


class ClientControl:
    """An engine behind vLLM's own ``VLLMWeightSyncClient``, which has the four phases and no more.

    Whoever calls ``send_weights`` pauses the engine and resumes it, as with every backend of vLLM's.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self.where = str(getattr(client, "base_url", None) or type(client).__name__)

    def look(self, deadline: Deadline) -> EngineFacts:
        del deadline
        return EngineFacts()

    def init(self, init_info: Mapping[str, Any], deadline: Deadline) -> None:
        del deadline
        self._ask("init_weight_transfer_engine", dict(init_info))

    def start(self, deadline: Deadline) -> None:
        del deadline
        self._ask("start_weight_update")

    def update(self, update_info: Mapping[str, Any], deadline: Deadline) -> None:
        del deadline
        self._ask("update_weights", dict(update_info))

    def finish(self, weight_version: str | None, deadline: Deadline) -> None:
        del deadline
        self._ask("finish_weight_update", weight_version)

    def pause(self, mode: str, deadline: Deadline, *, clear_cache: bool) -> None:
        del mode, deadline, clear_cache

    def resume(self, deadline: Deadline) -> None:
        del deadline

    def install_seconds(self, deadline: Deadline) -> list[dict[str, float]]:
        del deadline
        return []

    def _ask(self, method: str, *arguments: Any) -> Any:
        return _told(method, getattr(self._client, method), *arguments)


def _told(what: str, call: Callable[..., Any], *arguments: Any) -> Any:
    """Call; whatever vLLM raises is an error of the engine."""
    try:
        return call(*arguments)
    except ReshardError:
        raise
    except Exception as error:
        raise PeerError(f"{what} raised {type(error).__name__}: {error}", route=what) from error
