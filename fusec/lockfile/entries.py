"""Identify the steps of a program in a lock, and check that the plan or kernel that an entry names still exists."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from fusec import __version__
from fusec.errors import LoweringError
from fusec.gpu import device
from fusec.gpu.autotune.step_choices import has_candidates, step_key, steps_of_choice
from fusec.gpu.cudnn.plans import plan_serialization
from fusec.gpu.cudnn.without_driver.deviceless import cudnn_version
from fusec.gpu.kernels import GpuFigures, Kernel
from fusec.ir import Graph, Value
from fusec.lower_cudnn import lower
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.passes.base import Options
from fusec.plans.engine_numbers import DEVICE_ONLY
from fusec.plans.lock_record import Locked
from fusec.plans.plan_filter import PlanFilter
from fusec.plans.plan_record import BLAS, ORDERS, Choice, Part
from fusec.schedule.program import Kind, Partition, Program
from fusec.system.installed import installed_version
from fusec.targets.target import Target

WHOLE = "model"  # name of the entry for all steps

Builds = Callable[[CudnnGraph, Choice], bool]  # tells if cuDNN builds a plan


def work_of(step: Partition, graph: Graph, tensor_cores: bool) -> str:
    """Return the digest of what a step computes: ops, attributes, types and wiring, without names and weights."""
    return digest_of(step_key(graph, step), tensor_cores)


def digest_of(work: str, tensor_cores: bool) -> str:
    return hashlib.sha256((work + ("" if tensor_cores else "\nno tensor cores")).encode()).hexdigest()


def shapes_of(step: Partition) -> str:
    """Return the types read and written, for people: `f16[8,64,28,28]{0,2,3,1} -> f16[8,64,28,28]{0,2,3,1}`."""
    return _types(step.inputs, step.outputs)


def interface_of(graph: Graph) -> str:
    """Return the types of inputs and outputs, for people."""
    return _types(graph.inputs, graph.outputs)


def _types(given: Sequence[Value], made: Sequence[Value]) -> str:
    return " -> ".join(", ".join(str(v.type) for v in values) for values in (given, made))


def steps_with_candidates(program: Program) -> list[Partition]:
    """Return the steps that have several candidates."""
    return [step for step in program.steps if has_candidates(step)]


def cudnn_steps(program: Program) -> list[Partition]:
    """Return the steps that cuDNN runs."""
    return [step for step in program.steps if step.kind is Kind.CUDNN]


def versions() -> dict[str, str]:
    """Return the versions of fusec, cuDNN and its frontend here; empty if not installed."""
    frontend = installed_version("nvidia-cudnn-frontend") or ""
    return {"fusec": __version__, "cudnn": cudnn_version(), "frontend": frontend}


def whole_work(program: Program, tensor_cores: bool) -> str:
    """Return the digest of what the steps of a partitioned program compute, and how they are connected."""
    number: dict[str, int] = {}
    lines: list[str] = []
    for step in program.steps:
        places = [number.setdefault(v.name, len(number)) for v in (*step.inputs, *step.outputs)]
        lines += [step_key(program.graph, step), str(places)]
    return digest_of("\n".join(lines), tensor_cores)


def cudnn_parts(
    graph: Graph, step: Partition, split: Sequence[Part], figures: GpuFigures
) -> list[tuple[int, Partition]]:
    """Return the parts of a step that cuDNN runs, as steps, each with the number of the part.

    split: the parts that an entry of the lock names.
    figures: figures of the GPU, which shape kernels.
    Raises ValueError if the split does not fit the step.
    """
    steps = iter(steps_of_choice(graph, step, tuple(split), figures))
    found: list[tuple[int, Partition]] = []
    for place, part in enumerate(split):
        if part.runs == "cudnn":
            found.append((place, next(steps)))
        else:
            for _ in range(1 if part.runs == "kernel" else part.nodes):  # ops that run one by one are a step each
                next(steps)
    return found


def is_order(entry: Locked) -> bool:
    """Tell if an entry is about the order of all steps."""
    return entry.split[0].runs in ORDERS


def tries(target: Target, plan_filter: PlanFilter) -> Builds:
    """Return a function that lets cuDNN build a plan, because without a device its list of plans is incomplete."""
    return plan_serialization.Tries(target, plan_filter)


def is_unknown(step: Partition, choice: Choice, target: Target) -> bool:
    """Tell if only the device can say that a plan exists."""
    if choice.engine == BLAS:  # cuBLASLt looks for the algorithm when the plan is built
        return True
    listed = step.verdict is not None and any((p.engine, p.knobs) == choice.identity for p in step.verdict.plans)
    return not listed and choice.engine in DEVICE_ONLY and not device.is_present(target)


def unoffered(step: Partition, choice: Choice, target: Target, options: Options, builds: Builds) -> str:
    """Return the reason why a plan does not exist or may not be used; empty if it may, or only the device can say.

    builds: tells if cuDNN builds a plan of a graph.
    """
    if left_out := options.plan_filter.reason(choice.engine, choice.workspace_bytes):
        return left_out
    offered = step.verdict.plans if step.verdict is not None else ()
    if any((plan.engine, plan.knobs) == choice.identity for plan in offered) or is_unknown(step, choice, target):
        return ""
    try:
        if builds(lower(step.body, options.tensor_cores).graph, choice):
            return ""
    except LoweringError as error:
        return str(error)
    others = any(plan.engine == choice.engine for plan in offered)
    return f"{plan_name(choice)} is no longer offered{', the engine with other knobs is' if others else ''}"


def other_kernel(kernel: Kernel | None, entry: Locked) -> str:
    """Return the reason why a step does not run the kernel of an entry; empty if it does, or one of its variants."""
    named = entry.parts[0].kernel
    if kernel is None:
        return f"no kernel runs it any more, {named} did" if named else ""
    if not named:
        return f"kernel {kernel.key} runs it now, none did"
    if named in (kernel.key, *(other.key for other in kernel.others)):
        return ""
    return f"kernel {named} is not what fusec makes now, {kernel.key} is"


def library_of(choice: Choice) -> str:
    return "cuBLASLt" if choice.engine == BLAS else "cuDNN"


def plan_name(choice: Choice) -> str:
    knobs = ", ".join(f"{k}={v}" for k, v in choice.knobs)
    return f"{choice.name}{f' with knobs {knobs}' if knobs else ''}"
