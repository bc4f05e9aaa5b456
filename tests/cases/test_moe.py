"""Cases MO-*: experts by their global ids, in whatever slot, stacked or one by one."""

from __future__ import annotations

import torch
from tests.cases.dense import POISON, arange, refit, refused_refit, same_bits

from reshard.errors import ManifestError
from reshard.layouts.manifest import Manifest

EXPERTS = 4


def expert(number, shape=(3, 2)):
    return torch.full(shape, float(number))


def test_MO_01_experts_with_global_ids_land_in_their_places(transport):
    wanted = {f"experts.w{e}": expert(POISON) for e in range(EXPERTS)}

    def declare(rank):
        if rank == 2:
            return None, Manifest.from_torch(wanted)
        return Manifest.from_torch({f"experts.w{e}": expert(e) for e in (2 * rank, 2 * rank + 1)}), None

    refit(3, declare, transport=transport)
    for e in range(EXPERTS):
        assert same_bits(wanted[f"experts.w{e}"], expert(e))


def test_MO_01_one_local_name_for_two_experts_is_refused_with_its_owners():
    wanted = {f"experts.w{e}": expert(POISON) for e in range(2)}

    def declare(rank):
        if rank == 2:
            return None, Manifest.from_torch(wanted)
        return Manifest.from_torch({f"experts.w{at}": expert(2 * rank + at) for at in range(2)}), None

    for error in refused_refit(3, declare):
        assert isinstance(error, ManifestError)
        assert "'experts.w0'" in error.message
        assert "ranks 0 and 1" in error.message
    assert all(same_bits(tensor, expert(POISON)) for tensor in wanted.values())


def test_MO_03_every_slot_holds_the_expert_that_the_map_of_the_day_says(transport):
    slots = {2: torch.full((3, 2), float(POISON)), 3: torch.full((3, 2), float(POISON))}
    addresses = [tensor.data_ptr() for tensor in slots.values()]
    for version, slot_map, expected in (
        (1, [[2, 0, 3], [1, 0, 3]], [12, 10, 13, 11, 10, 13]),
        (2, [[2, 1, 3], [1, 0, 2]], [22, 21, 23, 21, 20, 22]),
    ):

        def declare(rank, version=version, slot_map=slot_map):
            if rank < 2:
                mine = {f"experts.{e}": expert(10 * version + e, (2,)) for e in (2 * rank, 2 * rank + 1)}
                return Manifest.from_torch(mine), None
            views = [(f"experts.{e}", (2,), (0,), slots[rank][at]) for at, e in enumerate(slot_map[rank - 2])]
            return None, Manifest.from_views(views)

        refit(4, declare, transport=transport)
        assert torch.cat([slots[2], slots[3]]).tolist() == [[float(value)] * 2 for value in expected]
    assert [tensor.data_ptr() for tensor in slots.values()] == addresses


DOWN = arange(EXPERTS, 6, 5)
COLUMNS = [(0, 3), (3, 5)]


def stacked(rank, experts):
    """Two experts of a stacked tensor on each of two ranks, by the names that they have one by one."""
    return Manifest.from_views(
        [(f"experts.{2 * rank + at}.down.weight", (6, 5), (0, 0), experts[at]) for at in range(2)]
    )


def one_by_one(rank, weights):
    lo, _ = COLUMNS[rank]
    return Manifest.from_views([(f"experts.{e}.down.weight", (6, 5), (0, lo), weights[e]) for e in range(EXPERTS)])


def test_MO_04_stacked_experts_become_single_ones_cut_by_columns(transport):
    landed = {}

    def declare(rank):
        if rank < 2:
            return stacked(rank, DOWN[2 * rank : 2 * rank + 2].clone()), None
        lo, hi = COLUMNS[rank - 2]
        landed[rank - 2] = [torch.full((6, hi - lo), float(POISON)) for _ in range(EXPERTS)]
        return None, one_by_one(rank - 2, landed[rank - 2])

    refit(4, declare, transport=transport)
    for rank, (lo, hi) in enumerate(COLUMNS):
        for e in range(EXPERTS):
            assert same_bits(landed[rank][e], DOWN[e][:, lo:hi])


def test_MO_04_single_experts_become_stacked_ones(transport):
    landed = {}

    def declare(rank):
        if rank < 2:
            lo, hi = COLUMNS[rank]
            return one_by_one(rank, [DOWN[e][:, lo:hi].contiguous() for e in range(EXPERTS)]), None
        landed[rank - 2] = torch.full((2, 6, 5), float(POISON))
        return None, stacked(rank - 2, landed[rank - 2])

    refit(4, declare, transport=transport)
    for rank in range(2):
        assert same_bits(landed[rank], DOWN[2 * rank : 2 * rank + 2])


def test_MO_04_the_stacked_name_serves_as_well_with_one_box_an_expert(transport):
    """The other way to say it: one tensor of three dims, whose experts the engine keeps apart."""
    landed = {}

    def declare(rank):
        if rank < 2:
            mine = DOWN[2 * rank : 2 * rank + 2].clone()
            return Manifest.from_views([("experts.down", (EXPERTS, 6, 5), (2 * rank, 0, 0), mine)]), None
        lo, hi = COLUMNS[rank - 2]
        landed[rank - 2] = [torch.full((6, hi - lo), float(POISON)) for _ in range(EXPERTS)]
        return None, Manifest.from_views(
            [("experts.down", (EXPERTS, 6, 5), (e, 0, lo), landed[rank - 2][e].unsqueeze(0)) for e in range(EXPERTS)]
        )

    refit(4, declare, transport=transport)
    for rank, (lo, hi) in enumerate(COLUMNS):
        assert same_bits(torch.stack(landed[rank]), DOWN[:, :, lo:hi])
