"""Test small training steps of the benchmark's models: their losses in fp16, and their launches on an H200."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import one_program

import fusec
from examples.training_models import training_step
from fusec.builder import Builder
from fusec.driver import build
from fusec.gpu.cudnn.legality.oracle import Oracle
from fusec.schedule.program import Kind

SIZES: dict[str, dict[str, Any]] = {
    "resnet50": {"blocks": (1, 1), "width": 8},
    "vit_b_16": {"size": 32, "depth": 1, "heads": 2},
}


def first(b: Builder) -> dict[str, np.ndarray[Any, Any]]:
    """Draw weights of unit gain and norms near one, without zeros."""
    rng = np.random.default_rng(0)
    found: dict[str, np.ndarray[Any, Any]] = {}
    for value in b.graph().inputs:
        shape = value.type.shape
        if value.name not in b.parameters or b.parameters[value.name] is not None:
            continue
        drawn = rng.standard_normal(shape)
        scale = len(shape) == 1 and value.name.endswith((".weight", "_var"))
        fan_in = max(1, int(np.prod(shape[1:])))
        found[value.name] = (1 + 0.1 * np.abs(drawn) if scale else drawn / fan_in**0.5 * 0.7).astype(np.float32)
    return found


@pytest.mark.parametrize("name", SIZES)
def test_fp16_learns_what_fp32_does(name: str) -> None:
    held = first(training_step(name, 2, 32, **SIZES[name]))
    losses: dict[str, list[float]] = {}
    for dtype in ("f16", "f32"):
        executable = one_program(
            fusec.compile(training_step(name, 2, 32, first=held, dtype=dtype, **SIZES[name]), target="cpu")
        )
        rng = np.random.default_rng(1)
        images, labels = rng.standard_normal((2, 3, 32, 32)), rng.integers(0, 1000, 2)
        images = images.astype(np.float16 if dtype == "f16" else np.float32)
        losses[dtype] = [float(executable.step(images, labels)) for _ in range(3)]
    np.testing.assert_allclose(losses["f16"], losses["f32"], rtol=1e-2)
    assert losses["f16"][-1] < losses["f16"][0]


@pytest.mark.cudnn
@pytest.mark.parametrize("name", SIZES)
def test_what_is_done_to_parameters_is_a_handful_of_launches(name: str, asked_once: Oracle) -> None:
    b = training_step(name, 2, 32, **SIZES[name])
    state = {p: b.updates.get(p, "") for p in b.parameters}
    program = build(b.graph(), target="h200", state=state, oracle=asked_once).program
    parameters = sum("." in p and not p.startswith(("loss", "adam")) for p in b.parameters)
    lists = [s for s in program.steps if s.kind is Kind.KERNEL and " x " in s.signature]
    assert len(lists) <= 8
    assert sum(int(s.signature.split(" x ")[0]) for s in lists) > parameters / 4
    # nothing that only replaces state is a launch of its own
    returned = zip(program.graph.output_names, program.graph.outputs, strict=True)
    replaced = {value for output, value in returned if output in set(state.values())}
    alone = [s for s in program.steps if s not in lists and replaced.intersection(s.outputs) and len(s.outputs) == 1]
    assert len(alone) <= 3
