"""Check bugs that fuzzing found, each as its shrunk graph: every property holds for it now.

A file is comments (why; then `# case: {…}` if it takes other data than the default), and the graph.
"""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from unittest import SkipTest

import pytest

from fusec.testing.case import Case
from fusec.testing.properties.table import PROPERTIES
from fusec.text import parse

FILES = sorted(Path(__file__).parent.glob("*.txt"))
MISSING = {"gpu"} if find_spec("onnxruntime") else {"gpu", "onnxruntime"}
CPU = [p for p in PROPERTIES.values() if p.needs not in MISSING]


def case_of(text: str) -> Case:
    """Read the case from a file."""
    lines = [line.removeprefix("# case:") for line in text.splitlines() if line.startswith("# case:")]
    given = json.loads(lines[0]) if lines else {}
    return Case.from_json({**Case().to_json(), **given})


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_finding_stays_fixed(file: Path) -> None:
    """Check all properties of one graph, because they share what is computed of it."""
    text = file.read_text()
    assert text.startswith("# "), "the first line says what was wrong"
    graph, case = parse(text), case_of(text)
    for checked in CPU:
        try:
            with suppress(SkipTest):  # the others still say something of this graph
                checked.check(graph, case)
        except Exception as error:
            error.add_note(f"the property {checked.name}")
            raise


@pytest.mark.gpu
@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "bf16"])
@pytest.mark.parametrize("property", ["device_agrees", "plans_agree", "kernels_agree"])
def test_finding_stays_fixed_on_the_gpu(file: Path, precision: str, property: str) -> None:
    text = file.read_text()
    PROPERTIES[property].check(parse(text), replace(case_of(text), precision=precision))
