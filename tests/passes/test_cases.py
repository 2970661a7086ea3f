"""Test every pass, text in and text out; each case has a sibling that must not fire. `pytest --accept` rewrites."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from passes.cases import Case, apply, assert_same_meaning, read_cases, read_graph, write_cases

from fusec.ir import Op
from fusec.passes import PIPELINE

FILES = {path.stem: path for path in sorted(Path(__file__).parent.rglob("*.txt")) if path.parent.name != "partition"}
# Passes that only move or remove are exact; the others round a new constant to f32.
EXACT = {"simplify", "cse", "fold_pads", "sink_views", "fold_constants"}


def test_every_pass_has_cases() -> None:
    assert {p.name for p in PIPELINE} <= FILES.keys() | {"precision", "assign_layout"}


@pytest.mark.parametrize("name", FILES)
def test_cases(name: str, request: pytest.FixtureRequest, rng: np.random.Generator) -> None:
    preamble, cases = read_cases(FILES[name])
    found: list[Case] = []
    for case in cases:
        before = read_graph(case.text)
        after = apply(name, before.clone(), case.options)
        rtol = 5e-3 if case.half else 1e-12 if name in EXACT else 1e-6
        try:
            assert_same_meaning(before, after, rng, rtol)
        except AssertionError as error:
            raise AssertionError(f"{name}: {case.title}: {error}") from error
        same = str(after) == str(before)
        reason = case.expected if case.expected.startswith("unchanged:") else "unchanged: "
        found.append(Case(case.title, case.text, reason if same else str(after)))
    if request.config.getoption("--accept"):
        write_cases(FILES[name], preamble, found)
    else:
        assert [f"== {c.title}\n{c.expected}" for c in found] == [f"== {c.title}\n{c.expected}" for c in cases]


@pytest.mark.parametrize("name", FILES)
def test_unchanged_cases_give_a_reason(name: str) -> None:
    _, cases = read_cases(FILES[name])
    kept = [case for case in cases if case.expected.startswith("unchanged:")]
    assert all(case.expected.removeprefix("unchanged:").strip() for case in kept)
    assert kept or name == "pipeline"
    assert len(kept) < len(cases)


def test_a_pass_that_changes_meaning_is_caught(rng: np.random.Generator) -> None:
    before = read_graph('graph "g" (%x: f32[4]) {\n  %y = relu(%x)\n  return %y\n}')
    after = read_graph('graph "g" (%x: f32[4]) {\n  %y = abs(%x)\n  return %y\n}')
    assert issubclass(type(next(before.nodes).op), Op)
    with pytest.raises(AssertionError, match="relative L2 error"):
        assert_same_meaning(before, after, rng, 1e-6)
