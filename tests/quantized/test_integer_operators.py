"""Test MatMulInteger and ConvInteger for every form of their zero points, known at import or not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

import fusec

Array = np.ndarray[Any, Any]
TYPES = {np.dtype(np.int8): TensorProto.INT8, np.dtype(np.uint8): TensorProto.UINT8}


def computed(kind: str, operands: list[Array], known: int, **attributes: Any) -> Array:
    """Run an operator; the operands from place `known` on are constants."""
    names = [f"x{i}" for i in range(len(operands))]
    inputs = [
        helper.make_tensor_value_info(name, TYPES[array.dtype], array.shape)
        for name, array in zip(names[:known], operands, strict=False)
    ]
    held = [numpy_helper.from_array(array, name) for name, array in zip(names, operands, strict=True)][known:]
    output = helper.make_tensor_value_info("y", TensorProto.INT32, None)
    nodes = [helper.make_node(kind, names, ["y"], **attributes)]
    graph = helper.make_graph(nodes, "g", inputs, [output], held)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    net = fusec.compile(model, target="cpu")
    (got,) = net.run(None, dict(zip(names[:known], operands, strict=False)))
    return np.asarray(got)


def drawn(rng: np.random.Generator, dtype: Any, *shape: int) -> Array:
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max, shape, dtype, endpoint=True)


@pytest.mark.parametrize("left", [np.int8, np.uint8])
@pytest.mark.parametrize("right", [np.int8, np.uint8])
@pytest.mark.parametrize("known", [1, 4])
@pytest.mark.parametrize(
    ("shapes", "zeros"),
    [
        (((3, 8), (8, 5)), ((), ())),
        (((3, 8), (8, 5)), ((3,), (5,))),
        (((2, 3, 8), (2, 8, 5)), ((2, 3, 1), (2, 1, 5))),
        (((2, 3, 8), (8, 5)), ((), (5,))),
        (((8,), (8, 5)), ((), ())),
        (((2, 3, 8), (8,)), ((1,), ())),
        (((8,), (8,)), ((), ())),
    ],
)
def test_products(left: Any, right: Any, known: int, shapes: Any, zeros: Any, rng: np.random.Generator) -> None:
    a, b, y, z = (drawn(rng, dtype, *shape) for dtype, shape in zip((left, right) * 2, (*shapes, *zeros), strict=True))
    row = y[:, None] if y.ndim == 1 and y.size > 1 else y
    want = np.matmul(a.astype(np.int32) - row, b.astype(np.int32) - z)
    got = computed("MatMulInteger", [a, b, y, z], known)
    assert got.dtype == np.int32
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("image", [np.int8, np.uint8])
@pytest.mark.parametrize("filters", [np.int8, np.uint8])
@pytest.mark.parametrize("zeros", [(), (6,)])
@pytest.mark.parametrize("known", [1, 4])
@pytest.mark.parametrize("narrow", [False, True])
def test_convolutions(
    image: Any, filters: Any, zeros: tuple[int, ...], known: int, narrow: bool, rng: np.random.Generator
) -> None:
    """narrow: filters less their zero points fit in 8 bits."""
    x, y = drawn(rng, image, 2, 4, 5, 6), drawn(rng, image)
    w, z = drawn(rng, filters, 6, 2, 3, 3), drawn(rng, filters, *zeros)
    if narrow:
        w, z = ((array // 4 + (96 if filters is np.uint8 else 0)).astype(filters) for array in (w, z))
    wide = np.pad(x.astype(np.int32) - y, ((0, 0), (0, 0), (1, 1), (1, 1)))
    taps = w.astype(np.int32) - (z[:, None, None, None] if zeros else z)
    windows = np.lib.stride_tricks.sliding_window_view(wide, (3, 3), (2, 3))
    groups = [np.einsum("nchwij,ocij->nohw", windows[:, c : c + 2], taps[o : o + 3]) for c, o in ((0, 0), (2, 3))]
    got = computed("ConvInteger", [x, w, y, z], known, pads=[1] * 4, kernel_shape=[3, 3], group=2)
    np.testing.assert_array_equal(got, np.concatenate(groups, axis=1))
