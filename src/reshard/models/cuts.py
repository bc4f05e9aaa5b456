"""Cuts: which part of a tensor each tensor parallel rank has, by the rules of trainers and engines.

What matters here is where the numbers come from, in the coordinates of the checkpoint; how a rank then puts them
together (q, k and v in one matrix) is a matter of its memory. The two worlds differ in three places:

- **KV heads**, where there are fewer than ranks: an engine gives the same head to several ranks; Megatron-Core keeps
  q, k and v of a group of heads together (all q heads of the group, then its k, then its v) and cuts that matrix
  evenly, so that a rank may have a part of a head, or no k at all.
- **The vocabulary**, where rows do not divide: both fill it up, to a multiple of 64 (an engine) or of 128 times tp
  (Megatron-Core), and cut evenly; what was filled up belongs to nobody.
- **Mamba-2's projections**: sections that are cut each for itself, the same in both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from reshard.errors import LayoutError
from reshard.layouts.box import Box
from reshard.layouts.placement import Steps, Strided
from reshard.models.roles import Role

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.layouts.piece import TensorSpec
    from reshard.models.model import Model, Weight
    from reshard.models.parallelism import Style


@dataclass(frozen=True, slots=True)
class Placed:
    """A cut by rule: mesh axes whose sizes multiply to the tensor parallel size, and what they split."""

    axes: tuple[tuple[str, int], ...]
    placement: tuple[Steps, ...]


@dataclass(frozen=True, slots=True)
class Boxed:
    """A cut by hand: the boxes of each tensor parallel rank."""

    boxes: tuple[tuple[Box, ...], ...]


Cut = Placed | Boxed

VOCABULARY_MULTIPLE = {"vllm": 64, "megatron": 128}
"""To a multiple of what a vocabulary is filled up; of Megatron-Core times tp."""

_DIMS = {
    Role.HEAD_ROWS: 0,
    Role.HEAD_COLUMNS: 1,
    Role.FFN_ROWS: 0,
    Role.FFN_COLUMNS: 1,
    Role.EXPERT_ROWS: 0,
    Role.EXPERT_COLUMNS: 1,
    Role.STACK_GATE_UP: 1,
    Role.STACK_ROWS: 1,
    Role.STACK_COLUMNS: 2,
    Role.MAMBA_ROWS: 0,
    Role.MAMBA_COLUMNS: 1,
}
_HEADS = (Role.QUERY, Role.KEY, Role.VALUE, Role.HEAD_ROWS, Role.HEAD_COLUMNS)


def cut(weight: Weight, tp: int, model: Model, style: Style) -> Cut:
    """How ``tp`` ranks share a tensor; an expert's, or a stack's beside dim 0, by expert tensor parallelism.

    Raises:
        LayoutError: A name that says nothing, or sizes that the style's rules do not divide.
    """
    spec, role = weight.spec, weight.role
    whole = Placed((("tp", tp),), ((),) * len(spec.shape))
    if tp == 1 or role is Role.WHOLE:
        return whole
    if role is None:
        raise LayoutError(
            f"{spec.name!r} {list(spec.shape)}: nothing says how tp splits it, since it is not the name of a tensor in "
            f"a model that is known here (q_proj, gate_proj, experts, norm, embed_tokens and so on). Give the side as "
            f"a manifest (Manifest.to_json), or leave tp out.",
            tensor=spec.name,
        )
    if role is Role.VOCABULARY:
        return _vocabulary(spec, tp, style)
    if role in (Role.MAMBA_IN, Role.MAMBA_CONV, Role.MAMBA_ROWS, Role.MAMBA_COLUMNS):
        return _state_space(spec, role, tp, model)
    if role in (Role.QUERY, Role.KEY, Role.VALUE) and model.heads is not None and model.heads.kv % tp:
        return _few_kv_heads(spec, role, tp, model, style)
    return _even(spec, role, tp, model)


def _steps(spec: TensorSpec, dim: int, *steps: str | Strided) -> tuple[Steps, ...]:
    return tuple(steps if at == dim else () for at in range(len(spec.shape)))


def _even(spec: TensorSpec, role: Role, tp: int, model: Model) -> Placed:
    dim = _DIMS.get(role, 0)
    if model.heads is not None and role in _HEADS:
        _check(spec, tp, model.heads.query, "query heads")
    if role is Role.STACK_GATE_UP:
        _check(spec, tp, spec.shape[dim] // 2, "rows of gate and as many of up")
        return Placed((("tp", tp),), _steps(spec, dim, Strided("tp", 2)))
    _check(spec, tp, spec.shape[dim], "rows" if dim == 0 else "columns")
    return Placed((("tp", tp),), _steps(spec, dim, "tp"))


def _check(spec: TensorSpec, tp: int, parts: int, what: str) -> None:
    if parts % tp:
        raise LayoutError(
            f"{spec.name!r}: it has {parts} {what} and tp is {tp}, which gives every rank as many. Use a tp that "
            f"divides {parts}, or give this side as a manifest (Manifest.to_json).",
            tensor=spec.name,
        )


def _few_kv_heads(spec: TensorSpec, role: Role, tp: int, model: Model, style: Style) -> Cut:
    """Query, key or value where tp does not divide the KV heads."""
    assert model.heads is not None
    if role is Role.QUERY and style != "megatron":
        return _even(spec, role, tp, model)
    kv = model.heads.kv
    if style == "fsdp" or tp % kv:
        way = "FSDP copies no head to several ranks: use a tp that divides"
        way = way if style == "fsdp" else "Use a tp that divides or is a multiple of"
        raise LayoutError(
            f"{spec.name!r}: it has {kv} KV heads and tp is {tp}. {way} {kv}, or give this side as a manifest "
            f"(Manifest.to_json).",
            tensor=spec.name,
        )
    if style == "megatron":
        return _by_groups(spec, role, tp, model.heads.query, kv)
    return Placed((("kv", kv), ("tp_copy", tp // kv)), _steps(spec, 0, "kv"))


def _by_groups(spec: TensorSpec, role: Role, tp: int, query: int, kv: int) -> Boxed:
    """The rows that an even cut of the groups' common matrix leaves of q, k or v."""
    many = query // kv
    head = spec.shape[0] // (query if role is Role.QUERY else kv)
    group = (many + 2) * head
    if kv * group % tp:
        raise LayoutError(
            f"{spec.name!r}: q, k and v have {kv * group} rows together, which tp {tp} does not divide. "
            f"Take a tp that divides them.",
            tensor=spec.name,
        )
    lo, size = {Role.QUERY: (0, many * head), Role.KEY: (many * head, head), Role.VALUE: ((many + 1) * head, head)}[
        role
    ]
    sections = [(at * group + lo, at * size, size) for at in range(kv)]
    share = kv * group // tp
    return Boxed(tuple(_overlaps(spec, sections, rank * share, (rank + 1) * share) for rank in range(tp)))


