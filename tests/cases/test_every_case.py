"""Each case of the collection is a test here, or the table in README.md says what is left of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

HERE = Path(__file__).parent
CASES = json.loads((HERE.parent / "data" / "cases.json").read_text(encoding="utf-8"))
IDS = {case["id"] for case in CASES}
ID = re.compile(r"([A-Z]{2})[_-](\d\d)")


def table():
    """What the table says is covered, by id; "" where nothing is."""
    lines = (HERE / "README.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("|")]
    return {"-".join(name): covered for names, covered, _ in rows for name in ID.findall(names)}


def ids_of_tests():
    names = [
        name
        for path in HERE.glob("test_*.py")
        for name in re.findall(r"^def test_((?:[A-Z]{2}_\d\d_)+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    return {"-".join(part) for name in names for part in ID.findall(name)}


def test_every_case_is_tested_or_listed_with_what_is_left_of_it():
    assert len(IDS) == len(CASES)
    assert IDS - ids_of_tests() - set(table()) == set()


def test_tests_and_table_name_only_cases_that_there_are():
    assert ids_of_tests() | set(table()) <= IDS


def test_the_table_says_that_a_case_is_covered_in_part_exactly_where_there_is_a_test():
    assert {name for name, covered in table().items() if covered} == ids_of_tests() & set(table())
