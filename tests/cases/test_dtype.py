"""Cases DQ-*: no bit changes on the way, no byte is read as another dtype, and no block is cut."""

from __future__ import annotations

import pytest
import torch
from tests.cases.dense import POISON, TIMEOUT, arange, lands_right, refit, refused_refit, same_bits, split

import reshard
from reshard.errors import BindingError, LayoutError, ManifestError, PeerError, ReshardError
from reshard.layouts.manifest import Manifest
from reshard.testing.processes import threads

BIAS = "gate.e_score_correction_bias"


def test_DQ_01_a_float32_buffer_among_bfloat16_weights_keeps_every_bit(transport):
    model = {"w": arange(8, 4, dtype=torch.bfloat16), BIAS: 1 + arange(8) * 2.0**-20}
    assert not torch.equal(model[BIAS].bfloat16().float(), model[BIAS]), "a rounded buffer would show"
    engine = {name: torch.full_like(value, POISON) for name, value in model.items()}
    refit(
        2,
        lambda rank: (None, Manifest.from_torch(engine)) if rank else (Manifest.from_torch(model), None),
        transport=transport,
    )
    assert all(same_bits(engine[name], model[name]) for name in model)


@pytest.mark.parametrize(
    ("src_dtype", "dst_dtype", "dst_shape"),
    [
        (torch.float32, torch.bfloat16, (6, 4)),  # a cast that nobody declared
        (torch.bfloat16, torch.float32, (6, 4)),
        (torch.bfloat16, torch.int32, (6, 2)),  # the same bytes read as another dtype
        (torch.bfloat16, torch.int16, (6, 4)),  # the same sizes, another meaning
    ],
)
def test_DQ_02_different_dtypes_are_refused_on_every_rank_and_nothing_is_written(src_dtype, dst_dtype, dst_shape):
    target = torch.full(dst_shape, POISON, dtype=dst_dtype)

    def declare(rank):
        side = Manifest.from_torch({"w": target if rank else arange(6, 4, dtype=src_dtype)})
        return (None, side) if rank else (side, None)

    for error in refused_refit(2, declare):
        assert isinstance(error, ManifestError)
        assert "'w'" in error.message
    assert torch.equal(target, torch.full(dst_shape, POISON, dtype=dst_dtype))


def test_DQ_02_a_source_that_advertises_another_dtype_than_it_stores_is_refused():
    layout = split((6, 4), [0], (), dtype="bfloat16")
    target_layout = split((6, 4), [1], (), dtype="bfloat16")
    target = torch.full((6, 4), POISON, dtype=torch.bfloat16)

    def body(ctx):
        group = ctx.process_group("advertised")
        held = {"src": arange(6, 4), "src_layout": layout}
        wanted = {"dst": target, "dst_layout": target_layout}
        with pytest.raises(ReshardError) as caught:
            reshard.reshard(**(wanted if ctx.rank else held), group=group, timeout=TIMEOUT)
        return caught.value.message

    for message in threads(2, body):
        assert "float32" in message
        assert "bfloat16" in message
    assert torch.equal(target, torch.full_like(target, POISON))


def test_DQ_04_a_shard_edge_inside_a_block_is_refused_by_name():
    """Ten columns in blocks of four, two ranks: the edge at column 5 cuts block [4, 8)."""
    with pytest.raises(LayoutError) as caught:
        reshard.Layout((4, 10), "uint8", reshard.Mesh({"tp": 2}), (None, "tp"), "ceil", (1, 4), name="w")
    assert (caught.value.tensor, caught.value.granule, caught.value.edge) == ("w", 4, 5)
    assert "'w'" in caught.value.message


def test_DQ_04_no_route_cuts_a_block_and_aligned_edges_pass(transport):
    src = reshard.Layout((4, 12), "uint8", reshard.Mesh({"tp": 2}), (None, "tp"), "ceil", (1, 2))
    dst = reshard.Layout((4, 12), "uint8", reshard.Mesh({"tp": 3}, [2, 3, 4]), (None, "tp"), "ceil", (1, 2))
    lands_right(arange(4, 12, dtype=torch.uint8), src, dst, 5, transport=transport)


def test_DQ_04_a_view_whose_edge_cuts_a_block_is_refused_by_name():
    with pytest.raises(LayoutError, match=r"'w'.*edge 5 on dim 1 cuts a block of 4"):
        Manifest.from_views([("w", (4, 10), (0, 5), torch.zeros(4, 5))], granules={"w": (1, 4)})


def test_DQ_05_a_destination_that_is_replaced_after_every_refit_is_still_the_one_that_is_written(transport):
    """The engine swaps in a new parameter after each load; the collective binds what it is given at each call."""
    live = torch.nn.Module()
    live.w = torch.nn.Parameter(torch.full((6, 4), float(POISON)), requires_grad=False)
    source, target = split((6, 4), [0], ()), split((6, 4), [1], ())

    def body(ctx):
        group = ctx.process_group("again")
        seen = []
        for version in (1, 2, 3):
            if ctx.rank == 0:
                reshard.reshard(
                    torch.full((6, 4), float(version)),
                    src_layout=source,
                    group=group,
                    transport=transport,
                    timeout=TIMEOUT,
                )
                continue
            reshard.reshard(dst=live.w, dst_layout=target, group=group, transport=transport, timeout=TIMEOUT)
            seen.append(live.w.detach().unique().tolist())
            live.w = torch.nn.Parameter(live.w * 1.0, requires_grad=False)
        return seen

    assert threads(2, body)[1] == [[1.0], [2.0], [3.0]]


def test_DQ_05_a_compiled_refit_writes_the_same_memory_three_times(transport):
    weights, live = {"w": torch.zeros(6, 4)}, {"w": torch.full((6, 4), float(POISON))}
    address = live["w"].data_ptr()

    def body(ctx):
        side = {"src": Manifest.from_torch(weights)} if ctx.rank == 0 else {"dst": Manifest.from_torch(live)}
        group = ctx.process_group("thrice")
        compiled = reshard.compile_refit(group, **side, transport=transport, timeout=TIMEOUT)
        seen = []
        for version in (1, 2, 3):
            if ctx.rank == 0:
                weights["w"].fill_(version)
            compiled.run(TIMEOUT)
            seen.append((live["w"].unique().tolist(), live["w"].data_ptr()) if ctx.rank else None)
            group.barrier().wait(TIMEOUT)
        return seen

    assert threads(2, body)[1] == [([float(version)], address) for version in (1, 2, 3)]


def test_DQ_05_a_compiled_refit_refuses_to_write_to_a_parameter_that_its_module_has_replaced():
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(torch.full((6, 4), float(POISON)), requires_grad=False)
    orphan = module.w

    def body(ctx):
        side = {"dst": Manifest.from_torch(module)} if ctx.rank else {"src": Manifest.from_torch({"w": arange(6, 4)})}
        group = ctx.process_group("replaced")
        compiled = reshard.compile_refit(group, **side, timeout=TIMEOUT)
        if ctx.rank:
            module.w = torch.nn.Parameter(orphan * 1.0, requires_grad=False)
        with pytest.raises(ReshardError) as caught:
            compiled.run(TIMEOUT)
        return caught.value

    theirs, mine = threads(2, body)
    assert isinstance(mine, BindingError)
    assert "'w'" in mine.message
    assert isinstance(theirs, PeerError)
    assert theirs.rank == 1
    assert torch.equal(orphan, torch.full((6, 4), float(POISON)))
    assert torch.equal(module.w, torch.full((6, 4), float(POISON)))
