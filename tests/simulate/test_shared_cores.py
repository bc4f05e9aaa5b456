"""Refits simulated on shared cores: what is copied and how, and what a byte on its way takes."""

import dataclasses

import pytest

from reshard.errors import ConfigError
from reshard.layouts.box import Box
from reshard.layouts.layout import Layout
from reshard.layouts.mesh import Mesh
from reshard.plan.plan import plan_refit
from reshard.schedule.schedule import plan_schedule
from reshard.simulate.calibration import Calibration, SocketCosts
from reshard.simulate.copies import run_numel
from reshard.simulate.costs import Costs, CpuCosts
from reshard.simulate.run_rates import RunRates
from reshard.simulate.simulator import simulate
from reshard.topology.presets import hosts
from reshard.topology.topology import ONE_HOST

KIB = 1024
CPU = CpuCosts(cores=2, strided_bytes_per_second=KIB, staging_bytes_per_second=2 * KIB, stages_runs=False)
COSTS = Costs(copy_bytes_per_second=4 * KIB, cpu=CPU)
MACHINE = Calibration(
    cores=2,
    copy_alone=10e9,
    copy=8e9,
    strided=6e9,
    warm=9e9,
    staging=5e9,
    fresh=2e9,
    box_seconds=1e-6,
    sum=9e9,
    fingerprint=3e9,
    memory=SocketCosts(0.0, 0.0, 2e-5, 1e-5),
    loopback=SocketCosts(3e-10, 2e-10, 3e-5, 1e-4),
    network=SocketCosts(4e-10, 8e-10, 3e-5, 2e-4),
    link_efficiency=0.94,
    sizes="none of a row",
    strided_runs=RunRates(((1 << 10, 5e9), (1 << 14, 7e9))),
    lent_runs=RunRates(((1 << 10, 4e9), (1 << 24, 7e9))),
)


def schedule(columns, bucket_nbytes=KIB):
    """1 KiB of one rank to a second, which has it alone (columns=False) or to a half of its columns each of two."""
    src = Layout((32, 32), "uint8", Mesh({"one": 1}, [0]), ())
    ranks = [1, 2] if columns else [1]
    dst = Layout((32, 32), "uint8", Mesh({"tp": len(ranks)}, ranks), (None, "tp"))
    return plan_schedule(plan_refit(src, dst), bucket_nbytes=bucket_nbytes, staging_nbytes=1 << 20)


def kinds(trace):
    return sorted((event.kind, event.rank, event.seconds) for event in trace.events if event.kind != "wait")


def test_a_bucket_of_one_run_is_not_copied_where_the_transport_sends_from_anywhere():
    trace = simulate(schedule(columns=False), ONE_HOST, COSTS)
    assert {event.kind for event in trace.events} <= {"send", "recv", "wait"}
    staged = dataclasses.replace(COSTS, cpu=dataclasses.replace(CPU, stages_runs=True))
    trace = simulate(schedule(columns=False), ONE_HOST, staged)
    assert [(kind, seconds) for kind, _, seconds in kinds(trace) if kind in ("pack", "unpack")] == [
        ("pack", 0.5),
        ("unpack", 0.5),
    ]


def test_columns_are_packed_and_land_in_one_run():
    trace = simulate(schedule(columns=True), ONE_HOST, COSTS)
    assert [(kind, rank) for kind, rank, _ in kinds(trace) if kind in ("pack", "unpack")] == [("pack", 0), ("pack", 0)]


def test_weights_in_shared_memory_are_read_in_one_copy_and_no_message_is_sent():
    trace = simulate(schedule(columns=True), ONE_HOST, COSTS, reads_in_place=True)
    # half a KiB each, strided, on a core each
    assert kinds(trace) == [("copy", 1, 0.5), ("copy", 2, 0.5)]
    one_core = dataclasses.replace(COSTS, cpu=dataclasses.replace(CPU, cores=1))
    assert simulate(schedule(columns=True), ONE_HOST, one_core, reads_in_place=True).seconds == 1.0


def test_bytes_between_hosts_take_cores_and_the_link_whichever_is_slower():
    topology = hosts([[0], [1]], port_bytes_per_second=KIB)
    src, dst = (Layout((KIB,), "uint8", Mesh({"one": 1}, [rank]), ()) for rank in (0, 1))
    made = plan_schedule(plan_refit(src, dst, topology), bucket_nbytes=KIB, staging_nbytes=1 << 20)
    for seconds_a_byte, seconds in ((0.5 / KIB, 1.0), (3 / KIB, 3.0)):
        cpu = dataclasses.replace(CPU, network_receive=seconds_a_byte)
        trace = simulate(made, topology, dataclasses.replace(COSTS, cpu=cpu))
        assert trace.seconds == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("piece", "box", "run"),
    [
        (Box((0, 0), (4, 8)), Box((1, 0), (3, 8)), 16),  # whole rows
        (Box((0, 0), (4, 8)), Box((1, 2), (2, 5)), 3),  # a part of one row
        (Box((0, 0), (4, 8)), Box((1, 2), (3, 5)), 3),  # parts of two rows
        (Box((0, 0, 0), (2, 4, 8)), Box((1, 1, 0), (2, 3, 8)), 16),  # rows of one matrix
        (Box((0, 0, 0), (2, 4, 8)), Box((0, 1, 0), (2, 3, 8)), 16),  # rows of two
        (Box((), ()), Box((), ()), 1),  # a scalar
    ],
)
def test_runs_of_a_box_are_as_long_as_its_last_dims_that_are_whole_and_one_more(piece, box, run):
    assert run_numel(piece, box) == run


