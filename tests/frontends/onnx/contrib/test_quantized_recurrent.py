"""Test LSTMs with weights of 8 bits against onnxruntime, which also rounds the input and states to 8 bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from frontends.onnx.contrib.models import Array, Held, Operand, assert_floats, both

from fusec.errors import ModelError

STEPS, BATCH, INPUTS, SIZE = 5, 2, 6, 4


def _codes(rng: np.random.Generator, inputs: int, directions: int, kind: str) -> tuple[Array, Array, Array]:
    """Draw codes, scales and zero points: `columns` for each column, which onnxruntime has for signed codes only."""
    shape = (directions, inputs, 4 * SIZE)
    per = (directions, 4 * SIZE) if kind == "columns" else (directions,)
    dtype: Any = np.uint8 if kind == "unsigned" else np.int8
    codes = rng.integers(-64, 64, shape) + (128 if kind == "unsigned" else 0)
    zero = np.full(per, 125 if kind == "unsigned" else 0)
    return codes.astype(dtype), rng.uniform(0.005, 0.01, per).astype(np.float32), zero.astype(dtype)


@pytest.mark.parametrize("kind", ["signed", "unsigned", "columns"])
@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize("more", [False, True])
def test_an_lstm_of_eight_bits(kind: str, direction: str, more: bool, rng: np.random.Generator) -> None:
    directions = 2 if direction == "bidirectional" else 1
    w, w_scale, w_zero = _codes(rng, INPUTS, directions, kind)
    r, r_scale, r_zero = _codes(rng, SIZE, directions, kind)
    x = rng.standard_normal((STEPS, BATCH, INPUTS)).astype(np.float32)
    optional: list[Operand] = [None] * 5
    if more:
        state = (directions, BATCH, SIZE)
        optional = [
            Held(rng.standard_normal((directions, 8 * SIZE)).astype(np.float32)),
            np.array([STEPS, 3], np.int32),
            *(rng.uniform(-1, 1, state).astype(np.float32) for _ in range(2)),
            Held(rng.standard_normal((directions, 3 * SIZE)).astype(np.float32)),
        ]
    held = [Held(v) for v in (w, r, w_scale, w_zero, r_scale, r_zero)]
    given: dict[str, Any] = {"outputs": ("y0", "y1", "y2"), "hidden_size": SIZE, "direction": direction}
    assert_floats("DynamicQuantizeLSTM", [x, *held[:2], *optional, *held[2:]], rtol=0.05, **given)
    # without the rounding of activations it is an LSTM with these weights
    per = (directions, 1, -1)
    wide = [
        ((codes.astype(np.float32) - zero.reshape(per)) * scale.reshape(per)).transpose(0, 2, 1)
        for codes, scale, zero in ((w, w_scale, w_zero), (r, r_scale, r_zero))
    ]
    got, _ = both("DynamicQuantizeLSTM", [x, *held[:2], *optional, *held[2:]], **given)
    want, _ = both("LSTM", [x, *map(Held, wide), *optional], domain="", **given)
    for ours, exact in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, exact, rtol=1e-5, atol=1e-6)


def test_scales_of_another_shape_are_refused(rng: np.random.Generator) -> None:
    w, scale, zero = _codes(rng, INPUTS, 1, "signed")
    r, *_ = _codes(rng, SIZE, 1, "signed")
    x = np.zeros((STEPS, BATCH, INPUTS), np.float32)
    wrong = Held(np.ones(3, np.float32))
    operands = [x, Held(w), Held(r), *[None] * 5, wrong, Held(zero), Held(scale), Held(zero)]
    with pytest.raises(ModelError, match=r"f32\[3\] is no number for each direction or column of i8\[1,6,16\]"):
        both("DynamicQuantizeLSTM", operands, hidden_size=SIZE)
