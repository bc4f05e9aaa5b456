"""What the benchmark of refits adds to a worker of vLLM: full tensors over gloo, and what memory the worker takes.

vLLM's backends that send full tensors need a GPU. Here its NCCL backend runs as it is, on both sides, with gloo in the
place of NCCL's communicator and nothing in the place of CUDA's streams.
"""

from __future__ import annotations

import json
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Iterator

TIMEOUT = timedelta(seconds=180)

if torch.cpu._is_amx_tile_supported():
    torch.cpu._init_amx()  # vLLM's kernels take the tile registers for granted, and for a tiny model nothing else asks


class GlooCommunicator:
    """What vLLM's NCCL backend asks of its communicator, over gloo.

    Args:
        port: Of the store where the ranks meet, which rank 0 hosts.
        rank: 0 is the trainer's first rank; the engine's workers follow.
        size: Of all.
    """

    def __init__(self, port: int, rank: int, size: int) -> None:
        store = dist.TCPStore("127.0.0.1", port, timeout=TIMEOUT)
        self._group = dist.ProcessGroupGloo(dist.PrefixStore("full", store), rank, size, TIMEOUT)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: object = None) -> None:
        """Send a tensor from ``src`` to all, or receive it."""
        del stream
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = src, 0
        self._group.broadcast([tensor.reshape(-1).view(torch.uint8)], options).wait()

    def destroy(self) -> None:
        """Nothing: the group ends with the process."""


class _NoStream:
    def __init__(self, device: object = None) -> None:
        del device

    def synchronize(self) -> None:
        """Nothing: what was called is done."""


@contextmanager
def without_cuda() -> Iterator[None]:
    """Let code that puts its calls into CUDA's streams run where there are none."""
    with (
        mock.patch("torch.cuda.Stream", _NoStream),
        mock.patch("torch.cuda.current_stream", _NoStream),
        mock.patch("torch.cuda.stream", return_value=nullcontext()),
        mock.patch("torch.accelerator.current_device_index", return_value=0),
    ):
        yield


class Extension:
    """Further methods of a worker, for ``--worker-extension-cls``; they are given text and return lists."""

    vllm_config: Any
    model_runner: Any
    device: Any
    rank: int

    def full_init(self, port: str, size: str) -> None:
        """Meet the trainer's first rank for full tensors."""
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        class Config:
            backend = "nccl"

        self.full_engine = NCCLWeightTransferEngine(Config(), self.vllm_config, self.device, self.model_runner.model)
        self.full_engine.model_update_group = GlooCommunicator(int(port), 1 + self.rank, int(size))

    def full_start(self) -> None:
        """Open the whole model for new weights."""
        with self._configured():
            self.full_engine.start_weight_update()

    def full_update(self, info: str, packed: str) -> None:
        """Receive every tensor whole, and load it."""
        self.full_engine.packed = packed == "packed"
        with self._configured(), without_cuda():
            self.full_engine.receive_weights(self.full_engine.parse_update_info(json.loads(info)))

    def full_finish(self) -> None:
        """Close the model again."""
        with self._configured():
            self.full_engine.finish_weight_update()

    def mend_tied_head(self) -> None:
        """Pack a tied head anew, which on CPUs keeps a packed copy of the embedding that vLLM's reloads forget."""
        from reshard.integrations.vllm.private import repack

        model = self.model_runner.model
        if self.vllm_config.model_config.hf_config.tie_word_embeddings:
            with self._configured():
                repack(model.lm_head)

    def memory_begin(self) -> list[int]:
        """Count the peak of this process's memory from now; the bytes that it has."""
        return [begin_peak()]

    def memory_peak(self) -> list[int]:
        """The peak since then."""
        return [resident("VmHWM")]

    def _configured(self) -> Any:
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self.vllm_config)


def begin_peak() -> int:
    """Let the kernel count this process's peak of memory from now; the bytes that it has now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def resident(what: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process, in bytes; memory that it shares with others counts."""
    text = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(f"{what}:"))
