"""Test state in place on a GPU: readers of the old value run before it is replaced."""

from __future__ import annotations

import numpy as np
import pytest
from gpu.models.test_state_on_stand_in import UPDATES
from helpers import assert_close, one_program

import fusec
from fusec.builder import Builder

pytestmark = pytest.mark.gpu
SIZE = 2048  # thousands of blocks


@pytest.mark.parametrize("what", UPDATES)
def test_new_state_is_made_of_the_old(what: str, rng: np.random.Generator) -> None:
    b = Builder()
    x = b.input("x", (SIZE, SIZE))
    start = {name: rng.standard_normal((SIZE, SIZE)).astype(np.float32) for name in "ab"}
    held = {name: b.parameter(name, array) for name, array in start.items()}
    for old, new in zip(held.values(), UPDATES[what](held["a"], held["b"], x), strict=True):
        b.update(old, new)
    b.output(y=x[0] * 2.0)
    here, there = one_program(fusec.compile(b, tune="none")), one_program(fusec.compile(b, target="cpu"))
    for _ in range(3):
        array = rng.standard_normal((SIZE, SIZE)).astype(np.float32)
        here.step(array)
        there.step(array)
    for name in start:
        assert_close(here.value(name), there.value(name), 1e-4)
    assert here.in_place > 0 or what != "by itself alone"
