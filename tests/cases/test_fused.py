"""Cases FU-*: fused parameters are pieces of named tensors in one buffer, on either side and in any order."""

from __future__ import annotations

import pytest
import torch
from tests.cases.dense import POISON, arange, refit, refused_refit, rows, same_bits

from reshard.errors import ManifestError
from reshard.layouts.box import Box
from reshard.layouts.manifest import Manifest

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 2, 3
FUSED = arange(16, HIDDEN)
"""The trainer's rows ``[q0 q1 k0 v0 | q2 q3 k1 v1]``: every row's values name its place in that order."""
SHAPES = {"q": (8, HIDDEN), "k": (4, HIDDEN), "v": (4, HIDDEN)}


def trainer_views(fused, groups, first_group):
    """q, k and v inside ``groups`` whole groups of the trainer's fused rows, as one view each."""
    by_group = fused.view(groups, 8, HIDDEN)
    views = []
    for name, at, count in (("q", 0, 4), ("k", 4, 2), ("v", 6, 2)):
        box = Box((first_group * count, 0), ((first_group + groups) * count, HIDDEN))
        views.append((name, SHAPES[name], box, by_group[:, at : at + count]))
    return views


def engine_views(buffer, tp, rank):
    """The engine's block order ``[q; k; v]`` on one of ``tp`` ranks; a KV head that two ranks need lies on both."""
    q = HEADS * HEAD_DIM // tp
    kv = max(1, KV_HEADS // tp) * HEAD_DIM
    first_kv = (rank * KV_HEADS // tp) * HEAD_DIM
    return [
        ("q", SHAPES["q"], (rank * q, 0), buffer[:q]),
        ("k", SHAPES["k"], (first_kv, 0), buffer[q : q + kv]),
        ("v", SHAPES["v"], (first_kv, 0), buffer[q + kv :]),
    ]


ENGINE_ROWS = {
    1: [[0, 1, 2, 3, 8, 9, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15]],
    2: [list(range(8)), list(range(8, 16))],
    4: [[0, 1, 4, 5, 6, 7], [2, 3, 4, 5, 6, 7], [8, 9, 12, 13, 14, 15], [10, 11, 12, 13, 14, 15]],
}


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("trainers", [1, 2])
def test_FU_01_qkv_rows_go_from_groups_to_blocks_for_every_tp_size(transport, trainers, tp):
    engines = {}

    def declare(rank):
        if rank < trainers:
            groups = 2 // trainers
            fused = FUSED[8 * groups * rank : 8 * groups * (rank + 1)].clone()
            return Manifest.from_views(trainer_views(fused, groups, groups * rank)), None
        mine = engines[rank - trainers] = torch.full((len(ENGINE_ROWS[tp][0]), HIDDEN), float(POISON))
        return None, Manifest.from_views(engine_views(mine, tp, rank - trainers))

    refit(trainers + tp, declare, transport=transport)
    for rank, numbers in enumerate(ENGINE_ROWS[tp]):
        assert same_bits(engines[rank], rows(FUSED, numbers))


COMPONENTS = {"q": 4, "k": 4, "v": 8, "z": 8, "b": 2, "a": 2}
FIRST_HALF = [0, 1, 4, 5, 8, 9, 10, 11, 16, 17, 18, 19, 24, 26]
HALVES = [FIRST_HALF, [row for row in range(28) if row not in FIRST_HALF]]


def packed_views(buffer, tp, rank):
    """All components of a packed projection, each cut into ``tp`` parts by itself."""
    views, at = [], 0
    for name, size in COMPONENTS.items():
        part = size // tp
        views.append((name, (size, HIDDEN), (rank * part, 0), buffer[at : at + part]))
        at += part
    return views


@pytest.mark.parametrize(("src_tp", "dst_tp"), [(2, 1), (1, 2)])
def test_FU_03_a_packed_projection_is_cut_component_by_component(transport, src_tp, dst_tp):
    full = arange(28, HIDDEN)
    held = {1: [list(range(28))], 2: HALVES}
    landed = {}

    def declare(rank):
        if rank < src_tp:
            return Manifest.from_views(packed_views(rows(full, held[src_tp][rank]), src_tp, rank)), None
        mine = landed[rank - src_tp] = torch.full((28 // dst_tp, HIDDEN), float(POISON))
        return None, Manifest.from_views(packed_views(mine, dst_tp, rank - src_tp))

    refit(src_tp + dst_tp, declare, transport=transport)
    for rank, numbers in enumerate(held[dst_tp]):
        assert same_bits(landed[rank], rows(full, numbers))


QKV = {"q": arange(6, 4), "k": 100 + arange(3, 4), "v": 200 + arange(3, 4)}


def qkv_views(buffer):
    return [
        ("q", (6, 4), (0, 0), buffer[:6]),
        ("k", (3, 4), (0, 0), buffer[6:9]),
        ("v", (3, 4), (0, 0), buffer[9:]),
    ]


def test_FU_05_parts_of_one_fused_buffer_may_come_in_many_buckets(transport):
    fused = torch.full((12, 4), float(POISON))
    told = refit(
        2,
        lambda rank: (
            (None, Manifest.from_views(qkv_views(fused)))
            if rank
            else (Manifest.from_torch({name: part.clone() for name, part in QKV.items()}), None)
        ),
        transport=transport,
        staging_nbytes=64,
    )
    _, compiled = told[0]
    assert compiled.schedule.messages > 3
    assert same_bits(fused, torch.cat(list(QKV.values())))


@pytest.mark.parametrize(("lost", "where"), [("q", "beside 'k'"), ("k", "between 'q' and 'v'"), ("v", "beside 'k'")])
def test_FU_05_a_part_that_the_source_lacks_is_named_with_the_fused_tensor_which_stays_as_it_was(lost, where):
    fused = torch.full((12, 4), float(POISON))

    def declare(rank):
        if rank:
            return None, Manifest.from_views(qkv_views(fused))
        return Manifest.from_torch({name: part.clone() for name, part in QKV.items() if name != lost}), None

    for error in refused_refit(2, declare, staging_nbytes=64):
        assert isinstance(error, ManifestError)
        assert error.missing == (lost,)
        assert f"rank 1 keeps {lost!r} {where} in one buffer, as fused tensors are" in error.message
        assert error.fused_with == {lost: {"q": ("k",), "k": ("q", "v"), "v": ("k",)}[lost]}
    assert torch.equal(fused, torch.full_like(fused, POISON))


GATE, UP = arange(6, 4), 100 + arange(6, 4)


def separate_views(gate, up, tp, rank):
    part = 6 // tp
    return [("gate", (6, 4), (rank * part, 0), gate), ("up", (6, 4), (rank * part, 0), up)]


def gate_up_views(fused, tp, rank):
    part = 6 // tp
    return separate_views(fused[:part], fused[part:], tp, rank)


@pytest.mark.parametrize("tp", [1, 2])
def test_FU_06_separate_gate_and_up_become_fused_a_rank(transport, tp):
    fused = {}

    def declare(rank):
        if rank < 3:
            mine = slice(2 * rank, 2 * rank + 2)
            return Manifest.from_views(separate_views(GATE[mine].clone(), UP[mine].clone(), 3, rank)), None
        fused[rank - 3] = torch.full((12 // tp, 4), float(POISON))
        return None, Manifest.from_views(gate_up_views(fused[rank - 3], tp, rank - 3))

    refit(3 + tp, declare, transport=transport)
    for rank in range(tp):
        mine = slice(6 // tp * rank, 6 // tp * (rank + 1))
        assert same_bits(fused[rank], torch.cat([GATE[mine], UP[mine]]))


def test_FU_06_fused_gate_and_up_become_separate_again(transport):
    landed = {}

    def declare(rank):
        if rank < 2:
            mine = slice(3 * rank, 3 * rank + 3)
            return Manifest.from_views(gate_up_views(torch.cat([GATE[mine], UP[mine]]), 2, rank)), None
        landed[rank - 2] = [torch.full((2, 4), float(POISON)) for _ in range(2)]
        return None, Manifest.from_views(separate_views(*landed[rank - 2], 3, rank - 2))

    refit(5, declare, transport=transport)
    for rank, (gate, up) in landed.items():
        assert same_bits(gate, GATE[2 * rank : 2 * rank + 2])
        assert same_bits(up, UP[2 * rank : 2 * rank + 2])


def test_FU_05_a_part_in_memory_of_its_own_belongs_to_no_fused_tensor():
    apart = {name: torch.full(part.shape, float(POISON)) for name, part in QKV.items()}

    def declare(rank):
        if rank:
            return None, Manifest.from_torch(apart)
        return Manifest.from_torch({name: part.clone() for name, part in QKV.items() if name != "k"}), None

    for error in refused_refit(2, declare):
        assert error.missing == ("k",)
        assert "fused" not in error.message
