"""Verification: bytes that were changed on the way, or after they landed, are named; what it cannot see is known."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.errors import VerifyError
from reshard.layouts.bound import bind_shards
from reshard.layouts.box import Box
from reshard.layouts.layout import Layout
from reshard.layouts.mesh import Mesh
from reshard.layouts.piece import Piece, TensorSpec
from reshard.plan.plan import plan_refit
from reshard.testing.memory_world import run_plan
from reshard.testing.oracle import bits, contiguous_memory, dense, local_shard, poisoned
from reshard.testing.processes import RanksFailed
from reshard.testing.strategies import DTYPES, memories, partitions, shapes
from reshard.transports.checks import Checks
from reshard.transports.memory import MemoryTransport
from reshard.transports.verify import box_sum
from reshard.transports.views import BoundMemory

KINDS = ("sum", "fingerprint")
SRC = Layout((32, 24), "bfloat16", Mesh({"x": 2}, [0, 1]), ("x",))
DST = Layout((32, 24), "bfloat16", Mesh({"y": 2}, [2, 3]), (None, "y"))


def run(verify, *, spoil_source=None):
    whole = dense(SRC.shape, SRC.dtype)
    src = {rank: local_shard(whole, SRC, rank) for rank in SRC.mesh.ranks}
    dst = {rank: poisoned(local_shard(whole, DST, rank)) for rank in DST.mesh.ranks}
    if spoil_source is not None:
        spoil_source(src)
    run_plan(
        plan_refit(SRC, DST),
        {rank: bind_shards("tensor", SRC, rank, local) for rank, local in src.items()},
        {rank: bind_shards("tensor", DST, rank, local) for rank, local in dst.items()},
        staging_nbytes=1024,
        verify=verify,
        timeout=20,
    )
    return dst


def spoil_landed(monkeypatch, spoil):
    """Change what has landed on rank 3 before it is compared."""
    compare = Checks.compare

    def spoiled(checks, deadline):
        if checks._rank == 3:
            (piece,) = checks._dst._by_name["tensor"]
            spoil(bits(piece.view))
        compare(checks, deadline)

    monkeypatch.setattr(Checks, "compare", spoiled)


def flip_a_bit(landed):
    landed[5, 2] ^= 1


def swap_two_blocks(landed):
    """Two blocks of four rows, both from source rank 0 and of equal size, change their places."""
    landed[0:4], landed[4:8] = landed[4:8].clone(), landed[0:4].clone()


@pytest.mark.parametrize("verify", KINDS)
def test_a_flipped_bit_in_a_landed_tensor_is_named(monkeypatch, verify):
    spoil_landed(monkeypatch, flip_a_bit)
    with pytest.raises(RanksFailed) as caught:
        run(verify)
    (failure,) = (f for f in caught.value.failures if f.summary.startswith(VerifyError.__name__))
    assert failure.rank == 3
    assert "'tensor': [0:16, 12:24) from rank 0 to rank 3 does not hold the bytes" in failure.summary
    assert "from rank 1" not in failure.summary, "what came from rank 1 is right"


def test_two_swapped_blocks_are_named_by_the_fingerprint(monkeypatch):
    spoil_landed(monkeypatch, swap_two_blocks)
    with pytest.raises(RanksFailed, match="fingerprint"):
        run("fingerprint")


def test_two_swapped_blocks_do_not_change_the_sum(monkeypatch):
    spoil_landed(monkeypatch, swap_two_blocks)
    run("sum")  # this is what the fingerprint is for


@pytest.mark.parametrize("verify", KINDS)
def test_a_byte_that_changes_on_the_way_is_named(monkeypatch, verify):
    post, spoiled = MemoryTransport.post_send, []

    def post_send(transport, peer, payload):
        if not spoiled and payload.numel() > 100:
            payload = payload.clone()
            payload[17] ^= 0x40
            spoiled.append((transport.rank, peer))
        return post(transport, peer, payload)

    monkeypatch.setattr(MemoryTransport, "post_send", post_send)
    with pytest.raises(RanksFailed) as caught:
        run(verify)
    (sender, receiver) = spoiled[0]
    assert f"from rank {sender} to rank {receiver} does not hold the bytes" in str(caught.value)


@pytest.mark.parametrize("verify", KINDS)
def test_what_was_poison_at_the_source_is_no_fault_of_the_way(verify):
    landed = run(verify, spoil_source=lambda src: src[0].fill_(float("nan")))
    assert landed[2][:16].isnan().all()


def test_without_verification_a_flipped_bit_passes(monkeypatch):
    monkeypatch.setattr(Checks, "compare", None)  # not called at all
    run("none")


# -- the sums themselves -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200)
@given(data=st.data())
def test_a_sum_depends_on_the_box_and_its_bits_not_on_where_they_lie(kind, data):
    shape = data.draw(shapes(max_dims=3).filter(lambda shape: 0 not in shape))
    spec = TensorSpec("w", shape, data.draw(st.sampled_from(DTYPES)))
    whole = {"w": dense(shape, spec.dtype)}
    pieces = [Piece("w", box) for box in data.draw(partitions(shape))]
    odd = data.draw(memories(pieces, {"w": spec.dtype}))
    plain = contiguous_memory([Piece("w", Box.whole(shape))], {"w": spec.dtype})
    odd.fill(whole)
    plain.fill(whole)
    box = data.draw(st.sampled_from([piece.box for piece in pieces] + [Box.whole(shape)]))
    assert sum_of(box, spec, odd, kind) == sum_of(box, spec, plain, kind)


def sum_of(box, spec, memory, kind):
    return box_sum(box, spec, BoundMemory(memory.pieces), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5,), (3, 8), (4, 3, 5), ()])
def test_every_bit_of_a_box_counts(kind, dtype, shape):
    spec = TensorSpec("w", shape, dtype)
    memory = contiguous_memory([Piece("w", Box.whole(shape))], {"w": dtype})
    memory.fill({"w": dense(shape, dtype)})
    before = sum_of(Box.whole(shape), spec, memory, kind)
    (buffer,) = memory.buffers
    for at in range(buffer.numel()):
        buffer[at] ^= 1 << at % 8
        assert sum_of(Box.whole(shape), spec, memory, kind) != before
        buffer[at] ^= 1 << at % 8
    assert sum_of(Box.whole(shape), spec, memory, kind) == before


def test_equal_blocks_at_other_places_have_other_fingerprints():
    spec = TensorSpec("w", (8, 4), "float32")
    memory = contiguous_memory([Piece("w", Box.whole((8, 4)))], {"w": "float32"})
    memory.fill({"w": torch.ones(8, 4)})
    top, bottom = Box((0, 0), (4, 4)), Box((4, 0), (8, 4))
    assert sum_of(top, spec, memory, "sum") == sum_of(bottom, spec, memory, "sum")
    assert sum_of(top, spec, memory, "fingerprint") != sum_of(bottom, spec, memory, "fingerprint")


@settings(max_examples=200)
@given(data=st.data())
def test_the_fingerprints_of_any_boxes_that_make_up_a_tensor_add_up_to_its_own(data):
    """Rows that cut words in two, strides, several blocks: layouts do not change what a tensor's fingerprint is."""
    shape = data.draw(shapes(max_dims=3).filter(lambda shape: 0 not in shape))
    spec = TensorSpec("w", shape, data.draw(st.sampled_from(DTYPES)))
    whole = {"w": dense(shape, spec.dtype)}
    pieces = [Piece("w", box) for box in data.draw(partitions(shape))]
    cut = data.draw(memories(pieces, {"w": spec.dtype}))
    plain = contiguous_memory([Piece("w", Box.whole(shape))], {"w": spec.dtype})
    cut.fill(whole)
    plain.fill(whole)
    parts = [sum_of(piece.box, spec, cut, "fingerprint") for piece in pieces]
    assert sum(int(part) for part in parts) % 2**64 == int(sum_of(Box.whole(shape), spec, plain, "fingerprint")) % 2**64


