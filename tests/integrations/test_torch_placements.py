"""Torch's placements as layouts: the judge is what torch itself puts into each rank's local tensor."""

from __future__ import annotations

import itertools
import json
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor.debug as dtensor_debug
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from reshard.errors import LayoutError
from reshard.layouts.box import Box
from reshard.layouts.layout import Layout, mesh_from_device_mesh
from reshard.layouts.manifest import Manifest
from reshard.layouts.merge import bound_pieces, merge
from reshard.layouts.mesh import Mesh
from reshard.plan.plan import plan_refit

NAMES = ("a", "b", "c")


def mesh_of(shape, rank, ranks=None):
    """A DeviceMesh as ``rank`` sees it, without any process group."""
    grid = torch.arange(int(np.prod(shape))) if ranks is None else torch.tensor(ranks)
    return DeviceMesh("cpu", grid.reshape(shape), mesh_dim_names=NAMES[: len(shape)], _init_backend=False, _rank=rank)


def numbered(shape):
    """A tensor whose elements are their own places in C order."""
    return torch.arange(int(np.prod(shape)), dtype=torch.int64).reshape(shape)


def distributed(shape, mesh_shape, placements, rank, ranks=None):
    """What torch gives a rank of a tensor that every rank has whole; nothing is communicated."""
    return distribute_tensor(numbered(shape), mesh_of(mesh_shape, rank, ranks), placements, src_data_rank=None)


def assert_holds(layout, rank, local):
    """Compare a layout's boxes and local shape with a rank's local tensor of numbered elements."""
    assert layout.local_shape(rank) == tuple(local.shape)
    whole = numbered(layout.shape)
    ours = torch.full(layout.local_shape(rank), -1)
    for shard in layout.shards(rank):
        stop = [at + size for at, size in zip(shard.local_start, shard.box.shape, strict=True)]
        ours[tuple(map(slice, shard.local_start, stop))] = whole[tuple(map(slice, shard.box.start, shard.box.stop))]
    assert ours.tolist() == local.tolist()


PLAIN = (Replicate(), Shard(0), Shard(1), Shard(-1))


