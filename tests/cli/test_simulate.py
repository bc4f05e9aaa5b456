from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from tests.simulate.test_shared_cores import MACHINE

from reshard.cli.main import main
from reshard.cli.published_rows import (
    _candidates,
    _on_one_host,
    describe_payload,
    describe_rows,
    payload_row,
    published_rows,
)
from reshard.plan.plan import plan_refit
from reshard.schedule.trace import Trace
from reshard.simulate.calibration import Calibration
from reshard.simulate.published import PUBLISHED
from reshard.topology.presets import named

ASKED = ("--shape", "512x512", "--source", "fsdp=2 [fsdp, -]", "--destination", "tp=4 [-, tp]")
TWO_HOSTS = (*ASKED, "--cluster", "0-1 / 2-5 @ 2Gbit")


def run(*args):
    return CliRunner().invoke(main, ["simulate", *map(str, args)])


def facts(*args):
    result = run(*args, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_every_strategy_is_predicted_beside_the_bound():
    rows = facts(*TWO_HOSTS)["strategies"]
    assert [row["strategy"] for row in rows] == ["reshard", "point-to-point", "gather-broadcast"]
    assert all(row["mode"] == "events" and row["bound_seconds"] <= row["seconds"] for row in rows)
    # half a MiB over 250 MB/s; the usual way takes it to each of four ranks
    assert rows[0]["bound_seconds"] == 512 * 512 * 2 / 250e6
    assert rows[2]["seconds"] > 3.5 * rows[0]["seconds"]
    assert rows[0]["fraction_of_bound"] == rows[0]["bound_seconds"] / rows[0]["seconds"]


def test_the_share_of_a_training_step_counts_the_refit_into_the_step():
    (row,) = facts(*TWO_HOSTS, "--strategy", "reshard", "--step-seconds", "0.01")["strategies"]
    assert row["share_of_step"] == row["seconds"] / (row["seconds"] + 0.01)
    table = run(*TWO_HOSTS, "--step-seconds", "60")
    assert table.exit_code == 0, table.output
    assert "of 60 s + refit" in table.stdout
    assert run(*TWO_HOSTS, "--step-seconds", "0").exit_code == 2


def test_given_costs_replace_those_of_the_preset_and_are_named():
    slow = facts(*TWO_HOSTS, "--strategy", "reshard", "--latency-seconds", "1")
    assert slow["strategies"][0]["seconds"] > 1
    assert slow["costs"].endswith("given: latency_seconds")


def test_a_trace_is_what_report_reads(tmp_path):
    trace, page = tmp_path / "trace.json", tmp_path / "page.html"
    row = facts(*TWO_HOSTS, "--trace", trace)["strategies"][0]
    read = Trace.from_json(json.loads(trace.read_text("utf-8")))
    assert read.seconds == row["seconds"]
    assert read.origin.startswith("simulated")
    shown = CliRunner().invoke(main, ["report", *TWO_HOSTS, "--trace", str(trace), "-o", str(page)])
    assert shown.exit_code == 0, shown.output
    assert 'id="timeline"' in page.read_text("utf-8")


def test_a_trace_of_totals_is_refused():
    result = run(*TWO_HOSTS, "--mode", "totals", "--trace", "-")
    assert result.exit_code == 2
    assert "--trace needs every message" in result.stderr


def test_the_costs_of_a_calibrated_machine_are_read_from_its_file(tmp_path):
    file = tmp_path / "machine.json"
    file.write_text(json.dumps(MACHINE.to_json()), "utf-8")
    gloo, shm = (facts(*ASKED, "--costs", file, "--transport", name)["strategies"][0] for name in ("gloo", "shm"))
    assert gloo["seconds"] > shm["seconds"] > 0  # a byte over loopback takes cores, one in shared memory only copies
    assert "measured on this machine" in facts(*ASKED, "--costs", file)["costs"]


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no such file"), ("{}", "not a calibration"), ("[]", "not a calibration"), ("{", "not JSON")],
)
def test_a_file_that_holds_no_costs_is_refused(tmp_path, content, message):
    file = tmp_path / "costs.json"
    if content is not None:
        file.write_text(content, "utf-8")
    result = run(*ASKED, "--costs", file)
    assert result.exit_code == 2
    assert message in result.stderr


def test_calibrating_writes_what_costs_reads(tmp_path, monkeypatch):
    monkeypatch.setattr("reshard.bench.calibrate.calibrate", lambda progress: MACHINE)
    file = tmp_path / "machine.json"
    assert run("--calibrate", file).exit_code == 0
    assert Calibration.from_json(json.loads(file.read_text("utf-8"))) == MACHINE
    assert facts(*ASKED, "--costs", file)["strategies"]
    result = run(*ASKED, "--calibrate", file)
    assert result.exit_code == 2
    assert "--calibrate measures this machine" in result.stderr


@pytest.mark.parametrize("option", ["--published", "--calibrate=costs.json"])
@pytest.mark.parametrize(
    ("others", "named"),
    [(ASKED, "--source and --destination and --shape"), (("--mode", "totals"), "--mode")],
)
def test_what_has_its_own_question_takes_no_other(option, others, named):
    result = run(*others, option)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"and nothing else; leave {named} out" in result.stderr


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--step-seconds", "nan", "'nan' is not a length of time"),
        ("--latency-seconds", "-1", "'-1' is not a length of time"),
        ("--message-seconds", "soon", "'soon' is not a length of time"),
        ("--copy-rate", "0", "'0' is nothing"),
        ("--bucket", "0MiB", "'0MiB' is nothing"),
    ],
)
def test_a_length_of_time_or_a_rate_that_cannot_be_is_a_wrong_question(option, value, said):
    result = run(*ASKED, option, value)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr


