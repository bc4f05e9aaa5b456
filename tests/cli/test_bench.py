from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from reshard.bench import RATIOS, local
from reshard.bench.case import SIZE, SOURCES, WORD, Case, Memory
from reshard.cli import bench
from reshard.cli.main import main
from reshard.errors import VerifyError
from reshard.schedule.trace import Trace

SIZE_OF_TEST = 64
REFITS = {
    "reshard_gloo",
    "reshard_shm",
    "reshard_shm_private",
    "point_to_point_gloo",
    "reshard_shm_sum",
    "reshard_shm_fingerprint",
}
USUAL = {"all_gather", "gather", "own_shards", "gather_broadcast", "gather_broadcast_shm"}


def run(*args):
    return CliRunner().invoke(main, ["bench", "local", *args])


@pytest.fixture(scope="module")
def report():
    result = run("--size", str(SIZE_OF_TEST), "--repeat", "2", "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module", params=["tp4", "tp2dp2"])
def scenario(request, report):
    return report["scenarios"][request.param]


def test_every_operation_is_measured_in_every_scenario(report, scenario):
    assert set(report["scenarios"]) == {"tp4", "tp2dp2", "small-tensors"}
    assert scenario["seconds"].keys() == REFITS | USUAL | {"bare_pull", "bare_staged", "memcpy"}
    assert all(0 < low <= high for low, high in scenario["seconds_range"].values())


def test_every_result_is_compared_element_by_element_before_the_measured_runs_and_after_them(scenario):
    landed = SIZE_OF_TEST * SIZE_OF_TEST * scenario["replicas"]
    assert scenario["compared"].pop("memcpy") == []  # brings nothing to a destination
    assert set(map(tuple, scenario["compared"].values())) == {(landed, landed)}


@pytest.mark.parametrize(("transport", "moved_by"), [("torch_p2p", ("send", "recv")), ("shm", ("copy",))])
def test_a_trace_of_one_more_refit_has_every_byte_and_is_what_report_reads(tmp_path, transport, moved_by):
    file, plan, page = tmp_path / "trace.json", tmp_path / "plan.json", tmp_path / "page.html"
    few = ("--scenario", "tp4", "--transport", transport, "--size", str(SIZE_OF_TEST), "--repeat", "1", "--json")
    result = run(*few, "--trace", str(file), "--plan", str(plan))
    assert result.exit_code == 0, result.output
    assert "tp4" in json.loads(result.stdout)["scenarios"]
    trace = Trace.from_json(json.loads(file.read_text("utf-8")))
    for kind in moved_by:
        events = [event for event in trace.events if event.kind == kind]
        assert sum(event.nbytes for event in events) == SIZE_OF_TEST * SIZE_OF_TEST * 2
    assert trace.origin.startswith("measured on this machine, tp4, reshard_")
    shown = CliRunner().invoke(main, ["report", "--plan", str(plan), "--trace", str(file), "-o", str(page)])
    assert shown.exit_code == 0, shown.output
    assert 'id="timeline"' in page.read_text("utf-8")


def test_ratios_are_of_the_medians_and_the_first_one_owes_nothing_to_gloo(scenario):
    seconds = scenario["seconds"]
    for label, ratio in scenario["ratios"].items():
        a, b = label.split(" / ")
        assert ratio == pytest.approx(seconds[a] / seconds[b])
    assert set(scenario["ratios"]) == {f"{a} / {b}" for a, b in RATIOS}
    assert RATIOS[0] == ("gather_broadcast_shm", "reshard_shm")


def test_the_usual_way_counts_with_its_fastest_form_whole_or_in_chunks(scenario):
    seconds, ways = scenario["seconds"], scenario["whole_or_chunks"]
    for form in ("all_gather", "gather", "own_shards", "gather_broadcast_shm"):
        assert seconds[form] == min(ways[f"{form}/whole"], ways[f"{form}/chunks"])
    assert seconds["gather_broadcast"] == min(seconds["all_gather"], seconds["gather"], seconds["own_shards"])
    assert seconds[scenario["fastest_usual_way"]] == seconds["gather_broadcast"]


