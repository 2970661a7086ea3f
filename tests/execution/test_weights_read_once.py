"""Test how often weights are read, and which of them a program keeps on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from lowering.lowers_judge import LowersJudge
from onnx import helper, numpy_helper

from fusec.execution.compilation import Compiled
from fusec.frontends import load
from fusec.ir import Graph
from fusec.passes import PIPELINE
from fusec.passes.base import Options, run
from fusec.passes.partition import partition
from fusec.plans.verdict import Plan
from fusec.runtime import Executable, SimulatorBackend
from fusec.system.byte_ranges import MemoryRanges
from fusec.system.rounded_read import PART_BYTES
from fusec.targets.target import load as load_target


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the weights that were read, each time."""
    found, read = list[int](), MemoryRanges.read_into

    def counted(data: MemoryRanges, room: memoryview, start: int) -> None:
        found.append(len(room))
        read(data, room, start)

    monkeypatch.setattr(MemoryRanges, "read_into", counted)
    return found


def model(nodes: list[onnx.NodeProto], shape: list[int], weight: np.ndarray[Any, Any]) -> Graph:
    """The graph of a model with one weight in the bytes of an ONNX file."""
    made = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", 1, shape)],
        [onnx.ValueInfoProto(name="y")],
        [numpy_helper.from_array(weight, "w")],
    )
    opsets = [helper.make_opsetid("", 21)]
    return load(helper.make_model(made, ir_version=10, opset_imports=opsets).SerializeToString())


class LoadingAhead(SimulatorBackend):
    """A backend that loads constants while it prepares, as that for GPUs."""

    loads_ahead = True


def compiled(source: Graph, precision: str) -> Compiled:
    options, goal = Options(precision), load_target("h200")
    graph = run(PIPELINE, source.clone(), options)
    return Compiled(source, partition(graph, LowersJudge((Plan(1, (), True),)), goal), goal, options, None)


@pytest.mark.parametrize("backend", [SimulatorBackend, LoadingAhead])
def test_a_weight_that_a_step_reads_as_it_is_is_read_once(
    backend: type, reads: list[int], rng: np.random.Generator
) -> None:
    weight = rng.standard_normal((128, 64, 3, 3)).astype(np.float32)
    graph = model([helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1, 1, 1])], [1, 64, 4, 4], weight)
    executable = Executable(compiled(graph, "fp32"), backend())
    assert len(reads) == (1 if backend is LoadingAhead else 0)
    first = executable(np.ones((1, 64, 4, 4), np.float32))
    again = executable(np.ones((1, 64, 4, 4), np.float32))
    assert reads == [weight.nbytes]
    assert np.array_equal(first, again)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_only_the_last_of_a_chain_of_derived_weights_is_stored(
    precision: str, reads: list[int], rng: np.random.Generator
) -> None:
    """A transposed weight is narrowed, and becomes the filters of a convolution."""
    weight = rng.standard_normal((512, 256)).astype(np.float32)
    net = compiled(model([helper.make_node("Gemm", ["x", "w"], ["y"], transB=1)], [8, 256], weight), precision)
    assert any("as_convolution" in step.spelling for step in net.program.steps)
    executable, x = Executable(net, SimulatorBackend()), rng.standard_normal((8, 256)).astype(np.float32)
    got = executable(x)
    want = x.astype(np.float64) @ weight.T.astype(np.float64)
    assert np.linalg.norm(got - want) <= 1e-3 * np.linalg.norm(want)
    assert reads == [weight.nbytes]
    held = [v.literal for v in net.graph.values() if v.literal is not None]
    assert held
    assert all(literal._array is None for literal in held), "only the filters are kept"
    assert np.array_equal(held[0].array, weight.T.astype(held[0].array.dtype)), "it can be asked for later"


def test_a_transposed_weight_is_rounded_as_it_is_read(reads: list[int], rng: np.random.Generator) -> None:
    """Its numbers are never in memory in fp32, which for a large weight takes longer than to read them."""
    weight = rng.standard_normal((1024, 768)).astype(np.float32)
    net = compiled(model([helper.make_node("Gemm", ["x", "w"], ["y"], transB=1)], [8, 768], weight), "fp16")
    executable, x = Executable(net, SimulatorBackend()), rng.standard_normal((8, 768)).astype(np.float32)
    got = executable(x)
    assert len(reads) == -(-weight.nbytes // PART_BYTES) > 1
    assert max(reads) <= PART_BYTES
    want = x.astype(np.float16).astype(np.float64) @ weight.T.astype(np.float16).astype(np.float64)
    assert np.linalg.norm(got - want) <= 1e-3 * np.linalg.norm(want)
    (held,) = (v.literal for v in net.graph.values() if v.literal is not None and v.literal.type.rank == 2)
    assert held.array.flags.c_contiguous
    assert np.array_equal(held.array, weight.T.astype(np.float16))


def test_a_transposed_weight_beyond_the_range_becomes_the_largest_number(rng: np.random.Generator) -> None:
    weight = rng.standard_normal((256, 192)).astype(np.float32)
    weight[5, 7] = -1e20
    net = compiled(model([helper.make_node("Gemm", ["x", "w"], ["y"], transB=1)], [8, 192], weight), "fp16")
    (held,) = (v.literal for v in net.graph.values() if v.literal is not None and v.literal.type.rank == 2)
    with pytest.warns(UserWarning, match="1 of 49152 elements are out of f16's range"):
        array = held.array
    assert array[7, 5] == np.finfo(np.float16).min