def _overlaps(spec: TensorSpec, sections: Sequence[tuple[int, int, int]], lo: int, hi: int) -> tuple[Box, ...]:
    """The tensor's boxes in rows [lo, hi) of a matrix: a section is (row there, row of the tensor, how many)."""
    rows = []
    for start, row, size in sections:
        first, last = max(lo, start), min(hi, start + size)
        if first < last:
            rows.append((row + first - start, row + last - start))
    return _row_boxes(spec, rows)


def _row_boxes(spec: TensorSpec, rows: Sequence[tuple[int, int]]) -> tuple[Box, ...]:
    """The boxes of some rows, all columns; rows that touch are one box."""
    joined: list[tuple[int, int]] = []
    for lo, hi in rows:
        if joined and joined[-1][1] == lo:
            joined[-1] = (joined[-1][0], hi)
        else:
            joined.append((lo, hi))
    rest = spec.shape[1:]
    return tuple(Box((lo, *(0 for _ in rest)), (hi, *rest)) for lo, hi in joined)


def _vocabulary(spec: TensorSpec, tp: int, style: Style) -> Cut:
    rows = spec.shape[0]
    placed = Placed((("tp", tp),), _steps(spec, 0, "tp"))
    if style == "fsdp":
        return placed  # torch.chunk: the ceil rule
    multiple = VOCABULARY_MULTIPLE[style] * (tp if style == "megatron" else 1)
    filled = -(-rows // multiple) * multiple
    if filled % tp:
        what = f"{rows}" if filled == rows else f"{rows}, filled up to {filled},"
        raise LayoutError(
            f"{spec.name!r}: the vocabulary of {what} is not a multiple of tp {tp}. Take a tp that divides {filled}.",
            tensor=spec.name,
        )
    if filled == rows:
        return placed
    share = filled // tp
    return Boxed(tuple(_overlaps(spec, [(0, 0, rows)], rank * share, (rank + 1) * share) for rank in range(tp)))


def _state_space(spec: TensorSpec, role: Role, tp: int, model: Model) -> Cut:
    sizes = model.state_space
    if sizes is None:
        raise LayoutError(
            f"{spec.name!r}: nothing says how many heads and groups its layer has, so tp {tp} cannot be placed. Put "
            f"the model's config.json beside it.",
            tensor=spec.name,
        )
    _check(spec, tp, sizes.heads, "state-space heads")
    _check(spec, tp, sizes.groups, "state-space groups")
    if role in (Role.MAMBA_ROWS, Role.MAMBA_COLUMNS):
        return Placed((("tp", tp),), _steps(spec, _DIMS[role], "tp"))
    sections = sizes.in_sections if role is Role.MAMBA_IN else sizes.conv_sections
    starts = [sum(sections[:at]) for at in range(len(sections))]
    return Boxed(
        tuple(
            _row_boxes(
                spec,
                [
                    (start + rank * size // tp, start + (rank + 1) * size // tp)
                    for start, size in zip(starts, sections, strict=True)
                ],
            )
            for rank in range(tp)
        )
    )
