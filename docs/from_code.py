"""The parts of the documentation that are made from the code at each build: models, public names, report pages.

Run ``python docs/from_code.py FOLDER`` to see them without building the site.
"""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import reshard
from reshard.cli.main import main as command
from reshard.models.catalogue import CATALOGUE
from reshard.models.parallelism import AXES
from reshard.models.summary import summary_of
from reshard.topology.presets import PRESETS
from reshard.units import format_nbytes

if TYPE_CHECKING:
    from collections.abc import Sequence

ONE_TENSOR = (
    *("--shape", "8x8", "--source", "fsdp=2 [fsdp, -]", "--destination", "tp=4 [-, tp]"),
    *("--cluster", "0-1 / 2-3 / 4-5 @ 2Gbit"),
)
DEEPSEEK_V3 = (
    *("--model", "deepseek-v3", "--source", "ep16 pp4 dp2", "--destination", "tp8 dp16", "--cluster", "gb200-nvl72"),
)
REPORTS = {"one-tensor.html": ONE_TENSOR, "deepseek-v3.html": DEEPSEEK_V3}
"""The report pages that the site shows, and what ``reshard report`` is asked for them."""

ORDER = (
    *("how-it-works", "sessions", "vllm", "vllm-engine", "plan-theory", "simulator", "reports", "models", "commands"),
    *("errors", "api"),
)
"""The pages as a reader meets them; others follow."""


def write(folder: Path) -> None:
    """Write all of them below ``folder``."""
    pages = folder / "pages" / "report"
    pages.mkdir(parents=True, exist_ok=True)
    for name, asked in REPORTS.items():
        write_report(asked, pages / name)
    (folder / "contents.inc.md").write_text(contents(), "utf-8")
    (folder / "models.inc.md").write_text(models_table(), "utf-8")
    (folder / "clusters.inc.md").write_text(clusters_table(), "utf-8")
    (folder / "styles.inc.md").write_text(styles_table(), "utf-8")
    (folder / "names.inc.rst").write_text(public_names(), "utf-8")


def write_report(asked: Sequence[str], path: Path) -> None:
    """Write one report page, as the command line would."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        command(["report", *asked, "-o", str(path)], standalone_mode=False)


def contents() -> str:
    """The table of contents: all pages that are there."""
    there = {path.stem for path in Path(__file__).parent.glob("*.md")} - {"index"}
    pages = [page for page in ORDER if page in there] + sorted(there - set(ORDER))
    return "\n".join(["```{toctree}", ":maxdepth: 2", ":hidden:", "", *pages, "```", ""])


def models_table() -> str:
    """The catalogue as a table in Markdown, and below it what is to be known of some models."""
    rows = [("name", "parameters", "tensors", "one copy", "layers", "experts", "in feed-forward")]
    notes: dict[str, list[str]] = {}
    for name, published in CATALOGUE.items():
        model = summary_of(name)
        if published.note:
            notes.setdefault(published.note, []).append(f"`{name}`")
        rows.append(
            (
                f"`{name}`",
                f"{model.parameters:,}",
                f"{model.tensors:,}",
                format_nbytes(model.nbytes).replace(" ", "\u00a0"),
                str(model.layers),
                str(model.experts or "-"),
                f"{model.feed_forward_share:.1%}",
            )
        )
    return _table(rows) + "".join(f"\n- {', '.join(names)}: {note}." for note, names in notes.items()) + "\n"


def clusters_table() -> str:
    """The presets of clusters as a table in Markdown."""
    rows = [("name", "what it is")]
    rows += [(f"`{name}`", (make.__doc__ or "").strip().splitlines()[0]) for name, make in PRESETS.items()]
    return _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *rest = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([head, "|" + "---|" * len(rows[0]), *rest]) + "\n"


def public_names() -> str:
    """Every public name of the package as a directive of autodoc, classes with their members."""
    text = []
    for name in reshard.__all__:
        thing: Any = getattr(reshard, name)
        if isinstance(thing, type):
            text.append(f".. autoclass:: reshard.{name}\n   :members:\n")
        elif callable(thing):
            text.append(f".. autofunction:: reshard.{name}\n")
    return "\n".join(text)


def styles_table() -> str:
    """The axes that each style of parallelism knows."""
    return _table([("style", "axes"), *((style, " ".join(axes)) for style, axes in AXES.items())])


if __name__ == "__main__":
    write(Path(sys.argv[1]))
