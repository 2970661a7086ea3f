"""Name the class of cuDNN engines that runs a step, of the four that NVIDIA's documentation of graphs describes.

https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/developer/graph-api.html
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fusec.diagnostics.explain.data import (
    GENERIC,
    SINGLE,
    SPECIALISED,
    SPECIALISED_RUNTIME,
    UNKNOWN,
    Explanation,
)
from fusec.errors import LoweringError
from fusec.gpu.cudnn.legality.judges import asks_cudnn
from fusec.lower_cudnn import lower
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.passes.partition import Judge
from fusec.plans.plan_record import Choice
from fusec.plans.verdict import Legal, Plan
from fusec.schedule.program import Kind, Partition, Program

# Calls with engines of their own, which are compiled at run time. Generic engines take products, pointwise ops and
# reductions.
_NORMS = ("layernorm", "rmsnorm", "instancenorm", "batchnorm", "batchnorm_backward")
_SPECIAL = frozenset(("sdpa", "sdpa_train", "sdpa_backward", *_NORMS))


def engine_class(graph: CudnnGraph, plan: Plan) -> str:
    """Return the class of the engine of a plan for a graph.

    cuDNN names no class. It follows from two things: if the plan is compiled at run time, and what the graph holds.
    """
    if plan.precompiled:
        return SINGLE if len(graph.calls) == 1 else SPECIALISED
    return SPECIALISED_RUNTIME if any(call.op in _SPECIAL for call in graph.calls) else GENERIC


def verdicts_of(program: Program, judge: Judge | None) -> dict[Partition, Legal]:
    """Return the verdicts of the cuDNN steps. Steps that tuning made have none of their own, so cuDNN is asked."""
    steps = [step for step in program.steps if step.kind is Kind.CUDNN]
    found = {step: step.verdict for step in steps if step.verdict is not None}
    missing = [step for step in steps if step.verdict is None]
    if missing and judge is not None and asks_cudnn(judge):
        answers = zip(missing, judge.judge([step.body for step in missing]), strict=True)
        found |= {step: answer for step, answer in answers if isinstance(answer, Legal)}
    return found


def class_of_step(step: Partition, verdict: Legal | None, choice: Choice | None = None) -> str:
    """Return the engine class of a cuDNN step; empty for a kernel, a view, or a step that cuBLASLt runs.

    choice: the plan that was chosen; None for the one that runs if nothing is tuned, the first that cuDNN built.
    """
    if step.kind is not Kind.CUDNN or (choice is not None and choice.library == "cublaslt"):
        return ""
    offered = verdict.plans if verdict is not None else ()
    if choice is not None:
        plans = [plan for plan in offered if (plan.engine, plan.knobs) == choice.identity]
        # another plan of the same engine is compiled in the same way
        plans = plans or [plan for plan in offered if plan.engine == choice.engine]
    else:
        plans = [plan for plan in offered if plan.built] or list(offered)
    if not plans:
        return UNKNOWN
    try:
        return engine_class(lower(step.body).graph, plans[0])
    except LoweringError:  # in a file of an older fusec
        return UNKNOWN


def with_chosen_plans(
    explanation: Explanation, program: Program, judge: Judge | None, chosen: Mapping[Partition, Choice]
) -> Explanation:
    """Return an explanation with the classes of the plans that were chosen for the program's steps."""
    verdicts = verdicts_of(program, judge) if chosen else {}
    steps = [
        replace(explained, engine_class=class_of_step(step, verdicts.get(step), chosen[step]))
        if step in chosen
        else explained
        for explained, step in zip(explanation.steps, program.steps, strict=True)
    ]
    return replace(explanation, steps=tuple(steps))
