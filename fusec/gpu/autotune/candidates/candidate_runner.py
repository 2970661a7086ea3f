"""Run the steps of a candidate one after the other, so that a step finds in the L2 cache what the step before wrote."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field

from fusec.gpu import kernels
from fusec.gpu.autotune.candidates.step_candidates import Candidate
from fusec.gpu.kernels import GpuFigures
from fusec.gpu.launch.kernel_launcher import Launcher
from fusec.gpu.measure.random_inputs import random_array, random_data, random_value
from fusec.ir import Array, TensorType, Value
from fusec.lower_cudnn import lower
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.schedule.buffer_donation import overwritten_input
from fusec.schedule.program import Kind, outputs_of
from fusec.system.dataclass import dataclass

Bind = Callable[[CudnnGraph, Mapping[int, Array]], Callable[[], None]]


@dataclass
class RandomMemory:
    """Memory of the steps of candidates, filled with random numbers.

    Writes of rows overwrite their operand, as they do in a program whose state that is.
    """

    held: dict[str, Array] = field(default_factory=dict[str, Array])
    constants: dict[tuple[Value, TensorType], Array] = field(default_factory=dict[tuple[Value, TensorType], Array])

    def __call__(self, value: Value, type: TensorType) -> Array:
        if value.literal is not None:
            if (value, type) not in self.constants:
                self.constants[value, type] = random_array(type)
            return self.constants[value, type]
        value = overwritten_input(value) or value
        if value.name not in self.held:
            self.held[value.name] = random_value(value, value.type)
        return self.held[value.name]


def bind_candidate(
    candidate: Candidate,
    tensor_cores: bool,
    bind: Bind,
    launcher: Launcher,
    figures: GpuFigures,
    memory: RandomMemory | None = None,
) -> Callable[[], None]:
    """Return a function that runs the steps of a candidate.

    tensor_cores: products may round their operands, as to tf32.
    bind: binds a cuDNN graph to its buffers. launcher: binds kernels.
    figures: figures of the GPU, which shape kernels.
    memory: memory that the compared candidates share; by default this candidate has its own.
    """
    memory = memory or RandomMemory()
    runs: list[Callable[[], None]] = []
    for step in candidate:
        if step.kind is Kind.VIEW:
            continue
        if step.kind is Kind.KERNEL:
            kernel = kernels.find(step.nodes, outputs_of(step.nodes), figures)
            assert kernel is not None, f"no kernel for {step.signature}"
            runs.append(launcher.bind(kernel, memory))
            continue
        lowered = lower(step.body, tensor_cores)
        by_name = {v.name: v for v in (*step.inputs, *step.outputs)}  # values of the body, which a spelling copies
        named = {uid: by_name[name] for uid, name in (*lowered.inputs, *lowered.outputs)}
        buffers = {uid: lowered.part(uid, memory(value, value.type)) for uid, value in named.items()}
        buffers |= {uid: random_data(lowered.graph.tensor(uid)) for uid in lowered.spare}
        for binding in lowered.constants:
            buffers[binding.uid] = random_data(lowered.graph.tensor(binding.uid))
        runs.append(bind(lowered.graph, buffers))

    def run() -> None:
        for each in runs:
            each()

    return run


def graphs_of(candidates: Sequence[Candidate], tensor_cores: bool) -> dict[str, CudnnGraph]:
    """Return the cuDNN graphs of candidates, by key."""
    graphs = (lower(step.body, tensor_cores).graph for each in candidates for step in each if step.kind is Kind.CUDNN)
    return {graph.key: graph for graph in graphs}
