"""Check bugs that fuzzing found, each as its shrunk graph: every property holds for it now.

A file is comments (why; then `# case: {…}` if it takes other data than the default), and the graph.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fusec.testing.case import Case, Property
from fusec.testing.properties.table import PROPERTIES
from fusec.text import parse

FILES = sorted(Path(__file__).parent.glob("*.txt"))
CPU = [p for p in PROPERTIES.values() if p.needs != "gpu"]


def case_of(text: str) -> Case:
    """Read the case from a file."""
    lines = [line.removeprefix("# case:") for line in text.splitlines() if line.startswith("# case:")]
    given = json.loads(lines[0]) if lines else {}
    return Case.from_json({**Case().to_json(), **given})


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
@pytest.mark.parametrize("property", CPU, ids=lambda p: p.name)
def test_finding_stays_fixed(file: Path, property: Property) -> None:
    if property.needs == "onnxruntime":
        pytest.importorskip("onnxruntime")
    text = file.read_text()
    assert text.startswith("# "), "the first line says what was wrong"
    property.check(parse(text), case_of(text))


@pytest.mark.gpu
@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
@pytest.mark.parametrize("property", ["device_agrees", "plans_agree", "kernels_agree"])
def test_finding_stays_fixed_on_the_gpu(file: Path, precision: str, property: str) -> None:
    text = file.read_text()
    PROPERTIES[property].check(parse(text), replace(case_of(text), precision=precision))
