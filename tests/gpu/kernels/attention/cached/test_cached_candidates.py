"""Test that attention with writes into its cache competes as one kernel with several steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
from gpu.kernels.attention.cached.test_cached_attention import apart, rotated
from gpu.kernels.cases import FIGURES
from gpu.stand_in_gpu import Machine
from lowering.lowers_judge import LowersJudge

from fusec.gpu.autotune.candidates.candidate_times import StepTuning, Timers, choose_steps
from fusec.gpu.autotune.fusion.step_fusion import fuse_steps
from fusec.gpu.autotune.plans.plan_search import RivalTimes
from fusec.gpu.autotune.step_choices import apply_choices
from fusec.gpu.kernels import Kernel
from fusec.ir import Array, DType, TensorType, Value
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.ops import pw
from fusec.passes.partition import partition
from fusec.plans.plan_record import Part
from fusec.schedule.program import Kind, Partition, Program
from fusec.targets.target import load

Memory = Callable[[Value, TensorType], Array]
TUNING = StepTuning(True, 1.0, "quick", FIGURES)
WRITES, ATTENDS = "rotary+slice+reshape+scatter+scatter", "attention"


def program(read_later: bool = False) -> Program:
    """A decode step of one image, whose result an op reads, or another one reads the embedded queries, too."""
    graph = rotated(DType.F16, (1, 4, 2), 64, 32).graph
    outputs = list(graph.outputs)
    if read_later:
        (embedding,) = (node.result for node in graph.nodes if node.op.name == "rotary")
        outputs.append(graph.add(pw("neg"), embedding))
    graph.set_outputs([*outputs[:2], graph.add(pw("neg"), outputs[2]), *outputs[3:]])
    return partition(graph, LowersJudge(), load("h200"))


def launches(program: Program) -> list[str]:
    return [step.signature for step in program.steps if step.kind is not Kind.VIEW]


def test_steps_are_timed_over_a_cache_that_they_write_in_place(machine: Machine) -> None:
    """Elsewhere they copy all rows that stay, which a program does not do."""
    from fusec.gpu.autotune.candidates.candidate_runner import bind_candidate
    from fusec.gpu.measure.random_inputs import RandomInputs

    bound: list[Memory] = []

    class Recorder:
        def bind(self, kernel: Kernel, memory: Memory) -> Callable[[], None]:
            bound.append(memory)
            return lambda: None

    before = program()
    writes = before.steps[[step.signature for step in before.steps].index(WRITES)]
    kernel = Partition(writes.nodes, Kind.KERNEL, writes.body)
    bind_candidate((kernel,), True, lambda graph, buffers: lambda: None, cast(Any, Recorder()), FIGURES)
    scatters = [node for node in writes.nodes if node.op.name == "scatter"]
    heads = [next(node.result for node in writes.nodes[0].graph.nodes if n.result in node.operands) for n in scatters]
    assert all(value.node is not None and value.node.op.name == "reshape" for value in heads), "attention reads them"
    for memory in (*bound, RandomInputs().in_place):
        for node, view in zip(scatters, heads, strict=True):
            old, new = node.operands[0], node.result
            assert memory(new, new.type) is memory(view, view.type) is memory(old, old.type)
    apart = RandomInputs().memory  # compares results
    assert all(apart(n.result, n.result.type) is not apart(n.operands[0], n.result.type) for n in scatters)


@pytest.mark.parametrize("kernel_us", [9.0, 21.0])
def test_the_faster_one_is_chosen(kernel_us: float) -> None:
    def graphs_us(graphs: Mapping[str, CudnnGraph], rivals_us: RivalTimes) -> dict[str, float]:
        return dict.fromkeys(graphs, 14.0)

    def kernels_us(found: Mapping[str, Kernel]) -> dict[str, float]:
        return {key: kernel_us if "attention" in kernel.name else 5.0 for key, kernel in found.items()}

    before = program()
    assert launches(before)[:2] == [WRITES, ATTENDS]
    fused = fuse_steps(before, FIGURES, products=True)
    (step, *_) = [step for step in fused.steps if "attention" in step.signature]
    assert step.kind is Kind.KERNEL
    chosen = choose_steps(fused, TUNING, Timers(graphs_us, kernels_us))
    after = apply_choices(before, chosen, FIGURES)
    together = kernel_us < 14.0 + 5.0 + 1.0
    assert launches(after)[:-1] == ([step.signature] if together else [WRITES, ATTENDS])
    choice = next(parts for parts in chosen.values() if sum(part.nodes for part in parts) == len(step.nodes))
    assert [Part.from_json(part.to_json()) for part in choice] == list(choice)


def test_embedded_queries_that_another_step_reads_stay_apart() -> None:
    fused = fuse_steps(program(read_later=True), FIGURES, products=True)
    assert launches(fused)[:2] == [WRITES, ATTENDS]


def test_one_of_two_attentions_over_the_same_cache_is_joined() -> None:
    """Its writes belong to one step alone, and the other attention reads the result."""
    graph = apart(DType.F16, (1, 4, 2), 64, 32).graph
    attention = next(node for node in graph.nodes if node.op.name == "attention")
    graph.set_outputs([*graph.outputs, graph.add(pw("neg"), graph.add(attention.op, *attention.operands))])
    fused = fuse_steps(partition(graph, LowersJudge(), load("h200")), FIGURES, products=True)
    assert sum("attention" in signature for signature in launches(fused)) == 2
    fused.verify()
