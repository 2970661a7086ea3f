"""Describe how a result differs from the reference, element by element, with the edge values of each element."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import ml_dtypes
import numpy as np
from gpu.edges.row import Array, Row

from fusec.ir import Constant, DType, Graph, Literal
from fusec.reference import evaluate

RELATIVE = {DType.F64: 1e-6, DType.F32: 2e-5, DType.F16: 2e-3, DType.BF16: 1.6e-2}
TF32 = 2e-3
SMALL = 1e-6  # where less is left of a result, all of it may be what a sum or a function in fp32 rounds off
TINY = 2.0**-100  # no further from zero than what denormals are made of, or lead to
FEW = 1e-3  # of what approximate functions give, this much may be wrong
MOST = 400  # different disagreements of one run that are listed


@dataclass(frozen=True)
class Disagreement:
    """`count` elements of these edge values that are `got` instead of `want`; `kind` in a few words."""

    kind: str
    label: str
    want: str
    got: str
    count: int = 1

    @property
    def data(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


def meanings(row: Row, feeds: Mapping[str, Array], graph: Graph | None = None) -> list[list[Array]]:
    """Compute what each output may be: in float64 and rounded, or in the op's own precision."""
    graph = graph or row.graph
    with np.errstate(all="ignore"):
        wide = evaluate(graph, dict(feeds), precision=DType.F64)
        own = evaluate(graph, dict(feeds))
        found: list[list[Array]] = []
        for name, value in zip(row.graph.output_names, row.graph.outputs, strict=True):
            found.append([np.asarray(wide[name]).astype(value.type.dtype.numpy), np.asarray(own[name])])
    return found


def disagreements(row: Row, feeds: Mapping[str, Array], got: Sequence[Array]) -> list[Disagreement]:
    """Find the elements of a run that agree with neither of the two meanings."""
    counted: dict[Disagreement, int] = {}
    flushed: list[list[Array]] | None = None  # what the outputs are if denormal operands are zeros
    both = zip(row.graph.outputs, got, meanings(row, feeds), strict=True)
    for number, (value, array, wants) in enumerate(both):
        dtype = value.type.dtype
        if array.shape != value.type.shape:
            counted[Disagreement("shape", "", str(value.type.shape), str(array.shape))] = 1
            continue
        wrong = ~_matches(row, dtype, array, wants)
        if not wrong.any():
            continue
        if flushed is None:
            flushed = _without_denormals(row, feeds)
        as_zeros = _matches(row, dtype, _flushed(array), [_flushed(want) for want in flushed[number]])
        labels = row.labels_of(dict(feeds), array.shape)
        for place in np.argwhere(wrong):
            at = tuple(place)
            w, g = wants[0][at], array[at]
            label = str(labels[at]) or _runs(feeds)
            what = "denormals" if as_zeros[at] else kind(row, dtype, w, g)
            one = Disagreement(what, label, text(w), text(g))
            counted[one] = counted.get(one, 0) + 1
    return [Disagreement(d.kind, d.label, d.want, d.got, n) for d, n in list(counted.items())[:MOST]]


def _runs(feeds: Mapping[str, Array]) -> str:
    """Describe unusual inputs of a run, whose elements have no labels."""
    words = [
        f"{k} {np.unique(v[~np.isfinite(v.astype(np.float64))].astype(np.float64))}"
        for k, v in feeds.items()
        if DType.of(v.dtype).is_float and not np.isfinite(v.astype(np.float64)).all()
    ]
    if words:
        return " ".join(words)
    floats = {k: v for k, v in feeds.items() if v.size and DType.of(v.dtype).is_float}
    big = [k for k, v in floats.items() if (np.abs(v.astype(np.float64)) == float(ml_dtypes.finfo(v.dtype).max)).any()]
    return " ".join(f"{k} to max" for k in big) or "plain"


def _without_denormals(row: Row, feeds: Mapping[str, Array]) -> list[list[Array]]:
    """Compute what each output may be if denormal operands are zeros."""
    graph = row.graph.clone()
    for value in [v for v in graph.values() if v.literal is not None and v.node is not None]:
        assert value.literal is not None and value.node is not None
        graph.set_op(value.node, Constant(Literal.of(_flushed(value.literal.array), value.name)))
    return meanings(row, {name: _flushed(x) for name, x in feeds.items()}, graph)


def _matches(row: Row, dtype: DType, got: Array, wants: Sequence[Array]) -> Array:
    return np.any([_same(row, dtype, got, want) for want in wants], axis=0)


def _flushed(x: Array) -> Array:
    """Make denormals zeros, where the type has the exponents of fp32."""
    if DType.of(x.dtype) not in (DType.F32, DType.BF16):
        return x
    least = float(ml_dtypes.finfo(np.float32).tiny)
    return np.where(np.abs(x.astype(np.float32)) < least, np.copysign(x.dtype.type(0), x), x).astype(x.dtype)


def _same(row: Row, dtype: DType, got: Array, want: Array) -> Array:
    if not dtype.is_float:
        return got == want
    if row.exact:
        bits = np.dtype(f"u{got.itemsize}")
        same = np.ascontiguousarray(got).view(bits) == np.ascontiguousarray(want).view(bits)
        return same.reshape(got.shape) | (np.isnan(got.astype(np.float64)) & np.isnan(want.astype(np.float64)))
    g, w = got.astype(np.float64), want.astype(np.float64)
    with np.errstate(all="ignore"):
        size = np.abs(w)
        relative = TF32 if row.tensor_cores and dtype is DType.F32 else RELATIVE[dtype]
        room = relative * size + 1.01 * float(ml_dtypes.finfo(dtype.numpy).smallest_subnormal)
        if not row.is_pointwise:  # sums cancel; but what is tiny is not to vanish
            room += relative * ((size > SMALL) | (w == 0))
        return (g == w) | (np.isnan(g) & np.isnan(w)) | (np.isfinite(w) & (np.abs(g - w) <= room))


def kind(row: Row, dtype: DType, want: Any, got: Any) -> str:
    """Say what happened to an element, in a few words."""
    if not dtype.is_float:
        return "value"
    w, g = float(want), float(got)
    if np.isnan(w):
        return "nan lost"
    if np.isnan(g):
        return "nan for infinity" if np.isinf(w) else "nan for a number"
    if np.isinf(w):
        return "other infinity" if np.isinf(g) else "infinity lost"
    if np.isinf(g):
        return "infinity for a number"
    if w == g:
        return "sign of zero"
    if max(abs(w), abs(g)) < TINY:
        return "denormals"
    room = SMALL if row.is_pointwise else max(SMALL, 1e-2 * RELATIVE[dtype])
    return "digits" if abs(g - w) <= max(room, FEW * abs(w)) else "value"


def text(number: Any) -> str:
    """A number for a table."""
    return f"{float(number):.6g}" if isinstance(number, np.floating) or number.dtype.itemsize == 2 else str(number)
