"""Collect what a report shows of a compiled program: steps, tensors, plans, times, memory."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any

from fusec import lockfile
from fusec.diagnostics.explain import Explanation, Progress, explain, float_edges, with_chosen_plans
from fusec.diagnostics.step_times import Bench
from fusec.diagnostics.text_table import bytes_text
from fusec.execution.compilation import Compiled
from fusec.gpu import kernels
from fusec.ir import Graph, Node, TensorType, Value, channels_last, print_node
from fusec.passes.partition.cost_model import flops, limit_us
from fusec.plans.lock_record import Lock
from fusec.plans.plan_record import Entry
from fusec.report.memory_use import memory_use
from fusec.report.plan_choices import Plans, plan_choices
from fusec.report.precision_edges import edges_by_type
from fusec.report.records import HostStepRow, PlanChoice, ReportedProgram, ReportedStep, ReportedTensor
from fusec.runtime import Executable
from fusec.schedule.memory_plan import MemoryPlan, plan_memory
from fusec.schedule.program import Kind, Partition, Program, inputs_of
from fusec.segments.records import HostStepRecord
from fusec.system.dataclass import dataclass

CHANNELS_LAST = {3: "NWC", 4: "NHWC", 5: "NDHWC"}  # by rank
CODE_LINES = 200  # ops of one step that a page shows


@dataclass(frozen=True)
class Background:
    """Facts about a program that its compilation does not hold.

    device: the GPU that runs it, or `simulated` or `cpu`. memory: None: it is planned here.
    plans: what a backend prepared or a file holds. bench: measured times. compile_s: seconds of compiling by stage.
    """

    title: str
    anchor: str = ""
    device: str = "simulated"
    memory: MemoryPlan | None = None
    plans: Plans = field(default_factory=dict[str, tuple[Entry, ...]])
    bench: Bench | None = None
    compile_s: Mapping[str, float] | None = None
    host_steps: tuple[HostStepRow, ...] = ()


def explained(
    compiled: Compiled, cores: bool, progress: Progress | None = None, libraries: Mapping[Partition, str] | None = None
) -> Explanation:
    """Explain a program as `fusec explain` does. cores: reduce each refusal to its smallest core, which asks cuDNN."""
    found = explain(compiled.program, compiled.target, compiled.judge, cores, progress, libraries)
    floats = float_edges(compiled)
    return replace(found, floats=floats, asked=compiled.asked)


def of_executable(
    executable: Executable, title: str, *, cores: bool = True, bench: Bench | None = None, anchor: str = ""
) -> ReportedProgram:
    """Collect the report of an executable. bench: its times, if they were measured."""
    compiled = executable.compiled
    keys = [lowered.graph.key for lowered in compiled.lowered if lowered is not None]
    spent = executable.spent
    background = Background(
        title,
        anchor,
        executable.device,
        executable.memory,
        {key: (entry,) for key, entry in executable.backend.entries(keys).items()},
        bench,
        None if spent is None else {name: stage.seconds for name, stage in spent.stages.items()},
    )
    return of_compiled(compiled, explained(compiled, cores, None, executable.libraries()), background)


def of_compiled(compiled: Compiled, explanation: Explanation, background: Background) -> ReportedProgram:
    """Collect the report of a program that nothing has prepared to run."""
    program, target = compiled.program, compiled.target
    memory = background.memory or plan_memory(program)
    choices = plan_choices(compiled, background.plans)
    graphs = ((s, each.graph.key) for s, each in zip(program.steps, compiled.lowered, strict=True) if each is not None)
    chosen = {step: background.plans[key][0].choice for step, key in graphs if background.plans.get(key)}
    explanation = with_chosen_plans(explanation, program, compiled.judge, chosen)
    tensors = _Tensors(program)
    graph = program.graph
    return ReportedProgram(
        title=background.title,
        anchor=background.anchor,
        model=_digest(compiled.source),
        target=target.name,
        target_name=target.device_name,
        is_derived=target.derived,
        bandwidth=target.memory_bandwidth,
        peaks=target.flops,
        precision=compiled.options.precision,
        device=background.device,
        inputs=tuple(map(tensors.row, graph.inputs)),
        outputs=tuple(map(tensors.row, graph.outputs)),
        output_names=graph.output_names,
        explanation=explanation,
        steps=tuple(_steps(compiled, explanation, choices, tensors, background.bench)),
        memory=memory_use(compiled, memory, choices),
        edges=edges_by_type(program, explanation),
        versions=compiled.tuned.versions if isinstance(compiled.tuned, Lock) else lockfile.versions(),
        bench=background.bench,
        compile_s=background.compile_s,
        host_steps=background.host_steps,
    )


def _steps(
    compiled: Compiled,
    explanation: Explanation,
    choices: list[PlanChoice | None],
    tensors: _Tensors,
    bench: Bench | None,
) -> list[ReportedStep]:
    """Describe each step: what it reads and writes, its limit, its plan or kernel, its refusals and its time."""
    target = compiled.target
    times = {} if bench is None or bench.is_simulated else {time.index: time for time in bench.steps}
    declines = (*explanation.left_out, *explanation.declined)
    found: list[ReportedStep] = []
    for step, explained_step, choice in zip(compiled.program.steps, explanation.steps, choices, strict=True):
        is_view = step.kind is Kind.VIEW
        limit = 0.0 if is_view else limit_us(step.nodes, target)
        memory_us = 1e6 * (explained_step.read_bytes + explained_step.written_bytes) / target.memory_bandwidth
        kernel = None
        if step.kind is Kind.KERNEL:
            kernel = kernels.find(step.nodes, step.outputs, compiled.figures)
        read = () if is_view and step.nodes[0].operands == () else inputs_of(step.nodes)
        found.append(
            ReportedStep(
                explained=explained_step,
                code=tuple(map(print_node, step.nodes[:CODE_LINES])),
                keys=tuple(dict.fromkeys(key for node in step.nodes for key in _keys(node))),
                tensors_read=tuple(map(tensors.row, read)),
                tensors_written=tuple(map(tensors.row, step.outputs)),
                flops=0 if is_view else sum(map(flops, step.nodes)),
                limit_us=limit,
                bound="compute" if limit > memory_us * (1 + 1e-9) else "memory",
                kernel="" if kernel is None else kernel.name,
                plans=choice,
                refusals=tuple(n for n, decline in enumerate(declines) if explained_step.index in decline.steps),
                time=times.get(explained_step.index),
            )
        )
    return found


def _keys(node: Node) -> tuple[str, ...]:
    """Identify an op in other programs of the same model: by its model nodes, or by its results if a pass made it."""
    return tuple(f"node {name}" for name in node.origin) or tuple(f"value {value.name}" for value in node.results)


def _digest(source: Graph) -> str:
    """Identify a model by its ops and names, so that programs for other GPUs, types and sizes have the same one."""
    lines = ["".join(f"{v.name}\n" for v in source.inputs), *source.output_names]
    for node in source.nodes:
        names = [v.name for v in (*node.operands, *node.results)]
        lines.append("\t".join((node.op.name, *node.origin, "", *names)))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class _Tensors:
    """Describes the stored values of a program, and which steps make and read them."""

    def __init__(self, program: Program):
        self._makers = {v: index for index, step in enumerate(program.steps) for v in step.outputs}
        self._inputs, self._outputs = set(program.graph.inputs), set(program.graph.outputs)
        self._readers: dict[Value, list[int]] = {}
        for index, step in enumerate(program.steps):
            for value in step.inputs:
                self._readers.setdefault(value, []).append(index)

    def row(self, value: Value) -> ReportedTensor:
        """Describe one value."""
        type = value.type
        role = "weight" if value.literal is not None else "input" if value in self._inputs else ""
        return ReportedTensor(
            value.name,
            type.dtype.value,
            " × ".join(map(str, type.shape)) or "one number",
            _order(type),
            type.nbytes,
            role or ("output" if value in self._outputs else ""),
            self._makers.get(value),
            tuple(self._readers.get(value, ())),
        )


def _order(type: TensorType) -> str:
    """Name the order of the dims in memory."""
    part = f", part of {' × '.join(map(str, type.within))}" if type.within else ""
    if not type.order:
        return f"row-major{part}"
    if type.rank in CHANNELS_LAST and type.order == channels_last(type.rank):
        return CHANNELS_LAST[type.rank] + part
    return f"dims {', '.join(map(str, type.order))} from outermost to innermost{part}"


def host_step_row(record: HostStepRecord) -> HostStepRow:
    """Describe a host step, with what it cost in the last call."""
    decides = "; they decide shapes, so the next program is compiled for these values" if record.decides else ""
    cost = "known after a call"
    if record.read_bytes is not None and record.written_bytes is not None:
        cost = f"{bytes_text(record.read_bytes)} to the host, {bytes_text(record.written_bytes)} back"
    return HostStepRow(record.node, record.op, f"{record.reason}{decides}", cost)


def totals_json(program: ReportedProgram) -> dict[str, Any]:
    """Return the figures of a program that a script may read."""
    return {
        "title": program.title,
        "target": program.target,
        "precision": program.precision,
        "device": program.device,
        "simulated": program.is_simulated,
        "cudnn_asked": program.explanation.asked,
        "totals": program.explanation.totals,
        "limit_us": program.limit_us,
        "time_us": None if program.is_simulated or program.bench is None else program.bench.whole.median_us,
        "arena_bytes": program.memory.arena_bytes,
        "weight_bytes": program.memory.weight_bytes,
    }
