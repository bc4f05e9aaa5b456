"""Where vLLM keeps each weight of a rank, learned from its own loaders: of a live engine, or of ranks without one.

A rank of any tensor or expert parallelism can be traced in one process without an engine: ``rank_model`` builds its
model with no weights.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from reshard.errors import ConfigError, EnvironmentNotSupported
from reshard.integrations.trace_check import check_trace
from reshard.integrations.traced import world_manifest
from reshard.integrations.tracing import trace_load
from reshard.integrations.vllm.groups import install_groups, one_of_each_kind, part_of
from reshard.integrations.vllm.private import alone_as, checkpoint_form, vllm_version

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from reshard.integrations.traced import LoadTrace
    from reshard.layouts.manifest import Manifest
    from reshard.layouts.piece import TensorSpec


def trace_model(
    model: torch.nn.Module, checkpoint: Iterable[TensorSpec], *, opaque: Mapping[str, str] | None = None
) -> LoadTrace:
    """Trace the loaders of this rank's model, one that serves or one that ``rank_model`` made.

    Args:
        model: The worker's model. It is not touched: the trace works on a copy without data, in any thread, while
            requests run.
        checkpoint: Names, shapes and dtypes of the checkpoint.
        opaque: Tensors that are not to be traced, with the reason.

    Returns:
        Pieces in the buffers that the loaders know, by the model's own names of them.

    Raises:
        EnvironmentNotSupported: As ``vllm_version``.
        ManifestError: As ``trace_load``.
    """
    twin: Any = checkpoint_form(model)
    return trace_load(twin.load_weights, checkpoint, twin, opaque=opaque)


def check_model(trace: LoadTrace, model: torch.nn.Module, *, seed: int = 0) -> int:
    """Check a trace of this rank's model against a real load of random weights, beside the weights that serve.

    Needs memory for three more copies of the rank's weights while it runs.

    Returns:
        How many elements were compared.

    Raises:
        VerifyError: As ``check_trace``.
    """
    twin: Any = checkpoint_form(model, with_memory=True)
    return check_trace(trace, twin.load_weights, twin, seed=seed)


def check_layers(trace: LoadTrace, model: torch.nn.Module, *, seed: int = 0) -> int:
    """As ``check_model``, for one layer of each kind, an install group at a time.

    Layers that are made alike are loaded by the same code, so that one of them stands for all. Needs memory for three
    copies of the largest group.
    """
    count = 0
    for group in one_of_each_kind(install_groups(trace)):
        twin: Any = checkpoint_form(model, with_memory=group.layers)
        count += check_trace(part_of(trace, group), twin.load_weights, twin, seed=seed)
    return count


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
            traces[rank] = trace_load(model.load_weights, specs, model)
            if check:
                check_trace(traces[rank], model.load_weights, model)
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
) -> Iterator[Any]:
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
        stack.enter_context(alone_as(rank, tp))
        stack.enter_context(_default_dtype(config.model_config.dtype))
        with torch.device("cpu"):
            model = initialize_model(vllm_config=config)
        yield model


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
