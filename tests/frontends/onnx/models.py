"""Small ONNX models for the tests, and what they give in onnxruntime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import onnx
import onnxruntime
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

RUNTIME_OPSET = 26  # newest opset onnxruntime takes without protest


def info(name: str, shape: Sequence[int | str | None] | None, dtype: int = TensorProto.FLOAT) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def model(
    nodes: Sequence[NodeProto],
    inputs: Sequence[ValueInfoProto],
    outputs: Sequence[ValueInfoProto | str],
    initializers: dict[str, np.ndarray] | None = None,
    opset: int = 21,
    **more: Any,
) -> ModelProto:
    """An unchecked model; outputs may be given by name alone."""
    listed = [onnx.ValueInfoProto(name=o) if isinstance(o, str) else o for o in outputs]
    held = [numpy_helper.from_array(a, n) for n, a in (initializers or {}).items()]
    graph = helper.make_graph(list(nodes), "g", list(inputs), listed, held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10, **more)


def one(op: str, *shapes: Sequence[int], opset: int = 21, outputs: int = 1, **attributes: Any) -> ModelProto:
    """A model of one node named 'n' with f32 operands x0, x1, … as graph inputs."""
    names = [f"x{i}" for i in range(len(shapes))]
    results = [f"y{i}" for i in range(outputs)]
    node = helper.make_node(op, names, results, name="n", **attributes)
    return model([node], [info(n, s) for n, s in zip(names, shapes, strict=True)], results, opset=opset)


def run(proto: ModelProto, arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The outputs as onnxruntime computes them, graph optimisations off."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    results = session.run(None, arrays)
    assert all(isinstance(result, np.ndarray) for result in results)
    return cast("list[np.ndarray]", results)
