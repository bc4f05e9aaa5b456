"""Model: the tensors of a model with what each is for, and the few numbers that say how it may be cut."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from reshard.models.roles import expert_of, layer_of, role_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from reshard.layouts.piece import TensorSpec
    from reshard.models.roles import Role


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of a model; ``role`` is None where its name says nothing."""

    spec: TensorSpec
    role: Role | None
    layer: int | None = None
    expert: int | None = None
    is_buffer: bool = False
    """It is not trained by gradient (a router's correction bias), and travels all the same."""


@dataclass(frozen=True, slots=True)
class Heads:
    """How many query and KV heads a layer has."""

    query: int
    kv: int


@dataclass(frozen=True, slots=True)
class StateSpace:
    """The sizes of a Mamba-2 layer, in rows of its projections."""

    heads: int
    head_dim: int
    groups: int
    state: int

    @property
    def inner(self) -> int:
        return self.heads * self.head_dim

    @property
    def in_sections(self) -> tuple[int, ...]:
        """Rows of z, x, B, C and dt in the input projection."""
        return (self.inner, self.inner, self.groups * self.state, self.groups * self.state, self.heads)

    @property
    def conv_sections(self) -> tuple[int, ...]:
        """Rows of x, B and C in the convolution."""
        return self.in_sections[1:4]


@dataclass(frozen=True)
class Model:
    """A model as data.

    Args:
        name: What it is called.
        weights: Its tensors.
        heads: Its attention heads; None where nothing says.
        state_space: Its Mamba-2 sizes, where it has such layers.
        is_tied: Whether the output head is the input embedding (and so no tensor of its own).
    """

    name: str
    weights: tuple[Weight, ...]
    heads: Heads | None = None
    state_space: StateSpace | None = None
    is_tied: bool = False

    @classmethod
    def from_specs(cls, name: str, specs: Iterable[TensorSpec], heads: Heads | None = None) -> Model:
        """A model from names and shapes alone: what each tensor is for follows from its name."""
        weights = tuple(
            Weight(
                spec,
                role_of(spec.name),
                layer_of(spec.name),
                expert_of(spec.name),
                spec.name.endswith(("e_score_correction_bias", "inv_freq")),
            )
            for spec in specs
        )
        has_head = any(weight.spec.name.endswith("lm_head.weight") for weight in weights)
        return cls(name, weights, heads, None, not has_head)

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(weight.spec for weight in self.weights)

    @cached_property
    def layers(self) -> int:
        return 1 + max((weight.layer for weight in self.weights if weight.layer is not None), default=-1)

    @cached_property
    def experts(self) -> int:
        """Routed experts of a layer; 0 for a dense model."""
        stacked = [weight.spec.shape[0] for weight in self.weights if weight.role is not None and weight.role.is_stack]
        single = [weight.expert + 1 for weight in self.weights if weight.expert is not None]
        return max((*stacked, *single), default=0)

    @cached_property
    def parameters(self) -> int:
        """How many numbers are trained."""
        return sum(prod(weight.spec.shape) for weight in self.weights if not weight.is_buffer)

    @property
    def tensors(self) -> int:
        """How many tensors the trained numbers are in."""
        return sum(not weight.is_buffer for weight in self.weights)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one copy of everything, buffers included."""
        return sum(weight.spec.nbytes for weight in self.weights)

    @cached_property
    def feed_forward_share(self) -> float:
        """The part of the bytes that is in projections of feed-forward blocks (experts and shared experts included)."""
        inside = sum(w.spec.nbytes for w in self.weights if w.role is not None and w.role.is_feed_forward)
        return inside / self.nbytes if self.nbytes else 0.0
