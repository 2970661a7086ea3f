"""Test fused activations, products and convolutions of onnxruntime against onnxruntime, over random shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from frontends.onnx.contrib.models import Held, assert_floats, floats, imported, one
from helpers import assert_close
from scipy.special import erf

from fusec.errors import ModelError
from fusec.frontends import load
from fusec.reference import evaluate

SEEDS = range(6)


def _shape(rng: np.random.Generator, rank: int) -> tuple[int, ...]:
    return tuple(int(d) for d in rng.integers(1, 9, rank))


@pytest.mark.parametrize("seed", SEEDS)
def test_activations(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = _shape(rng, int(rng.integers(1, 5)))
    x, bias = floats(rng, *shape), floats(rng, shape[-1])
    assert_floats("BiasGelu", [x, Held(bias)])
    assert_floats("FastGelu", [x], rtol=1e-5)
    assert_floats("FastGelu", [x, bias], rtol=1e-5)
    assert_floats("QuickGelu", [x], alpha=float(rng.uniform(0.5, 2)))
    assert_floats("QuickGelu", [x])
    assert_floats("Gelu", [x])


def _gelu(x: np.ndarray) -> np.ndarray:
    return x * 0.5 * (1 + erf(x / np.sqrt(2)))


@pytest.mark.parametrize("seed", SEEDS)
def test_gelus_that_onnxruntime_has_on_gpus_only(seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch, length, half = _shape(rng, 3)
    x, bias = floats(rng, batch, length, 2 * half), floats(rng, 2 * half)
    proto, feeds = one("BiasSplitGelu", [x, bias])
    left, right = np.split(x.astype(np.float64) + bias, 2, axis=-1)
    assert_close(evaluate(load(proto), feeds)["y0"], left * _gelu(right), 1e-6)
    w, more = floats(rng, 2 * half, 3), floats(rng, 3)
    for given in ([x, w], [x, w, more]):
        proto, feeds = one("GemmFastGelu", given)
        y = x.astype(np.float64) @ w + (more if len(given) == 3 else 0)
        want = 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
        assert_close(evaluate(load(proto), feeds)["y0"], want, 1e-6)


@pytest.mark.parametrize("seed", range(24))
def test_fused_matmul(seed: int) -> None:
    rng = np.random.default_rng(seed)
    m, k, n = _shape(rng, 3)
    batch = _shape(rng, seed % 3)
    turned_a, turned_b = (bool(v) for v in rng.integers(0, 2, 2))
    a = floats(rng, *batch, *((k, m) if turned_a else (m, k)))
    b = floats(rng, *batch, *((n, k) if turned_b else (k, n)))
    given: dict[str, Any] = {"transA": int(turned_a), "transB": int(turned_b), "alpha": float(rng.uniform(0.5, 2))}
    assert_floats("FusedMatMul", [a, b], **given)
    assert_floats("TransposeMatMul", [a, b], **given)
    if batch:  # the rows come before the batch
        a, b = (np.ascontiguousarray(np.moveaxis(v, -2, 0)) for v in (a, b))
        assert_floats("FusedMatMul", [a, b], transBatchA=1, transBatchB=1, **given)


def test_fused_matmul_of_a_matrix_has_no_batch_to_transpose() -> None:
    with pytest.raises(ModelError, match="has no batch dim"):
        imported("FusedMatMul", [np.ones((2, 3), np.float32), np.ones((3, 2), np.float32)], transBatchA=1)


ACTIVATIONS: dict[str, dict[str, Any]] = {
    "Relu": {},
    "Tanh": {},
    "Sigmoid": {},
    "Softplus": {},
    "Softsign": {},
    "LeakyRelu": {"activation_alpha": 0.3},
    "Elu": {"activation_alpha": 0.7},
    "ThresholdedRelu": {"activation_alpha": 0.4},
    "HardSigmoid": {"activation_alpha": 0.3, "activation_beta": 0.6},
    "Selu": {"activation_alpha": 1.2, "activation_gamma": 1.1},
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_fused_gemm(activation: str) -> None:
    rng = np.random.default_rng(len(activation))
    m, k, n = _shape(rng, 3)
    a, b, c = floats(rng, k, m), floats(rng, n, k), floats(rng, n)
    more: dict[str, Any] = {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 1.5}
    assert_floats("FusedGemm", [a, b, c], activation=activation, rtol=1e-5, **more, **ACTIVATIONS[activation])
    assert_floats("FusedGemm", [a.T.copy(), b.T.copy()], activation="Relu")


def test_an_activation_that_is_not_known() -> None:
    ones = np.ones((2, 2), np.float32)
    with pytest.raises(ModelError, match=r"node 'n' .*knows no activation 'Cosine'"):
        imported("FusedGemm", [ones, ones], activation="Cosine")


CONV_ACTIVATIONS = {
    "": (),
    "Relu": (),
    "Tanh": (),
    "Sigmoid": (),
    "LeakyRelu": (0.2,),
    "Clip": (-0.5, 0.8),
    "HardSigmoid": (0.3, 0.4),
}


@pytest.mark.parametrize("activation", CONV_ACTIVATIONS)
def test_fused_conv(activation: str) -> None:
    rng = np.random.default_rng(len(activation))
    x, w, b = floats(rng, 2, 4, 7, 6), floats(rng, 6, 2, 3, 3), floats(rng, 6)
    z = floats(rng, 2, 6, 4, 3)
    more: dict[str, Any] = {"strides": [2, 2], "pads": [1, 1, 1, 1], "group": 2}
    if activation:
        more |= {"activation": activation}
    if CONV_ACTIVATIONS[activation]:
        more |= {"activation_params": list(CONV_ACTIVATIONS[activation])}
    for operands in ([x, Held(w)], [x, Held(w), Held(b)], [x, Held(w), Held(b), z]):
        assert_floats("FusedConv", operands, rtol=1e-5, **more)


def test_range_and_expand_dims() -> None:
    bounds = [Held(np.array(v, np.int64)) for v in (3, 17, 4)]
    assert_floats("Range", bounds)
    assert_floats("Range", bounds[:2])
    assert_floats("ExpandDims", [np.ones((2, 3), np.float32), Held(np.array(1, np.int32))])
    assert_floats("ExpandDims", [np.ones((2, 3), np.float32), Held(np.array(-1, np.int32))])
