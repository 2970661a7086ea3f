"""Fixtures of the tests of ops."""

from __future__ import annotations

import pytest


@pytest.fixture
def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take few samples of a region, because an enormous one takes seconds otherwise."""
    monkeypatch.setattr("fusec.ops.roi_align.MAX_SAMPLES", 64)
