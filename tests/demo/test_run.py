"""The whole demo on a tiny model: real processes, both worlds."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from tests.demo.tiny import make_model, write_folder

from reshard.cli.main import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(make_model("llama"), tmp_path_factory.mktemp("model") / "tiny")


def demo(*args):
    return CliRunner().invoke(main, ["demo", *map(str, args)], catch_exceptions=False)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_demo_proves_and_times_a_refit(folder):
    # Strided shards that cut through heads on the source; a KV head that two ranks hold on the destination.
    worlds = ("--source", "fsdp1 tp2", "--destination", "tp4")
    options = ("--model", folder, *worlds, "--question", "w5 w17 w3")
    result = demo(*options, "--max-tokens", 5, "--timeout", 200, "--json")
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["model"] == "tiny"
    assert told["parameters"] == sum(p.numel() for p in make_model("llama").parameters())
    assert told["verified"] is True
    assert told["answer"]["before"] != told["answer"]["source"] == told["answer"]["after"]
    assert len(told["answer"]["after"].split()) == 5
    assert [answer["agree"] for answer in told["later_answers"]] == [True]
    assert told["optimizer_step"]["changed_elements"] > 0
    assert [refit["version"] for refit in told["refits"]] == [1, 2]
    wanted = sum(rank["received_nbytes"] for rank in told["ranks"])
    assert [refit["nbytes"] for refit in told["refits"]] == [wanted, wanted]
    seconds = told["seconds"]
    assert set(seconds) == {"gather_broadcast", "gather_broadcast_same_transport", "point_to_point", "reshard"}
    assert all(value > 0 for value in seconds.values())
    assert seconds["gather_broadcast"] == min(told["usual_way"]["forms"].values())
    # the K and V heads that two ranks want cross once, and twice point to point
    assert told["copies_per_domain"] == {"source": 0.0, "destination": 1.0}
    assert 1.0 < told["copies_per_domain_point_to_point"]["destination"] < 1.5
    for rank in told["ranks"]:
        if rank["world"] == "destination":  # its buffers hold its pieces and padding, nothing else
            assert 0 < rank["received_nbytes"] <= rank["holds_nbytes"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--destination", "tp7"), "6 query heads and the destination's tp is 7"),
        (("--source", "fsdp2 tp4"), "divisible by 4"),  # 50 rows of the MLP
        (("--source", "pp2"), "'pp2' is not an axis"),
        (("--destination", "tp4 dp16"), "are 66 processes"),
    ],
)
def test_a_layout_that_cannot_work_is_refused_with_the_reason(folder, options, reason):
    result = demo("--model", folder, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert reason in result.stderr


def test_a_folder_without_weights_is_refused_with_the_reason(tmp_path):
    result = demo("--model", tmp_path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "config.json does not exist" in result.stderr
