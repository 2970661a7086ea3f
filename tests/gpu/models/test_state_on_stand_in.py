"""Test state in place on a stand-in GPU. Its blocks run one after the other, so a late read gets the new value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gpu.kernels.emulator import needs_compiler
from gpu.stand_in_gpu import Machine
from helpers import assert_close, one_program

import fusec
from fusec import driver
from fusec.builder import Builder, Tensor
from fusec.gpu.cudnn.legality.oracle import Oracle
from fusec.plans.plan_cache import PlanStore
from fusec.runtime import Executable

pytest.importorskip("cupy")
pytest.importorskip("cudnn")
pytestmark = [pytest.mark.cudnn, needs_compiler]
SIZE = 96

UPDATES: dict[str, Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "each by the other": lambda a, b, x: (a - b * 0.5, b - a * 0.5),
    "one by the other": lambda a, b, x: (a - x * 0.5, b - a * 0.5),
    "by its transpose": lambda a, b, x: (a.T * x, b + b.T),
    "by its first row": lambda a, b, x: (a[0:1] * x, b * 0.5 + b[:, 0:1]),
    "by itself alone": lambda a, b, x: (a * 0.5 + x, b - x),
}
# States written in place. A step before the update copies a transpose or a column elsewhere.
PLACED = dict(zip(UPDATES, (0, 1, 2, 1, 2), strict=True))


@pytest.mark.parametrize("what", UPDATES)
def test_new_state_is_made_of_the_old(
    what: str, machine: Machine, tmp_path: Path, rng: np.random.Generator, asked_once: Oracle
) -> None:
    from fusec.gpu.backend import CudnnBackend

    b = Builder()
    x = b.input("x", (SIZE, SIZE))
    start = {name: rng.standard_normal((SIZE, SIZE)).astype(np.float32) for name in "ab"}
    held = {name: b.parameter(name, array) for name, array in start.items()}
    for old, new in zip(held.values(), UPDATES[what](held["a"], held["b"], x), strict=True):
        b.update(old, new)
    b.output(y=x * 2.0)
    state = {name: b.updates.get(name, "") for name in b.parameters}
    compiled = driver.build(b.graph(), target="h200", state=state, oracle=asked_once)
    here = Executable(compiled, CudnnBackend("none", store=PlanStore(tmp_path)))
    here.bind(**start)
    there = one_program(fusec.compile(b, target="cpu"))
    for _ in range(3):
        array = rng.standard_normal((SIZE, SIZE)).astype(np.float32)
        here.step(array)
        there.step(array)
    for name in start:
        assert_close(here.value(name), there.value(name), 1e-4)
    assert here.in_place == PLACED[what]


def test_a_count_and_a_parameter_of_another_shape(machine: Machine, tmp_path: Path, asked_once: Oracle) -> None:
    """The update of a parameter of shape [1] reads Adam's count in another block than the one that raises it."""
    from fusec import training
    from fusec.gpu.backend import CudnnBackend

    b = Builder()
    start = [np.ones(shape, np.float32) for shape in ((), (1,))]
    held = [b.parameter(f"p{i}", array) for i, array in enumerate(start)]
    training.adam(b, held, [b.input(f"g{i}", array.shape) for i, array in enumerate(start)], 0.1)
    b.output(y=b.input("x", (4,)) * 2.0)
    state = {name: b.updates.get(name, "") for name in b.parameters}
    compiled = driver.build(b.graph(), target="h200", state=state, oracle=asked_once)
    here = Executable(compiled, CudnnBackend("none", store=PlanStore(tmp_path)))
    here.bind(**{name: array for name, array in b.parameters.items() if array is not None})
    there = one_program(fusec.compile(b, target="cpu"))
    for _ in range(3):
        feeds = {"g0": np.float32(0.5), "g1": np.full(1, 0.25, np.float32), "x": np.ones(4, np.float32)}
        here.step(**feeds)
        there.step(**feeds)
    for name in b.parameters:
        assert_close(here.value(name), there.value(name), 1e-5)
