from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from tests.report.plans import rows_to_columns, two_engines

from reshard.cli.main import main
from reshard.schedule.trace import Trace, TraceEvent

ROWS_TO_COLUMNS = ("--shape", "8x8", "--source", "fsdp=2 [fsdp, -]", "--destination", "tp=4 [-, tp]")


def run(verb, *args):
    return CliRunner().invoke(main, [verb, *map(str, args)])


@pytest.fixture
def saved(tmp_path):
    def saved(plan, name="plan.json"):
        path = tmp_path / name
        path.write_text(json.dumps(plan.to_json()), "utf-8")
        return path

    return saved


def test_a_page_is_written_for_the_arguments_of_plan(tmp_path):
    page = tmp_path / "page.html"
    result = run("report", *ROWS_TO_COLUMNS, "-o", page, "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["nbytes"] == len(page.read_bytes()) < 2_000_000
    assert facts["tensors_drawn"] == ["tensor"]
    text = page.read_text("utf-8")
    assert text.startswith("<!doctype html>")
    assert '<p class="about">8x8: fsdp=2 [fsdp, -] → tp=4 [-, tp]</p>' in text


def test_a_page_of_a_saved_plan_has_its_digest_and_only_its_strategy_with_alone(saved):
    plan = two_engines()
    result = run("report", "--plan", saved(plan), "--alone", "--tensor", "layers.1.up.weight", "-o", "-")
    assert result.exit_code == 0, result.output
    assert plan.digest in result.stdout
    assert "layers.1.\u200bup" not in result.stdout  # names break at each dot
    assert "layers.\u200b1.\u200bup.\u200bweight" in result.stdout
    assert ">gather-broadcast<" not in result.stdout
    assert ">gather-broadcast<" in run("report", "--plan", saved(plan), "-o", "-").stdout


def test_a_trace_becomes_a_timeline_if_it_is_of_this_plan(saved, tmp_path):
    plan = rows_to_columns()
    event = TraceEvent(0, "send", 2, 0, 0.0, 1.0, 16)
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps(Trace((event,), "made up", plan.digest).to_json()), "utf-8")
    assert 'id="timeline"' in run("report", "--plan", saved(plan), "--trace", trace, "-o", "-").stdout
    other = run("report", "--plan", saved(two_engines()), "--trace", trace, "-o", "-")
    assert other.exit_code == 2
    assert f"is the trace of plan {plan.digest[:16]}" in other.stderr
    not_one = run("report", "--plan", saved(plan), "--trace", saved(plan), "-o", "-")
    assert not_one.exit_code == 2
    assert "This is not a trace" in not_one.stderr


def test_a_plan_that_lost_a_route_gets_no_page_and_exit_code_1(saved, tmp_path):
    data = rows_to_columns().to_json()
    data["routes"] = data["routes"][:-1]
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(data), "utf-8")
    result = run("report", "--plan", path, "-o", tmp_path / "page.html")
    assert result.exit_code == 1
    assert "not proven" in result.stderr
    assert not (tmp_path / "page.html").exists()


def test_a_page_that_cannot_be_written_is_an_error(tmp_path):
    result = run("report", *ROWS_TO_COLUMNS, "-o", tmp_path / "no" / "page.html")
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr


def test_diff_says_which_engine_changed(saved):
    before, after = saved(two_engines(tp=2), "a.json"), saved(two_engines(tp=4), "b.json")
    result = run("diff", before, after)
    assert result.exit_code == 0, result.output
    assert (
        "layers.{0-2}.up.weight (3): gen0: 2 boxes of 32 x 64, each on 2 ranks -> 4 boxes of 16 x 64" in result.stdout
    )
    assert "4 of the 4 receiving ranks of gen0 get other bytes" in result.stdout
    assert "0 of the 2 receiving ranks of gen1 get other bytes" in result.stdout
    assert run("diff", before, after, "--exit-code").exit_code == 1
    assert run("diff", before, before, "--exit-code").exit_code == 0
    facts = json.loads(run("diff", before, after, "--json").stdout)
    assert facts["equal"] is False
    assert facts["layouts"][0]["name"] == "layers.{0-2}.up.weight"


def test_diff_refuses_what_is_no_plan(saved, tmp_path):
    path = tmp_path / "other.json"
    path.write_text("{}", "utf-8")
    result = run("diff", saved(rows_to_columns()), path)
    assert result.exit_code == 2
    assert "not a saved plan" in result.stderr


def test_rounds_are_shown_unless_finding_them_takes_long(monkeypatch):
    small = run("report", *ROWS_TO_COLUMNS, "-o", "-")
    assert "No order needs fewer than" in small.stdout
    assert small.stderr == ""
    monkeypatch.setattr("reshard.report.strategies.MOST_MESSAGES", 7)  # there are 8
    large = run("report", *ROWS_TO_COLUMNS, "-o", "-")
    assert "No order needs fewer than" not in large.stdout
    assert large.stderr == "Rounds are left out, to be quick; --staging 64MiB shows them.\n"
    assert "No order needs fewer than" in run("report", *ROWS_TO_COLUMNS, "--staging", "1MiB", "-o", "-").stdout
