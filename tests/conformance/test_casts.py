"""Casts on the way: whatever the layouts and the memory, what lands is ``tensor.to(dtype)``, and nothing beside it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from reshard.layouts.bound import BoundPiece, binding_of
from reshard.layouts.box import Box
from reshard.layouts.layout import Layout
from reshard.layouts.mesh import Mesh
from reshard.layouts.piece import Piece, TensorSpec
from reshard.plan.plan import Plan, plan_refit
from reshard.refit.fingerprints import of_share
from reshard.testing.memory_world import run_plan
from reshard.testing.oracle import Memory, contiguous_memory, cut, dense
from reshard.testing.processes import RanksFailed
from reshard.testing.strategies import memories, shapes, sides, topologies
from reshard.transports import copies as copies_module
from reshard.transports.copies import carry_out, wire_copies
from reshard.transports.memory import MemoryTransport
from reshard.transports.views import BoundMemory

SLOW_TO_DRAW = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
DTYPES = [  # of the source's memory, on the wire, of the destination's memory
    ("float32", "bfloat16", "bfloat16"),
    ("float32", "float16", "float16"),
    ("float64", "float32", "float32"),
    ("float64", "bfloat16", "bfloat16"),
    ("float16", "bfloat16", "bfloat16"),
    ("bfloat16", "bfloat16", "float32"),
    ("float16", "float16", "float64"),
]


def same(got, want):
    """Bit by bit, but of a NaN only that it is one: torch's own kernels differ in its bits."""
    return got.dtype == want.dtype and torch.equal(got.isnan(), want.isnan()) and torch.equal(*map(no_nan, (got, want)))


def no_nan(tensor):
    return torch.where(tensor.isnan(), torch.zeros_like(tensor), tensor)


@dataclass
class World:
    plan: Plan
    src: dict[int, Memory]
    dst: dict[int, Memory]
    whole: dict[str, torch.Tensor]
    """As the source holds them: NaNs and infinities among them."""

    wanted: dict[str, torch.Tensor]
    casts: dict[str, str]


@st.composite
def worlds(draw, domains=False):
    """Bytes of odd number before what is cast, so that its place in a bucket is that of no element."""
    held, wire, wanted = draw(st.sampled_from(DTYPES))
    specs = [TensorSpec("a", draw(shapes(max_dims=1)), "uint8")]
    specs += [TensorSpec(name, draw(shapes(max_dims=3)), wire) for name in ("b", "c")]
    world = []
    for name, dtype in (("trainer", held), ("generator", wanted)):
        side = draw(sides(specs, name=name, world=3, wants=name == "generator"))
        dtypes = {spec.name: "uint8" if spec.name == "a" else dtype for spec in specs}
        plain = draw(st.booleans())
        made = {
            rank: contiguous_memory(pieces, dtypes) if plain else draw(memories(pieces, dtypes))
            for rank, pieces in side.pieces.items()
        }
        world.append((side.manifest, made))
    (src, src_memory), (dst, dst_memory) = world
    topology = draw(topologies(src.size + dst.size)) if domains else None
    plan = plan_refit(src, dst, topology, cut_nbytes=32)
    whole = {s.name: dense(s.shape, "uint8" if s.name == "a" else held, seed=at) for at, s in enumerate(specs)}
    casts = {} if held == wire == wanted else dict.fromkeys("bc", "source" if wire == wanted else "destination")
    return World(
        plan,
        {plan.rank_of(src.world, rank): memory for rank, memory in src_memory.items()},
        {plan.rank_of(dst.world, rank): memory for rank, memory in dst_memory.items()},
        whole,
        {n: t if n == "a" else t.to(getattr(torch, wire)).to(getattr(torch, wanted)) for n, t in whole.items()},
        casts,
    )


