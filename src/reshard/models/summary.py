"""Summary: how large a model is and how much of it is in feed-forward blocks, without naming each of its experts."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from reshard.models.catalogue import STACKED, published
from reshard.models.families import model_from_config

if TYPE_CHECKING:
    from reshard.models.model import Model


@dataclass(frozen=True, slots=True)
class Summary:
    """A model in numbers.

    Args:
        name: What it is called.
        parameters: How many numbers are trained.
        tensors: How many tensors these are in.
        buffers: Tensors that are not trained and travel all the same.
        nbytes: Bytes of one copy of everything, buffers included.
        layers: How many layers it has.
        experts: Routed experts of a layer; 0 for a dense model.
        feed_forward_nbytes: Of ``nbytes``, those in projections of feed-forward blocks.
    """

    name: str
    parameters: int
    tensors: int
    buffers: int
    nbytes: int
    layers: int
    experts: int
    feed_forward_nbytes: int

    @property
    def feed_forward_share(self) -> float:
        """The part of the bytes that is in projections of feed-forward blocks."""
        return self.feed_forward_nbytes / self.nbytes if self.nbytes else 0.0


def summary_of(name: str) -> Summary:
    """The summary of a model of the catalogue; equal to ``summarize(find_model(name))`` and much faster.

    Raises:
        ConfigError: The catalogue has no such model; the message has the nearest names.

    >>> summary_of("deepseek-v3").parameters
    671026404352
    """
    config = published(name).config
    return _sum_up(model_from_config(config, name=name, stacked=name.endswith(STACKED), outline=True), is_outline=True)


def summarize(model: Model) -> Summary:
    """The summary of any model."""
    return _sum_up(model, is_outline=False)


def _sum_up(model: Model, *, is_outline: bool) -> Summary:
    parameters = tensors = buffers = nbytes = feed_forward = 0
    for weight in model.weights:
        # In an outline the last expert of a layer stands for all of them.
        times = weight.expert + 1 if is_outline and weight.expert is not None else 1
        size = weight.spec.nbytes * times
        nbytes += size
        buffers += times * weight.is_buffer
        tensors += times * (not weight.is_buffer)
        parameters += times * prod(weight.spec.shape) * (not weight.is_buffer)
        if weight.role is not None and weight.role.is_feed_forward:
            feed_forward += size
    return Summary(model.name, parameters, tensors, buffers, nbytes, model.layers, model.experts, feed_forward)
