"""What the simulator predicts of the benchmarks' rows, and that calibrating this machine gives numbers that can be."""

import dataclasses

import pytest

torch = pytest.importorskip("torch")

from tests.simulate.test_shared_cores import MACHINE  # noqa: E402

from reshard.bench import RATIOS, SCENARIOS  # noqa: E402
from reshard.bench.calibrate import calibrate  # noqa: E402
from reshard.bench.cluster import STRATEGIES  # noqa: E402
from reshard.bench.cluster_scenarios import SCENARIO_NAMES, scenario_named  # noqa: E402
from reshard.bench.expected import expected_local  # noqa: E402
from reshard.bench.expected_cluster import expected_cluster  # noqa: E402
from reshard.simulate.calibration import Calibration  # noqa: E402

SIDE, RATE = 1024, 250e6
NBYTES = 16 * SIDE * SIDE * 2


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_row_of_the_local_benchmark_is_predicted(scenario):
    rows = expected_local(scenario, 1024, MACHINE)
    assert all(seconds > 0 for seconds in rows.values())
    if scenario != "small-tensors":
        assert rows.keys() >= {name for pair in RATIOS for name in pair}
        assert rows["bare_pull"] <= rows["reshard_shm"] < rows["gather_broadcast_shm"] < rows["gather_broadcast"]
        assert rows["reshard_shm"] < rows["reshard_shm_sum"] < rows["reshard_shm_fingerprint"]


def test_slower_cores_make_the_rows_of_one_host_longer_in_proportion():
    half = dataclasses.replace(MACHINE, cores=1)
    for name in ("reshard_gloo", "own_shards", "bare_pull"):
        one, two = (expected_local("tp4", 2048, machine)[name] for machine in (half, MACHINE))
        assert one == pytest.approx(2 * two, rel=0.25)


@pytest.mark.parametrize("name", SCENARIO_NAMES)
def test_every_row_of_the_cluster_benchmark_is_predicted_and_none_beats_the_bound(name):
    rows = expected_cluster(name, SIDE, RATE, MACHINE)
    bound = scenario_named(name).bound(NBYTES, RATE * MACHINE.link_efficiency).seconds
    assert rows.keys() >= {*STRATEGIES, "raw_socket"}
    assert rows["raw_socket"] == pytest.approx(bound, rel=0.01)
    assert all(seconds >= 0.999 * bound for row, seconds in rows.items() if row != "reshard_to_one_host")
    assert rows["reshard"] <= rows["point_to_point"] * 1.05
    assert rows["reshard"] < rows["gather_broadcast"]


def test_memory_that_is_freed_and_asked_for_again_costs_faults_only_where_the_system_had_it_back():
    faults = dataclasses.replace(MACHINE, fresh=MACHINE.fresh / 10)
    small, large = ([expected_local("tp4", side, each) for each in (MACHINE, faults)] for side in (2048, 8192))
    for rows in (small, large):
        assert rows[1]["all_gather/chunks"] == rows[0]["all_gather/chunks"]
    assert small[1]["all_gather/whole"] == small[0]["all_gather/whole"]
    assert large[1]["all_gather/whole"] > 1.5 * large[0]["all_gather/whole"]


def test_the_usual_way_sends_three_copies_over_the_link_of_its_root():
    # a binomial tree of five: the root sends to three, all on B
    rows = expected_cluster("one-host", SIDE, RATE, MACHINE)
    assert rows["gather_broadcast/own_shards"] == pytest.approx(3 * NBYTES / (RATE * 0.94), rel=0.1)
    assert rows["gather_broadcast_host_aware"] == pytest.approx(NBYTES / (RATE * 0.94), rel=0.1)


def test_calibrating_measures_this_machine_and_reads_back_equal():
    found = calibrate(repeat=1)
    assert Calibration.from_json(found.to_json()) == found
    for rate in (found.copy, found.strided, found.warm, found.staging, found.fresh, found.sum, found.copy_alone):
        assert 1e8 < rate < 1e12
    assert found.strided_runs.at(6144) == found.strided
    assert all(1e8 < rate < 1e12 for _, rate in (*found.strided_runs.measured, *found.lent_runs.measured))
    assert 0 < found.loopback.send < 1e-7
    assert 0 < found.memory.message_seconds < 1e-2
    assert 0.5 < found.link_efficiency <= 1.01
