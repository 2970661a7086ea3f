"""The command line as the tests call it, and a model small enough to compile in a moment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

from fusec.cli import app

SHAPE = ("--shape", "x=1,8,8,8")


def fusec(*args: object) -> Any:
    """Run a command in this process: exit_code, stdout, stderr. Nothing but exits may come out of it."""
    result = CliRunner().invoke(app, [str(a) for a in args], prog_name="fusec")
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert "Traceback" not in result.output
    return result


def tiny(folder: Path) -> Path:
    """Convolution and ReLU with a symbolic batch, then a sign that cuDNN cannot take and an add."""
    rng = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> TensorProto:
        return numpy_helper.from_array((0.3 * rng.standard_normal(shape)).astype(np.float32), name)

    nodes = [
        helper.make_node("Conv", ["x", "w", "b"], ["c"], "conv", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c"], ["r"], "act"),
        helper.make_node("Sign", ["r"], ["s"], "sign"),
        helper.make_node("Add", ["r", "s"], ["y"], "sum"),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 8, 8, 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", 16, 8, 8])
    graph = helper.make_graph(nodes, "tiny", [x], [y], [weight("w", 16, 8, 3, 3), weight("b", 16)])
    path = folder / "tiny.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path