@pytest.mark.parametrize("mesh_shape", [(4,), (1,), (2, 3), (3, 2), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("shape", [(8, 12, 6), (5, 7, 3), (1, 10, 2), (3, 0, 5)], ids=str)
def test_every_mix_of_shards_and_replicas_is_what_torch_makes_of_it(mesh_shape, shape):
    for placements in itertools.product(PLAIN, repeat=len(mesh_shape)):
        for rank in range(int(np.prod(mesh_shape))):
            tensor = distributed(shape, mesh_shape, placements, rank)
            assert_holds(Layout.from_dtensor(tensor), rank, tensor.to_local())


def test_ranks_of_a_mesh_may_be_any_in_any_order():
    ranks = [7, 2, 5, 3]
    for rank in ranks:
        tensor = distributed((5, 3), (2, 2), [Shard(0), Shard(1)], rank, ranks)
        layout = Layout.from_dtensor(tensor)
        assert layout.mesh == Mesh({"a": 2, "b": 2}, ranks)
        assert_holds(layout, rank, tensor.to_local())


def test_a_mesh_without_names_gets_some():
    mesh = mesh_from_device_mesh(DeviceMesh("cpu", torch.arange(6).reshape(2, 3), _init_backend=False, _rank=0))
    assert mesh == Mesh({"dim0": 2, "dim1": 3})


STRIDED = (Replicate(), Shard(0), *(_StridedShard(0, split_factor=factor) for factor in (2, 3, 4)))


@pytest.mark.parametrize("mesh_shape", [(2,), (3,), (2, 2), (3, 2), (2, 4)], ids=str)
def test_one_reading_of_strided_shards_is_torchs_own_arithmetic(mesh_shape):
    for size, placements in itertools.product((1, 4, 5, 7, 12), itertools.product(STRIDED, repeat=len(mesh_shape))):
        locals_of = {
            rank: distributed((size,), mesh_shape, placements, rank).to_local()
            for rank in range(int(np.prod(mesh_shape)))
        }
        mesh = Mesh(zip(NAMES, mesh_shape, strict=False))
        own = Layout.candidates_from_placements((size,), "int64", mesh, placements)[-1]
        for rank, local in locals_of.items():
            assert_holds(own, rank, local)


@pytest.mark.parametrize("size", [5, 6, 8])
def test_a_strided_shard_alone_is_several_intervals(size):
    # Case ST-02, the form with one axis; torch says itself where the rows of an uneven one go.
    for rank in range(2):
        tensor = distributed((size,), (2,), [_StridedShard(0, split_factor=2)], rank)
        assert len(Layout.from_dtensor(tensor).boxes(rank)) == 2
        assert_holds(Layout.from_dtensor(tensor), rank, tensor.to_local())


def test_fsdp_over_tp_puts_rows_where_the_case_says():
    # Case ST-01: the naive answer, mesh order, is [0, 2, 1, 3].
    mesh = Mesh({"dp": 2, "tp": 2})
    layout = Layout.from_placements((4, 1), "float32", mesh, [_StridedShard(0, split_factor=2), Shard(0)])
    assert [layout.boxes(rank)[0].start[0] for rank in range(4)] == [0, 2, 1, 3]
    assert layout.placement[0] == ("tp", "dp")


# -- what FSDP2 really makes ---------------------------------------------------------------------------------------


@contextmanager
def fake_world(rank, size):
    """This process as one rank of a world in which nothing is sent."""
    # Torch keeps the results of operators on DTensors, with the mesh as the rank saw it that ran them first.
    for name in ("_clear_sharding_prop_cache", "_clear_fast_path_sharding_prop_cache"):
        getattr(dtensor_debug, name, lambda: None)()
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def fsdp_tensors(mesh_axes, rank, shapes, *, inner, shard_dim=0, fsdp_dim=0):
    """Parameters of these shapes as FSDP2 makes them: cut by ``inner`` on ``shard_dim`` first, then by FSDP.

    Args:
        mesh_axes: Names and sizes; all but ``inner`` are FSDP's, the first of two is replicated (HSDP).
        rank: Whose shards.
        shapes: By parameter name.
        inner: The axis that cut first (tensor or expert parallel), or None.
        shard_dim: The dim that ``inner`` cuts.
        fsdp_dim: The dim that FSDP cuts.
    """
    mesh = init_device_mesh("cpu", tuple(mesh_axes.values()), mesh_dim_names=tuple(mesh_axes))
    module = torch.nn.Module()
    for name, shape in shapes.items():
        tensor = numbered(shape).to(torch.float64)
        if inner is not None:
            tensor = distribute_tensor(tensor, mesh[inner], [Shard(shard_dim)], src_data_rank=None)
        module.register_parameter(name, torch.nn.Parameter(tensor))
    outer = tuple(axis for axis in mesh_axes if axis != inner)
    fully_shard(module, mesh=mesh[outer if len(outer) > 1 else outer[0]], shard_placement_fn=lambda _: Shard(fsdp_dim))
    return {name: tensor.detach() for name, tensor in module.named_parameters()}


def check_world(mesh_axes, shapes, **how):
    """Publish what FSDP2 makes on every rank, merge it, and compare with every rank's local tensors."""
    size = int(np.prod(list(mesh_axes.values())))
    parts, held = {}, {}
    for rank in range(size):
        with fake_world(rank, size):
            tensors = fsdp_tensors(mesh_axes, rank, shapes, **how)
            parts[rank] = Manifest.from_torch(tensors)
            held[rank] = {name: tensor.to_local() for name, tensor in tensors.items()}
    published = {rank: Manifest.from_json(json.loads(json.dumps(part.to_json()))) for rank, part in parts.items()}
    merged = merge(published)
    for name, shape in shapes.items():
        (rule,) = merged.entry(name).holdings
        layout = rule.layout(merged.entry(name).spec)
        assert layout.shape == shape
        for rank in range(size):
            assert_holds(layout, rank, held[rank][name].long())
    for rank in range(size):
        check_pieces(bound_pieces(parts[rank], merged), held[rank])
    return merged


def check_pieces(pieces, locals_of):
    """The pieces of a rank are views of its local tensors, hold what their boxes say, and are all of them."""
    count = dict.fromkeys(locals_of, 0)
    for bound in pieces:
        count[bound.piece.name] += bound.piece.box.numel
        assert bound.binding.buffer == locals_of[bound.piece.name].untyped_storage().data_ptr()
    assert count == {name: local.numel() for name, local in locals_of.items()}
    for bound in pieces:
        first = bound.view.flatten()[0].item()
        assert first == first_number(bound)


def first_number(bound):
    """The number of the first element of a piece in its whole tensor; shapes are in the names (``w5x4``)."""
    shape = tuple(map(int, bound.piece.name[1:].split("x")))
    return int(np.ravel_multi_index(bound.piece.box.start, shape)) if shape else 0


def named_by_shape(*shapes):
    return {"w" + "x".join(map(str, shape)): shape for shape in shapes}


SIZES = named_by_shape(*((size,) for size in (*range(1, 18), 23, 24)), (5, 4), (12, 3))


@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (3, 2), (2, 3), (4, 2), (3, 4)])
def test_fsdp_over_tp_holds_what_fsdp_really_puts_there(dp, tp):
    check_world({"dp": dp, "tp": tp}, SIZES, inner="tp")