def test_a_refit_brings_what_is_wanted_and_the_usual_way_all_of_it_to_everybody(scenario):
    tensor = SIZE_OF_TEST * SIZE_OF_TEST * 2
    wire = scenario["wire_nbytes"]
    assert {wire[name] for name in REFITS - {"reshard_shm_sum", "reshard_shm_fingerprint"}} == {
        tensor * scenario["replicas"]
    }
    assert (wire["own_shards"], wire["gather"], wire["all_gather"]) == (4 * tensor, 4.5 * tensor, 5 * tensor)


def test_reading_in_place_needs_no_memory_beside_source_and_destination(scenario):
    assert scenario["peak_extra_nbytes"]["reshard_shm"] < 1 << 20
    assert scenario["peak_extra_nbytes"]["reshard_shm_private"] > 1 << 20


def test_many_tensors_are_compared_with_one_of_as_many_bytes(report):
    small = report["scenarios"]["small-tensors"]
    assert small["cpu_seconds_ratio"].keys() == {"gloo", "shm", "shm_private"}
    for kind, ratio in small["cpu_seconds_ratio"].items():
        many, one = f"many_{kind}", f"one_{kind}"
        assert ratio == pytest.approx(small["cpu_seconds"][many] / small["cpu_seconds"][one])
        assert small["wire_nbytes"][one] == pytest.approx(small["wire_nbytes"][many], rel=0.01)


def test_people_see_the_same_figures(report, capsys):
    bench._print(report)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(f"tp4: bf16 [{SIZE_OF_TEST}, {SIZE_OF_TEST}], 8 KiB; medians of 2 interleaved runs")
    assert lines[2].split()[:3] == ["gather_broadcast_shm", "/", "reshard_shm"]
    assert all(len(line) <= 80 for line in lines)


def test_at_full_size_there_are_two_thousand_tensors_from_4_kib_to_8_mib_and_1_gb_in_all():
    many, one = local.cases_of("small-tensors", local.FULL_SIZE)
    sizes = [2 * rows * columns for rows, columns in many.shapes]
    assert (len(sizes), min(sizes), max(sizes)) == (2000, 4 << 10, 8 << 20)
    assert many.nbytes == pytest.approx(10**9, rel=0.001)
    assert 0 <= one.nbytes - many.nbytes < 8192  # whole pairs of rows


def made(case, rank):
    flat = torch.zeros(case.numel(rank), dtype=WORD)
    private, landing = (flat, None) if rank < SOURCES else (None, flat)
    return Memory(case, rank, landing=landing, private=private, shared=())


def test_a_wrong_element_is_found_and_named():
    case = Case("tiny", ((8, 16), (4, 8)))
    memories = [made(case, rank) for rank in range(SIZE)]
    for memory in memories:
        memory.prepare(1)
    for at, (rows, columns) in enumerate(case.shapes):
        dense = torch.cat([memory.private[at] for memory in memories[:SOURCES]])
        assert dense.shape == (rows, columns)
        for memory in memories[SOURCES:]:
            box = case.boxes[memory.rank][at]
            memory.wanted[at].copy_(dense[:, box.start[1] : box.stop[1]])
    assert [memory.check(1, "copy") for memory in memories] == [0, 0, 40, 40, 40, 40]
    memories[3].wanted[1][2, 1] ^= 1
    with pytest.raises(
        VerifyError, match=r"tiny, copy: rank 3 .* \[2, 1\] of its part of tensor 1: .* \(1 of 8 differ"
    ):
        memories[3].check(1, "copy")
    with pytest.raises(VerifyError, match=r"40 of 40 differ|32 of 32 differ"):
        memories[2].check(2, "copy")  # the values of another version are other values


def test_exit_code_1_says_that_an_element_is_wrong_and_2_that_the_question_is(monkeypatch):
    assert run("--size", "66").exit_code == 2  # 66 columns cannot be cut in 4

    def wrong(**_):
        raise VerifyError("tp4, reshard_shm: rank 3 holds a wrong value.")

    monkeypatch.setattr(local, "run_local", wrong)
    result = run()
    assert (result.exit_code, result.stdout) == (1, "")
    assert "rank 3 holds a wrong value" in result.stderr