@pytest.mark.parametrize("cut", [1, 65536 * 2 - 3, 65536 * 2, 65536 * 2 + 5])
def test_the_fingerprints_of_parts_of_a_row_of_several_blocks_add_up(cut):
    shape = (2, 65536 * 4 + 7 * 2)
    spec = TensorSpec("w", shape, "bfloat16")
    memory = contiguous_memory([Piece("w", Box.whole(shape))], {"w": "bfloat16"})
    memory.fill({"w": dense(shape, "bfloat16")})
    boxes = [Box((0, 0), (2, cut)), Box((0, cut), (1, shape[1])), Box((1, cut), shape)]
    parts = [int(sum_of(box, spec, memory, "fingerprint")) for box in boxes]
    assert sum(parts) % 2**64 == int(sum_of(Box.whole(shape), spec, memory, "fingerprint")) % 2**64


def test_any_two_elements_that_change_places_are_seen():
    shape = (3, 6)
    spec = TensorSpec("w", shape, "uint8")
    memory = contiguous_memory([Piece("w", Box.whole(shape))], {"w": "uint8"})
    memory.fill({"w": torch.arange(18, dtype=torch.uint8).reshape(shape)})
    (buffer,) = memory.buffers
    before = sum_of(Box.whole(shape), spec, memory, "fingerprint")
    for a in range(18):
        for b in range(a):
            buffer[a], buffer[b] = int(buffer[b]), int(buffer[a])
            assert sum_of(Box.whole(shape), spec, memory, "fingerprint") != before
            buffer[a], buffer[b] = int(buffer[b]), int(buffer[a])
    assert sum_of(Box.whole(shape), spec, memory, "fingerprint") == before
