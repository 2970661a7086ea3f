"""Training steps on a GPU do what they do in NumPy: state in place, random bits, gradients, one CUDA graph."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import assert_close

import fusec
from fusec import training
from fusec.builder import Builder
from fusec.gpu import device

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(device.device_name() is None, reason="no GPU"),
]


def network() -> Builder:
    """A convolution with batch norm, pooling, dropout and a classifier, with momentum."""
    rng = np.random.default_rng(0)
    b = Builder()
    x, labels = b.input("x", (16, 8, 12, 12)), b.input("labels", (16,), "i64")
    state = b.parameter("random", np.array([7, 0], np.uint64))
    b.update(state, state + np.array([0, 1], np.uint64))
    w = b.parameter("w", (rng.standard_normal((16, 8, 3, 3)) / 8).astype(np.float32))
    scale, bias = (b.parameter(n, np.full(16, v, np.float32)) for n, v in (("scale", 1.0), ("bias", 0.0)))
    head = b.parameter("head", (rng.standard_normal((16 * 36, 10)) / 24).astype(np.float32))
    y = b.max_pool(b.batch_norm_train(b.conv(x, w, padding=1), scale, bias)[0].relu(), 2)
    logits = b.dropout(y, 0.25, state).reshape(16, -1) @ head
    loss = b.cross_entropy(logits, labels)
    weights = [w, scale, bias, head]
    training.sgd(b, weights, fusec.backward(loss, weights), 0.005, 0.9)
    b.output(loss=loss)
    return b


def test_steps_agree_with_numpy(rng: np.random.Generator) -> None:
    here, there = fusec.compile(network()), fusec.compile(network(), target="cpu")
    for _ in range(5):
        x = rng.standard_normal((16, 8, 12, 12)).astype(np.float32)
        labels = rng.integers(0, 10, 16)
        assert_close(here.step(x, labels), there.step(x, labels), 1e-3)
    for name in ("w", "scale", "head", "w.momentum"):
        assert_close(here.value(name), there.value(name), 1e-3)
    np.testing.assert_array_equal(here.value("random"), there.value("random"))


def test_random_bits_are_the_same() -> None:
    b = Builder()
    b.output(bits=b.random_bits(b.input("state", (2,), "u64"), (1000, 3)))
    state = np.array([3, 9], np.uint64)
    np.testing.assert_array_equal(fusec.compile(b)(state), fusec.compile(b, target="cpu")(state))
