"""Trainer: a source rank's model, held as a training framework holds it.

The model is transformers' own. It is made without memory, cut (by ``tp`` with torch's parallel styles, then by ``fsdp``
with ``fully_shard``), and each rank reads its own parts from the checkpoint; no rank ever loads the whole. Parameters
are bf16 DTensors; on a mesh of both axes their placements are ``(_StridedShard(0, sf=tp), Shard(0))`` or
``(Shard(0), Shard(1))``.

With 9 query and 3 KV heads, ``tp 2`` cuts through heads. That is legal for weights, so the projections are cut evenly
and their outputs are gathered before attention, which every ``tp`` rank computes whole.

Arithmetic is float32 (FSDP gathers the bf16 shards in float32), so that the answer does not depend on the layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from reshard.demo.worlds import SourceWorld, chunked
from reshard.errors import EnvironmentNotSupported, LayoutError
from reshard.layouts.box import Box

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from reshard.demo.checkpoint import Checkpoint

STEP = 5e-5
"""Length of an optimizer step as a part of the length of all weights: enough that a small model answers anew."""


@dataclass(frozen=True, slots=True)
class Stepped:
    """What an optimizer step did; equal on all ranks."""

    loss: float
    changed: int
    """Elements whose bf16 value is another one now, of all ranks, each counted once."""


@dataclass(frozen=True)
class Held:
    """One parameter's part on this rank; ``box`` is None where the rank holds nothing of it."""

    name: str
    shape: tuple[int, ...]
    box: Box | None
    local: torch.Tensor


class Trainer:
    """One rank of the source world; its process has a default group of the world's ranks.

    Args:
        checkpoint: Where the weights come from.
        world: The layout; its size is the default group's.
        dtype: Of the parameters, e.g. float32 for master weights.

    Raises:
        LayoutError: The model cannot be trained in this layout.
    """

    def __init__(self, checkpoint: Checkpoint, world: SourceWorld, *, dtype: torch.dtype = torch.bfloat16) -> None:
        world.check(checkpoint.architecture)
        self.checkpoint = checkpoint
        self.world = world
        self._mesh = init_device_mesh("cpu", (world.fsdp, world.tp), mesh_dim_names=("fsdp", "tp"))
        self.model = _model_without_memory(checkpoint, dtype)
        _cut(self.model, self._mesh)
        self.model.to_empty(device="cpu")
        _restore_rotary(self.model)
        self._load()
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0, foreach=False)

    # -- what it holds ---------------------------------------------------------------------------------------------

    def held(self) -> Iterator[Held]:
        """This rank's part of every parameter, a tied one once."""
        for name, parameter in self._parameters():
            box = _box_of(parameter, dict(zip(("fsdp", "tp"), self._mesh.get_coordinate() or (), strict=True)))
            local = _local(parameter)
            if (tuple(local.shape) if local.numel() else None) != (box.shape if box else None):
                raise LayoutError(
                    f"{name!r}: rank {dist.get_rank()} of the source holds {list(local.shape)}, but its placements "
                    f"{parameter.placements} put {box} there. Use another --source.",
                    tensor=name,
                )
            yield Held(name, tuple(parameter.shape), box, local)

    def _parameters(self) -> Iterator[tuple[str, DTensor]]:
        for name, parameter in self.model.named_parameters():
            assert isinstance(parameter, DTensor), name
            yield name, parameter

    def tensors(self) -> dict[str, DTensor]:
        """Every tensor by its names, a tied one under both."""
        tensors = self.model.state_dict()
        assert all(isinstance(tensor, DTensor) for tensor in tensors.values())
        return tensors

    @property
    def numel(self) -> int:
        """Elements of all parameters of the model, a tied one counted once."""
        return sum(parameter.numel() for _, parameter in self._parameters())

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's parts."""
        return sum(held.local.numel() * held.local.element_size() for held in self.held())

    @torch.no_grad()
    def _load(self) -> None:
        with self.checkpoint.reader() as reader:
            for held in self.held():
                if held.box is not None:
                    held.local.copy_(reader.read(held.name, held.box))

    # -- what it does ----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def generate(self, prompt: Sequence[int], *, max_tokens: int, stop: Sequence[int] = ()) -> list[int]:
        """Answer a prompt greedily; equal on all ranks. The model is gathered once for it and cut again afterwards."""
        tokens = torch.tensor([list(prompt)])
        self._gather()
        try:
            options: dict[str, Any] = {"eos_token_id": list(stop), "pad_token_id": stop[0]} if stop else {}
            out = self.model.generate(  # type: ignore[operator]
                tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=max_tokens, do_sample=False, **options
            )
        finally:
            self._cut_again()
        return [int(token) for token in out[0, len(prompt) :]]

    def step(self, prompt: Sequence[int], answer: Sequence[int]) -> Stepped:
        """Take one optimizer step away from an answer, as a policy gradient with reward -1 does.

        The step's length is set by the weights' (``STEP``), so that it changes a model of any size.

        Args:
            prompt: Token ids of the question.
            answer: Token ids of the answer that shall become less likely.
        """
        tokens = torch.tensor([[*prompt, *answer]])
        labels = torch.tensor([[-100] * len(prompt) + list(answer)])
        loss = self.model(input_ids=tokens, labels=labels, use_cache=False).loss
        (-loss).backward()
        self._cut_again()
        for group in self._optimizer.param_groups:
            group["lr"] = self._step_length()
        before = {held.name: held.local.clone() for held in self.held()}
        self._optimizer.step()
        self._optimizer.zero_grad()
        changed = torch.zeros(1, dtype=torch.float64)
        for held, replicas in zip(self.held(), self._replicas(), strict=True):
            changed += (held.local != before[held.name]).sum().item() / replicas
        dist.all_reduce(changed)
        return Stepped(loss.item(), round(changed.item()))

    def _step_length(self) -> float:
        """The learning rate with which the step is ``STEP`` of the weights' length."""
        squares = torch.zeros(2, dtype=torch.float64)
        for (_, parameter), replicas in zip(self._parameters(), self._replicas(), strict=True):
            gradient = parameter.grad
            assert isinstance(gradient, DTensor)
            for index, part in enumerate((_local(parameter), _local(gradient))):
                squares[index] += part.float().square().sum().item() / replicas
        dist.all_reduce(squares)
        weights, gradients = squares.sqrt().tolist()
        return STEP * float(weights) / max(float(gradients), 1e-30)

    def _replicas(self) -> Iterator[int]:
        """For each parameter, how many ranks hold the same part of it: norms are not cut by ``tp``."""
        for _, parameter in self._parameters():
            yield self.world.size // parameter.device_mesh.size()

    def _fsdp_modules(self) -> Iterator[FSDPModule]:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                yield module

    def _gather(self) -> None:
        for module in self._fsdp_modules():
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()

    def _cut_again(self) -> None:
        for module in self._fsdp_modules():
            module.reshard()
            module.set_reshard_after_forward(True, recurse=False)


