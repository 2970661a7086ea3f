"""Explain what fused into which step and, for every op left out and every fusion declined, why.

`explain` makes plain data of a program (data.py: to_json, str). `compare` shows several targets in one table.
A refusal of cuDNN is reduced to its smallest refused core (fusec.diagnostics.refusal_core).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from fusec.diagnostics.explain.compare import compare
from fusec.diagnostics.explain.data import Accepted, Cause, Decline, Edge, Explanation, Step
from fusec.diagnostics.refusal_core import Core, CoreSearch
from fusec.gpu.cudnn.partition_oracles import CudnnJudge, asks_cudnn
from fusec.ir import Constant, Graph, Node, Value, print_attribute, print_node
from fusec.lower_cudnn import WITHOUT
from fusec.lowering import virtual_rounding
from fusec.ops import STRIDED_VIEWS, Cast, Conv, ConvTranspose, ConvWgrad, Pointwise
from fusec.passes.partition import Judge
from fusec.passes.partition.equivalent_spellings import REWRITES
from fusec.plans.verdict import Legal, Refused
from fusec.schedule.program import Kind, Partition, Program, Refusal, body_of, display_name, inputs_of
from fusec.targets.target import Target

__all__ = ["Accepted", "Cause", "Decline", "Edge", "Explanation", "Progress", "Step", "compare", "explain"]

Progress = Callable[[str, int, int], None]  # stage, done, total

PRODUCTS = (Conv, ConvTranspose, ConvWgrad)
STAGES = {
    "lower": "fusec cannot write it as one cuDNN graph",
    "validate": "it never reaches an engine: the graph is invalid or known to be misread",
    "build_operation_graph": "cuDNN takes no such combination of operations",
    "plan": "no engine of cuDNN takes it",
    "build": "engines offered plans but could build none",
    "crash": "cuDNN ended its process on it, so it is never asked for",
    "fusec": "fusec chose not to fuse this; cuDNN did not refuse it",
    "none": "cuDNN takes it alone; no step was made of it because the rest of its candidate was declined",
    "proposed": "fusec's rules propose it alone; no step was made of it because the rest of its candidate was declined",
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
        Otherwise, or if the judge does not ask cuDNN, the explanation holds what the partitioner was told.
    libraries: who runs the steps, if plans were chosen (`Executable.libraries`).
    """
    libraries = libraries or {}
    steps = tuple(_step(index, step, libraries.get(step, "")) for index, step in enumerate(program.steps))
    kernels = [step for step in program.steps if step.kind is Kind.KERNEL]
    left_out = _grouped(_left_out(step, program.refusals, judge) for step in kernels)
    declined = _grouped((_declined(r), r) for r in _minimal(program))
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


def _step(index: int, step: Partition, library: str = "") -> Step:
    verdict = step.verdict
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
        read_bytes=sum(v.type.nbytes for v in read),
        written_bytes=sum(v.type.nbytes for v in written),
        edges=tuple(map(_edge, inside)),
    )


def _edge(edge: virtual_rounding.ValueUse) -> Edge:
    value, maker = edge.value, edge.value.node
    assert maker is not None
    return Edge(value.name, display_name(maker), display_name(edge.user), value.type.dtype.value, edge.rounding)


def _spelling_words(name: str) -> str:
    """Describe a spelling by the equation its docstring begins with."""
    equation = (REWRITES[name].__doc__ or name).partition(":")[0]
    return " ".join(equation.split())


def _origin(nodes: Iterable[Node]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(o for n in nodes for o in n.origin))


_Found = tuple[Decline, Refusal | None]  # with what a core search starts from


def _left_out(step: Partition, refusals: Sequence[Refusal], judge: Judge | None) -> _Found:
    """Return why cuDNN does not run a step's op; of a kernel, the op that its pointwise ops surround."""
    node = min(step.nodes, key=lambda n: isinstance(n.op, (Pointwise, Cast)))
    name, places = display_name(node), (_origin(step.nodes),)
    if node.op.name in WITHOUT:
        ours = COPIES if isinstance(node.op, STRIDED_VIEWS) else WITHOUT[node.op.name]
        return Decline(name, name, "lower", "", "", ours, places), None
    alone = next((r for r in refusals if r.nodes == (node,)), None)
    if alone is None and judge is not None:
        body = step.body if len(step.nodes) == 1 else body_of(node.graph, [node])
        (verdict,) = judge.judge([body])
        if isinstance(verdict, Refused):
            alone = Refusal((node,), body, verdict)
    if alone is None:
        stage = "none" if asks_cudnn(judge) else "proposed"
        return Decline(name, name, stage, "", "", STAGES[stage], places), None
    return replace(_declined(alone), op=name), alone


def _declined(refusal: Refusal) -> Decline:
    ops = "+".join(display_name(n) for n in refusal.nodes)
    places = (_origin(refusal.nodes),)
    reason = refusal.reason
    if isinstance(reason, str):
        return Decline("", ops, "fusec", "", reason, STAGES["fusec"], places)
    return Decline("", ops, reason.stage, reason.code, reason.message, STAGES.get(reason.stage, reason.stage), places)


def _minimal(program: Program) -> list[Refusal]:
    """Return the refusals that have no simpler explanation.

    Left out are those that follow from a smaller one of some of the same ops, or from an op with its own entry,
    and those whose nodes are in one step in the end.
    """
    kernels = {n for s in program.steps if s.kind is Kind.KERNEL for n in s.nodes}
    kept: dict[Node, list[frozenset[Node]]] = {node: [frozenset((node,))] for node in kernels}
    result: list[Refusal] = []
    for refusal in sorted(program.refusals, key=lambda r: len(r.nodes)):
        nodes = frozenset(refusal.nodes)
        overcome = len({program.step_of[n] for n in nodes}) == 1
        if overcome or any(smaller <= nodes for n in refusal.nodes for smaller in kept.get(n, ())):
            continue
        kept.setdefault(refusal.nodes[0], []).append(nodes)
        result.append(refusal)
    place = {r: i for i, r in enumerate(program.refusals)}
    return sorted(result, key=place.__getitem__)


def _grouped(found: Iterable[_Found]) -> list[_Found]:
    """Merge equal reasons for equal ops into one entry, with all places."""
    groups: dict[tuple[str, ...], _Found] = {}
    for decline, refusal in found:
        message = decline.message if decline.stage != "fusec" else ""  # names the value: one entry serves
        key = (decline.op, decline.ops, decline.stage, decline.code, message, decline.ours)
        if key in groups:
            first, start = groups[key]
            groups[key] = replace(first, places=(*first.places, *decline.places)), start
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
        verdict: Legal = variant.verdict
        accepted = Accepted(
            variant.change,
            _signature(variant.body),
            one_line(variant.body),
            len(verdict.plans),
            verdict.precompiled,
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
    """Return the ops of a body with the types they read and make: `relu(f16[8,64]) -> f16[8,64]`."""
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
    """Return the attributes that are not the usual ones: a window moves by 1, without pads or dilation."""
    granted = (1, 0, (), *((n,) * r for n in (0, 1) for r in range(1, 7)))
    told = {k: v for k, v in node.op.attributes.items() if v not in granted or not isinstance(node.op, PRODUCTS)}
    return " {" + ", ".join(f"{k}={print_attribute(v)}" for k, v in told.items()) + "}" if told else ""
