"""Recognise rotary position embeddings as exporters spell them: rotated halves of each row, times cos and sin."""

from __future__ import annotations

from fusec.passes.rewriting.pattern import Attribute, Match, Ops, Sides, TracedTensor, rule
from fusec.passes.rewriting.rewriter import Rewriter


def _halves(m: Match) -> None:
    """Check that the slices are the two halves of x's last dim, concatenated along it."""
    shape, half = m["x"].type.shape, m["x"].type.shape[-1] // 2
    zeros = (0,) * (len(shape) - 1)
    m.require(m.known["sizes"] == (*shape[:-1], half) and shape[-1] % 2 == 0, "not halves of the last dim", "x")
    m.require(m.known["low"] == (*zeros, 0) and m.known["high"] == (*zeros, half), "not its two halves", "x")
    m.require(all(s == 1 for s in m.known["steps"]), "a step other than 1", "x")
    m.require(m.known["axis"] % len(shape) == len(shape) - 1, "concatenated along another dim", "x")


_rotated = {
    "x": (2, 3, 4),
    "c": (3, 4),
    "s": (1, 3, 4),
    "low": (0, 0, 0),
    "high": (0, 0, 2),
    "sizes": (2, 3, 2),
    "steps": (1, 1, 1),
    "axis": 2,
}


@rule(where=_halves, sample=_rotated)
def rotary_from_halves(
    p: Ops, x: TracedTensor, c: TracedTensor, s: TracedTensor,
    low: Attribute, high: Attribute, sizes: Attribute, steps: Attribute, axis: Attribute,
) -> Sides:  # fmt: skip
    first = p.slice(x, starts=low, sizes=sizes, steps=steps)
    second = p.slice(x, starts=high, sizes=sizes, steps=steps)
    return p.add(p.mul(x, c), p.mul(p.concat(p.neg(second), first, axis=axis), s)), p.rotary(x, c, s)


RULES: tuple[Rewriter, ...] = (rotary_from_halves,)
