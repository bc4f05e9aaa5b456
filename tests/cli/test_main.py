from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from reshard.cli import main as main_module
from reshard.cli.main import main
from reshard.cli.output import emit_json, size, stderr_console
from reshard.errors import CoverageError


@pytest.fixture
def run(monkeypatch):
    """Run `reshard` with these arguments; ``verb`` replaces what `reshard doctor` does."""
    monkeypatch.delenv("RESHARD_DEBUG", raising=False)

    def run(*args, verb=None, env=None):
        if verb is not None:
            command = click.Command("doctor", callback=verb)
            monkeypatch.setattr(main_module.VerbGroup, "get_command", lambda *_: command)
        return CliRunner().invoke(main, args, env=env)

    return run


def uncovered():
    raise CoverageError("'lm_head.weight': no source rank holds rows [32000, 32064).", tensor="lm_head.weight")


def test_help_names_the_verbs_and_imports_none(run, monkeypatch):
    monkeypatch.delitem(sys.modules, "reshard.cli.doctor", raising=False)
    result = run("--help")
    assert result.exit_code == 0
    assert "doctor" in result.stdout
    assert "reshard.cli.doctor" not in sys.modules


def test_a_verb_that_this_installation_lacks_is_not_offered(run, monkeypatch):
    monkeypatch.setattr(main_module, "VERBS", {**main_module.VERBS, "fly": "No module has this name."})
    assert "fly" not in run("--help").stdout
    assert run("fly").exit_code == 2


def test_every_offered_verb_can_print_json():
    context = click.Context(main)
    for verb in main.list_commands(context):
        command = main.get_command(context, verb)
        leaves = command.commands.values() if isinstance(command, click.Group) else [command]
        for leaf in leaves:
            assert "--json" in {option for param in leaf.params for option in param.opts}, f"{verb}: {leaf.name}"


def test_our_error_is_one_message_on_stderr_and_exit_code_2(run):
    result = run("doctor", verb=uncovered)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "CoverageError: 'lm_head.weight': no source rank holds rows [32000, 32064).\n"


@pytest.mark.parametrize(
    ("args", "env"),
    [
        (["--debug", "doctor"], {}),
        (["doctor"], {"RESHARD_DEBUG": "1"}),
    ],
)
def test_debug_shows_the_traceback(run, args, env):
    result = run(*args, verb=uncovered, env=env)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Traceback" in result.stderr
    assert "in uncovered" in result.stderr


def test_a_fault_of_ours_is_not_taken_for_an_answer(run):
    def fault():
        raise RuntimeError("a fault")

    assert isinstance(run("doctor", verb=fault).exception, RuntimeError)


def test_an_interrupt_ends_with_130(run):
    def interrupted():
        raise KeyboardInterrupt

    assert run("doctor", verb=interrupted).exit_code == 130


def test_an_unknown_verb_or_option_is_a_wrong_question(run):
    assert run("nothing").exit_code == 2
    assert run("doctor", "--nothing").exit_code == 2


def test_version_is_the_one_that_the_package_is_built_with(run):
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    assert run("--version").stdout == f"reshard {project['version']}\n"


def test_no_color_is_honoured(run):
    def coloured():
        click.secho("red", fg="red")

    assert run("doctor", verb=coloured, env={"NO_COLOR": "1"}).stdout == "red\n"


def test_a_console_writes_to_stderr_only(run):
    result = run("doctor", verb=lambda: stderr_console().print("working"))
    assert (result.stdout, result.stderr) == ("", "working\n")


def test_equal_results_are_printed_as_equal_bytes(run):
    assert run("doctor", verb=lambda: emit_json({"b": 1, "a": "ü"})).stdout == '{"a": "ü", "b": 1}\n'
    assert run("doctor", verb=lambda: emit_json({"a": "ü", "b": 1})).stdout == '{"a": "ü", "b": 1}\n'


def test_json_never_holds_a_number_that_json_lacks():
    with pytest.raises(ValueError, match="JSON"):
        emit_json({"ratio": float("nan")})


def test_a_size_is_read_into_bytes_and_a_wrong_one_is_a_wrong_question():
    @click.command()
    @click.option("--staging", type=size, default="1KiB")
    def verb(staging):
        click.echo(repr(staging))

    assert CliRunner().invoke(verb, ["--staging", "512MiB"]).stdout == f"{512 * 2**20}\n"
    assert CliRunner().invoke(verb).stdout == "1024\n"
    wrong = CliRunner().invoke(verb, ["--staging", "many"])
    assert wrong.exit_code == 2
    assert "'many' is not a size" in wrong.stderr


def test_a_misspelt_verb_is_answered_with_the_nearest(run):
    result = run("explian")
    assert result.exit_code == 2
    assert "No such command 'explian'. Is 'explain' meant?" in result.stderr
    assert "No such command 'zzz'." in run("zzz").stderr
