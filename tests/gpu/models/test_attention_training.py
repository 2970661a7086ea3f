"""Test attention's gradient by cuDNN: its steps, that none copies, and on a GPU its results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import assert_close, one_program

import fusec
from fusec.builder import Builder, Tensor
from fusec.driver import build
from fusec.gpu.cudnn.legality.oracle import Oracle

SHAPES = {  # batch, rows, heads, features, dtype, causal
    "odd rows": (2, 197, 3, 64, "f16", False),
    "causal": (2, 128, 2, 128, "f16", True),
    "bf16": (1, 64, 2, 64, "bf16", False),
    "narrow heads": (2, 16, 2, 16, "f16", False),
}


def layer(batch: int, rows: int, heads: int, features: int, dtype: str, causal: bool) -> Builder:
    """Gradients of a packed projection of x and its weights through one attention."""
    width = heads * features
    b = Builder(dtype)
    x, seed = b.input("x", (batch, rows, width)), b.input("seed", (batch, rows, width))
    w, bias = b.input("w", (3 * width, width)), b.input("bias", (3 * width,))
    y = mix(b, x @ w.T + bias, heads, causal)
    found = fusec.backward(y, [x, w], seed)
    b.output(y=y, dx=found[0], dw=found[1])
    return b


def mix(b: Builder, packed: Tensor, heads: int, causal: bool) -> Tensor:
    batch, rows, width = packed.shape
    q, k, v = (part.reshape(batch, rows, heads, -1).transpose(0, 2, 1, 3) for part in b.split(packed, 3, -1))
    return b.attention(q, k, v, causal=causal).transpose(0, 2, 1, 3).reshape(batch, rows, width // 3)


def feeds(b: Builder, rng: np.random.Generator) -> dict[str, Any]:
    graph = b.graph()
    drawn = {v.name: rng.standard_normal(v.type.shape) for v in graph.inputs}
    drawn["w"] /= drawn["x"].shape[-1] ** 0.5
    return {v.name: drawn[v.name].astype(v.type.dtype.numpy) for v in graph.inputs}


def expected(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return results in f64, by products and a softmax."""
    batch, rows, heads, features, _, causal = SHAPES[name]
    wide = fusec.compile(layer(batch, rows, heads, features, "f64", causal), target="cpu")
    return dict(zip(("y", "dx", "dw"), wide(**{k: v.astype(np.float64) for k, v in given.items()}), strict=True))


def compare(name: str, executable: Any, rng: np.random.Generator) -> None:
    given = feeds(layer(*SHAPES[name]), rng)
    want = expected(name, given)
    bound = 4e-2 if SHAPES[name][4] == "bf16" else 6e-3
    for spec, got in zip(executable.outputs, executable(**given), strict=True):
        assert_close(np.asarray(got).astype(np.float64), want[spec.name], bound)


@pytest.mark.cudnn
@pytest.mark.parametrize("name", SHAPES)
def test_both_halves_are_one_step_each_and_read_the_projection_as_it_lies(name: str, asked_once: Oracle) -> None:
    program = build(layer(*SHAPES[name]).graph(), target="h200", oracle=asked_once).program
    found = [s.signature for s in program.steps if s.kind.value != "view"]
    assert found.count("attention_train") == found.count("attention_backward") == 1
    # gradients are written into the projection's gradient, so that no step joins them
    assert not [s.signature for s in program.steps if s.kind.value == "kernel"]


@pytest.mark.cudnn
@pytest.mark.parametrize("name", ["odd rows", "causal"])
def test_the_program_simulated_is_right(name: str, rng: np.random.Generator) -> None:
    compare(name, fusec.compile(layer(*SHAPES[name]), target="h200"), rng)


def test_numpy_is_right(rng: np.random.Generator) -> None:
    compare("narrow heads", fusec.compile(layer(*SHAPES["narrow heads"]), target="cpu"), rng)


@pytest.mark.slow
@pytest.mark.cudnn
def test_where_cudnn_declines_it_is_written_out(rng: np.random.Generator) -> None:
    sizes = (1, 8, 2, 12, "f16", True)  # features that are no multiple of 8
    b = layer(*sizes)
    executable = one_program(fusec.compile(b, target="h200"))
    names = [s.signature for s in executable.compiled.program.steps]
    assert not any("attention" in name for name in names)
    given = feeds(b, rng)
    want = fusec.compile(layer(1, 8, 2, 12, "f64", True), target="cpu")
    wide = want(**{k: v.astype(np.float64) for k, v in given.items()})
    for got, right in zip(executable(**given), wide, strict=True):
        assert_close(np.asarray(got).astype(np.float64), right, 6e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_the_program_on_a_gpu_is_right(name: str, rng: np.random.Generator) -> None:
    compare(name, fusec.compile(layer(*SHAPES[name]), tune="quick"), rng)
