"""Cases PC-*: few messages and no byte twice. Times are compared in benchmarks, not here."""

from __future__ import annotations

import pytest
import torch
from tests.cases.dense import arange, lands_right, refit, refused_refit, split

from reshard.errors import ManifestError
from reshard.layouts.manifest import Manifest
from reshard.plan.plan import plan_refit
from reshard.schedule.schedule import plan_schedule
from reshard.topology.presets import hosts

COLUMNS = ((4096, 64), split((4096, 64), [0, 1, 2, 3], (None, "x")), split((4096, 64), [4, 5], (None, "x")))
REPLICAS = (
    (64, 16),
    split((64, 16), list(range(8)), ("tp",), axes={"dp": 4, "tp": 2}),
    split((64, 16), [8, 9], ("x",)),
)


def test_PC_01_columns_travel_in_one_message_a_pair():
    _, src, dst = COLUMNS
    plan = plan_refit(src, dst)
    assert len(plan.pair_nbytes()) == 4
    assert plan_schedule(plan).messages == 4


def test_PC_01_column_shards_arrive_over_four_pairs(transport):
    shape, src, dst = COLUMNS
    reports = lands_right(arange(*shape), src, dst, 6, transport=transport)
    assert [report.sent_nbytes for report in reports[:4]] == [4096 * 16 * 4] * 4


def test_PC_02_replicas_send_each_byte_once_in_two_messages():
    _, src, dst = REPLICAS
    plan = plan_refit(src, dst)
    assert (plan.wire_nbytes, plan_schedule(plan).messages) == (4096, 2)


def test_PC_02_replicas_deliver_4096_bytes_in_all(transport):
    shape, src, dst = REPLICAS
    reports = lands_right(arange(*shape), src, dst, 10, transport=transport)
    assert sum(report.wire_nbytes for report in reports) == 4096


def test_PC_02_a_replica_that_differs_is_reported():
    """Ranks that publish one name by hand are compared before any byte moves."""
    landed = torch.zeros(64, 16)

    def declare(rank):
        if rank == 2:
            return None, Manifest.from_torch({"w": landed})
        return Manifest.from_torch({"w": arange(64, 16) + rank}), None

    for error in refused_refit(3, declare):
        assert isinstance(error, ManifestError)
        assert "ranks 0 and 1" in error.message
    assert not landed.any()


NODES = ((0, 1), (2, 3, 4, 5), (6, 7))


@pytest.mark.parametrize("known", [True, False])
def test_PC_05_one_copy_enters_each_node_where_nodes_are_known_and_every_replica_is_exact(transport, known):
    """Two ranks with the weights, three pairs that want them: two pairs of one node, and one of another."""
    full, landed = arange(64, 16), {}

    def declare(rank):
        half = slice(32 * (rank % 2), 32 * (rank % 2) + 32)
        if rank < 2:
            return Manifest.from_views([("w", (64, 16), (half.start, 0), full[half].clone())]), None
        landed[rank] = torch.zeros(32, 16)
        return None, Manifest.from_views([("w", (64, 16), (half.start, 0), landed[rank])])

    topology = hosts(NODES, port_bytes_per_second=10**9, names=["A", "B", "C"]) if known else None
    told = refit(8, declare, transport=transport, topology=topology)
    plan = told[0][1].plan
    assert plan.topology.name == ("hosts" if known else "one-host")
    assert all(torch.equal(part, full.chunk(2)[rank % 2]) for rank, part in landed.items())
    node = {rank: at for at, ranks in enumerate(NODES) for rank in ranks}
    crossing = sum(n for (sender, receiver), n in plan.pair_nbytes().items() if node[sender] != node[receiver])
    assert crossing == (2 if known else 3) * full.nbytes
    assert sum(report.wire_nbytes for report, _ in told) == 3 * full.nbytes
