"""Refuse candidates that keep a value in fp32 where the model rounds it to its storage type."""

from __future__ import annotations

from collections.abc import Sequence

from fusec.ir import Graph, quote
from fusec.lowering.virtual_rounding import WIDE, value_uses
from fusec.passes.partition.judge import Judge, RefusesItself
from fusec.plans.verdict import Refused, Verdict


class StrictRounding:
    """A judge that asks another judge only about bodies that round every value where the model does."""

    def __init__(self, judge: Judge):
        self.inner = judge

    def judge(self, bodies: Sequence[Graph]) -> list[Verdict]:
        verdicts: list[Verdict | None] = [_unrounded(body) for body in bodies]
        asked = [body for body, verdict in zip(bodies, verdicts, strict=True) if verdict is None]
        answers = iter(self.inner.judge(asked) if asked else ())
        return [next(answers) if verdict is None else verdict for verdict in verdicts]

    def refusal(self, body: Graph) -> Refused | None:
        """Return a refusal that is known without asking."""
        return _unrounded(body) or (self.inner.refusal(body) if isinstance(self.inner, RefusesItself) else None)


def _unrounded(body: Graph) -> Refused | None:
    wide = next((use for use in value_uses(list(body.nodes)) if use.rounding == WIDE), None)
    if wide is None:
        return None
    value = wide.value
    where = f"{quote(value.name)} would not be rounded to {value.type.dtype.value} before {wide.user.op.name}"
    return Refused("fusec", "FUSEC_ROUNDING", f"{where}, as --rounding source demands")
