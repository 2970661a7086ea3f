"""Test LSTM, GRU and RNN of random sizes and attributes: imported and exported, they compute what onnxruntime does."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import pytest
from frontends.onnx.models import info, model, run
from helpers import assert_close, one_program
from onnx import TensorProto, helper

import fusec
from fusec.errors import CudnnNotAskedWarning
from fusec.exporters.onnx import to_onnx
from fusec.frontends import load
from fusec.reference import evaluate

Array = np.ndarray[Any, Any]
CELLS = {"LSTM": (4, 3), "GRU": (3, 2), "RNN": (1, 1)}  # gates and activations
FUNCTIONS = {  # whether they have an alpha and a beta; onnxruntime has other defaults for the last two
    **dict.fromkeys(("Sigmoid", "Tanh", "Relu", "Softsign"), (False, False)),
    **dict.fromkeys(("LeakyRelu", "Elu"), (True, False)),
    **dict.fromkeys(("HardSigmoid", "Affine", "ScaledTanh"), (True, True)),
}


@dataclass(frozen=True)
class Layer:
    """A model of one layer, its inputs, and the number of its outputs."""

    proto: onnx.ModelProto
    feeds: dict[str, Array]


def draw(rng: np.random.Generator, cell: str) -> Layer:
    """Draw sizes, direction, activations, clip, and which optional operands there are."""
    gates, functions = CELLS[cell]
    direction = str(rng.choice(["forward", "reverse", "bidirectional"]))
    count = 2 if direction == "bidirectional" else 1
    steps, batch, inputs, size = (int(rng.integers(1, n)) for n in (7, 5, 9, 12))
    attributes: dict[str, Any] = {"hidden_size": size, "direction": direction}
    if rng.random() < 0.4:
        names = [str(rng.choice(list(FUNCTIONS))) for _ in range(count * functions)]
        attributes["activations"] = names
        for place, which in enumerate(("activation_alpha", "activation_beta")):
            numbers = [float(rng.uniform(0.2, 0.8)) for name in names if FUNCTIONS[name][place]]
            attributes |= {which: numbers} if numbers else {}
    if rng.random() < 0.3:
        attributes["clip"] = float(rng.uniform(0.3, 2.0))
    if cell == "GRU" and rng.random() < 0.5:
        attributes["linear_before_reset"] = 1
    if cell == "LSTM" and rng.random() < 0.3:
        attributes["input_forget"] = 1

    def normal(*shape: int) -> Array:
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    width = gates * size
    operands: list[Array | None] = [normal(steps, batch, inputs), normal(count, width, inputs)]
    operands += [normal(count, width, size), normal(count, 2 * width), rng.integers(1, steps + 1, batch, np.int32)]
    operands += [normal(count, batch, size)] * (2 if cell == "LSTM" else 1)
    operands += [normal(count, 3 * size)] * (cell == "LSTM")
    given = [a if i < 3 or rng.random() < 0.6 else None for i, a in enumerate(operands)]
    names = ["" if a is None else f"x{i}" for i, a in enumerate(given)]
    results = ["y", "h", "c"][: 3 if cell == "LSTM" else 2]
    feeds = {name: a for name, a in zip(names, given, strict=True) if a is not None}
    inputs_ = [
        info(name, list(a.shape), TensorProto.INT32 if a.dtype == np.int32 else TensorProto.FLOAT)
        for name, a in feeds.items()
    ]
    return Layer(model([helper.make_node(cell, names, results, name="n", **attributes)], inputs_, results), feeds)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("cell", CELLS)
def test_random_layers_agree_with_onnxruntime(cell: str, seed: int) -> None:
    layer = draw(np.random.default_rng([seed, len(cell), ord(cell[0])]), cell)
    graph = load(layer.proto)
    assert [n.op.name for n in graph.nodes].count("recurrent") == 1
    want = run(layer.proto, layer.feeds)
    for got in (evaluate(graph, layer.feeds), evaluate(load(to_onnx(graph)), layer.feeds)):
        for name, array in zip(graph.output_names, want, strict=True):
            assert_close(got[name], array, 1e-5)


def test_a_long_sequence_is_a_few_steps_and_right_in_simulation() -> None:
    rng = np.random.default_rng(0)
    nodes, inits, source = [], dict[str, Array](), "x"
    for i in range(3):
        for name, shape in (("w", (1, 64, 16)), ("r", (1, 64, 16)), ("b", (1, 128))):
            inits[f"{name}{i}"] = rng.uniform(-0.25, 0.25, shape).astype(np.float32)
        operands = [source, f"w{i}", f"r{i}", f"b{i}"]
        nodes.append(helper.make_node("LSTM", operands, [f"y{i}"], name=f"n{i}", hidden_size=16))
        nodes.append(helper.make_node("Squeeze", [f"y{i}", "axes"], [f"z{i}"]))
        source = f"z{i}"
    inits["axes"] = np.array([1])
    proto = model(nodes, [info("x", [400, 4, 16])], [source], inits)
    x = rng.standard_normal((400, 4, 16)).astype(np.float32)
    with warnings.catch_warnings():  # where cuDNN is not installed, fusec's rules alone say what fuses
        warnings.simplefilter("ignore", CudnnNotAskedWarning)
        exe = one_program(fusec.compile(proto.SerializeToString(), target="h200", simulate=True))
    assert len(exe.compiled.program.steps) <= 10
    (want,) = run(proto, {"x": x})
    assert_close(exe(x), want, 1e-5)
