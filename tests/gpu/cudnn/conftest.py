"""Tests of what asks cuDNN ask it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module", autouse=True)
def nothing_recorded(fusec_cache: Path) -> Iterator[None]:
    """Use a cache without recorded answers, one for all of these files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSEC_CACHE", str(fusec_cache.with_name(f"{fusec_cache.name}-asked")))
        yield
