"""Give a small model file, and what it computes; let workers fail."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusec.scale.device_pool import pool_process

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


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let workers of pools fail as `faulty_worker.py` says."""
    monkeypatch.setattr(pool_process, "WORKER", "scale.device_pool.faulty_worker")
    monkeypatch.setenv("FAIL_ONCE_FILE", str(tmp_path / "once"))
