"""Run the examples of docs/scale.md as they stand, except for paths."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
from helpers import one_program
from scale.conftest import TEXT

import fusec
from fusec.text import parse

PAGE = Path(__file__).parent.parent.parent / "docs" / "scale.md"


def run_examples(title: str) -> dict[str, Any]:
    """Run all examples of a section in the current folder, and return the names that they leave."""
    fusec.save("model.fusec", [one_program(fusec.compile(parse(TEXT), target="cpu")).compiled], {})
    Path("in").mkdir()
    batches = np.random.default_rng(0).standard_normal((5, 4, 6)).astype(np.float32)
    names: dict[str, Any] = {"__name__": "__main__", "batches": batches, "x": batches[0], "np": np}
    (section,) = re.findall(rf"^## {re.escape(title)}[^\n]*\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)
    for code in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
        if code.startswith("# train.py\n"):
            Path("train.py").write_text(code)
            continue
        exec(code.replace("/models/", os.getcwd() + "/"), names)  # noqa: PTH109
    return names
