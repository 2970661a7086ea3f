"""Run one ONNX operator in onnxruntime, as an independent opinion of what an op means."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import helper

Array = np.ndarray[Any, Any]
Oracle = Callable[..., Sequence[Array]]  # arrays -> arrays

OPSET = 22
OLDER = {"RoiAlign": 16, "MaxRoiPool": 16}  # ops whose newest version onnxruntime lacks


@functools.lru_cache(maxsize=512)
def _session(op_type: str, dtypes: tuple[str, ...], results: int, attributes: tuple[tuple[str, Any], ...]) -> Any:
    opset = OLDER.get(op_type, OPSET)
    names = [f"in{i}" if dtype else "" for i, dtype in enumerate(dtypes)]
    outputs = [f"out{i}" for i in range(results)]
    given: dict[str, Any] = {k: list(v) if isinstance(v, tuple) else v for k, v in attributes}
    node = helper.make_node(op_type, names, outputs, **given)
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), None)
        for name, dtype in zip(names, dtypes, strict=True)
        if dtype
    ]
    untyped = [onnx.ValueInfoProto(name=name) for name in outputs]
    graph = helper.make_graph([node], "one", inputs, untyped)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(op_type: str, arrays: Sequence[Array | None], results: int = 1, **attributes: Any) -> list[Array]:
    """The operator's results; an operand that is None is left out."""
    dtypes = tuple("" if a is None else a.dtype.name for a in arrays)
    session = _session(op_type, dtypes, results, tuple(sorted(attributes.items())))
    feeds = {f"in{i}": np.ascontiguousarray(a) for i, a in enumerate(arrays) if a is not None}
    return session.run(None, feeds)


def onnx_op(op_type: str, results: int = 1, **attributes: Any) -> Oracle:
    """An oracle that runs `op_type` on the operands as they are."""
    return lambda *arrays: run(op_type, arrays, results, **attributes)
