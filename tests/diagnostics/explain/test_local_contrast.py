"""Test local contrast normalisation as exporters write it: each of its two convolutions is a step with what follows.

The mean of a Gaussian window is subtracted, and the difference is divided by its own deviation in such a window, which
has a lower limit: a number, or the deviation's mean over the image.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from frontends.onnx.models import info, model, run
from gpu.kernels.cases import Case, assert_same, normal
from gpu.kernels.emulator import Emulator, needs_compiler
from helpers import assert_close
from onnx import helper

import fusec
from fusec import Executable, frontends
from fusec.gpu.autotune.fusion.step_fusion import fuse_steps
from fusec.gpu.kernels import GpuFigures
from fusec.ir import Graph, TensorType, Value, channels_last
from fusec.schedule.program import Kind, Partition, Program, body_of
from fusec.targets.target import load

GRAY, COLOUR, DEEP = (1, 1, 64, 64), (4, 3, 64, 64), (1, 64, 56, 56)


def gaussian(taps: int, width: float = 2.0) -> np.ndarray:
    along = np.exp(-((np.arange(taps) - taps // 2) ** 2) / (2 * width * width))
    window = np.outer(along, along)
    return (window / window.sum()).astype(np.float32)


def contrast(
    shape: tuple[int, ...], limit: str = "number", mixed: bool = False, dtype: type = np.float32
) -> onnx.ModelProto:
    """mixed: all channels have one mean and one deviation."""
    channels, pad = shape[1], 4
    window = gaussian(2 * pad + 1)
    filters = window / channels + np.zeros((1, channels, 1, 1)) if mixed else np.tile(window, (channels, 1, 1, 1))
    how: dict[str, Any] = {"pads": [pad] * 4, "group": 1 if mixed else channels}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["mean"], **how),
        helper.make_node("Sub", ["x", "mean"], ["centred"]),
        helper.make_node("Mul", ["centred", "centred"], ["square"]),
        helper.make_node("Conv", ["square", "w"], ["variance"], **how),
        helper.make_node("Sqrt", ["variance"], ["deviation"]),
        helper.make_node("Max", ["deviation", "limit"], ["divisor"]),
        helper.make_node("Div", ["centred", "divisor"], ["y"]),
    ]
    numbers = {"w": filters.astype(dtype)}
    if limit == "number":
        numbers["limit"] = np.array(0.5, dtype)
    else:
        nodes.insert(5, helper.make_node("ReduceMean", ["deviation"], ["limit"], axes=[2, 3]))
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return model(nodes, [info("x", shape, kind)], ["y"], numbers, opset=13)


TWO = ["conv+sub+mul", "conv+sqrt+clip+div"]
BY_THE_MEAN = ["conv+sub+mul", "conv+sqrt", "reduce", "max+div"]
APART = ["conv", "sub+mul", "conv", "sqrt+clip+div"]  # cuDNN's engines are slow where they fuse depthwise convolutions
STEPS = {  # shape, limit, mixed, whether images are stored channels last
    "one channel": ((GRAY, "number", False, False), TWO),
    "one channel, limited by the mean": ((GRAY, "mean", False, False), BY_THE_MEAN),
    "colours": ((COLOUR, "number", False, True), TWO),
    "colours, limited by the mean": ((COLOUR, "mean", False, True), BY_THE_MEAN),
    "colours in rows": ((COLOUR, "number", False, False), ["conv", "relayout", "sub+mul", TWO[1], "relayout"]),
    "many channels": ((DEEP, "number", False, True), APART),
}


@pytest.mark.cudnn
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("name", STEPS)
def test_each_convolution_is_a_step(name: str, dtype: type, rng: np.random.Generator) -> None:
    (shape, limit, mixed, last), steps = STEPS[name]
    proto = contrast(shape, limit, mixed, dtype)
    executable = fusec.compile(proto, target="h200", simulate=True, channels_last=last)
    assert isinstance(executable, Executable)
    assert [step.ops for step in executable.explain().steps] == steps
    x = rng.uniform(0, 4, shape).astype(dtype)
    (want,) = run(contrast(shape, limit, mixed), {"x": x.astype(np.float32)})
    assert_close(executable(x), want, 1e-5 if dtype is np.float32 else 3e-3)


@pytest.mark.cudnn
def test_a_mean_over_all_channels_is_subtracted_in_a_step_of_its_own(rng: np.random.Generator) -> None:
    """It has one channel, and the difference has all of them."""
    executable = fusec.compile(
        contrast(COLOUR, mixed=True, dtype=np.float16), target="h200", simulate=True, channels_last=True
    )
    assert isinstance(executable, Executable)
    assert [step.ops for step in executable.explain().steps] == ["conv", "sub+mul", "conv+sqrt+clip", "div"]
    x = rng.uniform(0, 4, COLOUR).astype(np.float16)
    (want,) = run(contrast(COLOUR, mixed=True), {"x": x.astype(np.float32)})
    assert_close(executable(x), want, 3e-3)


@pytest.mark.cudnn
def test_many_channels_are_two_steps_where_the_depthwise_kernel_is_faster() -> None:
    """On a GPU, tuning decides about the convolutions, and kernels are then fused with their neighbours."""
    executable = fusec.compile(contrast(DEEP, dtype=np.float16), target="h200", simulate=True, channels_last=True)
    assert isinstance(executable, Executable)
    program = executable.compiled.program
    steps = tuple(
        Partition(step.nodes, Kind.KERNEL, body_of(program.graph, step.nodes)) if step.signature == "conv" else step
        for step in program.steps
    )
    fused = fuse_steps(Program(program.graph, steps, program.refusals), GpuFigures.of(load("h200")))
    assert [(step.kind, step.signature) for step in fused.steps] == [(Kind.KERNEL, ops) for ops in TWO]


@needs_compiler
@pytest.mark.parametrize("shape", [(1, 16, 12, 13), (2, 3, 9, 20)], ids=str)
def test_one_kernel_runs_each_depthwise_convolution_with_what_follows(
    shape: tuple[int, ...], rng: np.random.Generator
) -> None:
    whole = frontends.load(contrast(shape))
    nodes = [node for node in whole.nodes if node.operands]
    assert [node.op.name for node in nodes] == ["conv", "sub", "mul", "conv", "sqrt", "max", "div"]
    for first, last, stored in ((0, 3, (1, 2)), (3, 7, (6,))):
        part = Graph("part")
        inside = {value for node in nodes[first:last] for value in node.results}
        copies: dict[Value, Value] = {}
        for node in nodes[first:last]:
            for value in node.operands:
                if value in copies or value in inside:
                    continue
                if value.literal is not None:
                    copies[value] = part.constant(value.literal.array, value.name)
                else:
                    copies[value] = part.add_input(value.name, stored_last(value.type))
            made = part.add(node.op, *(copies[v] for v in node.operands))
            part.set_type(made, stored_last(made.type))
            copies[node.result] = made
        part.set_outputs([copies[nodes[i].result] for i in stored])
        case = Case("part", part, normal, False)
        assert case.kernel is not None and len(case.kernel.launches) == 1
        arrays = {v: np.abs(a) if a.ndim == 4 else a for v, a in case.arrays(rng).items()}
        for way in (case.kernel, *case.kernel.others):
            assert_same(case, Emulator([way]).run(way, arrays, case.outputs), case.reference(arrays))


def stored_last(type: TensorType) -> TensorType:
    return type.with_order(channels_last(type.rank)) if type.rank == 4 else type
