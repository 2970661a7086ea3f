"""How a result differs from what the op means: element by element, named by the edge values it is of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import ml_dtypes
import numpy as np
from gpu.edges.row import Array, Row

from fusec.ir import DType
from fusec.reference import evaluate

RELATIVE = {DType.F64: 1e-6, DType.F32: 2e-5, DType.F16: 2e-3, DType.BF16: 1.6e-2}
TF32 = 2e-3
SMALL = 1e-6  # tails of functions, which approximations cut off
MOST = 400  # different disagreements of one run that are kept


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


def meanings(row: Row, feeds: Mapping[str, Array]) -> list[list[Array]]:
    """For each output of the step what it may be: computed in float64 and rounded, or in the op's own precision."""
    with np.errstate(all="ignore"):
        wide = evaluate(row.graph, dict(feeds), precision=DType.F64)
        own = evaluate(row.graph, dict(feeds))
        found: list[list[Array]] = []
        for name, value in zip(row.graph.output_names, row.graph.outputs, strict=True):
            found.append([np.asarray(wide[name]).astype(value.type.dtype.numpy), np.asarray(own[name])])
    return found


def disagreements(row: Row, feeds: Mapping[str, Array], got: Sequence[Array]) -> list[Disagreement]:
    """Where a run is neither of the two meanings."""
    counted: dict[Disagreement, int] = {}
    for value, array, wants in zip(row.graph.outputs, got, meanings(row, feeds), strict=True):
        dtype = value.type.dtype
        if array.shape != value.type.shape:
            counted[Disagreement("shape", "", str(value.type.shape), str(array.shape))] = 1
            continue
        wrong = ~np.any([_same(row, dtype, array, want) for want in wants], axis=0)
        if not wrong.any():
            continue
        labels = row.labels_of(dict(feeds), array.shape)
        for place in np.argwhere(wrong):
            at = tuple(place)
            w, g = wants[0][at], array[at]
            label = str(labels[at]) or _runs(feeds)
            one = Disagreement(kind(dtype, w, g), label, text(w), text(g))
            counted[one] = counted.get(one, 0) + 1
    return [Disagreement(d.kind, d.label, d.want, d.got, n) for d, n in list(counted.items())[:MOST]]


def _runs(feeds: Mapping[str, Array]) -> str:
    """What is odd about the inputs of a run, where its elements have no labels."""
    words = [
        f"{k} {np.unique(v[~np.isfinite(v.astype(np.float64))].astype(np.float64))}"
        for k, v in feeds.items()
        if DType.of(v.dtype).is_float and not np.isfinite(v.astype(np.float64)).all()
    ]
    if words:
        return " ".join(words)
    big = [f"{k} to {np.abs(v.astype(np.float64)).max():.3g}" for k, v in feeds.items() if v.size]
    return " ".join(big)


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


def kind(dtype: DType, want: Any, got: Any) -> str:
    """What happened to an element, in a few words."""
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
    if g == 0.0 and abs(w) < float(ml_dtypes.finfo(dtype.numpy).tiny):
        return "denormal flushed"
    if abs(w) < SMALL and abs(g) < SMALL:
        return "tail"
    return "value"


def text(number: Any) -> str:
    """A number for a table."""
    return f"{float(number):.6g}" if isinstance(number, np.floating) or number.dtype.itemsize == 2 else str(number)
