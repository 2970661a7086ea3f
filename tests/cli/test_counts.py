"""Test that every report counts the steps of a program the same way."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from cli.command import fusec
from helpers import quick

from fusec.schedule.program import counts

pytestmark = pytest.mark.cudnn

# A view (the reshape), an op that cuDNN lacks, and casts at inputs and outputs in fp16.
MODEL = """graph "net" (%x: f32[4,8]) {
  %w = constant weight("w") : f32[8,16]
  %m = matmul(%x, %w)
  %r = relu(%m)
  %v = reshape(%r) {shape=[8,8]}
  %y = sign(%v)
  return %y
}"""


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("counts") / "net.txt"
    path.write_text(re.sub(r'weight\("w"\)', f"[{', '.join(str(i % 7 - 2.5) for i in range(128))}]", MODEL))
    return path


@pytest.mark.parametrize("precision", quick(["fp32", "fp16"], ["fp16"]))
def test_all_reports_give_one_number(net: Path, tmp_path: Path, precision: str) -> None:
    options = ("--target", "h200", "--precision", precision)
    file = tmp_path / "net.fusec"
    commands = {
        "compile": ("compile", net, *options),
        "explain": ("explain", net, *options, "--no-cores"),
        "bench": ("bench", net, *options, "--runs", 1),
        "convert": ("convert", net, *options, "-o", tmp_path / "net.onnx"),
        "written": ("compile", net, *options, "-o", file),
        "file": ("explain", file, "--no-cores"),
        "benched file": ("bench", file, "--runs", 1),
    }
    told: dict[str, tuple[str, ...]] = {}
    for name, command in commands.items():
        result = fusec(*command)
        assert result.exit_code == 0, result.stderr
        told[name] = tuple(re.findall(r"\d+ steps? \([^)]*\)", result.stdout))
        assert told[name], name
    assert len({text for texts in told.values() for text in texts}) == 1, told
    summary = json.loads(fusec(*commands["compile"], "--json").stdout)["totals"]
    (target,) = json.loads(fusec(*commands["explain"], "--json").stdout)["targets"]
    bench = json.loads(fusec(*commands["bench"], "--json").stdout)["totals"]
    convert = json.loads(fusec(*commands["convert"], "--json").stdout)
    assert summary["views"] == 1
    assert len(target["steps"]) == target["totals"]["steps"] == summary["steps"] == bench["steps"] == convert["steps"]
    assert target["totals"]["launches"] == summary["launches"] == bench["launches"] == convert["launches"]
    assert told["compile"] == (counts(summary["steps"], summary["launches"]),)


def test_counts_in_words() -> None:
    assert [counts(1, 1), counts(58, 57), counts(3, 1)] == [
        "1 step (1 launch)",
        "58 steps (57 launches, 1 view)",
        "3 steps (1 launch, 2 views)",
    ]
