"""Make model files for tests of the program cache, and programs of them without cuDNN."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnx
from lowering.lowers_judge import LowersJudge
from onnx import TensorProto, helper, numpy_helper

from fusec.compiler.build_program import ModelWithHostSteps
from fusec.compiler.file_program import FileProgram
from fusec.execution.compilation import Compiled
from fusec.execution.compile_options import CompileOptions
from fusec.gpu.cudnn.legality.oracle import Oracle
from fusec.ir import Graph
from fusec.passes import PIPELINE
from fusec.passes.base import run
from fusec.passes.partition import partition
from fusec.targets.target import Target, load

TARGET = load("h200")


def write_mlp(path: Path, weight: np.ndarray[Any, Any], bias: float = 0.5, node: str = "MatMul") -> Path:
    """Write relu(x @ w + b) for a weight of more than 64 KiB, and a row of numbers."""
    depth, columns = weight.shape
    row = np.full(columns, bias, np.float32)
    weights = [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(row, "b")]
    nodes = [
        helper.make_node(node, ["x", "w"], ["y"]),
        helper.make_node("Add", ["y", "b"], ["z"]),
        helper.make_node("Relu", ["z"], ["out"]),
    ]
    shapes = {"x": (8, depth), "out": (8, columns)}
    x, out = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items())
    graph = helper.make_graph(nodes, "mlp", [x], [out], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]), path)
    return path


def drawn(seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal((160, 256)).astype(np.float32)


def workers() -> Oracle:
    """Return what a compilation on a GPU asks; nothing is asked in these tests."""
    filter = CompileOptions().plan_filter
    return cast("Oracle", SimpleNamespace(device=True, target=TARGET, plan_filter=filter))


class Builder:
    """Builds programs by fusec's rules, and counts them."""

    def __init__(self, options: CompileOptions):
        self.options, self.count = options, 0

    def __call__(self, graph: Graph, target: Target = TARGET) -> Compiled:
        self.count += 1
        options, judge = self.options.for_passes(graph), LowersJudge()
        optimised = run(PIPELINE, graph.clone(), options)
        return Compiled(graph, partition(optimised, judge, target), target, options, judge)


def compile_file(model: Any, shapes: Any = None, **given: Any) -> tuple[Compiled, bool]:
    """Compile a file as on a GPU, up to its program. Returns the program, and whether it came from the cache."""
    options = CompileOptions(**given)
    builder, file = Builder(options), FileProgram.of(model, options, shapes)
    assert file is not None
    read = file.read()
    assert not isinstance(read, ModelWithHostSteps)
    compiled = read.compiled(TARGET, workers(), builder)
    return compiled, builder.count == 0
