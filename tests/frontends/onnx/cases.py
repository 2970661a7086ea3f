"""At least one case for every (op, since) the ONNX front end knows; test_ops.py runs them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import TensorProto, helper

Maker = Callable[[np.random.Generator], np.ndarray]


@dataclass(frozen=True)
class Case:
    """One node. Operands: a Maker is a graph input, an array an initializer, None is left out."""

    op: str
    since: int
    operands: Sequence[Maker | np.ndarray | None]
    attributes: dict[str, Any] = field(default_factory=dict)
    outputs: int = 1
    rtol: float = 1e-5
    oldest: int = 0  # first opset to run, if the first one of the entry lacks a feature that the case needs

    @property
    def id(self) -> str:
        attributes = ",".join(f"{k}={v}" for k, v in self.attributes.items() if isinstance(v, int | float | str))
        return f"{self.op}-{self.since}" + (f"[{attributes}]" if attributes else "")


def f32(*shape: int) -> Maker:
    return lambda rng: rng.standard_normal(shape).astype(np.float32)


def f16(*shape: int) -> Maker:
    return lambda rng: rng.standard_normal(shape).astype(np.float16)


def positive(*shape: int) -> Maker:
    return lambda rng: rng.uniform(0.5, 2.0, shape).astype(np.float32)


def above_one(*shape: int) -> Maker:
    return lambda rng: rng.uniform(1.1, 3.0, shape).astype(np.float32)


def unit(*shape: int) -> Maker:
    return lambda rng: rng.uniform(-0.9, 0.9, shape).astype(np.float32)


def integers(*shape: int, low: int = -9, high: int = 10, dtype: Any = np.int64) -> Maker:
    return lambda rng: rng.integers(low, high, shape).astype(dtype)


def nonzero(*shape: int, dtype: Any = np.int64) -> Maker:
    return lambda rng: (rng.integers(1, 5, shape) * rng.choice([-1, 1], shape)).astype(dtype)


def bools(*shape: int) -> Maker:
    return lambda rng: rng.integers(0, 2, shape).astype(np.bool_)


def odd_floats(*shape: int) -> Maker:
    """Some NaN, some infinities of both signs."""

    def make(rng: np.random.Generator) -> np.ndarray:
        return rng.choice(np.array([np.nan, np.inf, -np.inf, 1.5, -2.0], np.float32), shape)

    return make


def fixed(*items: float, dtype: Any = np.float32) -> Maker:
    return lambda rng: np.array(items, dtype)


def i64(*items: int) -> np.ndarray:
    return np.array(items, np.int64)


def scalar(item: Any, dtype: Any = np.float32) -> np.ndarray:
    return np.array(item, dtype)


def floats(*items: float) -> np.ndarray:
    return np.array(items, np.float32)


def tensor(array: np.ndarray) -> TensorProto:
    return helper.make_tensor(
        "t", helper.np_dtype_to_tensor_dtype(array.dtype), array.shape, array.reshape(-1).tolist()
    )


def _unary() -> list[Case]:
    plain = {
        "Abs": (6, f32), "Acos": (7, unit), "Acosh": (9, above_one), "Asin": (7, unit), "Asinh": (9, f32),
        "Atan": (7, f32), "Atanh": (9, unit), "Ceil": (6, f32), "Cos": (7, f32), "Cosh": (9, f32), "Erf": (9, f32),
        "Exp": (6, f32), "Floor": (6, f32), "HardSwish": (14, f32), "IsNaN": (9, odd_floats), "Log": (6, positive),
        "Mish": (18, f32), "Neg": (6, f32), "Not": (1, bools), "Reciprocal": (6, positive), "Relu": (6, f32),
        "Sigmoid": (6, f32), "Sign": (9, f32), "Sin": (7, f32), "Sinh": (9, f32), "Softplus": (1, f32),
        "Softsign": (1, f32), "Sqrt": (6, positive), "Tan": (7, unit), "Tanh": (6, f32), "Elu": (6, f32),
        "Selu": (6, f32), "Celu": (12, f32), "LeakyRelu": (6, f32), "ThresholdedRelu": (10, f32),
        "HardSigmoid": (6, f32), "Swish": (24, f32), "Gelu": (20, f32), "Identity": (1, f32), "IsInf": (10, odd_floats),
    }  # fmt: skip
    return [Case(op, since, [make(3, 5)]) for op, (since, make) in plain.items()]


def _pointwise() -> list[Case]:
    return [
        Case("Round", 11, [fixed(0.5, 1.5, -2.5, 0.3, 2.7)]),
        Case("Neg", 6, [integers(4)]),
        Case("Elu", 6, [f32(3, 5)], {"alpha": 0.3}),
        Case("Selu", 6, [f32(3, 5)], {"alpha": 1.2, "gamma": 0.7}),
        Case("Celu", 12, [f32(3, 5)], {"alpha": 0.5}),
        Case("LeakyRelu", 6, [f32(3, 5)], {"alpha": 0.2}),
        Case("ThresholdedRelu", 10, [f32(3, 5)], {"alpha": 0.4}),
        Case("HardSigmoid", 6, [f32(3, 5)], {"alpha": 0.3, "beta": 0.4}),
        Case("Swish", 24, [f32(3, 5)], {"alpha": 1.7}),
        Case("Gelu", 20, [f32(3, 5)], {"approximate": "tanh"}),
        Case("IsInf", 10, [odd_floats(20)], {"detect_negative": 0}),
        Case("IsInf", 10, [odd_floats(20)], {"detect_positive": 0}),
        Case("IsInf", 10, [odd_floats(20)], {"detect_positive": 0, "detect_negative": 0}),
        Case("Add", 7, [f32(2, 3, 4), f32(3, 1)]),
        Case("Add", 7, [f16(2, 3), f16(3)], rtol=1e-3),
        Case("Sub", 7, [f32(3), f32(2, 1)]),
        Case("Mul", 7, [f32(2, 3), floats(2.0)]),
        Case("Div", 7, [f32(2, 3), positive(3)]),
        Case("Div", 7, [integers(40), nonzero(40)]),
        Case("Pow", 7, [positive(2, 3), f32(3)]),
        Case("Pow", 7, [f32(2, 3), scalar(2.0)]),
        Case("Pow", 7, [f32(2, 3), scalar(3, np.int64)], oldest=12),
        Case("Pow", 7, [integers(6), scalar(3, np.int64)], oldest=12),
        Case("Pow", 7, [integers(6, low=1), f32(6)], oldest=12),
        Case("Pow", 7, [integers(6, low=1, high=4), integers(6, low=0, high=4, dtype=np.int32)], oldest=12),
        Case("Mod", 10, [integers(20), nonzero(20)]),
        Case("Mod", 10, [integers(20), nonzero(20)], {"fmod": 1}),
        Case("Mod", 10, [f32(20), positive(20)], {"fmod": 1}),
        Case("Equal", 7, [integers(3, 4, high=3), integers(4, high=3)]),
        Case("Equal", 7, [bools(3, 4), bools(4)]),
        Case("Greater", 7, [f32(3, 4), f32(4)]),
        Case("GreaterOrEqual", 12, [integers(3, 4), integers(4)]),
        Case("Less", 7, [f32(3, 4), f32(4)]),
        Case("LessOrEqual", 12, [integers(3, 4), integers(4)]),
        Case("And", 7, [bools(3, 4), bools(4)]),
        Case("Or", 7, [bools(3, 4), bools(4)]),
        Case("Xor", 7, [bools(3, 4), bools(4)]),
        Case("Where", 9, [bools(3, 4), f32(4), f32(3, 1)]),
        *(Case(op, 6, [f32(2, 3), f32(2, 3), f32(2, 3)]) for op in ("Max", "Min", "Sum", "Mean")),
        *(Case(op, 6, [f32(2, 3), f32(3), f32(2, 1)], oldest=8) for op in ("Max", "Min", "Sum", "Mean")),
        Case("Mean", 6, [f32(2, 3)]),
        Case("Sum", 6, [f32(2, 3)]),
        Case("PRelu", 7, [f32(2, 3, 4), f32(3, 1)]),
        Case("PRelu", 7, [f32(2, 3, 4), floats(0.25)]),
        Case("Clip", 6, [f32(3, 5)], {"min": -0.5, "max": 0.5}),
        Case("Clip", 6, [f32(3, 5)], {"max": 0.5}),
        Case("Clip", 6, [f32(3, 5)]),
        Case("Clip", 11, [f32(3, 5), scalar(0.0), scalar(6.0)]),
        Case("Clip", 11, [f32(3, 5), None, scalar(0.5)]),
        Case("Clip", 11, [f32(20), scalar(0.0), scalar(math.nan)]),
        Case("Clip", 11, [f32(20), lambda rng: scalar(math.nan), lambda rng: scalar(0.4)]),
        Case("Clip", 11, [f32(20), lambda rng: scalar(-0.3), lambda rng: scalar(math.nan)]),
        Case("Clip", 11, [f32(3, 5), lambda rng: scalar(-0.3), lambda rng: scalar(0.4)]),
        Case("Clip", 11, [integers(9), scalar(-2, np.int64), scalar(3, np.int64)], oldest=12),
        Case("Cast", 6, [f32(9)], {"to": TensorProto.INT32}),
        Case("Cast", 6, [integers(9)], {"to": TensorProto.FLOAT}),
        Case("Cast", 6, [integers(9, low=0, high=3)], {"to": TensorProto.BOOL}),
        Case("Cast", 6, [f32(9)], {"to": TensorProto.FLOAT16}),
        Case("Cast", 6, [f32(9)], {"to": TensorProto.FLOAT}),
        Case("CastLike", 15, [integers(9), f32(1)]),
    ]


def _windows() -> list[Case]:
    x, w = f32(2, 4, 9, 8), f32(6, 4, 3, 3)
    t = f32(4, 3, 3, 2)
    pools = [
        {},
        {"strides": [2, 2], "pads": [1, 0, 1, 1]},
        {"auto_pad": "SAME_UPPER", "strides": [2, 3]},
        {"auto_pad": "SAME_LOWER", "strides": [3, 2]},
        {"auto_pad": "VALID", "strides": [2, 2]},
    ]
    return [
        Case("Conv", 1, [x, w]),
        Case("Conv", 1, [x, w, f32(6)], {"kernel_shape": [3, 3], "pads": [1, 0, 2, 1], "strides": [2, 1]}),
        Case("Conv", 1, [x, w], {"dilations": [2, 1], "pads": [2, 2, 2, 2]}),
        Case("Conv", 1, [x, f32(6, 2, 3, 3), f32(6)], {"group": 2}),
        Case("Conv", 1, [f32(1, 4, 7, 7), f32(4, 1, 3, 3)], {"group": 4, "auto_pad": "SAME_UPPER", "strides": [2, 2]}),
        Case("Conv", 1, [x, f32(6, 4, 2, 4)], {"auto_pad": "SAME_LOWER"}),
        Case("Conv", 1, [x, w], {"auto_pad": "VALID"}),
        Case("Conv", 1, [f32(2, 3, 11), f32(5, 3, 4), f32(5)], {"strides": [2], "pads": [1, 2]}),
        Case("Conv", 1, [f32(1, 2, 5, 6, 4), f32(3, 2, 2, 3, 2), f32(3)], {"pads": [0, 1, 0, 1, 0, 1]}),
        Case("ConvTranspose", 1, [x, t, f32(3)], {"strides": [2, 3], "pads": [1, 0, 0, 1]}),
        Case("ConvTranspose", 1, [x, t], {"strides": [3, 2], "output_padding": [2, 1], "dilations": [1, 2]}),
        Case("ConvTranspose", 1, [x, t], {"strides": [2, 2], "output_shape": [17, 16]}),
        Case("ConvTranspose", 1, [x, t], {"strides": [2, 2], "output_shape": [18, 15], "auto_pad": "SAME_UPPER"}),
        Case("ConvTranspose", 1, [x, t], {"strides": [2, 2], "output_shape": [20, 17]}),
        Case("ConvTranspose", 1, [x, t], {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
        Case("ConvTranspose", 1, [x, t], {"strides": [2, 1], "auto_pad": "SAME_LOWER"}),
        Case("ConvTranspose", 1, [x, t], {"strides": [2, 1], "auto_pad": "VALID"}),
        Case("ConvTranspose", 1, [x, f32(4, 2, 3, 3)], {"group": 2}),
        Case("ConvTranspose", 1, [f32(1, 3, 6), f32(3, 2, 4)], {"strides": [3]}),
        *(Case("MaxPool", 1, [x], {"kernel_shape": [3, 2], **more}) for more in pools),
        *(Case("AveragePool", 7, [x], {"kernel_shape": [3, 2], **more}) for more in pools),
        Case("MaxPool", 1, [x], {"kernel_shape": [3, 3], "ceil_mode": 1, "strides": [3, 2]}, oldest=10),
        Case("MaxPool", 1, [x], {"kernel_shape": [3, 3], "dilations": [2, 1]}, oldest=10),
        Case("MaxPool", 1, [f32(2, 3, 9)], {"kernel_shape": [3], "strides": [2]}),
        Case("MaxPool", 1, [f32(2, 3, 5, 5, 4)], {"kernel_shape": [3, 2, 2], "storage_order": 1}, oldest=8),
        Case("AveragePool", 7, [x], {"kernel_shape": [3, 2], "pads": [1, 1, 1, 1], "count_include_pad": 1}),
        Case("AveragePool", 7, [x], {"kernel_shape": [3, 3], "ceil_mode": 1, "strides": [3, 2]}, oldest=10),
        Case(
            "AveragePool",
            7,
            [x],
            {"kernel_shape": [3, 3], "ceil_mode": 1, "strides": [3, 2], "pads": [1, 0, 1, 1], "count_include_pad": 1},
            oldest=19,
        ),
        Case("AveragePool", 7, [x], {"kernel_shape": [2, 3], "dilations": [3, 1]}, oldest=19),
        Case("GlobalAveragePool", 1, [x]),
        Case("GlobalMaxPool", 1, [x]),
        Case("GlobalMaxPool", 1, [f32(2, 3, 5)]),
        Case("GlobalLpPool", 2, [x]),
        Case("GlobalLpPool", 2, [x], {"p": 1}),
        Case("GlobalLpPool", 2, [x], {"p": 3}),
    ]


def _products() -> list[Case]:
    return [
        Case("MatMul", 1, [f32(3, 4), f32(4, 5)]),
        Case("MatMul", 1, [f32(2, 1, 3, 4), f32(6, 4, 5)]),
        Case("MatMul", 1, [f32(4), f32(2, 4, 5)]),
        Case("MatMul", 1, [f32(2, 3, 4), f32(4)]),
        Case("MatMul", 1, [f32(4), f32(4)]),
        Case("MatMul", 1, [integers(3, 4, dtype=np.int32), integers(4, 5, dtype=np.int32)], oldest=9),
        Case("MatMul", 1, [integers(2, 3, 4, low=-(2**62), high=2**62), integers(4)], oldest=9),
        Case("MatMul", 1, [integers(3, 4, low=0, dtype=np.uint32), integers(4, 5, low=0, dtype=np.uint32)], oldest=9),
        Case("MatMul", 1, [integers(3, 4, low=0, dtype=np.uint64), integers(4, 5, low=0, dtype=np.uint64)], oldest=9),
        Case("Gemm", 7, [f32(3, 4), f32(4, 5), f32(5)]),
        Case("Gemm", 7, [f32(4, 3), f32(5, 4), f32(3, 1)], {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 2.0}),
        Case("Gemm", 7, [f32(3, 4), f32(4, 5), f32(3, 5)], {"beta": 0.0}),
        Case("Gemm", 7, [f32(3, 4), f32(4, 5)], oldest=11),
    ]


def _normalizations() -> list[Case]:
    x = f32(2, 6, 4, 5)
    return [
        Case("BatchNormalization", 7, [x, positive(6), f32(6), f32(6), positive(6)], {"epsilon": 1e-3}),
        Case("BatchNormalization", 7, [f32(4, 6), positive(6), f32(6), f32(6), positive(6)]),
        Case("BatchNormalization", 7, [f16(2, 3, 4), positive(3), f32(3), f32(3), positive(3)], oldest=15, rtol=2e-3),
        Case("InstanceNormalization", 6, [x, f32(6), f32(6)], {"epsilon": 1e-3}),
        Case("GroupNormalization", 18, [x, f32(3), f32(3)], {"num_groups": 3}),
        Case("GroupNormalization", 21, [x, f32(6), f32(6)], {"num_groups": 2, "epsilon": 1e-3}),
        Case("GroupNormalization", 21, [f16(2, 6, 5), f16(6), f16(6)], {"num_groups": 2, "stash_type": 10}, rtol=2e-3),
        Case("GroupNormalization", 21, [x, f32(6), f32(6)], {"num_groups": 2, "stash_type": 11}),
        Case("GroupNormalization", 21, [x, f32(6), f32(6)], {"num_groups": 3, "stash_type": 16}, rtol=2e-2),
        Case("LayerNormalization", 17, [f32(2, 3, 8), f32(8), f32(8)]),
        Case("LayerNormalization", 17, [f16(2, 3, 8), f16(8), f16(8)], {"stash_type": 10}, rtol=2e-3),
        Case("RMSNormalization", 23, [f16(2, 3, 8), f16(8)], {"stash_type": 10}, rtol=2e-3),
        Case("RMSNormalization", 23, [f32(2, 3, 8), f32(8)], {"stash_type": 11}),
        Case("LayerNormalization", 17, [f32(2, 3, 8), f32(3, 8)], {"axis": 1, "epsilon": 1e-3}),
        Case("LayerNormalization", 17, [f32(2, 3, 8), f32(1, 1, 8), f32(1, 8)]),
        Case("LayerNormalization", 17, [f32(2, 3, 8), f32(3, 1), f32(8)]),
        Case("RMSNormalization", 23, [f32(2, 3, 8), f32(8)]),
        Case("RMSNormalization", 23, [f32(2, 3, 8), f32(3, 8)], {"axis": -2, "epsilon": 1e-3}),
        Case("RMSNormalization", 23, [f32(2, 3, 8), f32(3, 1)]),
        Case("MeanVarianceNormalization", 9, [x]),
        Case("MeanVarianceNormalization", 9, [x], {"axes": [1, -1]}),
        Case("LpNormalization", 1, [f32(3, 5)]),
        Case("LpNormalization", 1, [f32(3, 5)], {"p": 1, "axis": 0}),
        Case("LRN", 1, [x], {"size": 3}),
        Case("LRN", 1, [x], {"size": 5, "alpha": 0.5, "beta": 0.6, "bias": 2.0}),
        *(
            Case(op, since, [f32(2, 3, 4)], {} if axis is None else {"axis": axis})
            for op in ("Softmax", "LogSoftmax")
            for since, axes in ((1, (None, 0, 2)), (13, (None, 0, 1, -2)))
            for axis in axes
        ),
        Case("Softmax", 1, [f32(2, 3, 4)], {"axis": -1}, oldest=11),
        Case("Softmax", 1, [f32(2, 7, 1, 1)]),
    ]


def _reductions() -> list[Case]:
    cases: list[Case] = []
    for op in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare"):
        operand, moved = 13 if op == "Sum" else 18, f"Reduce{op}"
        x = positive(2, 3, 4)
        cases += [
            Case(moved, 1, [x], {"axes": [0, 2]}),
            Case(moved, 1, [x], {"axes": [1], "keepdims": 0}),
            Case(moved, 1, [x]),
            Case(moved, 1, [x], {"axes": [-1], "keepdims": 0}, oldest=11),
            Case(moved, operand, [x, i64(0, -1)], {"keepdims": 0}),
            Case(moved, operand, [x]),
            Case(moved, operand, [x, i64()]),
            Case(moved, operand, [x], {"noop_with_empty_axes": 1}),
        ]
    return [
        *cases,
        Case("ReduceMax", 18, [bools(3, 4), i64(1)], oldest=20),
        Case("ReduceMin", 18, [bools(3, 4), i64(1)], oldest=20),
        Case("ReduceSum", 13, [integers(3, 4), i64(1)]),
    ]


def _shapes() -> list[Case]:
    x = f32(2, 3, 4)
    image = f32(2, 8, 4, 6)
    return [
        Case("Dropout", 7, [x], {"ratio": 0.9}),
        Case("Dropout", 12, [x]),
        Case("Dropout", 12, [x, scalar(0.3), scalar(False, np.bool_)]),
        Case("Reshape", 5, [x, i64(4, 6)]),
        Case("Reshape", 5, [x, i64(0, -1)]),
        Case("Reshape", 5, [f32(0, 3), i64(3, 0)], {"allowzero": 1}, oldest=14),
        Case("Flatten", 1, [x]),
        Case("Flatten", 1, [x], {"axis": 0}),
        Case("Flatten", 1, [x], {"axis": 3}),
        Case("Flatten", 1, [x], {"axis": -1}, oldest=11),
        Case("Squeeze", 1, [f32(1, 3, 1, 2)]),
        Case("Squeeze", 1, [f32(1, 3, 1, 2)], {"axes": [2]}),
        Case("Squeeze", 13, [f32(1, 3, 1, 2)]),
        Case("Squeeze", 13, [f32(1, 3, 1, 2), i64(-2)]),
        Case("Unsqueeze", 1, [f32(3, 2)], {"axes": [0, 3]}),
        Case("Unsqueeze", 13, [f32(3, 2), i64(-1, 0)]),
        Case("Transpose", 1, [x]),
        Case("Transpose", 1, [x], {"perm": [1, 0, 2]}),
        Case("Expand", 8, [f32(3, 1), i64(2, 1, 4)]),
        Case("Expand", 8, [f32(2, 3), i64(1)]),
        Case("Tile", 6, [f32(2, 3), i64(2, 3)]),
        Case("Tile", 6, [f32(2, 3), i64(1, 1)]),
        Case("Tile", 6, [f32(2, 1, 3, 1), i64(1, 4, 1, 2)]),
        Case("Tile", 6, [f32(1, 2, 1), i64(0, 2, 3)]),
        Case("DepthToSpace", 1, [image], {"blocksize": 2}),
        Case("DepthToSpace", 1, [image], {"blocksize": 2, "mode": "CRD"}, oldest=11),
        Case("SpaceToDepth", 1, [image], {"blocksize": 2}),
        Case("SpaceToDepth", 1, [image], {"blocksize": 2, "mode": "CRD"}, oldest=28),
        Case("Concat", 4, [x, f32(2, 1, 4), f32(2, 2, 4)], {"axis": 1}),
        Case("Concat", 4, [x, x], {"axis": -1}, oldest=11),
        Case("Split", 2, [x], {"axis": 2}, outputs=2),
        Case("Split", 2, [x], {"axis": 1, "split": [1, 2]}, outputs=2),
        Case("Split", 13, [x], {"axis": -1}, outputs=2),
        Case("Split", 13, [x, i64(1, 2)], {"axis": 1}, outputs=2),
        Case("Split", 18, [f32(7, 2)], {"num_outputs": 3}, outputs=3),
        Case("Split", 18, [x, i64(3, 1)], {"axis": 2}, outputs=2),
        Case("Slice", 1, [x], {"starts": [0, -3], "ends": [1, 1000], "axes": [0, 2]}),
        Case("Slice", 1, [x], {"starts": [0, 1], "ends": [2, -1]}),
        Case("Slice", 10, [x, i64(1), i64(2**62), i64(2), i64(2)]),
        Case("Slice", 10, [x, i64(0, 0), i64(2, 2)]),
        Case("Slice", 10, [x, i64(-1), i64(-(2**62)), i64(-1), i64(-2)], oldest=11),
        *(
            Case("Slice", 10, [integers(n), i64(start), i64(end), i64(0), i64(step)], oldest=11)
            for n in (1, 3)
            for start in (-(2**62), -8, -n - 1, -n)
            for end in (-(2**62), -8, -n, -n + 1, 0, 5)
            for step in (-1, -2, 1)
        ),
        Case("Slice", 10, [x, np.array([3], np.int32), np.array([0], np.int32), np.array([1], np.int32)]),
        Case("Pad", 2, [x], {"pads": [0, 1, 2, 1, 0, 0], "value": 1.5}),
        Case("Pad", 2, [x], {"pads": [0, 1, 2, 1, 0, 0], "mode": "reflect"}),
        Case("Pad", 2, [x], {"pads": [0, -1, 2, 1, 0, -1]}),
        Case("Pad", 11, [x, i64(0, 1, 2, 1, 0, 0), scalar(-2.0)]),
        Case("Pad", 11, [x, i64(0, 1, 2, 1, 0, 0)], {"mode": "edge"}),
        Case("Pad", 11, [x, i64(1, 2), scalar(0.5), i64(-1)], oldest=18),
        Case("Pad", 11, [x, i64(1, 1, 2, 0, 1, 2)], {"mode": "wrap"}, oldest=19),
        Case("Pad", 11, [integers(4), i64(1, 2), scalar(7, np.int64)]),
        Case("Gather", 1, [x, i64(2, 0)], {"axis": 1}),
        Case("Gather", 1, [x, integers(2, 2, low=-4, high=4)], {"axis": -1}, oldest=11),
        Case("Gather", 1, [x, scalar(1, np.int64)]),
    ]


def _resizes() -> list[Case]:
    x = f32(1, 2, 5, 6)
    modes = [
        {"coordinate_transformation_mode": c, "mode": "linear"}
        for c in ("half_pixel", "pytorch_half_pixel", "align_corners", "asymmetric")
    ] + [
        {"coordinate_transformation_mode": c, "nearest_mode": r}
        for c, r in (
            ("half_pixel", "round_prefer_floor"),
            ("half_pixel", "round_prefer_ceil"),
            ("asymmetric", "floor"),
            ("asymmetric", "ceil"),
            ("align_corners", "round_prefer_floor"),
        )
    ]
    scales, none = floats(1, 1, 2, 1.5), floats()
    return [
        Case("Upsample", 7, [x], {"scales": [1.0, 1.0, 2.0, 1.5]}),
        Case("Upsample", 7, [x], {"scales": [1.0, 1.0, 2.0, 1.5], "mode": "linear"}),
        Case("Upsample", 9, [x, scales]),
        Case("Upsample", 9, [x, scales], {"mode": "linear"}),
        Case("Resize", 10, [x, scales]),
        Case("Resize", 10, [x, floats(1, 1, 0.6, 2)]),
        Case("Resize", 10, [x, floats(1, 1, 0.6, 2)], {"mode": "linear"}),
        *(Case("Resize", 11, [x, none, scales], mode) for mode in modes),
        *(Case("Resize", 11, [x, none, none, i64(1, 2, 3, 9)], mode) for mode in modes),
        Case("Resize", 11, [x, None, None, i64(1, 2, 3, 9)], {"mode": "linear"}, oldest=13),
        Case("Resize", 11, [x, None, floats(2, 1.5)], {"axes": [2, 3], "mode": "linear"}, oldest=18),
        Case("Resize", 11, [x, None, None, i64(9, 7)], {"axes": [3, 2]}, oldest=18),
        *(
            Case("Resize", 11, [x, None, None, i64(9, 8)], {"axes": [2, 3], "keep_aspect_ratio_policy": p}, oldest=18)
            for p in ("not_larger", "not_smaller")
        ),
        Case(
            "Resize",
            11,
            [x, None, floats(1, 1, 0.7, 1.3)],
            {"mode": "linear", "coordinate_transformation_mode": "half_pixel_symmetric"},
            oldest=19,
        ),
    ]


def _constants() -> list[Case]:
    return [
        Case("Constant", 1, [], {"value": tensor(floats(1, 2, 3))}),
        Case("Constant", 1, [], {"value_float": 2.5}, oldest=12),
        Case("Constant", 1, [], {"value_floats": [2.5, 1.0]}, oldest=12),
        Case("Constant", 1, [], {"value_int": 7}, oldest=12),
        Case("Constant", 1, [], {"value_ints": [7, 8]}, oldest=12),
        Case("ConstantOfShape", 9, [i64(2, 3)]),
        Case("ConstantOfShape", 9, [i64(2, 3)], {"value": tensor(i64(5))}),
        Case("Shape", 1, [f32(2, 3, 4)]),
        Case("Shape", 1, [f32(2, 3, 4)], {"start": 1, "end": -1}, oldest=15),
        Case("Shape", 1, [f32(2, 3, 4)], {"start": -2}, oldest=15),
        Case("Size", 1, [f32(2, 3, 4)]),
        Case("Range", 11, [scalar(1.0), scalar(2.1), scalar(0.25)]),
        Case("Range", 11, [scalar(9, np.int64), scalar(-2, np.int64), scalar(-3, np.int64)]),
    ]


CASES: list[Case] = [
    *_unary(),
    *_pointwise(),
    *_windows(),
    *_products(),
    *_normalizations(),
    *_reductions(),
    *_shapes(),
    *_resizes(),
    *_constants(),
]
