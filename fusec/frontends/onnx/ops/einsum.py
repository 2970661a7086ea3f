"""Import Einsum: multiply two operands at a time, by a batched matmul between transposes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np

from fusec.frontends.onnx.emission.emit import Emitter, Table
from fusec.ir import Value
from fusec.ops import Gather, MatMul, Reduce, Transpose, pw
from fusec.ops.spec import require

Labels = tuple[str, ...]  # letters, and "0", "1", … for the dims of an ellipsis


def einsum(g: Emitter, /, *operands: Value, equation: str) -> Value:
    terms, result = _parsed(equation, [v.type.rank for v in operands])
    sizes: dict[str, int] = {}
    for term, value in zip(terms, operands, strict=True):
        for label, size in zip(term, value.type.shape, strict=True):
            known = sizes.setdefault(label, size)
            require(known == size or 1 in (known, size), f"{equation!r}: {label!r} is {known} and {size}")
            sizes[label] = max(known, size)
    parts = [_without_repeats(g, v, t) for v, t in zip(operands, terms, strict=True)]
    value, term = parts[0]
    for index, (other, labels) in enumerate(parts[1:], 1):
        later = {label for _, t in parts[index + 1 :] for label in t} | set(result)
        value, term = _product(g, value, term, other, labels, later)
    return _arranged(g, value, term, result)


def _parsed(equation: str, ranks: Sequence[int]) -> tuple[list[Labels], Labels]:
    """Parse an equation: the labels of each operand's dims, and of the result's."""
    text = equation.replace(" ", "")
    left, arrow, right = text.partition("->")
    terms = left.split(",")
    require(len(terms) == len(ranks), f"{equation!r} names {len(terms)} operands, there are {len(ranks)}")
    for term in (*terms, right):
        require(re.fullmatch(r"[A-Za-z]*(\.\.\.)?[A-Za-z]*", term) is not None, f"cannot read {equation!r}")
    widths = [rank - len(term.replace("...", "")) for term, rank in zip(terms, ranks, strict=True)]
    for term, width in zip(terms, widths, strict=True):
        require(width == 0 or (width > 0 and "..." in term), f"{equation!r}: {term!r} does not fit its operand")
    widest = max((w for t, w in zip(terms, widths, strict=True) if "..." in t), default=0)

    def expanded(term: str, width: int) -> Labels:
        before, dots, after = term.partition("...")
        return (*before, *(str(i) for i in range(widest - width, widest) if dots), *after)

    labels = [expanded(t, w) for t, w in zip(terms, widths, strict=True)]
    if arrow:
        result = expanded(right, widest)
    else:
        every = left.replace(",", "").replace("...", "")
        single = sorted(c for c in set(every) if every.count(c) == 1)
        result = (*(str(i) for i in range(widest)), *single)
    known = {label for term in labels for label in term}
    require(set(result) <= known and len(set(result)) == len(result), f"{equation!r}: no such result")
    return labels, result


def _without_repeats(g: Emitter, x: Value, term: Labels) -> tuple[Value, Labels]:
    """Take the diagonal along labels that an operand has twice."""
    for label in dict.fromkeys(term):
        while term.count(label) > 1:
            first, second = [i for i, c in enumerate(term) if c == label][:2]
            rest = [i for i in range(len(term)) if i not in (first, second)]
            size = x.type.shape[first]
            require(size == x.type.shape[second], f"{label!r} is {size} and {x.type.shape[second]}")
            x = _transposed(g, x, [first, second, *rest])
            x = g.reshape(x, (size * size, *x.type.shape[2:]))
            x = g(Gather(0), x, g.constant(np.arange(size, dtype=np.int64) * (size + 1)))
            term = (label, *(term[i] for i in rest))
    return x, term


def _product(g: Emitter, x: Value, a: Labels, y: Value, b: Labels, later: set[str]) -> tuple[Value, Labels]:
    """Multiply two operands: sum each over labels that nothing else has, then contract the labels that both have.

    a, b: labels of x and y.
    later: labels that other operands or the result have.
    """
    x, a = _summed(g, x, a, {c for c in a if c not in b and c not in later})
    y, b = _summed(g, y, b, {c for c in b if c not in a and c not in later})
    shared = [c for c in a if c in b]
    same = all(x.type.shape[a.index(c)] == y.type.shape[b.index(c)] for c in shared)
    if not x.type.dtype.is_float or not same:
        union = (*a, *(c for c in b if c not in a))
        wide = g(pw("mul"), _aligned(g, x, a, union), _aligned(g, y, b, union))
        return _summed(g, wide, union, {c for c in shared if c not in later})
    batch = [c for c in shared if c in later]
    inner = [c for c in shared if c not in later]
    rows, columns = [c for c in a if c not in b], [c for c in b if c not in a]
    size = {**dict(zip(b, y.type.shape, strict=True)), **dict(zip(a, x.type.shape, strict=True))}

    def total(labels: Sequence[str]) -> int:
        return math.prod(size[c] for c in labels)

    left = _transposed(g, x, [a.index(c) for c in (*batch, *rows, *inner)])
    right = _transposed(g, y, [b.index(c) for c in (*batch, *inner, *columns)])
    left = g.reshape(left, (total(batch), total(rows), total(inner)))
    right = g.reshape(right, (total(batch), total(inner), total(columns)))
    labels = (*batch, *rows, *columns)
    return g.reshape(g(MatMul(), left, right), [size[c] for c in labels]), labels


def _aligned(g: Emitter, x: Value, term: Labels, union: Labels) -> Value:
    x = _transposed(g, x, [term.index(c) for c in union if c in term])
    sizes = iter(x.type.shape)
    return g.reshape(x, [next(sizes) if c in term else 1 for c in union])


def _summed(g: Emitter, x: Value, term: Labels, summed: set[str]) -> tuple[Value, Labels]:
    if not summed:
        return x, term
    axes = tuple(i for i, c in enumerate(term) if c in summed)
    return g(Reduce("sum", axes, False), x), tuple(c for c in term if c not in summed)


def _arranged(g: Emitter, x: Value, term: Labels, result: Labels) -> Value:
    x, term = _summed(g, x, term, {c for c in term if c not in result})
    return _transposed(g, x, [term.index(c) for c in result])


def _transposed(g: Emitter, x: Value, perm: Sequence[int]) -> Value:
    return x if list(perm) == list(range(len(perm))) else g(Transpose(tuple(perm)), x)


TABLE: Table = {("Einsum", 12): einsum}
