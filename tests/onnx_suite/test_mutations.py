"""Test that models of onnx's suite with a fault run, or raise a FusecError that says why; nothing else is raised."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import onnx
import pytest
from conftest import SEED
from onnx import AttributeProto, helper, numpy_helper
from onnx_suite.suite import Reference, models

from fusec.errors import FusecError

COUNT = 400  # of each kind
INTS, FLOATS = (-7, -1, 0, 1, 2, 5, 100, 1 << 40), (0.0, -1.0, float("nan"), float("inf"), 1e30)
Inputs = list[Any]


def _one_input_less(rng: random.Random, node: onnx.NodeProto, graph: onnx.GraphProto, inputs: Inputs) -> None:
    del node.input[-1:]


def _one_output_more(rng: random.Random, node: onnx.NodeProto, graph: onnx.GraphProto, inputs: Inputs) -> None:
    node.output.append("extra")
    graph.output.append(onnx.ValueInfoProto(name="extra"))


def _attribute_left_out(rng: random.Random, node: onnx.NodeProto, graph: onnx.GraphProto, inputs: Inputs) -> None:
    if node.attribute:
        del node.attribute[rng.randrange(len(node.attribute))]


def _attribute_of_another_value(
    rng: random.Random, node: onnx.NodeProto, graph: onnx.GraphProto, inputs: Inputs
) -> None:
    if not node.attribute:
        return
    attribute = rng.choice(node.attribute)
    if attribute.type == AttributeProto.INT:
        attribute.i = rng.choice(INTS)
    elif attribute.type == AttributeProto.FLOAT:
        attribute.f = rng.choice(FLOATS)
    elif attribute.type == AttributeProto.STRING:
        attribute.s = rng.choice([b"", b"xyz", b"max"])
    elif attribute.type == AttributeProto.INTS:
        if attribute.ints and rng.random() < 0.7:
            attribute.ints[rng.randrange(len(attribute.ints))] = rng.choice(INTS)
        else:
            attribute.ints.append(3)


def _some_array(rng: random.Random, inputs: Inputs) -> int | None:
    usable = [i for i, a in enumerate(inputs) if isinstance(a, np.ndarray) and a.dtype != object]
    return rng.choice(usable) if usable else None


def _another_shape(rng: random.Random, node: onnx.NodeProto, graph: onnx.GraphProto, inputs: Inputs) -> None:
    if (i := _some_array(rng, inputs)) is None:
        return
    a = inputs[i]
    inputs[i] = rng.choice([a[None], a.reshape(-1), a[..., :1], a[:0], np.repeat(a, 2, 0)] if a.ndim else [a[None]])
    graph.input[i].type.tensor_type.ClearField("shape")


def _another_type(rng: random.Random, node: onnx.NodeProto, graph: onnx.GraphProto, inputs: Inputs) -> None:
    if (i := _some_array(rng, inputs)) is None:
        return
    dtype = np.dtype(rng.choice([np.float32, np.int64, np.bool_, np.int8, np.float16, np.uint8]))
    with np.errstate(all="ignore"):
        inputs[i] = inputs[i].astype(np.float32).astype(dtype)
    graph.input[i].type.tensor_type.elem_type = helper.np_dtype_to_tensor_dtype(dtype)


def _another_value(rng: random.Random, node: onnx.NodeProto, graph: onnx.GraphProto, inputs: Inputs) -> None:
    i = _some_array(rng, inputs)
    if i is not None and inputs[i].dtype.kind in "if" and inputs[i].size:
        inputs[i] = inputs[i].copy()
        inputs[i].reshape(-1)[rng.randrange(inputs[i].size)] = rng.choice([-100, -1, 0, 1, 50, 120])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NaN and infinity where onnx's data had none
@pytest.mark.filterwarnings("ignore:.*LayerNormalization has parameters of another type:UserWarning")
@pytest.mark.parametrize(
    "mutate",
    [
        _one_input_less,
        _one_output_more,
        _attribute_left_out,
        _attribute_of_another_value,
        _another_shape,
        _another_type,
        _another_value,
    ],
)
def test_mutated_models_raise_nothing_but_fusec_errors(mutate: Any) -> None:
    rng = random.Random(f"{SEED} {mutate.__name__}")
    cases = list(models().values())
    ran = 0
    for _ in range(COUNT):
        case = rng.choice(cases)
        model = onnx.ModelProto.FromString(case.model.SerializeToString())
        inputs = [numpy_helper.to_array(a) if isinstance(a, onnx.TensorProto) else a for a in case.data_sets[0][0]]
        for value in model.graph.output:
            value.type.Clear()
        mutate(rng, rng.choice(model.graph.node), model.graph, inputs)
        try:
            Reference.prepare(model).run(inputs)
            ran += 1
        except FusecError:
            continue
        except Exception as error:
            raise AssertionError(f"{case.name}: {type(error).__name__}: {error}\n{model.graph}") from error
    assert ran < COUNT
