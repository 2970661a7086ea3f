"""Test that the examples of docs/scale.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from scale.conftest import TEXT

import fusec
from fusec.text import parse

PAGE = Path(__file__).parent.parent.parent / "docs" / "scale.md"
EXAMPLES = re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("title", "text"), EXAMPLES, ids=lambda part: part if len(part) < 80 else "")
def test_examples(title: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FUSEC_DEVICE", "none")
    fusec.save("model.fusec", [fusec.compile(parse(TEXT), target="cpu").compiled], {})
    rng = np.random.default_rng(0)
    batches = rng.standard_normal((5, 4, 6)).astype(np.float32)
    names = {"batches": batches, "x": batches[0], "np": np}
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(code, names)
    assert names["y"].shape == (4, 6)