def _model_without_memory(checkpoint: Checkpoint, dtype: torch.dtype) -> nn.Module:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise EnvironmentNotSupported(
            f"The source world needs transformers: {error}. Install what the demo needs: pip install 'reshard[demo]'."
        ) from error
    config = AutoConfig.from_pretrained(str(checkpoint.folder))
    config.tie_word_embeddings = checkpoint.architecture.tied
    with torch.device("meta"):
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model


def _cut(model: Any, mesh: DeviceMesh) -> None:
    """Cut by tensor parallelism, then each layer and the rest by FSDP."""
    if mesh["tp"].size() > 1:
        gathered = ColwiseParallel(output_layouts=Replicate())
        plan = {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "model.layers.*.self_attn.q_proj": gathered,
            "model.layers.*.self_attn.k_proj": gathered,
            "model.layers.*.self_attn.v_proj": gathered,
            "model.layers.*.self_attn.o_proj": RowwiseParallel(input_layouts=Replicate()),
            "model.layers.*.mlp.gate_proj": ColwiseParallel(),
            "model.layers.*.mlp.up_proj": ColwiseParallel(),
            "model.layers.*.mlp.down_proj": RowwiseParallel(),
            "lm_head": gathered,
        }
        parallelize_module(model, mesh["tp"], plan)
        if model.config.tie_word_embeddings:
            model.lm_head.weight = model.model.embed_tokens.weight  # each style has made its own
    policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["fsdp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["fsdp"], mp_policy=policy)


def _restore_rotary(model: Any) -> None:
    """Compute the rotary frequencies again: they are no parameters, and memory that was just made holds none."""
    model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config)


def _local(tensor: DTensor) -> torch.Tensor:
    return tensor.to_local().detach()


def _box_of(parameter: DTensor, at: dict[str, int]) -> Box | None:
    """The part of a parameter that lies at a coordinate: cut by ``tp``, then what is left of dim 0 by ``fsdp``.

    Worked out here and not by the library, so that what the demo checks with is not what it checks.
    """
    spans = [(0, size) for size in parameter.shape]
    mesh = parameter.device_mesh
    cuts: dict[str, tuple[int, int]] = {}
    for axis, placement in zip(mesh.mesh_dim_names or (), parameter.placements, strict=True):
        cuts[axis] = (placement.dim, mesh[axis].size())  # type: ignore[attr-defined] # Shard's and _StridedShard's
    for axis in ("tp", "fsdp"):
        if axis in cuts:
            dim, parts = cuts[axis]
            lo, hi = spans[dim]
            inner = chunked(hi - lo, at[axis], parts)
            spans[dim] = (lo + inner[0], lo + inner[1])
    if any(lo >= hi for lo, hi in spans):
        return None
    return Box(tuple(lo for lo, _ in spans), tuple(hi for _, hi in spans))
