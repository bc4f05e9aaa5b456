"""Cases OD-*: who talks first, in which order things were registered, and when a buffer may be used again."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace
from datetime import timedelta
from itertools import groupby

import pytest
import torch
from tests.cases.dense import POISON, SOON, TIMEOUT, arange, refit, refusals, refused_refit, same_bits, split

import reshard
from reshard.errors import DigestError, ManifestError, PeerError, RefitTimeout, TransportError
from reshard.layouts.layout import Layout
from reshard.layouts.manifest import Manifest
from reshard.layouts.mesh import Mesh
from reshard.plan.plan import plan_refit
from reshard.schedule.schedule import plan_schedule
from reshard.testing.processes import threads
from reshard.transports import mover, program


def _first_exchange(ctx, transport):
    group = ctx.process_group("first")
    started = time.monotonic()
    sides = {0: {"src": arange(8), "src_layout": split((8,), [0], ())}}
    target = torch.full((8,), float(POISON))
    sides[3] = {"dst": target, "dst_layout": split((8,), [3], ())}
    reshard.reshard(**sides.get(ctx.rank, {}), group=group, transport=transport, timeout=TIMEOUT)
    return time.monotonic() - started, target


@pytest.mark.parametrize("how", ["torch_p2p", "auto"])
def test_OD_01_ranks_with_nothing_to_do_may_be_part_of_a_group_s_first_exchange(pool, how):
    told = pool.run(_first_exchange, how, ranks=4)
    assert max(seconds for seconds, _ in told) < 5
    assert same_bits(told[3][1], arange(8))


def test_OD_01_members_that_do_not_call_are_named_on_those_that_do():
    barrier = threading.Barrier(4, timeout=20)

    def body(ctx):
        group = ctx.process_group("partial")
        if ctx.rank in (1, 2):
            barrier.wait()  # alive, but it does not call
            return None
        side = {"src": Manifest.from_torch({"w": arange(8)})} if ctx.rank == 0 else {}
        side = side or {"dst": Manifest.from_torch({"w": torch.zeros(8)})}
        with pytest.raises(RefitTimeout) as caught:
            reshard.compile_refit(group, **side, timeout=timedelta(seconds=1))
        barrier.wait()
        return caught.value

    told = threads(4, body)
    assert told[0].ranks == told[3].ranks == (1, 2)
    assert "ranks 1, 2" in told[0].message


TENSORS = 600


def many_tensors():
    """600 tensors of mixed sizes on two sources by rows and on four destinations by columns."""
    sizes = random.Random(7)
    shapes = {f"t{at}": (sizes.choice([2, 4, 32]), sizes.choice([4, 8, 64])) for at in range(TENSORS)}
    src_mesh, dst_mesh = Mesh({"x": 2}, [0, 1]), Mesh({"x": 4}, [2, 3, 4, 5])
    by_name = Manifest.from_layouts({n: Layout(s, "float32", src_mesh, ("x",)) for n, s in sorted(shapes.items())})
    by_size = Manifest.from_layouts(
        {n: Layout(s, "float32", dst_mesh, (None, "x")) for n, s in sorted(shapes.items(), key=lambda row: row[1])}
    )
    return shapes, by_name, by_size


def drains(operations, window):
    """Play what each rank does, where a rank opens its next ``window`` rounds only when the ones before are all done.

    A round of a rank is one send, one receive or one of each; a rank that only sends has one operation open a round.
    An operation is done once its counterpart is open too: the k-th from a to b with the k-th that b expects from a.
    """
    rounds = {
        rank: [list(ops) for _, ops in groupby(mine, key=lambda op: op.round)] for rank, mine in operations.items()
    }
    opened: dict[tuple[str, int, int], int] = {}
    waiting: dict[int, list[tuple[tuple[str, int, int], int]]] = {rank: [] for rank in rounds}
    moved = True
    while moved:
        moved = False
        for rank, left in rounds.items():
            still = [(other, k) for other, k in waiting[rank] if opened.get(other, 0) <= k]
            moved = moved or len(still) < len(waiting[rank])
            waiting[rank] = still
            if still or not left:
                continue
            moved = True
            for op in (op for _ in range(min(window, len(left))) for op in left.pop(0)):
                a, b = (rank, op.peer) if op.kind == "send" else (op.peer, rank)
                k = opened.get((op.kind, a, b), 0)
                opened[op.kind, a, b] = k + 1
                waiting[rank].append((("recv" if op.kind == "send" else "send", a, b), k))
    return not any(waiting.values()) and not any(rounds.values())


def operations_of(src, dst, **options):
    schedule = plan_schedule(plan_refit(src, dst), **options)
    return {rank: schedule.for_rank(rank) for rank in range(schedule.plan.size)}


@pytest.mark.parametrize("window", [1, 2, 64])
@pytest.mark.parametrize("dst_ranks", [[1, 0], [1, 2, 0], [2, 0, 3, 1]], ids=str)
def test_OD_02_ranks_that_both_send_and_receive_drain_with_any_window(dst_ranks, window):
    size = len(dst_ranks)
    src, dst = split((12, 12), list(range(size)), ("x",)), split((12, 12), dst_ranks, ("x",))
    by_columns = split((12, 12), dst_ranks, (None, "x"))
    assert drains(operations_of(src, dst, staging_nbytes=256), window)
    assert drains(operations_of(src, by_columns, staging_nbytes=256), window)


@pytest.mark.parametrize("window", [1, 2, 64])
def test_OD_02_any_window_of_open_operations_drains(window):
    _, src, dst = many_tensors()
    operations = operations_of(src, dst, staging_nbytes=64 << 10, bucket_nbytes=512, depth=2)
    assert sum(map(len, operations.values())) > 2000
    for ops in operations.values():
        assert len({(op.round, op.kind) for op in ops}) == len(ops), "a round has one send and one receive at most"
    assert drains(operations, window)


def test_OD_02_the_simulator_sees_a_cycle():
    """Two sources serve two destinations in an order of which each destination expects the opposite."""
    good = operations_of(split((8, 8), [0, 1], ("x",)), split((8, 8), [2, 3], ()))
    bad = {
        rank: [
            replace(op, round=at) for at, op in enumerate(sorted(ops, key=lambda op: op.peer, reverse=rank in (1, 2)))
        ]
        for rank, ops in good.items()
    }
    assert drains(good, 1)
    assert drains(bad, 2)
    assert not drains(bad, 1)


@pytest.mark.parametrize("depth", [1, 2, 64])
def test_OD_02_the_real_program_drains_with_any_depth(depth):
    shapes, _, _ = many_tensors()
    full = {name: at + arange(*shape) for at, (name, shape) in enumerate(shapes.items())}
    landed = {}

    def declare(rank):
        if rank < 2:
            halves = {n: t.chunk(2)[rank].contiguous() for n, t in sorted(full.items())}
            starts = {n: (rank * t.shape[0] // 2, 0) for n, t in full.items()}
            return Manifest.from_views([(n, shapes[n], starts[n], part) for n, part in halves.items()]), None
        by_size = sorted(shapes.items(), key=lambda row: row[1])
        landed[rank] = {n: torch.full((rows, cols // 4), float(POISON)) for n, (rows, cols) in by_size}
        start = {n: (0, (rank - 2) * shapes[n][1] // 4) for n in shapes}
        return None, Manifest.from_views([(n, shapes[n], start[n], part) for n, part in landed[rank].items()])

    refit(6, declare, transport="torch_p2p", depth=depth, bucket_nbytes=1024, staging_nbytes=256 << 10)
    for rank, tensors in landed.items():
        assert all(same_bits(part, full[n].chunk(4, 1)[rank - 2]) for n, part in tensors.items())


def registered(names, shapes, value):
    return Manifest.from_torch({name: torch.full(shapes.get(name, (8,)), float(value)) for name in names})


def test_OD_03_the_order_of_registration_does_not_matter(transport):
    values = {"A": 1.0, "B": 2.0, "C": 3.0}
    wanted = {rank: {name: torch.full((8,), float(POISON)) for name in "ACB"} for rank in (1, 2)}

    def declare(rank):
        if rank:
            return None, Manifest.from_torch(wanted[rank])
        return Manifest.from_torch({name: torch.full((8,), value) for name, value in values.items()}), None

    refit(3, declare, transport=transport)
    assert all(wanted[rank][name].tolist() == [values[name]] * 8 for rank in (1, 2) for name in "ABC")


@pytest.mark.parametrize(
    ("src_names", "dst_names", "dst_shapes", "first"),
    [
        ("AB", "ACB", {}, "'C', which no source rank holds"),  # the destination wants what the source lacks
        ("ABC", "ACB", {"B": (6,)}, "'B': the source's shape is [8]"),  # another shape
    ],
)
def test_OD_03_a_difference_is_named_on_every_rank_and_nothing_moves(src_names, dst_names, dst_shapes, first):
    wanted = {rank: {n: torch.full(dst_shapes.get(n, (8,)), float(POISON)) for n in dst_names} for rank in (1, 2)}

    def declare(rank):
        return (None, Manifest.from_torch(wanted[rank])) if rank else (registered(src_names, {}, 1), None)

    errors = refused_refit(3, declare)
    assert all(isinstance(error, ManifestError) and first in error.message for error in errors)
    assert len({error.message for error in errors}) == 1
    assert all(t.tolist() == [float(POISON)] * t.numel() for tensors in wanted.values() for t in tensors.values())


def test_OD_03_destinations_that_disagree_on_a_shape_are_named():
    def declare(rank):
        if rank == 0:
            return registered("AB", {}, 1), None
        return None, registered("AB", {"B": (6,)} if rank == 2 else {}, POISON)

    for error in refused_refit(3, declare):
        assert isinstance(error, ManifestError)
        assert "'B'" in error.message
        assert "[6]" in error.message
        assert "[8]" in error.message


def simple_sides(rank, shape=(8,)):
    side = Manifest.from_torch({"w": torch.full(shape, float(rank))})
    return {"src": side} if rank == 0 else {"dst": side}


@pytest.mark.parametrize(
    "differs",
    [{"strategy": "point-to-point"}, {"verify": "sum"}, {"transport": "torch_p2p"}, {"bucket_nbytes": 4096}],
    ids=lambda option: next(iter(option)),
)
def test_OD_03_ranks_that_choose_different_options_are_told_which(differs):
    def call(rank, group):
        reshard.compile_refit(group, **simple_sides(rank), **(differs if rank == 2 else {}), timeout=TIMEOUT)

    for error in refusals(3, call):
        assert isinstance(error, DigestError)
        assert next(iter(differs)) in error.message
        assert "rank 2" in error.message


@pytest.mark.parametrize(
    "wrong",
    [{"strategy": "fastest"}, {"verify": "sums"}, {"transport": "tcp"}, {"staging_nbytes": "12 apples"}],
    ids=lambda option: next(iter(option)),
)
def test_OD_03_an_option_that_cannot_work_on_one_rank_is_told_to_all(wrong):
    def call(rank, group):
        reshard.compile_refit(group, **simple_sides(rank), **(wrong if rank == 1 else {}), timeout=TIMEOUT)

    errors = refusals(3, call)
    assert all(isinstance(errors[rank], PeerError) and errors[rank].rank == 1 for rank in (0, 2))
    assert all(next(iter(wrong.values())) in error.message for error in errors)


def test_OD_03_ranks_that_make_different_calls_are_told():
    """Two compile a refit, one calls the collective."""

    def call(rank, group):
        if rank == 2:
            reshard.reshard(dst=torch.zeros(8), dst_layout=split((8,), [2], ()), group=group, timeout=TIMEOUT)
        reshard.compile_refit(group, **simple_sides(rank), timeout=TIMEOUT)

    for error in refusals(3, call):
        assert isinstance(error, TransportError)
        assert "same calls in the same order" in error.message


def test_OD_03_ranks_that_run_different_refits_are_told():
    ready = threading.Barrier(2, timeout=20)

    def body(ctx):
        group = ctx.process_group("two refits")
        first = reshard.compile_refit(group, **simple_sides(ctx.rank), timeout=TIMEOUT)
        second = reshard.compile_refit(group, **simple_sides(ctx.rank, (9,)), timeout=TIMEOUT)
        ready.wait()
        started = time.monotonic()
        with pytest.raises(DigestError, match="same calls in the same order"):
            (first if ctx.rank == 0 else second).run(TIMEOUT)
        return time.monotonic() - started

    assert max(threads(2, body)) < SOON


def test_OD_03_a_rank_whose_own_declaration_is_wrong_is_named_on_the_others():
    src, dst = split((8,), [0], ()), split((8,), [1, 2], ("x",))

    def call(rank, group):
        if rank == 0:
            reshard.reshard(arange(8), src_layout=src, group=group, timeout=TIMEOUT)
        reshard.reshard(dst=torch.zeros(4 + (rank == 2)), dst_layout=dst, group=group, timeout=TIMEOUT)

    errors = refusals(3, call)
    assert "float32 [5]" in errors[2].message
    for rank in (0, 1):
        assert isinstance(errors[rank], PeerError)
        assert errors[rank].rank == 2
        assert errors[2].message in errors[rank].message


def test_OD_03_a_plain_tensor_without_a_layout_is_told_to_all():
    def call(rank, group):
        layout = {"src_layout": split((8,), [0], ())} if rank == 0 else {}
        tensors = (arange(8), None) if rank == 0 else (None, torch.zeros(8))
        reshard.reshard(*tensors, **layout, group=group, timeout=TIMEOUT)

    errors = refusals(2, call)
    assert "dst_layout=" in errors[1].message
    assert isinstance(errors[0], PeerError)


def test_OD_03_two_ranks_that_declare_different_layouts_of_one_side_are_told():
    def call(rank, group):
        if rank == 0:
            reshard.reshard(arange(8), src_layout=split((8,), [0], ()), group=group, timeout=TIMEOUT)
        layout = split((8,), [1, 2], ("x",) if rank == 1 else ())
        target = torch.zeros(layout.local_shape(rank))
        reshard.reshard(dst=target, dst_layout=layout, group=group, timeout=TIMEOUT)

    errors = refusals(3, call)
    assert all("'tensor'" in error.message for error in errors)


@pytest.mark.parametrize("sides", [("src", "src"), ("dst", "dst"), (None, None)])
def test_OD_03_a_refit_without_a_source_or_a_destination_is_refused_everywhere(sides):
    def call(rank, group):
        side = {sides[rank]: Manifest.from_torch({"w": arange(8)})} if sides[rank] else {}
        reshard.compile_refit(group, **side, timeout=TIMEOUT)

    assert all(isinstance(error, ManifestError) for error in refusals(2, call))


def test_OD_03_a_rank_of_the_mesh_that_passes_nothing_is_named():
    def call(rank, group):
        src = {"src": arange(8, 2)[4 * rank : 4 * rank + 4], "src_layout": split((8, 2), [0, 1], ("x",))}
        dst = {"dst": torch.zeros(8, 2), "dst_layout": split((8, 2), [2], ())}
        reshard.reshard(**({} if rank == 1 else src if rank == 0 else dst), group=group, timeout=TIMEOUT)

    for error in refusals(3, call):
        assert "rank 1" in error.message


def test_OD_07_a_shared_staging_buffer_waits_for_its_slowest_reader(transport, monkeypatch):
    """Five chunks of 16 bytes through 64 bytes of staging, to two ranks of which one is late with every copy.

    The late one waits until the sender is done, which a right sender never is before; the bound keeps the test short.
    """
    chunks = torch.arange(5.0).repeat_interleave(4).reshape(20, 1)
    wide = torch.cat([chunks, chunks * 0 - 1], 1)
    src, dst = split((20, 1), [0], ()), split((20, 1), [1, 2], ())
    sender_done = threading.Event()
    carry_out = program.carry_out

    def late(copies):
        if threading.current_thread().name == "rank 2":
            sender_done.wait(0.005)
        carry_out(copies)

    for module in (mover, program):
        monkeypatch.setattr(module, "carry_out", late)
    apart = {rank: torch.full((20, 2), float(POISON)) for rank in (1, 2)}

    def body(ctx):
        group = ctx.process_group("slow reader")
        for version in range(20):
            wide[:, 0] = chunks[:, 0] + 10 * version
            group.barrier().wait(TIMEOUT)
            sender_done.clear()
            options = {"group": group, "transport": transport, "staging_nbytes": 64, "timeout": TIMEOUT}
            if ctx.rank == 0:
                reshard.reshard(wide[:, :1], src_layout=src, **options)
                wide[:, 0] = -2  # the sender's memory is its own again
                sender_done.set()
            else:
                reshard.reshard(dst=apart[ctx.rank][:, :1], dst_layout=dst, **options)
                assert torch.equal(apart[ctx.rank][:, 0], chunks[:, 0] + 10 * version), version
            group.barrier().wait(TIMEOUT)

    threads(3, body, timeout=60)
