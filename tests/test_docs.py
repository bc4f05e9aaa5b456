"""What the documents and examples show is what happens: their code runs, their commands print what stands below them.

In a document, fenced ``python`` blocks are one session, run from the top; one that follows ``<!-- ranks: 6 -->`` is run
by that many processes as torchrun would start them. In ``console`` blocks every line ``$ reshard ...`` is run and its
output compared; ``...`` alone on a line stands for any lines. ``<!-- not run: why -->`` before a block excuses it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

import reshard
from reshard.cli.main import main
from reshard.testing.ports import free_port
from reshard.testing.processes import ProcessPool

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ELSEWHERE = {"vllm_refit.py"}  # run by tests/vllm, where there is a vLLM
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.name not in ELSEWHERE)
BLOCK = re.compile(
    r"(?:<!-- (?P<mark>[^\n]*?) -->\n\n?)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    document: str
    line: int
    language: str
    code: str
    mark: str

    @property
    def is_run(self):
        return not self.mark.startswith("not run: ")

    @property
    def ranks(self):
        """How many processes run it; 0 for the session of its document."""
        return int(self.mark.removeprefix("ranks: ")) if self.mark.startswith("ranks: ") else 0


def blocks(document, *languages):
    text = document.read_text("utf-8")
    found = [
        Block(
            document.name,
            text[: match.start("code")].count("\n"),
            match["language"],
            match["code"],
            match["mark"] or "",
        )
        for match in BLOCK.finditer(text)
    ]
    return [block for block in found if block.language in languages and block.is_run]


def names(paths):
    return [path.relative_to(ROOT).as_posix() for path in paths]


def as_torchrun(context, source, name):
    """Run a script as this rank, with the variables that torchrun would set."""
    if context.rank == 0:  # for the group that the script makes
        context.store.set("port", str(free_port()))
    port = context.store.get("port").decode()
    variables = {"RANK": context.rank, "WORLD_SIZE": context.size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in variables.items()})
    exec(compile(source, name, "exec"), {"__name__": "__main__"})


@pytest.fixture(scope="module")
def pool():
    with ProcessPool(6) as pool:
        yield pool


@pytest.mark.parametrize("document", DOCUMENTS, ids=names(DOCUMENTS))
def test_the_python_blocks_of_a_document_run_as_one_session(document, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    session = {"__name__": "__docs__"}
    for block in blocks(document, "python"):
        if not block.ranks:
            exec(compile("\n" * block.line + block.code, block.document, "exec"), session)


@pytest.mark.parametrize("document", DOCUMENTS, ids=names(DOCUMENTS))
def test_the_console_blocks_of_a_document_print_what_stands_there(document, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for block in blocks(document, "console"):
        for command, shown in commands(block.code):
            if command[0] == "reshard":
                result = CliRunner().invoke(main, command[1:])
                assert result.exit_code == 0, f"{block.document}:{block.line}: {result.output}"
                assert matches(shown, result.stdout), f"{block.document}:{block.line} prints:\n{result.stdout}"


def commands(code):
    """(command, lines shown below it) for every line that begins with ``$``."""
    found = []
    for line in code.splitlines():
        if line.startswith("$ "):
            found.append((shlex.split(line[2:]), []))
        else:
            found[-1][1].append(line)
    return found


def matches(shown, printed):
    pattern = "".join("(?:.*\n)*" if line == "..." else re.escape(line) + "\n" for line in shown)
    return re.fullmatch(pattern, printed) is not None


@pytest.mark.parametrize("example", EXAMPLES, ids=names(EXAMPLES))
def test_an_example_runs(example, pool):
    ranks = int(re.search(r"torchrun --nproc-per-node (\d+)", example.read_text("utf-8"))[1])
    pool.run(as_torchrun, example.read_text("utf-8"), example.name, ranks=ranks, timeout=60)


def test_every_block_for_several_ranks_is_an_example():
    known = [example.read_text("utf-8").split('"""\n\n', 1)[1] for example in EXAMPLES]
    for document in DOCUMENTS:
        for block in blocks(document, "python"):
            assert not block.ranks or block.code in known, f"{block.document}:{block.line} is in no file of examples/"


@pytest.mark.parametrize("document", DOCUMENTS, ids=names(DOCUMENTS))
def test_every_link_and_picture_is_there(document):
    text = document.read_text("utf-8")
    headings = {
        re.sub(r"[^\w\- ]", "", h).strip().lower().replace(" ", "-") for h in re.findall(r"^#+ (.*)$", text, re.M)
    }
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("#"):
            assert target[1:] in headings, target
        elif "://" not in target:
            assert (document.parent / target.split("#")[0]).exists(), target


def test_the_figure_is_drawn_from_the_plan():
    script = ROOT / "docs" / "draw_one_tensor.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == (ROOT / "docs" / "one-tensor.svg").read_text("utf-8"), (
        "draw it again: python docs/draw_one_tensor.py > docs/one-tensor.svg"
    )


def test_a_document_that_shows_another_output_would_be_seen():
    assert matches(["a", "...", "c"], "a\nb\nb\nc\n")
    assert matches(["...", "c"], "c\n")
    assert not matches(["a", "c"], "a\nb\nc\n")
    assert commands("$ reshard check 'a b'\nproven\n") == [(["reshard", "check", "a b"], ["proven"])]


def test_the_report_pages_of_the_site_are_made_and_stay_small(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import from_code

    from_code.write(tmp_path)
    pages = {path.name: path.read_text("utf-8") for path in (tmp_path / "pages" / "report").iterdir()}
    assert set(pages) == set(from_code.REPORTS)
    shown = (ROOT / "docs" / "reports.md").read_text("utf-8")
    for name, page in pages.items():
        assert page.startswith("<!doctype html>")
        assert len(page.encode()) < 2_000_000
        assert f'href="report/{name}"' in shown
    assert "deepseek-v3" in (tmp_path / "models.inc.md").read_text("utf-8")
    names = (tmp_path / "names.inc.rst").read_text("utf-8")
    assert all(f"reshard.{name}\n" in names for name in reshard.__all__ if name != "__version__")
