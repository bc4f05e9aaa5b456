"""Worlds: a model and a parallelism -> the manifest of a world, by rules, so that many tensors take little time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.errors import ConfigError
from reshard.layouts.box import Box
from reshard.layouts.holding import Entry, Holding, Pieces, Rule
from reshard.layouts.manifest import Manifest
from reshard.layouts.mesh import Mesh
from reshard.layouts.placement import cut as cut_rows
from reshard.models.cuts import Boxed, Cut, Placed, cut
from reshard.models.roles import is_input_embedding

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.layouts.placement import Split, Steps
    from reshard.models.model import Model, Weight
    from reshard.models.parallelism import Parallelism

ExpertMap = tuple[tuple[int, ...], ...]
"""For each expert parallel rank the experts that it has; an expert may be on several."""


def manifest_of(
    model: Model,
    parallelism: Parallelism,
    *,
    first: int = 0,
    world: str = "world",
    expert_map: Sequence[Sequence[int]] | None = None,
) -> Manifest:
    """What each rank of a world holds (or wants) of a model.

    Args:
        model: Its tensors.
        parallelism: How they are spread.
        first: The number of the world's first rank.
        world: The world's name.
        expert_map: For each expert parallel rank its experts, in place of the parallelism's own order; an expert may
            be on several ranks (redundant experts), and must be on one.

    Raises:
        LayoutError: A tensor that the style's rules cannot cut so.
        ConfigError: Experts that ``ep`` does not divide, or a map that leaves one out.
    """
    hands = _Hands(model, parallelism, first, expert_map)
    entries = tuple(Entry(weight.spec, hands.holdings(weight)) for weight in model.weights)
    return Manifest(entries, world, first + parallelism.size)


class _Hands:
    """Who holds what; equal questions get the same object, since a plan tells holdings apart by identity first."""

    def __init__(
        self, model: Model, parallelism: Parallelism, first: int, expert_map: Sequence[Sequence[int]] | None
    ) -> None:
        self._model, self._parallelism = model, parallelism
        self._ranks = tuple(parallelism.stage_ranks(stage, first) for stage in range(parallelism.pp))
        self._layer_stage = parallelism.stages(model.layers)
        self._is_custom = expert_map is not None
        self._map = _checked_map(model, parallelism, expert_map)
        self._owners: dict[int, tuple[int, ...]] = {
            expert: tuple(at for at, has in enumerate(self._map) if expert in has) for expert in range(model.experts)
        }
        self._known: dict[tuple[object, ...], tuple[Holding, ...]] = {}

    def holdings(self, weight: Weight) -> tuple[Holding, ...]:
        stages = self._stages(weight)
        key = (weight.role, weight.spec.shape, stages, self._whose(weight))
        if key not in self._known:
            make = self._shards if self._parallelism.style == "fsdp" else self._parts
            self._known[key] = tuple(make(weight, self._ranks[stage]) for stage in stages)
        return self._known[key]

    def _whose(self, weight: Weight) -> tuple[int, ...]:
        """What tells the ranks of two experts of one layer apart."""
        if weight.expert is None or self._parallelism.ep == 1:
            return ()
        # fsdp may deal out the experts of one owner
        return (weight.expert,) if self._parallelism.style == "fsdp" else self._owners[weight.expert]

    def _stages(self, weight: Weight) -> tuple[int, ...]:
        last = self._parallelism.pp - 1
        if weight.layer is not None:
            return (self._layer_stage[weight.layer],)
        if not is_input_embedding(weight.spec.name):
            return (last,)
        return (0, last) if self._model.is_tied and last else (0,)  # the last stage has the output head's copy

    # -- a Megatron-like trainer, a vLLM-like engine -------------------------------------------------------------------

    def _parts(self, weight: Weight, ranks: tuple[int, ...]) -> Holding:
        p = self._parallelism
        if weight.role is None or not weight.role.is_expert:
            return _hold(cut(weight, p.tp, self._model, p.style), ranks, p.tp)
        inner = cut(weight, p.etp, self._model, p.style)
        assert isinstance(inner, Placed)  # experts are cut evenly
        if weight.role.is_stack:
            return self._stack(weight, inner, ranks)
        assert weight.expert is not None
        owners = self._owners[weight.expert]
        mine = tuple(
            ranks[(copy * p.ep + owner) * p.etp + place]
            for copy in range(len(ranks) // (p.ep * p.etp))
            for owner in owners
            for place in range(p.etp)
        )
        return _hold(inner, mine, p.etp)

    def _stack(self, weight: Weight, inner: Placed, ranks: tuple[int, ...]) -> Holding:
        """A stack of experts: dim 0 by expert parallelism, another dim by expert tensor parallelism."""
        p, shape = self._parallelism, weight.spec.shape
        mesh = Mesh((("copies", len(ranks) // (p.ep * p.etp)), ("ep", p.ep), *inner.axes), ranks)
        if p.expert_order == "linear" and not self._is_custom:
            split: Split = "balanced" if shape[0] % p.ep else "even"
            return Rule(mesh, (("ep",), *inner.placement[1:]), split)
        one = Rule(Mesh(inner.axes), inner.placement, "even").layout(weight.spec)
        held = []
        for position, rank in enumerate(ranks):
            owner, place = position // p.etp % p.ep, position % p.etp
            parts = one.boxes(place)
            held.append((rank, tuple(_rows(box, run) for run in _runs(self._map[owner]) for box in parts)))
        return Pieces(tuple(sorted(held)))

    # -- an FSDP-like trainer ------------------------------------------------------------------------------------------

    def _shards(self, weight: Weight, ranks: tuple[int, ...]) -> Holding:
        p, spec = self._parallelism, weight.spec
        if weight.role is not None and weight.role.is_expert and p.ep > 1:
            return self._expert_shards(weight, ranks)
        inner = cut(weight, p.tp, self._model, p.style)
        if not isinstance(inner, Placed):
            raise ConfigError(f"{spec.name!r}: fsdp with tp is not known for it; leave tp out.", tensor=spec.name)
        mesh = Mesh((("dp", p.dp), ("fsdp", p.shards), *inner.axes), ranks)
        return Rule(mesh, _then_fsdp(inner.placement, 0), "ceil")

    def _expert_shards(self, weight: Weight, ranks: tuple[int, ...]) -> Holding:
        """Expert parallelism takes the inner ranks of fsdp; the others deal out an owner's experts, or rows of each.

        They cut dim 0 of the stack where there are experts enough for all ranks, else dim 1 (as torchtitan chooses).
        """
        p, experts = self._parallelism, self._model.experts
        outer = p.shards // p.ep
        apart = p.shards <= experts
        assert weight.role is not None
        if weight.role.is_stack:
            mesh = Mesh((("dp", p.dp), ("fsdp", outer), ("ep", p.ep)), ranks)
            rest: tuple[Steps, ...] = ((),) * (len(weight.spec.shape) - 2)
            placement = (("ep", "fsdp"), (), *rest) if apart else (("ep",), ("fsdp",), *rest)
            return Rule(mesh, placement, "ceil")
        expert = weight.expert
        assert expert is not None
        (owner,) = self._owners[expert]
        count = experts // p.ep
        shards = [
            at
            for at in range(outer)
            if not apart or expert - owner * count in range(*cut_rows(count, outer, at, "ceil"))
        ]
        mine = tuple(ranks[(copy * outer + at) * p.ep + owner] for copy in range(p.dp) for at in shards)
        mesh = Mesh((("dp", p.dp), ("fsdp", len(shards))), mine)
        return Rule(mesh, (("fsdp",), ()), "ceil")


def _then_fsdp(placement: tuple[Steps, ...], dim: int) -> tuple[Steps, ...]:
    return tuple((*steps, "fsdp") if at == dim else steps for at, steps in enumerate(placement))


def _hold(how: Cut, ranks: tuple[int, ...], tp: int) -> Holding:
    """A cut over ranks of which every ``tp`` side by side share one copy."""
    if isinstance(how, Boxed):
        return Pieces(tuple(sorted((rank, how.boxes[at % tp]) for at, rank in enumerate(ranks))))
    return Rule(Mesh((("copies", len(ranks) // tp), *how.axes), ranks), how.placement, "ceil")


def _rows(box: Box, run: tuple[int, int]) -> Box:
    return Box((run[0], *box.start[1:]), (run[1], *box.stop[1:]))


def _runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Numbers in order as half-open runs."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs


def _checked_map(model: Model, parallelism: Parallelism, given: Sequence[Sequence[int]] | None) -> ExpertMap:
    if given is None:
        return parallelism.expert_map(model.experts) if model.experts else ((),) * parallelism.ep
    made = tuple(tuple(sorted(set(experts))) for experts in given)
    missing = sorted(set(range(model.experts)) - {expert for experts in made for expert in experts})
    if len(made) != parallelism.ep or missing:
        raise ConfigError(
            f"The expert map has {len(made)} ranks and leaves out experts {missing[:8]}; ep is {parallelism.ep} and "
            f"each of the {model.experts} experts must be on a rank."
        )
    return made
