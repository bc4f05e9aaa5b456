"""Shorthand: a world in a few words, as the command line takes it.

For one tensor, the mesh axes with their sizes and, in brackets, what splits each dim of the tensor::

    fsdp=2 [fsdp, -]             rows over 2 ranks
    dp=2 tp=4 [-, tp] @8         columns over 4 ranks, twice, on ranks 8 to 15 (the last axis varies fastest)
    fsdp=2 tp=2 [tp+fsdp, -]     rows cut by tp, each part cut again by fsdp
    fsdp=2 tp=2 [fsdp/2]         rows cut into 2 runs, each run by fsdp (a strided shard)

For a whole model, only the axes: ``fsdp8``, ``tp4 dp2``, ``ep16 pp4 dp2``; what they split follows from what a tensor
is for. A word may say whose rules count: ``megatron`` (of a source, if nothing is said), ``vllm`` (of a destination)
or ``fsdp`` (where an axis is called so); ``round_robin`` deals the experts out in turn.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from reshard.errors import ConfigError
from reshard.layouts.layout import Layout
from reshard.layouts.manifest import Manifest
from reshard.layouts.mesh import Mesh
from reshard.layouts.placement import Split, Step, Steps, Strided
from reshard.models.parallelism import EXPERT_ORDERS, STYLES, Parallelism, Style

if TYPE_CHECKING:
    from collections.abc import Sequence

_WORLD = re.compile(r"(?P<axes>[^\[\]@]*)(?:\[(?P<entries>[^\[\]]*)\])?\s*(?:@\s*(?P<start>[0-9]+))?\s*")
_AXIS = re.compile(r"([A-Za-z_]+)=?([0-9]+)")
_WORDS = (*STYLES, *EXPERT_ORDERS)
_STEP = re.compile(r"([A-Za-z_]+)(?:/([0-9]+))?")

EXAMPLE = "Write the axes with their sizes and what splits each dim, as in 'dp=2 tp=4 [-, tp]'."


@dataclass(frozen=True, slots=True)
class WorldText:
    """A world as written: axes, per dim what splits it (None where no bracket was given), first rank, words."""

    text: str
    axes: tuple[tuple[str, int], ...]
    entries: tuple[Steps, ...] | None
    start: int | None
    words: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return prod(size for _, size in self.axes)

    @classmethod
    def parse(cls, text: str) -> WorldText:
        """Read a world in words.

        Raises:
            ConfigError: The text is not of this form; the message names the part that is not.

        >>> WorldText.parse("fsdp=2 [fsdp, -] @4").entries
        (('fsdp',), ())
        """
        match = _WORLD.fullmatch(text)
        if match is None:
            raise ConfigError(f"{text!r} is not a world. {EXAMPLE}", value=text)
        parts = match["axes"].replace(",", " ").split()
        words = tuple(part for part in parts if part in _WORDS)
        axes = tuple(_axis(part, text) for part in parts if part not in _WORDS)
        if not axes:
            raise ConfigError(f"{text!r} names no mesh axis. {EXAMPLE}", value=text)
        entries = None if match["entries"] is None else _entries(match["entries"], text)
        return cls(text, axes, entries, None if match["start"] is None else int(match["start"]), words)

    def mesh(self, start: int) -> Mesh:
        """The ranks from ``start`` on (or from where the text says) on these axes."""
        first = start if self.start is None else self.start
        return Mesh(self.axes, range(first, first + self.size))


def _axis(word: str, text: str) -> tuple[str, int]:
    match = _AXIS.fullmatch(word)
    if match is None:
        raise ConfigError(f"{text!r}: {word!r} is not an axis with its size. {EXAMPLE}", value=text)
    return match[1], int(match[2])


def _entries(inside: str, text: str) -> tuple[Steps, ...]:
    if not inside.strip():
        return ()
    return tuple(_steps(entry.strip(), text) for entry in inside.split(","))


def _steps(entry: str, text: str) -> Steps:
    if entry == "-":
        return ()
    steps: list[Step] = []
    for word in entry.split("+"):
        match = _STEP.fullmatch(word.strip())
        if match is None:
            raise ConfigError(
                f"{text!r}: {entry!r} does not say what splits a dim. Write '-' for nothing, an axis, or axes joined "
                f"by '+', the one that cuts first in front.",
                value=text,
            )
        steps.append(match[1] if match[2] is None else Strided(match[1], int(match[2])))
    return tuple(steps)


def number_worlds(worlds: Sequence[WorldText], sizes: Sequence[int], *, same_ranks: bool) -> list[int]:
    """The first rank of each world: the source's is 0, each other follows the one before, or is where its text says.

    Args:
        worlds: The source, then one destination or more.
        sizes: How many ranks each has.
        same_ranks: The first destination starts where the source does: the same processes.
    """
    firsts: list[int] = []
    free = 0
    for world, size in zip(worlds, sizes, strict=True):
        firsts.append(free if world.start is None else world.start)
        free = firsts[0] if same_ranks and len(firsts) == 1 else firsts[-1] + size
    return firsts


def parse_shape(text: str) -> tuple[int, ...]:
    """Read a shape; ``scalar`` is the one without dims.

    Raises:
        ConfigError: It is not numbers joined by ``x``.

    >>> parse_shape("8x8"), parse_shape("scalar")
    ((8, 8), ())
    """
    if text == "scalar":
        return ()
    if not re.fullmatch(r"[0-9]+(x[0-9]+)*", text):
        raise ConfigError(f"{text!r} is not a shape. Join the sizes by 'x', as in 8192x8192, or write 'scalar'.")
    return tuple(int(size) for size in text.split("x"))


TENSOR = "tensor"
"""What the one tensor of a shorthand is called."""


def one_tensor(world: WorldText, mesh: Mesh, shape: tuple[int, ...], dtype: str, split: Split) -> Manifest:
    """The manifest of one tensor under a shorthand.

    Raises:
        LayoutError: The placement does not fit the shape or names an axis that the mesh lacks.
    """
    if world.words:
        raise ConfigError(
            f"{world.text!r}: {world.words[0]!r} is for whole models (--model). {EXAMPLE}", value=world.text
        )
    if world.entries is None and len(world.axes) and world.size > 1:
        raise ConfigError(
            f"{world.text!r} does not say what its axes split. Add the dims in brackets: "
            f"[{', '.join([world.axes[0][0], '-', '-'][: max(1, len(shape))])}], or [] if every rank has a copy.",
            value=world.text,
        )
    return Manifest.from_layouts({TENSOR: Layout(shape, dtype, mesh, world.entries or (), split)})


# -- whole models --------------------------------------------------------------------------------------------------


def parallelism_of(world: WorldText, *, is_source: bool) -> Parallelism:
    """What the axes of a whole model mean: by the word that was given, else fsdp, else the side's usual style.

    Raises:
        ConfigError: Brackets, an axis given twice or unknown, sizes or words that do not go together.
    """
    if world.entries is not None:
        raise ConfigError(
            f"{world.text!r}: the dims of a model follow from its names; leave the brackets out.", value=world.text
        )
    sizes = dict(world.axes)
    if len(sizes) != len(world.axes):
        raise ConfigError(f"{world.text!r} gives an axis twice. Give each once.", value=world.text)
    styles: list[Style] = [style for style in STYLES if style in world.words]
    orders = [word for word in world.words if word in EXPERT_ORDERS]
    if len(styles) > 1 or len(orders) > 1:
        raise ConfigError(f"{world.text!r} gives {' and '.join(world.words)}; give one of them.", value=world.text)
    usual: Style = "fsdp" if {"fsdp", "hsdp"} & set(sizes) else "megatron" if is_source else "vllm"
    try:
        return Parallelism.from_sizes(styles[0] if styles else usual, sizes, orders[0] if orders else "linear")
    except ConfigError as error:
        raise ConfigError(f"{world.text!r}: {error.message}", value=world.text) from error
