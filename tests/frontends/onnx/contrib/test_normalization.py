"""Test layer norms with a residual, of onnxruntime, against onnxruntime."""

from __future__ import annotations

import numpy as np
import pytest
from frontends.onnx.contrib.models import Held, assert_floats, both, floats, imported

from fusec.errors import ModelError
from fusec.ir import DType


@pytest.mark.parametrize("seed", range(8))
def test_skip_layer_norms(seed: int) -> None:
    rng = np.random.default_rng(seed)
    b, s, h = (int(d) for d in rng.integers(1, 9, 3))
    h *= 4
    x, gamma, beta, bias = floats(rng, b, s, h), floats(rng, h), floats(rng, h), floats(rng, h)
    skip = floats(rng, *[(b, s, h), (1, s, h), (s, h)][seed % 3])
    epsilon = float(rng.choice([1e-12, 1e-3]))
    outputs = ("y0", "", "", "y3")
    for parameters in ([gamma], [gamma, beta], [gamma, beta, bias], [gamma, None, bias]):
        assert_floats("SkipLayerNormalization", [x, skip, *parameters], ("y0",), rtol=1e-5, epsilon=epsilon)
        proto_outputs = both("SkipLayerNormalization", [x, skip, *parameters], outputs, epsilon=epsilon)
        for ours, theirs in zip(*proto_outputs, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)
    for parameters in ([gamma], [gamma, bias]):
        results = both("SkipSimplifiedLayerNormalization", [x, skip, *parameters], outputs, epsilon=epsilon)
        for ours, theirs in zip(*results, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("types", [("f4", "f4"), ("f2", "f2"), ("f2", "f4")], ids=str)
def test_simplified_layer_norm(seed: int, types: tuple[str, str]) -> None:
    rng = np.random.default_rng(seed)
    shape = tuple(int(d) for d in rng.integers(2, 9, 3))
    axis = int(rng.integers(1, 3)) if seed % 2 else -1
    scale = floats(rng, *shape[axis:]).astype(types[1])
    x = floats(rng, *shape).astype(types[0])
    outputs = ("y0",) if "f2" in types else ("y0", "y1")
    rtol = 2e-3 if "f2" in types else 1e-5
    if types == ("f2", "f4"):  # which onnxruntime's schema has, but no kernel on a CPU
        graph = imported("SimplifiedLayerNormalization", [x, scale], domain="", axis=axis)
        assert graph.outputs[0].type.dtype is DType.F32
        return
    assert_floats("SimplifiedLayerNormalization", [x, Held(scale)], outputs, rtol, domain="", axis=axis, epsilon=1e-3)


@pytest.mark.parametrize("seed", range(8))
def test_embed_layer_norm(seed: int) -> None:
    rng = np.random.default_rng(seed)
    b, s, h = (int(d) for d in rng.integers(1, 9, 3))
    h *= 4
    ids, segments = rng.integers(0, 11, (b, s)).astype(np.int32), rng.integers(0, 2, (b, s)).astype(np.int32)
    tables = [Held(floats(rng, rows, h)) for rows in (11, 12, 2)]
    gamma, beta = Held(floats(rng, h)), Held(floats(rng, h))
    mask = rng.integers(0, 2, (b, s)).astype(np.int32)
    places = rng.integers(0, 12, (b, s)).astype(np.int32)
    whole = [ids, segments, *tables, gamma, beta]
    for operands in (
        whole,
        [*whole, mask],
        [*whole, None, places],
        [*whole, mask, places],
        [ids, None, *tables[:2], None, gamma, beta, mask],
    ):
        assert_floats("EmbedLayerNormalization", operands, ("y0", "y1", "y2"), 1e-5)


def test_a_residual_that_does_not_fit() -> None:
    x, gamma = np.ones((2, 3, 4), np.float32), np.ones(4, np.float32)
    with pytest.raises(ModelError, match=r"a residual .* does not broadcast to"):
        imported("SkipLayerNormalization", [x, np.ones((5, 2, 3, 4), np.float32), gamma])


def test_a_result_that_is_not_computed() -> None:
    x, gamma = np.ones((2, 3), np.float32), np.ones(3, np.float32)
    with pytest.raises(ModelError, match=r"its output 'y1' .* is read, but fusec does not compute it"):
        imported("FastGelu", [x, gamma], ("y0", "y1"))