def move(world, staging_nbytes, verify):
    for memory in world.src.values():
        memory.fill(world.whole)
    for memory in world.dst.values():
        memory.poison(world.wanted)
    gaps = {rank: [buffer.clone() for buffer in memory.buffers] for rank, memory in world.dst.items()}
    try:
        programs = run_plan(
            world.plan,
            {rank: memory.pieces for rank, memory in world.src.items()},
            {rank: memory.pieces for rank, memory in world.dst.items()},
            staging_nbytes=staging_nbytes,
            verify=verify,
            casts=world.casts,
            runs=2,
            timeout=20,
        )
    except RanksFailed as error:
        assume("no common grid" not in str(error))
        raise
    for rank, memory in world.dst.items():
        for bound in memory.pieces:
            want = cut(world.wanted[bound.piece.name], bound.piece.box).reshape(bound.view.shape)
            assert same(bound.view, want), (bound.piece, bound.view, want)
        memory.poison(world.wanted)
        assert all(map(torch.equal, memory.buffers, gaps[rank])), "written beside the pieces"
    return programs


STAGING = st.sampled_from((512, 1 << 10, 1 << 16))


@pytest.mark.parametrize("verify", ["none", "sum", "fingerprint"])
@settings(SLOW_TO_DRAW, max_examples=120)
@given(world=worlds(), staging_nbytes=STAGING)
def test_what_lands_is_the_tensor_cast_once_whatever_lies_where(verify, world, staging_nbytes):
    move(world, staging_nbytes, verify)


@settings(SLOW_TO_DRAW, max_examples=120)
@given(world=worlds(domains=True), staging_nbytes=STAGING)
def test_what_is_handed_on_between_domains_is_cast_once_too(world, staging_nbytes):
    move(world, staging_nbytes, "sum")


@settings(SLOW_TO_DRAW, max_examples=60)
@given(world=worlds(), most=st.sampled_from((1, 7, 64)))
def test_what_lands_is_the_tensor_cast_once_however_few_narrow_rows_fit_into_scratch(world, most):
    with (
        mock.patch.object(copies_module, "_NARROW", range(1, 257)),
        mock.patch.object(copies_module, "_ROWS_NUMEL", most),
    ):
        move(world, 512, "none")


@settings(SLOW_TO_DRAW, max_examples=60)
@given(world=worlds())
def test_fingerprints_of_cast_sources_are_those_of_their_dense_cast(world):
    plain = {spec.name: world.whole[spec.name].to(getattr(torch, spec.dtype)) for spec in world.plan.specs}
    for rank, memory in world.src.items():
        memory.fill(world.whole)
        wanted = [b.piece for b in memory.pieces if b.piece.name in plain]
        dense_pieces = [bound(piece.name, cut(plain[piece.name], piece.box), piece.box) for piece in wanted]
        share = of_share(world.plan, rank, memory.pieces, world.casts)
        assert share == of_share(world.plan, rank, dense_pieces, world.casts)


@settings(SLOW_TO_DRAW, max_examples=60)
@given(world=worlds(), staging_nbytes=STAGING)
def test_fingerprints_made_while_packing_are_those_of_the_sources(world, staging_nbytes):
    made = {program.rank: program.made_fingerprints for program in move(world, staging_nbytes, "fingerprint")}
    for rank, memory in world.src.items():
        share = of_share(world.plan, rank, memory.pieces, world.casts)
        assert of_share(world.plan, rank, memory.pieces, world.casts, made.get(rank)) == share


@pytest.mark.parametrize("spoil", [None, float("nan")])
def test_what_was_summed_while_packing_is_not_read_again(spoil):
    held, target = torch.randn(32, 25), torch.zeros(32, 25, dtype=torch.bfloat16)
    if spoil is not None:
        held[3, 4] = spoil
    src, dst = (Layout((32, 25), "bfloat16", Mesh({"x": 1}, [rank]), ()) for rank in (0, 1))
    plan, pieces, casts = plan_refit(src, dst), [bound("tensor", held)], {"tensor": "source"}
    sender, _ = run_plan(
        plan, {0: pieces}, {1: [bound("tensor", target)]}, staging_nbytes=512, verify="fingerprint", casts=casts
    )
    share, made = of_share(plan, 0, pieces, casts), sender.made_fingerprints
    assert len(made[0][0]) > 1, "in several buckets"
    held.zero_()
    assert of_share(plan, 0, pieces, casts, made) == share
    _, *rest = made[0][0].items()
    assert of_share(plan, 0, pieces, casts, {0: [dict(rest)]}) == {"tensor": 0}, "a part is missing: all is read"


