"""Explain which ops fused into which step, and the reason for each op that cuDNN does not run.

`explain` turns a program into plain data (data.py: to_json, str). `compare` shows several targets in one table.
A refusal of cuDNN is reduced to its smallest refused core (fusec.diagnostics.refusal_core).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from fusec.diagnostics.explain.data import Accepted, Cause, Decline, Edge, Explanation, Step
from fusec.diagnostics.explain.engine_classes import class_of_step, verdicts_of
from fusec.diagnostics.refusal_core import Core, CoreSearch
from fusec.gpu.cudnn.legality.judges import CudnnJudge, asks_cudnn
from fusec.ir import Constant, Graph, Node, Value, print_attribute, print_node
from fusec.lower_cudnn import WITHOUT
from fusec.lowering import virtual_rounding
from fusec.ops import CONVOLUTIONS, POINTWISE_OPS, STRIDED_VIEWS, Scatter
from fusec.passes.partition import Judge
from fusec.passes.partition.equivalent_spellings import REWRITES
from fusec.plans.verdict import UNASKED, Legal, Refused
from fusec.schedule.buffer_donation import reads
from fusec.schedule.program import Kind, Partition, Program, Refusal, body_of, display_name, inputs_of
from fusec.targets.target import Target

Progress = Callable[[str, int, int], None]  # stage, done, total

STAGES = {
    "lower": "fusec cannot write it as one cuDNN graph",
    "validate": "fusec does not ask cuDNN: the graph is invalid, or cuDNN is known to compute it wrongly",
    "build_operation_graph": "cuDNN does not support this combination of operations",
    "plan": "no engine of cuDNN supports it",
    "build": "engines offered plans but could build none",
    "crash": "cuDNN crashed on this graph, so fusec does not ask again",
    "fusec": "fusec chose not to fuse this; cuDNN did not refuse it",
    "none": "cuDNN accepts it alone; it is no cuDNN step because the rest of its candidate was declined",
    "proposed": "fusec's rules propose it alone; it is no cuDNN step because the rest of its candidate was declined",
}

COPIES = "elements change places in memory here, so it is no view; cuDNN graphs do not copy"


def explain(
    program: Program,
    target: Target,
    judge: Judge | None = None,
    cores: bool = True,
    progress: Progress | None = None,
    libraries: Mapping[Partition, str] | None = None,
) -> Explanation:
    """Explain a program.

    judge, cores: with both, each distinct refusal is reduced to its smallest core, with at most 60 questions each.
        Otherwise, or if the judge does not ask cuDNN, the explanation gives the reasons that the partitioner got.
    libraries: library of each step, if plans were chosen (`Executable.libraries`).
    """
    libraries, verdicts = libraries or {}, verdicts_of(program, judge)
    number = {step: index for index, step in enumerate(program.steps)}
    steps = tuple(_step(index, step, verdicts.get(step), libraries.get(step, "")) for step, index in number.items())
    kernels = [step for step in program.steps if step.kind is Kind.KERNEL]
    left_out = _grouped(_of_steps(_left_out(step, program.refusals, judge), (number[step],)) for step in kernels)
    declined = _grouped(
        _of_steps((_declined(r), r), {number[program.step_of[n]] for n in r.nodes}) for r in _minimal(program)
    )
    asked = asks_cudnn(judge)
    if judge is not None and cores and asked:
        loose = CudnnJudge(judge.oracle, True) if isinstance(judge, CudnnJudge) and not judge.tensor_cores else None
        search = CoreSearch(judge, loose)
        total = len(left_out) + len(declined)
        left_out = [_with_cause(search, *entry, progress, i, total) for i, entry in enumerate(left_out)]
        declined = [_with_cause(search, *entry, progress, i, total) for i, entry in enumerate(declined, len(left_out))]
        if progress is not None and total:
            progress("refused cores", total, total)
    return Explanation(target.name, steps, tuple(d for d, _ in left_out), tuple(d for d, _ in declined), asked)


def with_rows_in_place(explanation: Explanation, program: Program, donated: Mapping[Value, Value]) -> Explanation:
    """Return an explanation in which a step that only writes rows into state reads and writes these rows alone.

    donated: for each value that is written over state, that state.
    """
    steps: list[Step] = []
    for record, step in zip(explanation.steps, program.steps, strict=True):
        for node in step.nodes:
            if isinstance(node.op, Scatter) and donated.get(node.result) is reads(program, node.operands[0]):
                old, _, rows = (v.type.nbytes for v in node.operands)
                written = record.written_bytes - old + rows
                record = replace(record, read_bytes=record.read_bytes - old, written_bytes=written)
        steps.append(record)
    return replace(explanation, steps=tuple(steps))


def _step(index: int, step: Partition, verdict: Legal | None, library: str) -> Step:
    fused = step.kind is Kind.CUDNN
    inside = [e for e in virtual_rounding.value_uses(step.nodes) if e.rounding != virtual_rounding.OWN] if fused else []
    read = list(inputs_of(step.nodes)) if step.kind is not Kind.VIEW else []
    written = step.outputs if step.kind is not Kind.VIEW else ()
    return Step(
        index=index,
        kind=step.kind.value,
        ops=step.signature,
        values=tuple(v.name for n in step.nodes for v in n.results),
        nodes=_origin(step.nodes),
        engine=library if library == "cublaslt" else verdict.kind if verdict else "",
        plans=len(verdict.plans) if verdict else 0,
        precompiled=verdict.precompiled if verdict else 0,
        spelling=tuple(_spelling_words(name) for name in step.spelling),
        virtual_bytes=step.virtual_bytes if step.kind is Kind.CUDNN else 0,
        read_bytes=sum(v.type.device_bytes for v in read),
        written_bytes=sum(v.type.device_bytes for v in written),
        edges=tuple(map(_edge, inside)),
        engine_class="" if library == "cublaslt" else class_of_step(step, verdict),
    )


def _edge(edge: virtual_rounding.ValueUse) -> Edge:
    value, maker = edge.value, edge.value.node
    assert maker is not None
    return Edge(value.name, display_name(maker), display_name(edge.user), value.type.dtype.value, edge.rounding)


def _spelling_words(name: str) -> str:
    """Describe a spelling by the equation at the start of its docstring."""
    equation = (REWRITES[name].__doc__ or name).partition(":")[0]
    return " ".join(equation.split())


def _origin(nodes: Iterable[Node]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(o for n in nodes for o in n.origin))


_Found = tuple[Decline, Refusal | None]  # an entry, and the refusal that a core search starts from


def _left_out(step: Partition, refusals: Sequence[Refusal], judge: Judge | None) -> _Found:
    """Return the reason why cuDNN does not run the main op of a kernel: its first op that is not pointwise."""
    node = min(step.nodes, key=lambda n: isinstance(n.op, POINTWISE_OPS))
    name, places = display_name(node), (_origin(step.nodes),)
    if node.op.name in WITHOUT:
        ours = COPIES if isinstance(node.op, STRIDED_VIEWS) else WITHOUT[node.op.name]
        return Decline(name, name, "lower", "", "", ours, places), None
    alone = next((r for r in refusals if r.nodes == (node,) or (r.reason == UNASKED and node in r.nodes)), None)
    if alone is None and judge is not None:
        body = step.body if len(step.nodes) == 1 else body_of(node.graph, [node])
        (verdict,) = judge.judge([body])
        if isinstance(verdict, Refused):
            alone = Refusal((node,), body, verdict)
    if alone is None:
        stage = "none" if asks_cudnn(judge) else "proposed"
        return Decline(name, name, stage, "", "", STAGES[stage], places), None
    return replace(_declined(alone), op=name), alone


def _of_steps(found: _Found, steps: Iterable[int]) -> _Found:
    """Return an entry with the numbers of the steps that run its ops."""
    return replace(found[0], steps=tuple(sorted(steps))), found[1]


def _declined(refusal: Refusal) -> Decline:
    ops = "+".join(display_name(n) for n in refusal.nodes)
    places = (_origin(refusal.nodes),)
    reason = refusal.reason
    if isinstance(reason, str):
        return Decline("", ops, "fusec", "", reason, STAGES["fusec"], places)
    return Decline("", ops, reason.stage, reason.code, reason.message, STAGES.get(reason.stage, reason.stage), places)


def _minimal(program: Program) -> list[Refusal]:
    """Return the refusals that have no simpler explanation.

    A refusal is left out if its nodes are in one step after all, or if some of its nodes explain it: a smaller
    refusal, or an op that cuDNN does not run and that has its own entry.
    """
    kernels = {n for s in program.steps if s.kind is Kind.KERNEL for n in s.nodes}
    explained: dict[Node, list[frozenset[Node]]] = {node: [frozenset((node,))] for node in kernels}  # by first node
    minimal: set[Refusal] = set()
    for refusal in sorted(program.refusals, key=lambda r: len(r.nodes)):
        nodes = frozenset(refusal.nodes)
        fused = len({program.step_of[n] for n in nodes}) == 1
        if fused or any(smaller <= nodes for n in refusal.nodes for smaller in explained.get(n, ())):
            continue
        explained.setdefault(refusal.nodes[0], []).append(nodes)
        minimal.add(refusal)
    return [refusal for refusal in program.refusals if refusal in minimal]


def _grouped(found: Iterable[_Found]) -> list[_Found]:
    """Merge equal reasons for equal ops into one entry, with all places."""
    groups: dict[tuple[str, ...], _Found] = {}
    for decline, refusal in found:
        message = decline.message if decline.stage != "fusec" else ""  # because fusec's message names the value
        key = (decline.op, decline.ops, decline.stage, decline.code, message, decline.ours)
        if key in groups:
            first, start = groups[key]
            merged = replace(first, places=(*first.places, *decline.places))
            groups[key] = _of_steps((merged, start), {*first.steps, *decline.steps})
        else:
            groups[key] = decline, refusal
    return list(groups.values())


def _with_cause(
    search: CoreSearch, decline: Decline, refusal: Refusal | None, progress: Progress | None, done: int, total: int
) -> _Found:
    if progress is not None:
        progress("refused cores", done, total)
    if refusal is None or isinstance(refusal.reason, str):
        return decline, refusal
    core = search.find(refusal.body, refusal.reason)
    return replace(decline, cause=_cause(core)), refusal


def _cause(core: Core) -> Cause:
    variant = core.variant
    accepted = None
    if variant is not None:
        accepted = Accepted(
            variant.change,
            _signature(variant.body),
            one_line(variant.body),
            len(variant.verdict.plans),
            variant.verdict.precompiled,
            variant.whole,
        )
    refused = core.verdict
    return Cause(
        _signature(core.body),
        one_line(core.body),
        refused.stage,
        refused.code,
        refused.message,
        accepted,
        core.questions,
    )


def _signature(body: Graph) -> str:
    return "+".join(display_name(n) for n in body.nodes if not isinstance(n.op, Constant))


def one_line(body: Graph) -> str:
    """Return the ops of a body with the types of inputs and outputs: `relu(f16[8,64]) -> f16[8,64]`."""
    nodes = [n for n in body.nodes if not isinstance(n.op, Constant)]
    if any(len(v.uses) > 1 for n in nodes for v in n.results):
        return "; ".join(map(print_node, nodes))
    texts: dict[Value, str] = {}

    def read(value: Value) -> str:
        scalar = value.scalar()
        return texts.get(value) or (str(value.type) if scalar is None else f"{scalar:g}")

    for node in nodes:
        text = f"{node.op.name}({', '.join(map(read, node.operands))}){_attributes(node)}"
        texts.update(dict.fromkeys(node.results, text))
    return "; ".join(f"{texts[v]} -> {v.type}" for v in body.outputs)


def _attributes(node: Node) -> str:
    """Return the attributes, without those of a convolution with stride 1, no pads and no dilation."""
    usual = (1, 0, (), *((n,) * r for n in (0, 1) for r in range(1, 7)))
    shown = {k: v for k, v in node.op.printed.items() if v not in usual or not isinstance(node.op, CONVOLUTIONS)}
    return " {" + ", ".join(f"{k}={print_attribute(v)}" for k, v in shown.items()) + "}" if shown else ""
