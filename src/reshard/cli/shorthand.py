"""Shorthand: a world in a few words, as the command line takes it.

For one tensor, the mesh axes with their sizes and, in brackets, what splits each dim of the tensor::

    fsdp=2 [fsdp, -]             rows over 2 ranks
    dp=2 tp=4 [-, tp] @8         columns over 4 ranks, twice, on ranks 8 to 15 (the last axis varies fastest)
    fsdp=2 tp=2 [tp+fsdp, -]     rows cut by tp, each part cut again by fsdp
    fsdp=2 tp=2 [fsdp/2]         rows cut into 2 runs, each run by fsdp (a strided shard)

For a whole model, only the axes: ``fsdp8``, ``tp4 dp2``. Which dim ``tp`` splits then follows from the name that a
tensor has in a Hugging Face checkpoint of a dense Llama-like model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

from reshard.errors import ConfigError, LayoutError
from reshard.layouts.layout import Layout
from reshard.layouts.manifest import Manifest
from reshard.layouts.mesh import Mesh
from reshard.layouts.placement import Split, Step, Steps, Strided

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.cli.model_files import ModelFiles
    from reshard.layouts.piece import TensorSpec

_WORLD = re.compile(r"(?P<axes>[^\[\]@]*)(?:\[(?P<entries>[^\[\]]*)\])?\s*(?:@\s*(?P<start>[0-9]+))?\s*")
_AXIS = re.compile(r"([A-Za-z_]+)=?([0-9]+)")
_STEP = re.compile(r"([A-Za-z_]+)(?:/([0-9]+))?")

EXAMPLE = "Write the axes with their sizes and what splits each dim, as in 'dp=2 tp=4 [-, tp]'."


@dataclass(frozen=True, slots=True)
class WorldText:
    """A world as written: axes, per dim the steps that split it (None where no bracket was given), first rank."""

    text: str
    axes: tuple[tuple[str, int], ...]
    entries: tuple[Steps, ...] | None
    start: int | None

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
        axes = tuple(_axis(word, text) for word in match["axes"].replace(",", " ").split())
        if not axes:
            raise ConfigError(f"{text!r} names no mesh axis. {EXAMPLE}", value=text)
        entries = None if match["entries"] is None else _entries(match["entries"], text)
        return cls(text, axes, entries, None if match["start"] is None else int(match["start"]))

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


def place(source: WorldText, destinations: Sequence[WorldText], *, same_ranks: bool) -> tuple[Mesh, list[Mesh]]:
    """Number the ranks: the source from 0, each destination after the one before, or where its text says.

    Args:
        source: The source world.
        destinations: One or more.
        same_ranks: The first destination starts where the source does: the same processes.
    """
    held = source.mesh(0)
    meshes, free = [], held.ranks[0] if same_ranks else held.ranks[-1] + 1
    for world in destinations:
        meshes.append(world.mesh(free))
        free = meshes[-1].ranks[-1] + 1
    return held, meshes


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
    if world.entries is None and len(world.axes) and world.size > 1:
        raise ConfigError(
            f"{world.text!r} does not say what its axes split. Add the dims in brackets: "
            f"[{', '.join([world.axes[0][0], '-', '-'][: max(1, len(shape))])}], or [] if every rank has a copy.",
            value=world.text,
        )
    return Manifest.from_layouts({TENSOR: Layout(shape, dtype, mesh, world.entries or (), split)})


# -- whole models --------------------------------------------------------------------------------------------------

_MODEL_AXES = ("dp", "fsdp", "tp")  # outermost first: ranks of one tp group follow one another

# By name: the dim that tp splits, or None for a replica on each tp rank.
_TP_DIMS: tuple[tuple[str, int | None], ...] = (
    (r"self_attn\.[qkv]_proj\.(weight|bias)", 0),
    (r"mlp\.(gate|up)_proj\.(weight|bias)", 0),
    (r"self_attn\.o_proj\.weight", 1),
    (r"mlp\.down_proj\.weight", 1),
    (r"(self_attn\.o_proj|mlp\.down_proj)\.bias", None),
    (r"(\w*norm|self_attn\.[qk]_norm)\.(weight|bias)", None),
    (r"(self_attn\.)?rotary_emb\.inv_freq", None),
    (r"(embed_tokens|lm_head)\.weight", 0),
)
_IN_LAYER = r"(?:model\.|language_model\.)*(?:layers\.[0-9]+\.)?"


def _tp_dim(spec: TensorSpec, world: WorldText) -> int | None:
    for pattern, dim in _TP_DIMS:
        if re.fullmatch(_IN_LAYER + pattern, spec.name):
            return dim if dim is None or dim < len(spec.shape) else None
    raise LayoutError(
        f"{spec.name!r} {list(spec.shape)}: {world.text!r} does not say how tp splits it, since it is not the name of "
        f"a tensor in a dense Llama-like model (q_proj, gate_proj, down_proj, norm, embed_tokens and so on). Give the "
        f"side as a manifest (Manifest.to_json), or leave tp out.",
        tensor=spec.name,
    )


def whole_model(world: WorldText, mesh: Mesh, model: ModelFiles) -> Manifest:
    """The manifest of a model under a shorthand of the axes ``dp``, ``fsdp`` and ``tp``.

    ``tp`` splits by name (columns, rows, vocabulary), then ``fsdp`` splits what is left of dim 0 by torch's ceil rule;
    ``dp`` repeats.

    Raises:
        ConfigError: Another axis, or brackets.
        LayoutError: A tensor whose name says nothing, or heads that ``tp`` does not divide.
    """
    if world.entries is not None:
        raise ConfigError(f"{world.text!r}: the dims of a model follow from its names; leave the brackets out.")
    unknown = [name for name, _ in world.axes if name not in _MODEL_AXES]
    if unknown:
        raise ConfigError(
            f"{world.text!r}: {unknown[0]!r} is not an axis of a model. Known: fsdp and tp split it, dp repeats it.",
            value=world.text,
        )
    # Built first in the order in which the axes were written, so that an axis given twice is refused.
    sizes = dict(mesh.axes)
    ordered = Mesh(((name, sizes[name]) for name in _MODEL_AXES if name in sizes), mesh.ranks)
    layouts = {
        spec.name: Layout(
            spec.shape, spec.dtype, ordered, _placement(spec, world, sizes, model), "ceil", name=spec.name
        )
        for spec in model.tensors
    }
    return Manifest.from_layouts(layouts)


def _placement(spec: TensorSpec, world: WorldText, sizes: dict[str, int], model: ModelFiles) -> list[Steps]:
    steps: list[list[Step]] = [[] for _ in spec.shape]
    tp = sizes.get("tp", 1)
    dim = _tp_dim(spec, world) if tp > 1 else None
    if dim is not None:
        _check_tp(spec, dim, tp, model)
        steps[dim].append("tp")
    if steps and "fsdp" in sizes:
        steps[0].append("fsdp")
    return [tuple(entry) for entry in steps]


def _check_tp(spec: TensorSpec, dim: int, tp: int, model: ModelFiles) -> None:
    """Refuse what an engine would do otherwise: split a head, copy a KV head to several ranks, split unevenly."""
    if re.search(r"(embed_tokens|lm_head)\.weight", spec.name):
        return  # rows of the vocabulary may be uneven
    parts, what = spec.shape[dim], "rows" if dim == 0 else "columns"
    if model.heads is not None and "self_attn" in spec.name:
        is_kv = re.search(r"\.[kv]_proj\.", spec.name) is not None
        parts, what = (model.heads.kv, "KV heads") if is_kv else (model.heads.query, "query heads")
    if parts % tp:
        raise LayoutError(
            f"{spec.name!r}: it has {parts} {what} and tp is {tp}. This shorthand gives every tp rank as many, and "
            f"copies no head to several ranks. Use a tp that divides {parts}, or give this side as a manifest "
            f"(Manifest.to_json).",
            tensor=spec.name,
            dim=dim,
        )
