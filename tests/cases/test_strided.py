"""Cases ST-*: tensors that tensor parallelism cut first and FSDP cut again, in the order that torch really uses."""

from __future__ import annotations

import pytest
import torch
from tests.cases.dense import POISON, TIMEOUT, arange, lands_right, same_bits, split
from tests.cases.worlds import default_group, mesh_of

import reshard
from reshard.layouts.layout import Layout
from reshard.layouts.mesh import Mesh


class Shard:
    def __init__(self, dim):
        self.dim = dim


class _StridedShard(Shard):
    """Read by its name and attributes, as torch's own."""

    def __init__(self, dim, split_factor):
        super().__init__(dim)
        self.split_factor = split_factor


def test_ST_01_fsdp_over_tp_arrives_in_logical_row_order(transport):
    mesh = Mesh({"dp": 2, "tp": 2}, range(4))
    src = Layout.from_placements((4, 1), "float32", mesh, [_StridedShard(0, 2), Shard(0)])
    rows = {mesh.coordinate(rank): [box.start[0] for box in src.boxes(rank)] for rank in range(4)}
    assert rows == {(0, 0): [0], (0, 1): [2], (1, 0): [1], (1, 1): [3]}
    lands_right(arange(4, 1), src, split((4, 1), [4], ()), 5, transport=transport)


def _fsdp_over_tp(ctx, shape):
    """A parameter that torch itself splits by TP and then by FSDP2; rank 4 wants it whole."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import Shard as TorchShard

    full = arange(*shape)
    with default_group(ctx):
        mesh = mesh_of([[0, 1], [2, 3]], ("dp", "tp"))
        if ctx.rank == 4:
            # torch makes no group for the parts of a mesh without all ranks, so this rank only calls what all call.
            target = torch.full(shape, float(POISON))
            reshard.reshard(None, target, dst_layout=split(shape, [4], ()), timeout=TIMEOUT)
            return target
        module = torch.nn.Module()
        local = torch.chunk(full, 2)[mesh.get_local_rank("tp")].clone()
        weight = DTensor.from_local(local, mesh["tp"], [TorchShard(0)], shape=full.shape, stride=full.stride())
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
        fully_shard(module, mesh=mesh["dp"])
        reshard.reshard(module.weight, None, timeout=TIMEOUT)
        mine = module.weight.to_local().flatten().tolist()
        layouts = Layout.candidates_from_dtensor(module.weight)
        return mine, [
            [n for box in one.boxes(ctx.rank) for n in full[_rows(box)].flatten().tolist()] for one in layouts
        ]


def _rows(box):
    return tuple(slice(lo, hi) for lo, hi in zip(box.start, box.stop, strict=True))


@pytest.mark.parametrize("shape", [(4, 1), (5,), (6,), (7,), (9, 2)])
def test_ST_01_ST_02_what_fsdp2_over_tp_really_holds_arrives_in_logical_order(pool, shape):
    """5 and 6 are the sizes for which trackers hold two readings; torch's own local tensors decide."""
    *sources, landed = pool.run(_fsdp_over_tp, shape, ranks=5)
    assert same_bits(landed, arange(*shape))
    assert all(mine in readings for mine, readings in sources)


def _one_axis(ctx, size):
    from torch.distributed.tensor import DTensor, distribute_tensor
    from torch.distributed.tensor.placement_types import _StridedShard as TorchStrided

    with default_group(ctx):
        mesh = mesh_of([0, 1])
        if ctx.rank == 2:
            target = torch.full((size,), float(POISON))
            reshard.reshard(None, target, dst_layout=split((size,), [2], ()), timeout=TIMEOUT)
            return target
        source = distribute_tensor(arange(size), mesh, [TorchStrided(0, split_factor=2)], src_data_rank=None)
        assert isinstance(source, DTensor)
        reshard.reshard(source, None, timeout=TIMEOUT)
        return source.to_local().tolist()


@pytest.mark.parametrize("size", [5, 6, 8])
def test_ST_02_a_strided_shard_of_one_axis_is_what_torch_puts_there(pool, size):
    *sources, landed = pool.run(_one_axis, size, ranks=3)
    assert sorted(value for local in sources for value in local) == list(range(size))
    assert same_bits(landed, arange(size))
