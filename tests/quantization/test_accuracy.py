"""Test the losses of quantised formats against measured ones."""

from __future__ import annotations

import json

from benchmarks.checks import quantized_accuracy
from benchmarks.common.result_files import RESULTS


def test_no_format_loses_more_than_its_goal() -> None:
    rows = json.loads((RESULTS / "quantization.json").read_text())["rows"]
    own = [row for row in rows if row["tool"] == "fusec"]
    assert {(row["model"], row["format"]) for row in own} == {
        (m, f) for m in ("cnn", "vit") for f in quantized_accuracy.GOALS
    }
    for row in own:
        assert row["float"] - min(row["accuracy"], row["onnxruntime"]) <= quantized_accuracy.GOALS[row["format"]], row
