from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from reshard import Layout, Mesh, plan_refit
from reshard.cli.main import main

ROWS = Layout((8, 8), "bfloat16", Mesh({"fsdp": 2}, [0, 1]), ("fsdp", None))
COLUMNS = Layout((8, 8), "bfloat16", Mesh({"tp": 4}, [2, 3, 4, 5]), (None, "tp"))


def run(*args, **options):
    return CliRunner().invoke(main, ["check", *map(str, args)], **options)


@pytest.fixture
def data():
    return json.loads(json.dumps(plan_refit(ROWS, COLUMNS).to_json()))


@pytest.fixture
def checked(tmp_path):
    def checked(data, *args):
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(data), "utf-8")
        return run(path, *args)

    return checked


def test_a_plan_that_was_saved_is_proved(data, checked):
    result = checked(data)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "128 bytes delivered exactly once" in result.stdout
    assert result.stdout.endswith(f"digest {data['digest']}\n")
    as_json = json.loads(checked(data, "--json").stdout)
    assert (as_json["proven"], as_json["digest"], as_json["delivered_nbytes"]) == (True, data["digest"], 128)


def test_a_plan_is_read_from_stdin(data):
    assert run("-", input=json.dumps(data)).exit_code == 0
    assert run("--plan", "-", input=json.dumps(data)).exit_code == 0


def test_a_plan_is_made_and_proved_from_both_sides():
    sides = ["--shape", "8x8", "--source", "fsdp=2 [fsdp]"]
    assert run(*sides, "--destination", "tp=4 [-, tp]").exit_code == 0
    wrong = run(*sides, "--destination", "tp=4 [-, dp]")
    assert wrong.exit_code == 2


def route(data, **changes):
    fields = ("route_class", "start", "stop", "rule", "edges")
    for name, value in changes.items():
        data["routes"][0][fields.index(name)] = value


@pytest.mark.parametrize(
    ("tamper", "reason"),
    [
        (lambda data: data["routes"].pop(), "rank 5 never gets bytes [0, 16)"),
        (lambda data: data["routes"].append(data["routes"][0]), "rank 2 gets bytes [0, 16) of its class twice"),
        (lambda data: route(data, edges="1>2"), "rank 1 sends bytes [0, 16)"),
        (lambda data: route(data, edges="0>3"), "receives what it never asked for"),
        (lambda data: route(data, edges="0>2,1"), "receives what it never asked for"),
        (lambda data: route(data, stop=14), "never gets bytes [14, 16)"),
        (lambda data: route(data, stop=17), "a route carries bytes [0, 17) of 16"),
        (lambda data: route(data, route_class=99), ""),
        (lambda data: route(data, route_class=-1), ""),
        (lambda data: route(data, edges="-1>2"), ""),
        (lambda data: route(data, start="0"), "cannot be replayed"),
        (lambda data: route(data, edges=[[0, 2]]), "cannot be replayed"),
        (lambda data: route(data, edges="0>two"), "'two' is not a number"),
        (lambda data: data.update(routes=None), "cannot be replayed"),
        (lambda data: route(data, rule="whole"), "not the one that was saved"),
        (lambda data: data.update(strategy="point-to-point"), "not the one that was saved"),
        (lambda data: data.update(digest="0" * 64), "the file says 0000000000000000"),
        (lambda data: data["src"]["holdings"][0].update(ranks="7,1"), "rank 0 sends bytes"),
        (lambda data: data["src"]["tensors"][0].update(shape=[4, 8]), "the source's shape is [4, 8]"),
        (lambda data: data.pop("src"), "it has no 'src'"),
    ],
)
def test_a_plan_that_was_changed_is_not_proved_and_the_reason_is_said(data, checked, tamper, reason):
    tamper(data)
    result = checked(data)
    assert (result.exit_code, result.stderr) == (1, "")
    assert result.stdout.startswith("not proven: ")
    assert reason in result.stdout
    as_json = json.loads(checked(data, "--json").stdout)
    assert as_json["proven"] is False
    assert reason in as_json["reason"]


def test_a_cut_inside_an_element_is_not_proved(data, checked):
    first = data["routes"][0]
    data["routes"][:1] = [[first[0], 0, 5, *first[3:]], [first[0], 5, *first[2:]]]
    assert checked(data).exit_code == 1


def test_a_plan_of_another_version_is_replayed_and_its_digest_left_alone(data, checked):
    data["version"] = "0.0.1"
    result = checked(data)
    assert result.exit_code == 0
    assert "Saved by version 0.0.1" in result.stderr


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a saved plan"),
        ('{"format": "reshard-manifest-1"}', "is not a saved plan"),
        ("\x00", "is not JSON"),
    ],
)
def test_a_file_that_is_no_plan_is_a_wrong_question(tmp_path, content, said):
    path = tmp_path / "plan.json"
    path.write_text(content, "utf-8")
    result = run(path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr


@pytest.mark.parametrize("args", [["plan.json", "--shape", "8x8"], ["plan.json", "--plan", "other.json"], []])
def test_a_file_or_two_sides_but_not_both_or_neither(args):
    result = run(*args)
    assert (result.exit_code, result.stdout) == (2, "")
