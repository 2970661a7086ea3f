"""Test that norms and attention round their result to fp8 in their kernel, as they do to integers of 8 bits."""

from __future__ import annotations

import numpy as np
import pytest
from gpu.autotune.fusion.test_rounded_results import ATTENTION, NORMS, TEXT, NormsAlone
from gpu.autotune.squeeze_excite_text import drawn
from gpu.kernels.cases import FIGURES
from gpu.kernels.emulator import Emulator, needs_compiler

from fusec.gpu.autotune.fusion.fusion_proposals import is_joint_work
from fusec.gpu.autotune.fusion.step_fusion import fuse_steps
from fusec.gpu.kernels import find
from fusec.ir import DType, Graph
from fusec.passes.partition import partition
from fusec.reference import evaluate_node
from fusec.schedule.program import Kind, Partition, body_of
from fusec.targets.target import load
from fusec.text import parse


def in_fp8(text: str) -> str:
    """The text with a rounding to fp8 in place of that to i8."""
    lines = [line for line in text.splitlines() if "round(" not in line]
    changed = "\n".join(lines).replace("clip(%r)", "clip(%q)").replace("to=i8", "to=f8e4m3")
    return changed.replace("min=-128.0, max=127.0", "min=-448.0, max=448.0").replace("[21.7]", "[150.0]")


def check(graph: Graph, step: Partition, rng: np.random.Generator) -> None:
    kernel = find(step.nodes, step.outputs, FIGURES)
    assert kernel is not None and {v.type.dtype for v in step.outputs} >= {DType.F8E4M3}
    known = {v: v.literal.array for v in graph.values() if v.literal is not None}
    known |= {v: rng.standard_normal(v.type.shape).astype(v.type.dtype.numpy) for v in graph.inputs}
    results = Emulator([kernel]).run(kernel, known, step.outputs)
    for node in step.nodes:
        known.update(zip(node.results, evaluate_node(node, [known[v] for v in node.operands]), strict=True))
    for value, result in zip(step.outputs, results, strict=True):
        got, want = (
            np.asarray(each).view(value.type.dtype.numpy).astype(np.float32).ravel() for each in (result, known[value])
        )
        assert np.isfinite(want).all() and want.std() > 0
        if value.type.dtype is DType.F8E4M3:  # a number next to the border of two codes may become either
            assert np.linalg.norm(got - want) <= 0.01 * np.linalg.norm(want)
            assert (got == want).mean() > 0.98
            assert np.abs(want).max() == 448
        else:
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


@needs_compiler
@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_stores_both_results(norm: str, rng: np.random.Generator) -> None:
    text = in_fp8(TEXT.replace("NORM", norm))
    graph = parse(text, drawn(text))
    program = fuse_steps(partition(graph, NormsAlone(), load("h200")), FIGURES, products=True)
    step = program.steps[0]
    assert step.kind is Kind.KERNEL and step.signature.endswith("norm+mul+clip+cast") and len(step.outputs) == 2
    check(program.graph, step, rng)


@needs_compiler
def test_attention_rounds_its_result(rng: np.random.Generator) -> None:
    graph = parse(in_fp8(ATTENTION).replace("[150.0]", "[1500.0]"), {})
    nodes = tuple(n for n in graph.nodes if n.op.name != "constant")
    assert is_joint_work(nodes)
    check(graph, Partition(nodes, Kind.KERNEL, body_of(graph, nodes)), rng)
