"""Test that the planted faults still fit the code; a few are hunted here, all of them with `-m manual`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mutation.mutants import MUTANTS, Mutant
from mutation.suite import ALL, PACKAGE, digest, hunt

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "mutants.json"
DOC = Path(__file__).parents[2] / "docs" / "mutants.md"
BEGIN, END = "<!-- begin: python benchmarks/checks/mutants.py -->\n", "\n<!-- end -->"


@pytest.mark.parametrize("mutant", ALL, ids=lambda m: m.name)
def test_a_mutant_fits_and_compiles(mutant: Mutant) -> None:
    text = (PACKAGE / mutant.file).read_text()
    assert text.count(mutant.old) == 1, f"{mutant.file} was edited: plant the same fault in its text of today"
    assert mutant.old != mutant.new
    if mutant.file.endswith(".py"):
        compile(text.replace(mutant.old, mutant.new), mutant.file, "exec")


def test_mutants_are_many_and_everywhere() -> None:
    assert len({m.name for m in ALL}) == len(ALL)
    assert len(MUTANTS) >= 40
    assert len({m.area for m in MUTANTS}) >= 15


@pytest.mark.slow
@pytest.mark.parametrize("name", ["runtime_freed_early", "patches_padded"])  # `-m manual` hunts these and all others
def test_some_are_found_at_once(name: str) -> None:
    found = hunt(next(m for m in ALL if m.name == name))
    assert found["caught"], found
    assert found["ops"] <= 5


@pytest.mark.manual
@pytest.mark.parametrize("mutant", ALL, ids=lambda m: m.name)
def test_every_one_is_found(mutant: Mutant) -> None:
    found = hunt(mutant)
    assert found["caught"], found


def test_the_committed_report_is_about_these() -> None:
    rows: list[dict[str, Any]] = json.loads(RESULTS.read_text())["mutants"]
    found = {r["name"]: r["digest"] for r in rows}
    changed = [m.name for m in ALL if found.get(m.name) != digest(m)]
    assert not changed, "run benchmarks/checks/mutants.py with the names of these mutants"
    assert [r["name"] for r in rows] == [m.name for m in ALL]
    assert all(r["caught"] for r in rows)


def test_the_tests_that_the_report_names_exist() -> None:
    found = [row["property"].split("[")[0].split("::") for row in json.loads(RESULTS.read_text())["mutants"]]
    named = [(file, test[0]) for file, *test in found if test]
    assert named
    gone = [each for each in named if f"def {each[1]}(" not in (RESULTS.parents[2] / each[0]).read_text()]
    assert not gone, "run benchmarks/checks/mutants.py with the names of these mutants"


def test_the_cases_that_the_report_names_are_in_make_test(request: pytest.FixtureRequest) -> None:
    """If all tests are collected, those that found a fault are among them, and not marked as slow."""
    run = {item.nodeid for item in request.session.items}
    named = {row["property"] for row in json.loads(RESULTS.read_text())["mutants"] if "::" in row["property"]}
    if {name.partition("::")[0] for name in named} <= {name.partition("::")[0] for name in run}:
        assert not named - run, "let them run, or run benchmarks/checks/mutants.py with the names of these mutants"


def test_the_table_in_the_docs_is_that_of_the_results(request: pytest.FixtureRequest) -> None:
    from benchmarks.checks.mutants import table

    text, made = DOC.read_text(), table(json.loads(RESULTS.read_text()))
    before, _, rest = text.partition(BEGIN)
    listed, _, after = rest.partition(END)
    if request.config.getoption("--accept"):
        DOC.write_text(before + BEGIN + made + END + after)
    else:
        assert listed == made, "run pytest --accept to write it anew"