@pytest.fixture(scope="module")
def rows():
    """Two of the rows; all of them take half a minute."""
    return published_rows(
        [refit for refit in PUBLISHED if refit.model in ("qwen3-30b-a3b", "qwen3-32b")],
    )


def test_a_plan_on_one_host_serves_each_rank_directly_as_the_strategy_point_to_point_does_anywhere():
    flat = _on_one_host("qwen3-0.6b", "fsdp4", "tp2 dp2")
    topology = named("dgx-h100", flat.size)
    direct = plan_refit(flat.src, flat.dst, topology, strategy="point-to-point")
    assert direct.routes == flat.routes
    assert direct.classes == flat.classes


def test_a_published_row_has_both_times_the_bound_and_the_assumptions(rows):
    moe = rows[0]
    # 61 GB to every host of 8 ports of 50 GB/s
    assert moe["wire_bound_seconds"] == pytest.approx(0.153, abs=0.001)
    assert moe["wire_bound_seconds"] <= moe["reshard_seconds"] <= moe["point_to_point_seconds"]
    assert moe["reshard_seconds"] < moe["usual_way_seconds"]
    assert moe["usual_way_payload_nbytes"] == 2 * moe["one_copy_nbytes"]
    assert (moe["published"][0]["low_seconds"], moe["published"][0]["high_seconds"]) == (0.74, 1.0)
    assert moe["assumptions"]
    json.dumps(rows)


def test_a_row_that_differs_by_more_than_twice_says_what_could_explain_it(rows):
    assert rows[0]["published"][0]["of_predicted"] > 2
    assert "times what is predicted here" in rows[0]["differs_because"]
    assert rows[1]["differs_because"] == ""


def test_what_could_be_added_to_a_published_refit_is_in_seconds(rows):
    counted = rows[0]["also_counted"]
    assert counted["one_launch_a_tensor"] == pytest.approx(8.4e-6 * rows[0]["tensors"])
    # 5% of 61 GB did not go shard to shard: 3 GB through one port of 50 GB/s
    assert counted["rest_by_one_port"] == pytest.approx(0.0611, abs=0.001)
    assert "61.1 ms for what does not go shard to shard" in rows[0]["differs_because"]
    assert rows[1]["also_counted"].keys() == {"one_launch_a_tensor"}  # nobody has published a part


def test_a_layout_that_was_not_published_has_all_its_candidates():
    (announced,) = {
        tuple(_candidates(refit))
        for refit in PUBLISHED
        if refit.title == "DeepSeek-V3 on GB200" and not refit.is_layout_published
    }
    assert announced == ("pp16 ep16 -> tp32 dp8", "ep16 pp4 dp2 -> tp8 dp16")


def test_the_usual_way_moves_eleven_terabytes_of_a_model_of_2_8_trillion_parameters():
    row = payload_row()
    assert row["parameters"] == pytest.approx(2.8e12, rel=0.002)
    assert row["usual_way_payload_nbytes"] == pytest.approx(11.2e12, rel=0.002)
    # every engine rank is in another domain than its sources: one copy crosses, and no more
    assert row["reshard_crossing_nbytes"] == row["one_copy_nbytes"] == row["usual_way_payload_nbytes"] / 2
    assert row["reshard_wire_nbytes"] >= row["reshard_crossing_nbytes"]
    assert "moves 11.2 TB logically" in describe_payload(row)
    assert "ours takes 5.6 TB over the network" in describe_payload(row)


def test_a_row_without_a_published_layout_says_so(rows):
    assert [row["layout"] for row in rows] == ["published", "not published; a candidate"]
    text = describe_rows(rows)
    assert "tp8 dp2 -> tp8 dp2 (not published; a candidate)" in text
    assert "nothing that we know" in text
