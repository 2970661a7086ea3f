"""Differentiate loops by writing out all their steps as ops."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusec.builder import Tensor
from fusec.errors import VerifyError
from fusec.gradients.core import BackwardStep, Rule, by_formula
from fusec.ir import Op, Value
from fusec.lowering.unroll_scan import unroll_scan
from fusec.ops import Scan

MAX_STEPS = 4096  # because each adds the ops of the body, and those of their gradients


def _scan(step: BackwardStep, *operands: Tensor) -> list[Tensor]:
    op: Scan = step.op
    if op.steps > MAX_STEPS:
        raise VerifyError(f"{step.node!r}: a gradient over {op.steps} steps; up to {MAX_STEPS} are supported")

    def add(made: Op, given: Sequence[Value]) -> list[Value]:
        return [t.value for t in step.b.results(made, *(Tensor(step.b, v) for v in given))]

    return [Tensor(step.b, v) for v in unroll_scan(op, [t.value for t in operands], add)]


RULES: Mapping[str, Rule] = {"scan": by_formula(_scan)}
