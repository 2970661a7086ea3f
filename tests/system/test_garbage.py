"""Test that collections are rarer within blocks, and as before afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from fusec.system.garbage import OBJECTS, seldom_collected


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 10, 5)
    yield
    gc.set_threshold(*before)


def test_the_threshold_is_restored_by_the_last_block() -> None:
    one, two = seldom_collected(), seldom_collected()
    one.__enter__()
    assert gc.get_threshold() == (OBJECTS, 10, 5)
    two.__enter__()
    one.__exit__(None, None, None)
    assert gc.get_threshold()[0] == OBJECTS, "another block is open"
    two.__exit__(None, None, None)
    assert gc.get_threshold() == (700, 10, 5)


def test_an_error_restores_the_threshold() -> None:
    with pytest.raises(ValueError, match="within"), seldom_collected():
        raise ValueError("within")
    assert gc.get_threshold() == (700, 10, 5)


@pytest.mark.parametrize("own", [(0, 10, 5), (2 * OBJECTS, 10, 5)])
def test_a_process_that_collects_seldom_or_never_is_left_alone(own: tuple[int, int, int]) -> None:
    gc.set_threshold(*own)
    with seldom_collected():
        assert gc.get_threshold() == own
    assert gc.get_threshold() == own


def test_a_threshold_that_is_set_meanwhile_stays() -> None:
    with seldom_collected():
        gc.set_threshold(5000, 10, 5)
    assert gc.get_threshold() == (5000, 10, 5)
