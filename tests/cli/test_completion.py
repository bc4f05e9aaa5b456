"""What a shell offers after a tab: the shells' own protocol, spoken with the real program."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from click.testing import CliRunner

from reshard.cli.main import VERBS, main
from reshard.models.catalogue import CATALOGUE
from reshard.plan.plan import STRATEGIES


def offered(line):
    """What stands after ``line`` and a tab, as bash asks for it: (kind, word) each."""
    words = line.split(" ")
    env = os.environ | {"_RESHARD_COMPLETE": "bash_complete", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    script = "from reshard.cli.main import main; main(prog_name='reshard')"
    done = subprocess.run(
        [sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stderr == ""
    return [tuple(row.split(",", 1)) for row in done.stdout.splitlines()]


def words(line):
    return [word for kind, word in offered(line) if kind == "plain"]


def test_verbs_are_offered():
    assert words("reshard ") == list(VERBS)
    assert words("reshard pl") == ["plan"]


@pytest.mark.parametrize("verb", ["plan", "report", "simulate"])
def test_models_and_clusters_are_offered_by_every_verb_that_plans(verb):
    assert words(f"reshard {verb} --model ") == list(CATALOGUE)
    assert words(f"reshard {verb} --model qwen3-3") == ["qwen3-30b-a3b", "qwen3-32b"]
    assert "gb200-nvl72" in words(f"reshard {verb} --cluster ")


def test_strategies_are_offered():
    assert words("reshard plan --strategy ") == [*STRATEGIES, "all"]
    assert words("reshard explain --strategy g") == ["gather-broadcast"]


def test_a_whole_name_is_offered_with_its_experts_stacked_too():
    assert words("reshard models deepseek-v3") == ["deepseek-v3", "deepseek-v3:stacked"]


def test_what_is_no_name_is_left_to_the_shell_as_a_file():
    assert offered("reshard plan --model ./checkpoint") == [("file", "./checkpoint")]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shells_part_asks_this_program(shell):
    text = CliRunner().invoke(main, ["completion", shell]).stdout
    assert f"_RESHARD_COMPLETE={shell}_complete" in text
    told = json.loads(CliRunner().invoke(main, ["completion", shell, "--json"]).stdout)
    assert told == {"shell": shell, "script": text.removesuffix("\n")}


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_takes_its_part_and_completes_with_it(tmp_path):
    program = tmp_path / "reshard"
    program.write_text(f"#!{sys.executable}\nfrom reshard.cli.main import main\nmain(prog_name='reshard')\n", "utf-8")
    program.chmod(0o755)
    script = (
        'eval "$(reshard completion bash)"; COMP_WORDS=(reshard plan --cluster dg); COMP_CWORD=3; '
        '_reshard_completion reshard; echo "${COMPREPLY[@]}"'
    )
    env = os.environ | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["dgx-h100"], done.stderr


def test_a_shell_that_is_not_known_is_a_wrong_question():
    result = CliRunner().invoke(main, ["completion", "cmd.exe"])
    assert (result.exit_code, result.stdout) == (2, "")
