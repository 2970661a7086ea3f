"""Test symbolic dims: what stays unbound or is bound twice, and inputs of no known type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
import pytest
from frontends.onnx.models import info, model
from onnx import TensorProto, helper

from fusec.errors import ModelError
from fusec.frontends import load


def _model(*shapes: Sequence[int | str | None] | None, dtype: int = TensorProto.FLOAT) -> onnx.ModelProto:
    names = [f"x{i}" for i in range(len(shapes))]
    nodes = [helper.make_node("Relu", [n], [f"y{n}"]) for n in names]
    return model(nodes, [info(n, s, dtype) for n, s in zip(names, shapes, strict=True)], [f"y{n}" for n in names])


def fails(proto: onnx.ModelProto, shapes: Any, *parts: str) -> str:
    with pytest.raises(ModelError) as caught:
        load(proto, shapes)
    message = str(caught.value)
    for part in parts:
        assert part in message, message
    return message


def test_unbound_dims_come_with_the_remedy() -> None:
    fails(
        _model(["batch", 3, "h", None]),
        None,
        "input 'x0' has symbolic dims [batch, 3, h, ?]",
        "--shape x0=1,3,224,224",
        "shapes={'x0': (1, 3, 224, 224)}",
    )


def test_every_unbound_input_is_named() -> None:
    fails(_model(["n", 4], ["m"], [2]), None, "2 problems", "'x0' has symbolic dims [n, 4]", "'x1' has symbolic")


def test_input_without_shape() -> None:
    fails(_model(None), None, "input 'x0' declares no shape: give one, say --shape x0=")


def test_dims_of_one_name_that_disagree() -> None:
    shapes = {"x0": (2, 4), "x1": (3,)}
    fails(_model(["n", 4], ["n"]), shapes, "dim 'n' is 2 in the shape given for 'x0', 3 in that for 'x1'")


def test_a_dim_twice_in_one_input_that_disagrees() -> None:
    fails(_model(["n", "n"]), {"x0": (2, 3)}, "dim 'n' is 2 in the shape given for 'x0', 3 in that for 'x0'")


def test_shape_against_the_declared_one() -> None:
    fails(_model(["n", 4]), {"x0": (2, 5)}, "input 'x0': has shape [n, 4], the shape given is [2, 5]")


def test_rank_against_the_declared_one() -> None:
    fails(_model(["n", 4]), {"x0": (2,)}, "input 'x0': has 2 dims [n, 4], the shape given is [2]")


def test_unknown_input() -> None:
    fails(_model([4]), {"image": (4,)}, "there is no input 'image'; inputs: x0")


@pytest.mark.parametrize("shape", [5, ("a",), (1.5,), None])
def test_shape_that_is_none(shape: object) -> None:
    fails(_model(["n"]), {"x0": shape}, "the shape given for input 'x0' is", "not a sequence of sizes")


def test_negative_size() -> None:
    fails(_model(["n"]), {"x0": (-1,)}, "the shape given for input 'x0' has a negative dimension")


def test_negative_dim_of_an_input_is_unknown() -> None:
    fails(_model([-1, 3]), None, "input 'x0' has symbolic dims [?, 3]: give its shape, say --shape x0=1,3")
    assert load(_model([-1, 3]), {"x0": (2, 3)}).inputs[0].type.shape == (2, 3)


def test_absurd_dims() -> None:
    fails(_model([1 << 30, 1 << 30]), None, "input 'x0': a tensor f32[1073741824,1073741824] takes", "limit is 64 GiB")
    fails(_model(["n"]), {"x0": (1 << 50,)}, "input 'x0': a tensor", "the limit is 64 GiB")


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(TensorProto.COMPLEX64, "complex64"), (TensorProto.COMPLEX128, "complex128")],
)
def test_element_types_fusec_does_not_have(dtype: int, name: str) -> None:
    fails(_model([2], dtype=dtype), None, f"input 'x0': element type {name} is not supported")


def test_input_that_is_no_tensor() -> None:
    proto = _model([2])
    proto.graph.input[0].CopyFrom(helper.make_tensor_sequence_value_info("x0", TensorProto.FLOAT, [2]))
    fails(proto, None, "input 'x0': has type sequence, not tensor")


def test_input_without_type() -> None:
    proto = _model([2])
    proto.graph.input[0].ClearField("type")
    fails(proto, None, "input 'x0': has type none, not tensor")