def test_hsdp_over_tp_holds_replicas_of_what_fsdp_puts_there():
    check_world({"rep": 2, "dp": 2, "tp": 2}, SIZES, inner="tp")


def test_fsdp_alone_and_hsdp_are_plain_shards():
    check_world({"dp": 4}, SIZES, inner=None)
    check_world({"rep": 2, "dp": 3}, SIZES, inner=None)


def test_experts_are_cut_by_expert_ranks_first_and_then_by_fsdp():
    check_world({"dp": 2, "ep": 3}, named_by_shape((8, 4, 3), (12, 2, 2), (7, 1, 2)), inner="ep")


@pytest.mark.parametrize(("shard_dim", "fsdp_dim"), [(0, 1), (1, 0)])
def test_fsdp_may_cut_another_dim_than_tp(shard_dim, fsdp_dim):
    # FSDP refuses dims other than 0 that do not divide.
    shapes = named_by_shape((5, 8), (8, 4)) if fsdp_dim else named_by_shape((5, 7), (8, 4))
    merged = check_world({"dp": 2, "tp": 2}, shapes, inner="tp", shard_dim=shard_dim, fsdp_dim=fsdp_dim)
    (rule,) = merged.entry(next(iter(shapes))).holdings
    assert rule.placement == ((("tp",), ("dp",)) if fsdp_dim else (("dp",), ("tp",)))


def test_the_shapes_of_all_ranks_choose_between_torchs_two_answers():
    # Seven rows on dp 3 x tp 2: FSDP2 leaves rank 4 empty and gives rank 5 a row; torch's own arithmetic does the
    # opposite. Ranks 0 to 3 hold equal shapes either way, so none of them could decide alone.
    placements = [_StridedShard(0, split_factor=2), Shard(0)]
    mesh = Mesh({"dp": 3, "tp": 2})
    by_fsdp, own = Layout.candidates_from_placements((7,), "int64", mesh, placements)
    assert by_fsdp.boxes(4) == ()
    assert by_fsdp.boxes(5) == (Box((6,), (7,)),)
    assert len(own.boxes(4)) == 1
    assert own.boxes(5) == ()

    parts, held = {}, {}
    for rank in range(6):
        tensor = distributed((7,), (3, 2), placements, rank)  # torch's own arithmetic
        parts[rank] = Manifest.from_torch({"w7": tensor})
        held[rank] = {"w7": tensor.to_local()}
        assert_holds(own, rank, held[rank]["w7"])
    merged = merge(parts)
    (rule,) = merged.entry("w7").holdings
    layout = rule.layout(merged.entry("w7").spec)
    for rank in range(6):
        assert layout.boxes(rank) == own.boxes(rank)
        check_pieces(bound_pieces(parts[rank], merged), held[rank])