def bound(name, tensor, box=None):
    return BoundPiece(Piece(name, box or Box.whole(tensor.shape)), binding_of(tensor), tensor)


@pytest.mark.parametrize("verify", ["sum", "fingerprint"])
def test_a_byte_of_a_cast_bucket_that_changes_on_the_way_is_named(monkeypatch, verify):
    post, spoiled = MemoryTransport.post_send, []

    def post_send(transport, peer, payload):
        if not spoiled and payload.numel() > 100:
            payload = payload.clone()
            payload[17] ^= 0x40
            spoiled.append((transport.rank, peer))
        return post(transport, peer, payload)

    monkeypatch.setattr(MemoryTransport, "post_send", post_send)
    held, target = torch.randn(32, 24), torch.zeros(32, 24, dtype=torch.bfloat16)
    src, dst = (Layout((32, 24), "bfloat16", Mesh({"x": 1}, [rank]), ()) for rank in (0, 1))
    plan = plan_refit(src, dst)
    with pytest.raises(RanksFailed, match=r"'tensor': .* does not hold the bytes sent"):
        run_plan(
            plan,
            {0: [bound("tensor", held)]},
            {1: [bound("tensor", target)]},
            staging_nbytes=1024,
            verify=verify,
            casts={"tensor": "source"},
        )
    assert spoiled


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("base", [0, 1])
@pytest.mark.parametrize("transposed", [False, True])
def test_large_casts_take_little_memory_wherever_the_wire_lies(pack, base, transposed):
    """A bucket at an odd byte, and memory in another order than the wire, of more elements than scratch holds."""
    shape = (700, 1100)
    memory = torch.randn(shape[::-1]).t() if transposed else torch.randn(shape)
    expected = memory.bfloat16()
    wire = torch.zeros(base + 2 * memory.numel(), dtype=torch.uint8)
    ((region,),) = [
        list(BoundMemory([bound("w", memory)]).regions(TensorSpec("w", shape, "bfloat16"), Box.whole(shape)))
    ]
    copies = wire_copies([(Box.whole(shape), 0, region)], wire, base, pack=pack)
    assert bool(copies.stepwise) == bool(base or transposed)
    if not pack:
        wire[base:] = expected.contiguous().view(torch.uint8).flatten()
        memory.zero_()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        carry_out(copies)
    sizes = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert sum(size for size in sizes if size > 0) <= 1 << 20, "scratch for a moment"
    landed = wire[base:].clone().view(torch.bfloat16).view(shape) if pack else memory
    assert torch.equal(landed, expected if pack else expected.float())
    assert copies.nbytes == 2 * memory.numel()


@pytest.mark.parametrize("held", ["float16", "float32", "float64"])
def test_narrow_rows_of_many_tensors_are_cast_together_exactly_and_in_little_memory(held):
    """Columns of large, small and 3-d tensors, end to end in one bucket; one is too wide to be brought together."""
    placed, expected, at = [], [], 0
    for shape, columns in (((700, 640), 128), ((64, 64), 16), ((5, 7, 90), 30), ((4, 1024), 512), ((3, 33), 32)):
        memory = torch.randn(shape).to(getattr(torch, held))
        memory.view(-1)[::97], memory.view(-1)[1::97] = float("nan"), float("inf")
        box = Box((0,) * len(shape), (*shape[:-1], columns))
        (region,) = BoundMemory([bound("w", memory)]).regions(TensorSpec("w", shape, "bfloat16"), box)
        placed.append((box, at, region))
        expected.append(memory[..., :columns].to(torch.bfloat16).flatten())
        at += 2 * box.numel
    wire = torch.zeros(at, dtype=torch.uint8)
    copies = wire_copies(placed, wire, 0, pack=True)
    assert (len(copies.casts[0]), copies.nbytes) == (1, at)

    def landed():
        wire.zero_()
        carry_out(copies)
        assert same(wire.clone().view(torch.bfloat16), torch.cat(expected))

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        carry_out(copies)
    sizes = [event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    assert sum(size for size in sizes if size > 0) <= 8 << 16, "scratch for a moment"
    landed()
    with ThreadPoolExecutor(1) as other:  # with scratch of its own
        other.submit(landed).result()
    landed()
