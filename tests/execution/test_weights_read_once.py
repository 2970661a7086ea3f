"""Test how often weights are read, and which of them a program keeps on the host."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import onnx
import pytest
from lowering.lowers_judge import LowersJudge
from onnx import helper, numpy_helper

from fusec.errors import ModelError
from fusec.execution.compilation import Compiled
from fusec.frontends import load
from fusec.graph import literal as literal_module
from fusec.ir import Constant, Graph, Literal, load_early
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
    weight = rng.standard_normal((2048, 768)).astype(np.float32)
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


def narrowed(weight: np.ndarray[Any, Any]) -> Literal:
    """The weight of a model, rounded to fp16 by the passes."""
    graph = model([helper.make_node("Conv", ["x", "w"], ["y"])], [1, weight.shape[1], 8, 8], weight)
    made = run(PIPELINE, graph, Options("fp16"))
    (literal,) = (node.op.literal for node in made.nodes if isinstance(node.op, Constant))
    return literal


def test_a_weight_that_is_loaded_early_is_read_once(reads: list[int], rng: np.random.Generator) -> None:
    weight = rng.standard_normal((256, 256, 3, 3)).astype(np.float32)
    literal = narrowed(weight)
    load_early([literal])
    early = literal.operand()
    np.testing.assert_array_equal(early, weight.astype(np.float16))
    assert sum(reads) == weight.nbytes
    literal.operand()
    assert sum(reads) == 2 * weight.nbytes, "it is held for one use"


def test_whoever_needs_a_weight_waits_for_the_thread_that_loads_it(rng: np.random.Generator) -> None:
    weight = rng.standard_normal((256, 256, 3, 3)).astype(np.float32)
    literal = narrowed(weight)
    work = literal.early()
    assert work is not None and literal.early() is None, "it is loading"
    threading.Timer(0.1, work).start()
    np.testing.assert_array_equal(literal.array, weight.astype(np.float16))
    assert literal.early() is None, "it is loaded"


def test_small_weights_and_those_beyond_a_limit_are_not_loaded_early(
    reads: list[int], rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large, larger = (
        narrowed(rng.standard_normal((size, size, 3, 3)).astype(np.float32)) for size in (16, 256, 320)
    )
    reads.clear()
    monkeypatch.setattr(literal_module, "EARLY_BYTES", larger.type.nbytes)
    load_early([small, large, larger])
    for thread in threading.enumerate():
        if thread.name == "fusec-early-weights":
            thread.join()
    assert sum(reads) == 2 * larger.type.nbytes
    larger.forget_early()
    assert larger.operand().shape == larger.type.shape
    assert sum(reads) == 4 * larger.type.nbytes


def test_an_error_of_early_loading_is_raised_where_the_weight_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    literal = narrowed(np.ones((256, 256, 3, 3), np.float32))

    def fail(*_: object) -> None:
        raise OSError("gone")

    monkeypatch.setattr(MemoryRanges, "read_into", fail)
    monkeypatch.setattr(MemoryRanges, "read", fail)
    load_early([literal])
    with pytest.raises(ModelError, match="a weight cannot be read"):
        literal.operand()