def test_local_shapes_that_no_reading_gives_are_refused():
    parts = {}
    for rank in range(4):
        local = torch.zeros(3 if rank == 2 else 2)
        mesh = mesh_of((4,), rank)
        tensor = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=(8,), stride=(1,))
        parts[rank] = Manifest.from_torch({"w": tensor})
    with pytest.raises(LayoutError, match=r"'w': no reading of its placements .*rank 2 holds another shape"):
        merge(parts)


# -- what is refused -----------------------------------------------------------------------------------------------


class Ragged:
    """A placement of some later torch."""

    dim = 0

    def __repr__(self):
        return "Ragged(0)"


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        (
            [Partial(), Shard(0)],
            r"'w': placement .* on mesh axis 'a' holds partial sums, not values\. Reduce first: tensor\.redistribute",
        ),
        (
            [Replicate(), Ragged()],
            r"'w': placement Ragged\(0\) on mesh axis 'b' is not one that reshard knows .*Manifest\.from_views",
        ),
        ([Shard(2), Replicate()], r"'w': placement .* splits dim 2, but the tensor has 2 dims"),
        ([Shard(-3), Replicate()], r"'w': placement .* splits dim -3, but the tensor has 2 dims"),
        ([Shard(0)], r"'w': 1 placements for a mesh of 2 axes .*Give one placement for each mesh axis"),
    ],
)
def test_placements_that_cannot_be_are_refused_with_the_way_out(placements, message):
    with pytest.raises(LayoutError, match=message):
        Layout.from_placements((4, 4), "float32", Mesh({"a": 2, "b": 2}), placements, name="w")


def test_a_scalar_can_only_be_replicated():
    mesh = Mesh({"a": 2})
    assert Layout.from_placements((), "float32", mesh, [Replicate()]).boxes(1) == (Box((), ()),)
    with pytest.raises(LayoutError, match="A scalar can only be replicated"):
        Layout.from_placements((), "float32", mesh, [Shard(0)])


# -- the checkpoint planner as a second opinion --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        (Layout((10, 7), "float32", Mesh({"x": 4}), ("x",), "ceil"), (None, "y")),  # rows to columns, uneven
        (Layout((10, 7), "float32", Mesh({"x": 2, "z": 2}), ("x", "z"), "ceil"), ("y",)),  # a grid to rows
        (Layout((9, 9, 4), "float32", Mesh({"x": 3}), (None, None, "x"), "ceil"), (None, "y")),  # three dims
        (Layout((12, 5), "float32", Mesh({"x": 2, "z": 3}), (("z", "x"),)), ("y",)),  # two axes on one dim
        (Layout((5, 3), "float32", Mesh({"x": 4}), ("x",), "ceil"), ("y",)),  # an empty shard
    ],
)
def test_transfers_are_the_overlaps_that_torchs_checkpoint_planner_reads(src, dst):
    ranks = range(src.mesh.size, src.mesh.size + 3)
    destination = Layout(src.shape, "float32", Mesh({"y": 3}, ranks), dst, "ceil")
    chunks = [(rank, box) for rank in src.mesh.ranks for box in src.boxes(rank)]
    stored = TensorStorageMetadata(
        TensorProperties(dtype=torch.float32), torch.Size(src.shape), [chunk_of(box) for _, box in chunks]
    )
    plan = plan_refit(src, destination)
    for rank in ranks:
        expected = {}
        for box in destination.boxes(rank):
            for item in create_read_items_for_chunk_list("tensor", stored, [chunk_of(box)]):
                sender, chunk = next(c for c in chunks if c[1].start == tuple(item.storage_index.offset))
                start = tuple(map(sum, zip(chunk.start, item.storage_offsets, strict=True)))
                stop = tuple(map(sum, zip(start, item.lengths, strict=True)))
                expected.setdefault(sender, set()).add(Box(start, stop))
        ours = {}
        for transfer in plan.transfers("tensor"):
            if transfer.dst == rank:
                ours.setdefault(transfer.src, set()).add(transfer.box)
        assert ours == expected


def chunk_of(box):
    return ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape))