def with_runs(**rates):
    return dataclasses.replace(COSTS, cpu=dataclasses.replace(CPU, **rates))


def test_out_of_lent_memory_short_runs_are_copied_at_their_own_rate():
    # columns of 16 bytes; whole rows are one run of 1 KiB
    costs = with_runs(lent=RunRates(((16, KIB / 2), (KIB, KIB))))
    trace = simulate(schedule(columns=True), ONE_HOST, costs, reads_in_place=True)
    assert kinds(trace) == [("copy", 1, 1.0), ("copy", 2, 1.0)]
    trace = simulate(schedule(columns=False), ONE_HOST, costs, reads_in_place=True)
    assert kinds(trace) == [("copy", 1, 1.0)]


def test_the_rate_of_runs_lies_between_those_of_the_nearest_lengths_that_were_measured():
    costs = with_runs(strided=RunRates(((64, 1 * KIB), (KIB, 4 * KIB))))
    seconds = {run: costs.copy_seconds(KIB, "strided", run_nbytes=run) for run in (1, 64, 256, KIB, 2 * KIB, 0)}
    assert seconds == {1: 1.0, 64: 1.0, 256: pytest.approx(0.625), KIB: 0.25, 2 * KIB: 0.25, 0: 1.0}
    assert COSTS.copy_seconds(KIB, "lent", run_nbytes=64) == COSTS.copy_seconds(KIB, "strided")
    assert COSTS.copy_seconds(KIB, "lent") == COSTS.copy_seconds(KIB)


@pytest.mark.parametrize("wrong", [(), ((64, 1.0), (64, 2.0)), ((0, 1.0),), ((64, 0.0),), ((64, float("nan")),)])
def test_rates_of_runs_that_cannot_be_are_refused(wrong):
    with pytest.raises(ConfigError, match="ascending"):
        RunRates(wrong)


def test_a_calibration_reads_back_equal_and_gives_costs_by_transport():
    assert Calibration.from_json(MACHINE.to_json()) == MACHINE
    without = dataclasses.replace(MACHINE, network=None)
    assert Calibration.from_json(without.to_json()) == without
    older = MACHINE.to_json()
    del older["strided_runs"], older["lent_runs"]
    assert Calibration.from_json(older) == dataclasses.replace(MACHINE, strided_runs=None, lent_runs=None)
    gloo, shm = MACHINE.costs("gloo"), MACHINE.costs("shm")
    assert (gloo.cpu.local_send, shm.cpu.local_send) == (3e-10, 0.0)
    assert (gloo.cpu.stages_runs, shm.cpu.stages_runs) == (False, True)
    assert gloo.cpu.network_receive == shm.cpu.network_receive == 8e-10
    assert gloo.copy_seconds(10**9, "fresh") == pytest.approx(0.5, rel=1e-3)
    assert gloo.copy_seconds(10**9, "strided", run_nbytes=1 << 10) == pytest.approx(0.2, rel=1e-3)
    assert shm.copy_seconds(10**9, "lent", run_nbytes=1 << 10) == pytest.approx(0.25, rel=1e-3)


def test_of_several_calibrations_the_median_of_each_number_counts():
    few = dataclasses.replace(MACHINE, copy=1.0, loopback=SocketCosts(1.0, 2.0, 30.0, 4.0))
    many = dataclasses.replace(MACHINE, copy=3.0, loopback=SocketCosts(3.0, 20.0, 10.0, 40.0))
    some = dataclasses.replace(MACHINE, copy=200.0, loopback=SocketCosts(20.0, 10.0, 20.0, 0.0))
    found = Calibration.median_of([few, many, some])
    assert found == dataclasses.replace(MACHINE, copy=3.0, loopback=SocketCosts(3.0, 10.0, 20.0, 4.0))
    assert Calibration.median_of([few]) == few
    slow, fast = (dataclasses.replace(MACHINE, lent_runs=RunRates(((64, rate),))) for rate in (1e9, 3e9))
    assert Calibration.median_of([slow, fast]).lent_runs == RunRates(((64, 2e9),))


def test_what_is_no_calibration_is_refused():
    with pytest.raises(ConfigError, match="not a calibration"):
        Calibration.from_json({"format": "reshard-plan-1"})
    lacking = MACHINE.to_json()
    del lacking["warm"]
    with pytest.raises(ConfigError, match="'warm'"):
        Calibration.from_json(lacking)
    with pytest.raises(ConfigError, match="Measure it again"):
        Calibration.from_json(MACHINE.to_json() | {"lent_runs": [64, 1e9]})


@pytest.mark.parametrize("wrong", [{"cores": 0}, {"cores": 2, "box_seconds": -1}, {"cores": 2, "local_send": 1e999}])
def test_cores_that_cannot_be_are_refused(wrong):
    with pytest.raises(ConfigError, match=list(wrong)[-1]):
        CpuCosts(**wrong)
