"""Hold what a report shows as plain data, so that pages, differences and tests read the same facts."""

from __future__ import annotations

from collections.abc import Mapping

from fusec.diagnostics.explain.data import Explanation, FloatEdge, Step
from fusec.diagnostics.step_times import Bench, StepTime
from fusec.system.dataclass import dataclass


@dataclass(frozen=True)
class ReportedTensor:
    """A stored tensor that a step reads or writes.

    order: row-major, NHWC, or the dims from outermost to innermost in memory.
    role: `input`, `output`, `weight`, or empty for a value between steps.
    maker: number of the step that computes it; None for inputs and weights. readers: numbers of the steps that read it.
    """

    name: str
    dtype: str
    shape: str
    order: str
    nbytes: int
    role: str
    maker: int | None = None
    readers: tuple[int, ...] = ()


@dataclass(frozen=True)
class ReportedPlan:
    """A plan of cuDNN or cuBLASLt. knobs: by name, in cuDNN's words. time_us: measured alone, None if not timed."""

    engine: str
    knobs: str
    compiled: str  # precompiled, at run time, or empty if that is not known
    workspace_bytes: int
    time_us: float | None = None


@dataclass(frozen=True)
class PlanChoice:
    """The plans of one cuDNN graph, which several steps may share.

    why: how the plan was chosen. graph: the cuDNN graph as text. first: number of the first step with this graph.
    """

    chosen: ReportedPlan | None
    why: str
    offered: tuple[ReportedPlan, ...]
    graph: str
    first: int


@dataclass(frozen=True)
class ReportedStep:
    """One step: what `fusec explain` says of it, and its tensors, work, plans and refusals.

    code: its ops in fusec's text form. keys: identify the values that it computes, in any version of the model.
    flops: multiplications and additions of products. limit_us: least time on the target; 0 for a view.
    bound: `memory` or `compute`, whichever sets the limit.
    kernel: name of fusec's kernel; empty if none runs it.
    refusals: numbers of the entries of `ReportedProgram.refusals` that are about it.
    """

    explained: Step
    code: tuple[str, ...]
    keys: tuple[str, ...]
    tensors_read: tuple[ReportedTensor, ...]
    tensors_written: tuple[ReportedTensor, ...]
    flops: int
    limit_us: float
    bound: str
    kernel: str
    plans: PlanChoice | None
    refusals: tuple[int, ...]
    time: StepTime | None = None

    @property
    def index(self) -> int:
        return self.explained.index

    @property
    def runner(self) -> str:
        """Return what runs it: a key of `render.RUNNERS`."""
        return self.explained.engine or self.explained.kind

    @property
    def time_us(self) -> float | None:
        """Return the measured median; None in simulation and for a view."""
        return None if self.time is None else self.time.time.median_us


@dataclass(frozen=True)
class AliveValue:
    """A value that is stored while most memory is in use. last: the last step that reads it."""

    name: str
    type: str
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of a program on the device.

    by_step: bytes of values that are alive while each step runs. peak_step: the step with most of them.
    arena_bytes: the block that holds all of them. weights: bytes of constants by element type.
    workspace_bytes: the largest workspace of a plan.
    alive: the values at the peak, the largest first.
    """

    by_step: tuple[int, ...]
    peak_step: int
    arena_bytes: int
    weights: Mapping[str, int]
    workspace_bytes: int
    alive: tuple[AliveValue, ...]

    @property
    def weight_bytes(self) -> int:
        return sum(self.weights.values())


@dataclass(frozen=True)
class EdgesOfType:
    """The edges with one element type.

    stored: values in memory between steps, inputs and outputs included, with the bytes of writing and reading them.
    inside: values that stay inside a step. in_fp32: uses of these where registers hold fp32 instead of the type.
    """

    dtype: str
    stored: int
    moved_bytes: int
    inside: int
    in_fp32: int
    weights: int
    weight_bytes: int


@dataclass(frozen=True)
class HostStepRow:
    """A node that the host computes between two programs, and why."""

    node: str
    op: str
    reason: str
    cost: str


@dataclass(frozen=True)
class ReportedProgram:
    """One program of a model on one target.

    anchor: start of the ids of this program on a page; empty for a page with one program.
    model: digest of the ops and names of the model, without types and weights.
    device: the GPU that ran it, or `simulated` or `cpu`.
    outputs: the values under their names in the graph; output_names: the names of the interface.
    is_derived: the figures of the target come from data sheets. bandwidth: bytes per second. peaks: operations per
        second by precision.
    versions: what the plans were made with. compile_s: seconds of compiling by stage.
    host_steps: what the host computes after this program.
    """

    title: str
    anchor: str
    model: str
    target: str
    target_name: str
    is_derived: bool
    bandwidth: float
    peaks: Mapping[str, float]
    precision: str
    device: str
    inputs: tuple[ReportedTensor, ...]
    outputs: tuple[ReportedTensor, ...]
    output_names: tuple[str, ...]
    explanation: Explanation
    steps: tuple[ReportedStep, ...]
    memory: MemoryUse
    edges: tuple[EdgesOfType, ...]
    versions: Mapping[str, str]
    bench: Bench | None = None
    compile_s: Mapping[str, float] | None = None
    host_steps: tuple[HostStepRow, ...] = ()

    @property
    def is_simulated(self) -> bool:
        """Tell if no time of a GPU is known."""
        return self.bench is None or self.bench.is_simulated

    @property
    def limit_us(self) -> float:
        """Return the sum of the limits of the steps."""
        return sum(step.limit_us for step in self.steps)

    @property
    def working(self) -> tuple[ReportedStep, ...]:
        """Return the steps that do work: all except views."""
        return tuple(step for step in self.steps if step.explained.kind != "view")

    @property
    def refusals(self) -> tuple[tuple[str, int], ...]:
        """Return the kind (`left_out` or `declined`) and place of each refusal, in the order of their numbers."""
        left_out, declined = self.explanation.left_out, self.explanation.declined
        return (*(("left_out", i) for i in range(len(left_out))), *(("declined", i) for i in range(len(declined))))

    @property
    def floats(self) -> tuple[FloatEdge, ...]:
        return self.explanation.floats
