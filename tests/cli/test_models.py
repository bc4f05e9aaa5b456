from __future__ import annotations

import json
import shlex

import click
from click.testing import CliRunner

from reshard.cli.main import main
from reshard.models.catalogue import CATALOGUE


def run(*args):
    return CliRunner().invoke(main, ["models", *map(str, args)])


def test_the_example_in_the_help_runs():
    epilog = main.get_command(click.Context(main), "models").epilog
    command = shlex.split(epilog.removeprefix("Example: "))
    result = CliRunner().invoke(main, command[1:])
    assert result.exit_code == 0, result.output
    assert "66.9%" in result.stdout


def test_json_lists_the_catalogue_with_sizes_and_shares():
    result = run("--json")
    assert result.exit_code == 0
    rows = {row["name"]: row for row in json.loads(result.stdout)["models"]}
    assert list(rows) == list(CATALOGUE)
    assert rows["deepseek-v3"] | {"feed_forward_share": round(rows["deepseek-v3"]["feed_forward_share"], 3)} == {
        "name": "deepseek-v3",
        "title": "DeepSeek-V3 671B",
        "note": "without the layer for multi-token prediction",
        "parameters": 671_026_404_352,
        "tensors": 45_337,
        "buffers": 58,
        "nbytes": 1_342_052_868_096,
        "layers": 61,
        "experts": 256,
        "feed_forward_share": 0.98,
    }


def test_a_folder_is_described_too(tmp_path):
    config = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 12, "vocab_size": 50}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 2, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    (row,) = json.loads(run(tmp_path, "--json").stdout)["models"]
    assert (row["parameters"], row["tensors"], row["experts"]) == (50 * 8 + 8 + 2 * (4 * 64 + 3 * 96 + 16), 20, 0)


def test_a_name_that_is_not_there_is_a_wrong_question():
    result = run("gpt-2")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "'gpt-2' is no model of the catalogue" in result.stderr
