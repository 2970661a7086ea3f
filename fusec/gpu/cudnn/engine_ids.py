"""Name cuDNN's engines and their knobs as plain numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Identity = tuple[int, tuple[tuple[int, int], ...]]  # of a plan: engine and knobs


PYTHON_ENGINES = 10_000  # from here on the engines are the frontend's own, not the library's


def knobs_of(knobs: Mapping[Any, Any]) -> dict[int, int]:
    """Return a plan's knobs as plain numbers."""
    return {int(k): int(v) for k, v in knobs.items()}
