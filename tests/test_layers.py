"""Imports point one way: every import is read, those inside functions too, and what points up is shown."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src" / "reshard"

# Each part of the package, and what it stands on: it may import that, and what that may import.
STANDS_ON = {
    "errors": "",
    "version": "",
    "units": "errors version",
    "layouts": "units",
    "topology": "units",
    "models": "layouts",
    "plan": "layouts topology",
    "schedule": "plan",
    "simulate": "schedule",
    "transports": "schedule",
    "report": "schedule",
    "refit": "simulate transports",
    "integrations": "refit",
    "__init__": "integrations models report",  # the public names
    "demo": "__init__",
    "bench": "demo",  # starts processes as the demo does
    "cli": "bench",
    "__main__": "cli",
    "testing": "cli",  # everything; and nothing but tests imports it
}
PURE = ("errors", "version", "units", "layouts", "topology", "models", "plan", "schedule", "simulate", "report")
REFIT_WITH_TORCH = tuple(
    f"refit/{name}.py"
    for name in (
        "agreement",
        "collective",
        "compiled",
        "connect",
        "fingerprints",
        "group",
        "handed",
        "landing",
        "loans",
        "room",
        "session",
        "store",
        "whole",
    )
)
TORCH = ("transports", *REFIT_WITH_TORCH, "integrations", "demo", "bench", "cli", "testing")
NO_NUMPY = ("errors.py", "units.py", "layouts", "topology")

MODULES = {path.relative_to(SRC).as_posix(): ast.parse(path.read_text("utf-8")) for path in sorted(SRC.rglob("*.py"))}


def name_of(file: str) -> str:
    """``plan/cells.py`` -> ``plan.cells``, ``plan/__init__.py`` -> ``plan``, ``__init__.py`` -> ``__init__``."""
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


NAMES = {name_of(file) for file in MODULES}


def imports(tree: ast.AST) -> set[str]:
    """Every module that is named by an import below this node, as written: ``reshard.plan.cells``, ``torch``."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import; write it in full"
            named = {f"{node.module}.{alias.name}" for alias in node.names}
            submodules = {name for name in named if name.removeprefix("reshard.") in NAMES}
            found |= submodules | ({node.module} if submodules < named else set())
    return found


def own_imports(file: str) -> set[str]:
    """The modules of this package that a file imports, named as in ``NAMES``."""
    found = {name for name in imports(MODULES[file]) if name.split(".")[0] == "reshard"}
    return {"__init__" if name == "reshard" else name.removeprefix("reshard.") for name in found}


def below(part: str) -> set[str]:
    """All that a part may import."""
    return {part}.union(*(below(other) for other in STANDS_ON[part].split()))


def at_run_time(tree: ast.Module) -> ast.Module:
    """The module without its ``if TYPE_CHECKING:`` blocks."""
    kept = [node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))]
    return ast.Module(kept, [])


@pytest.mark.parametrize("file", MODULES)
def test_no_import_points_up(file):
    part = name_of(file).split(".")[0]
    assert part in STANDS_ON, f"say in STANDS_ON what {part!r} stands on"
    above = {name for name in own_imports(file) if name.split(".")[0] not in below(part)}
    # `reshard bench cluster` measures on the hosts that tests use too; they themselves stand on errors and units alone
    assert above - ({"testing.hosts"} if part == "bench" else set()) == set()


def test_the_hosts_that_the_bench_borrows_from_testing_stand_on_errors_and_units_alone():
    files = {f"testing.{name}": own_imports(f"testing/{name}.py") for name in ("hosts", "namespaces", "tasks")}
    assert set().union(*files.values()) - set(files) == {"errors", "units"}


def test_no_modules_import_each_other_in_a_ring():
    TopologicalSorter(
        {name_of(file): own_imports(file) - {name_of(file)} for file in MODULES}
    ).prepare()  # raises CycleError


@pytest.mark.parametrize("file", MODULES)
def test_torch_and_numpy_are_imported_only_where_bytes_move_or_numbers_are_many(file):
    roots = {name.split(".")[0] for name in imports(at_run_time(MODULES[file]))}
    assert "torch" not in roots or file.startswith(TORCH)
    assert "numpy" not in roots or not file.startswith(NO_NUMPY)


def test_the_pure_parts_and_the_command_line_start_without_torch():
    names = [name_of(file) for file in MODULES]
    wanted = [name for name in names if name.split(".")[0] in PURE] + ["cli.main"]
    script = (
        "import importlib, sys\n"
        "class Blocker:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'torch':\n"
        "            raise ImportError(f'{name} is imported at start')\n"
        "sys.meta_path.insert(0, Blocker())\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
    )
    command = [sys.executable, "-c", script, "reshard", *(f"reshard.{name}" for name in wanted)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
