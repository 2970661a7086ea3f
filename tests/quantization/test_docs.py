"""The table of docs/quantization.md is that of the measurements."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import quantization
from benchmarks.machine import RESULTS

PAGE = Path(__file__).parent.parent.parent / "docs" / "quantization.md"
BEGIN, END = "<!-- begin: python -m benchmarks.quantization -->\n", "<!-- end -->"


def test_the_table_is_generated(request: pytest.FixtureRequest) -> None:
    made = quantization.tables(json.loads((RESULTS / "quantization.json").read_text()))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    listed, _, after = rest.partition(END)
    if request.config.getoption("--accept"):
        PAGE.write_text(before + BEGIN + made + END + after)
    else:
        assert listed == made, "run pytest --accept to write it anew"


def test_no_format_loses_more_than_its_goal() -> None:
    rows = json.loads((RESULTS / "quantization.json").read_text())["rows"]
    own = [row for row in rows if row["tool"] == "fusec"]
    assert {(row["model"], row["format"]) for row in own} == {
        (m, f) for m in ("cnn", "vit") for f in quantization.GOALS
    }
    for row in own:
        assert row["float"] - min(row["accuracy"], row["onnxruntime"]) <= quantization.GOALS[row["format"]], row
