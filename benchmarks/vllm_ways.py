"""The trainer of the benchmark of refits: two FSDP2 ranks that hand their weights to a live server in several ways.

The ways take turns. Before each one the weights become another set, of two that take turns as well, so that a way that
brought nothing would be seen: after each hand-over the server is asked, and a set's answer must always be the same.
"""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from vllm_worker import TIMEOUT, GlooCommunicator, begin_peak, resident, without_cuda

import reshard
from reshard.integrations.vllm.routes import Routes
from reshard.transports.base import Deadline

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reshard.testing.processes import RankContext

PLUGIN, PACKED, SINGLE, FOLDER = "reshard", "full tensors, packed", "full tensors, one by one", "checkpoint folder"
WAYS = (PLUGIN, PACKED, SINGLE, FOLDER)
PROMPTS = ([1, 5, 9, 12], [7, 7, 7, 40, 2], [40, 3, 200, 17, 99, 1])
TOKENS = 8


@dataclass(frozen=True)
class HandOver:
    """New weights, brought to the server once."""

    way: str
    turn: int
    kind: int
    """Which of the two sets of weights."""

    seconds: float
    pause_seconds: float
    trainer_nbytes: tuple[int, ...]
    """By rank: the most memory in use, less what was in use before."""

    worker_nbytes: tuple[int, ...]
    answers_as_left: Any
    answers: Any
    """After a tied head was packed anew; (tokens, sum of logprobs) of each prompt."""

    sent_nbytes: int | None = None
    """Weights that the trainer's ranks sent, where that was counted."""


class Server:
    """The server, as the trainer's first rank asks it."""

    def __init__(self, url: str) -> None:
        self._routes = Routes(url, TIMEOUT.total_seconds())

    def post(self, route: str, body: Any = None, **query: Any) -> Any:
        """What a route answers."""
        return self._routes.post(route, Deadline(TIMEOUT.total_seconds()), body, **query)

    def workers(self, method: str, *arguments: str, **named: str) -> list[Any]:
        """What a method of each worker returns."""
        return self.post("/collective_rpc", {"method": method, "args": arguments, "kwargs": named})["results"]

    @contextmanager
    def paused(self) -> Iterator[list[float]]:
        """Let it stand still; afterwards the list has the seconds."""
        seconds: list[float] = []
        began = time.perf_counter()
        self.post("/pause", mode="keep", clear_cache="true")
        yield seconds
        self.post("/resume")
        seconds.append(time.perf_counter() - began)

    def answers(self) -> list[tuple[tuple[int, ...], float]]:
        """Tokens, and the sum of their logprobs, of each prompt, one at a time."""
        found = []
        for prompt in PROMPTS:
            sampling = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "logprobs": 1, "detokenize": False}
            choice = self.post("/inference/v1/generate", {"token_ids": prompt, "sampling_params": sampling})["choices"][
                0
            ]
            logprobs = [one["logprob"] for one in choice["logprobs"]["content"]]
            found.append((tuple(choice["token_ids"]), sum(logprobs)))
        return found


class Client:
    """vLLM's four phases of a weight transfer, for the full tensors; a ``VLLMWeightSyncClient``."""

    def __init__(self, server: Server, form: str) -> None:
        self._server, self._form = server, form

    def start_weight_update(self) -> None:
        self._server.workers("full_start")

    def update_weights(self, info: dict[str, Any]) -> None:
        self._server.workers("full_update", json.dumps(info), self._form)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._server.workers("full_finish")


# -- the ways: each gives (seconds of the pause, bytes sent or None) on the first rank ---------------------------------


class ByPlugin:
    """Every rank sends its own pieces, beside the weights that serve."""

    def __init__(self, rank: int, address: str, expect: dict[str, int], url: str) -> None:
        self._rank, self._address, self._expect, self._url = rank, address, expect, url
        self._session: Any = None
        self._version = 0

    def __call__(self, model: Any) -> tuple[float | None, int | None]:
        from reshard.integrations.vllm.servers import VLLMServers

        if self._session is None:
            self._session = reshard.connect(
                self._address,
                role="source",
                world="trainer",
                rank=self._rank,
                world_size=self._expect["trainer"],
                expect=self._expect,
                timeout=TIMEOUT,
                engines=VLLMServers({"engine": self._url}, pause="keep"),
            )
            self._session.offer(model)
        self._version += 1
        report = self._session.refit(self._version)
        return report.pause_seconds, report.sent_nbytes

    def close(self) -> None:
        self._session.close()


class ByFullTensors:
    """vLLM's own trainer side of its NCCL backend: gather a tensor, broadcast it, load it; all within a pause."""

    def __init__(self, rank: int, server: Server, port: int, tp: int, form: str) -> None:
        from vllm.distributed.weight_transfer.base import ModuleSource
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

        self._rank, self._server, self._port, self._size = rank, server, port, 1 + tp
        self._source = ModuleSource
        self._make = NCCLTrainerWeightTransferEngine
        self._form = form

    def __call__(self, model: Any) -> tuple[float | None, int | None]:
        engine = self._make(
            client=Client(self._server, self._form),
            source=self._source(model),
            is_sender=self._rank == 0,
            packed=self._form == "packed",
        )
        engine.model_update_group = communicator(self._server, self._port, self._size) if self._rank == 0 else None
        with without_cuda():
            if self._rank:
                engine.send_weights()
                return None, None
            with self._server.paused() as seconds:
                engine.send_weights()
        return seconds[0], None


