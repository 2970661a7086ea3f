"""Sort the nodes of a step by their role around one reduction, softmax or forward norm of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusec.gpu.kernels.codegen.kernel import C_TYPES
from fusec.gpu.kernels.codegen.pointwise_code import can_generate
from fusec.gpu.kernels.norm.formulas import Formula, formula_of
from fusec.gpu.kernels.norm.step_roles import ancestors
from fusec.ir import Node, Op, TensorType, Value
from fusec.ops import AvgPool, GroupNorm, InstanceNorm, LayerNorm, MaxPool, Reduce, RmsNorm, Softmax
from fusec.schedule.program import inputs_of
from fusec.system.dataclass import dataclass

ANCHORS = (Reduce, Softmax, LayerNorm, RmsNorm, InstanceNorm, GroupNorm, AvgPool, MaxPool)


@dataclass(frozen=True)
class RowStep:
    """A step with one anchor, or with several reductions of the same elements, as a quantisation needs min and max.

    name: the ops of the step.
    anchor: the first of several reductions.
    reductions: each reduction, and its result in the terms of `formula`, whose passes are those of all of them.
    op: what the anchor means: a reduction, if it is a pool over the whole image.
    prologue: the nodes that the anchor depends on.
    epilogue: the other nodes.
    prologue_outputs, epilogue_outputs: the values of the prologue, and of anchor and epilogue, that are stored.
    """

    name: str
    anchor: Node
    reductions: tuple[tuple[Node, str], ...]
    op: Op
    formula: Formula
    prologue: tuple[Node, ...]
    epilogue: tuple[Node, ...]
    prologue_outputs: tuple[Value, ...]
    epilogue_outputs: tuple[Value, ...]

    @property
    def x(self) -> Value:
        return self.anchor.operands[0]

    @property
    def y(self) -> Value:
        return self.anchor.result

    @property
    def moved(self) -> list[TensorType]:
        """Types of all that is read or written element by element of x."""
        parameters = self.anchor.operands[1:]
        read = [v for v in (*inputs_of([*self.prologue, self.anchor]), *self.prologue_outputs) if v not in parameters]
        written = [v for v in (*inputs_of(self.epilogue), *self.epilogue_outputs) if v is not self.y]
        values = read if isinstance(self.op, Reduce) else [*read, *written]
        return [v.type for v in values if v.type.size != 1]


def match_row_step(nodes: Sequence[Node], outputs: Sequence[Value]) -> RowStep | None:
    """Sort the nodes of a step by role; None if a kernel cannot run them so."""
    anchors = [node for node in nodes if isinstance(node.op, ANCHORS)]
    if not anchors or not all(can_generate(node) for node in nodes if node not in anchors):
        return None
    anchor = anchors[0]
    op = _reduction_op(anchor)
    formula = None if op is None else formula_of(anchor, op)
    if op is None or formula is None or anchor.operands[0].type.dtype not in C_TYPES:
        return None
    reductions = [(anchor, formula.result)] if isinstance(op, Reduce) else []
    for other in anchors[1:]:
        added = _same_elements(anchor, other)
        if added is None or len(formula.passes) != len(reductions):
            return None
        reductions.append((other, added.result.replace("#0", f"#{len(reductions)}")))
        formula = replace(formula, passes=(*formula.passes, *added.passes))
    prologue = ancestors(nodes, anchor.operands[:1])
    epilogue = tuple(node for node in nodes if node not in anchors and node not in prologue)
    made = {v for node in nodes for v in node.results}
    if any(v in made for v in anchor.operands[1:]):
        return None
    if any(v.node in prologue for node in epilogue for v in node.operands):
        return None
    first = tuple(v for v in outputs if v.node in prologue)
    last = tuple(v for v in outputs if v not in first)
    name = "+".join(node.op.name for node in nodes)
    step = RowStep(name, anchor, tuple(reductions), op, formula, prologue, epilogue, first, last)
    if any(v.type.shape != step.x.type.shape for v in first) or any(v.type.shape != step.y.type.shape for v in last):
        return None
    return step


def _same_elements(anchor: Node, other: Node) -> Formula | None:
    """Return the formula of a reduction that visits the same elements once, in the same type; None for others."""
    one, two = anchor.op, other.op
    if not isinstance(one, Reduce) or not isinstance(two, Reduce) or other.operands != anchor.operands:
        return None
    found = formula_of(other, two) if replace(two, kind=one.kind) == one else None
    return found if found is not None and len(found.passes) == 1 else None


def _reduction_op(anchor: Node) -> Op | None:
    """Return the anchor's op, or the reduction that a pool over the whole image is; None for other pools."""
    op, x = anchor.op, anchor.operands[0].type
    if not isinstance(op, (AvgPool, MaxPool)):
        return op
    whole = op.window == x.shape[2:] and not any(op.pads) and set(op.dilations) == {1}
    kind = "mean" if isinstance(op, AvgPool) else "max"
    return Reduce(kind, tuple(range(2, x.rank))) if whole and x.size else None
