"""A small model file, and what it computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

TEXT = """graph "g" (%x: f32[4,6]) {
  %y = tanh(%x)
  %z = mul(%y, %x)
  return %z
}"""

Array = np.ndarray[Any, Any]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def meaning() -> Callable[[Array], Array]:
    def compute(x: Array) -> Array:
        wide = x.astype(np.float64)
        return np.tanh(wide) * wide

    return compute