_met: list[GlooCommunicator] = []


def communicator(server: Server, port: int, size: int) -> GlooCommunicator:
    """The one between the trainer's first rank and the engine's workers, made at the first call."""
    if not _met:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(1) as thread:
            told = thread.submit(server.workers, "full_init", str(port), str(size))
            _met.append(GlooCommunicator(port, 0, size))
            told.result()
    return _met[0]


class ByFolder:
    """Gather every tensor, save the checkpoint, and let vLLM reload it."""

    def __init__(self, rank: int, server: Server, folder: str) -> None:
        self._rank, self._server, self._folder = rank, server, folder

    def __call__(self, model: Any) -> tuple[float | None, int | None]:
        from safetensors.torch import save_file

        whole = {}
        for name, parameter in model.named_parameters():
            tensor = parameter.full_tensor().detach()
            if self._rank == 0:
                whole[name] = tensor
        if self._rank:
            return None, None
        save_file(whole, f"{self._folder}/model.safetensors")
        del whole, tensor
        with self._server.paused() as seconds:
            self._server.workers("reload_weights", weights_path=self._folder)
        return seconds[0], None


# -- the trainer -------------------------------------------------------------------------------------------------------


def train(ctx: RankContext, options: dict[str, Any]) -> list[dict[str, Any]]:
    """One rank of the trainer: hand over by all ways in turn; the first rank returns what was measured.

    Args:
        ctx: The rank.
        options: ``model`` and ``saved`` (folders), ``url``, ``address`` (of the session's store), ``port`` (of a store
            for the full tensors), ``tp``, ``repeat``.
    """
    from reshard.demo.checkpoint import Checkpoint
    from reshard.demo.trainer import Trainer
    from reshard.demo.worlds import SourceWorld

    torch.set_num_threads(1)
    store = dist.PrefixStore("trainer", ctx.store)
    dist.init_process_group("gloo", store=store, rank=ctx.rank, world_size=ctx.size, timeout=TIMEOUT)
    try:
        trainer = Trainer(Checkpoint.open(Path(options["model"])), SourceWorld(ctx.size))
        return _hand_over_all(ctx.rank, trainer, options)
    finally:
        dist.destroy_process_group()


def _hand_over_all(rank: int, trainer: Any, options: dict[str, Any]) -> list[dict[str, Any]]:
    server = Server(options["url"])
    tp = options["tp"]
    plugin = ByPlugin(rank, options["address"], {"trainer": dist.get_world_size(), "engine": tp}, options["url"])
    ways = {
        PLUGIN: plugin,
        PACKED: ByFullTensors(rank, server, options["port"], tp, "packed"),
        SINGLE: ByFullTensors(rank, server, options["port"], tp, "one by one"),
        FOLDER: ByFolder(rank, server, options["saved"]),
    }
    locals_ = [held.local for held in trainer.held()]
    kinds = [[tensor.clone() for tensor in locals_]]
    trainer.step([1, 5, 9], [17, 200, 3])
    kinds.append([tensor.clone() for tensor in locals_])
    results: list[dict[str, Any]] = []
    if rank == 0:
        results.append({"way": "as loaded", "kind": 0, "answers": server.answers()})
    names = list(ways)
    for turn in range(1 + options["repeat"]):  # the first one connects, traces and plans
        for at in range(len(names)):
            way = names[(turn + at) % len(names)]
            kind = (at + 1) % 2
            with torch.no_grad():
                for tensor, value in zip(locals_, kinds[kind], strict=True):
                    tensor.copy_(value)
            one = _hand_over(rank, server, trainer.model, ways[way], way, turn, kind)
            results += [] if one is None else [asdict(one)]
    plugin.close()
    return results


def _hand_over(rank: int, server: Server, model: Any, way: Any, name: str, turn: int, kind: int) -> HandOver | None:
    had_there = [one[0] for one in server.workers("memory_begin")] if rank == 0 else []
    dist.barrier()
    had = begin_peak()
    began = time.perf_counter()
    pause, sent = way(model)
    seconds = time.perf_counter() - began
    grown: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(grown, (resident("VmHWM") - had, sent))
    if rank:
        return None
    peaks = [one[0] for one in server.workers("memory_peak")]
    as_left = server.answers()
    if name != PLUGIN:
        server.workers("mend_tied_head")
        server.post("/reset_prefix_cache")
    counts = [sent for _, sent in grown]
    return HandOver(
        way=name,
        turn=turn,
        kind=kind,
        seconds=seconds,
        pause_seconds=pause,
        trainer_nbytes=tuple(nbytes for nbytes, _ in grown),
        worker_nbytes=tuple(peak - before for peak, before in zip(peaks, had_there, strict=True)),
        answers_as_left=as_left,
        answers=server.answers(),
        sent_nbytes=None if None in counts else sum(counts),
    )
