"""The command line as the tests call it, and a model small enough to compile in a moment."""

from __future__ import annotations

import contextlib
import io
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from fusec.cli import commands

SHAPE = ("--shape", "x=1,8,8,8")


@dataclass(frozen=True)
class Result:
    """The end of a command: its status and its output."""

    exit_code: int
    stdout: str
    stderr: str


def fusec(*args: object) -> Result:
    """Run a command in this process, through the entry point. Nothing but an exit may come out of it."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["fusec", *map(str, args)])
        try:
            status = commands.main()
        except SystemExit as leave:
            status = leave.code
    assert "Traceback" not in err.getvalue()
    return Result(int(status or 0), out.getvalue(), err.getvalue())


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
