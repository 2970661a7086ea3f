"""Draw random tensors that reveal wrong results: exact small integers, normals, extremes, ties, NaN and infinity."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from fusec.ir import HALVES, DType, Graph, HostArray, TensorType
from fusec.lowering.indexed_dims import indexed_sizes
from fusec.ops import Cast, Scan

Draw = Callable[[np.random.Generator, tuple[int, ...], DType], HostArray]


def _integers(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> HostArray:
    """Draw sparse integers from -3 to 3: sums and products of a few hundred are exact in every format."""
    return rng.integers(-3, 4, shape) * (rng.random(shape) < 0.6)


def _normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> HostArray:
    return rng.standard_normal(shape)


def _positive(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> HostArray:
    """Draw numbers away from zero, so that quotients, roots and logarithms are not large."""
    return rng.uniform(0.5, 2.0, shape)


def _ties(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> HostArray:
    """Draw multiples of 0.5 and signed zeros: equal operands, kinks of functions, quotients that round half to even."""
    return rng.integers(-4, 5, shape) * 0.5 * rng.choice([-1.0, 1.0], shape)


def _wide(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> HostArray:
    """Draw magnitudes from 1e-3 to 1e3 (1e-2 to 30 in half precision), so that functions saturate."""
    reach = 3.0 if dtype not in HALVES else 1.5
    return 10.0 ** rng.uniform(-reach, reach, shape) * rng.choice([-1.0, 1.0], shape)


def _special(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> HostArray:
    """Draw small integers, with NaN, infinities and signed zeros among them."""
    plain = _integers(rng, shape, dtype).astype(np.float64)
    odd = rng.choice(np.array([np.nan, np.inf, -np.inf, -0.0, 0.0]), shape)
    return np.where(rng.random(shape) < 0.15, odd, plain)


STYLES: Mapping[str, Draw] = {
    "integers": _integers,
    "normal": _normal,
    "positive": _positive,
    "ties": _ties,
    "wide": _wide,
    "special": _special,
}


def draw_array(rng: np.random.Generator, type: TensorType, style: str) -> HostArray:
    """Draw an array: floats of the style, integers from -3 to 3 (unsigned from 0 to 3), also in fp8, or bools."""
    if type.dtype is DType.BOOL:
        return rng.random(type.shape) < 0.5
    if type.dtype.is_int or type.dtype is DType.F8E4M3:
        low = 0 if type.dtype.value.startswith("u") else -3
        return rng.integers(low, 4, type.shape).astype(type.dtype.numpy)
    return np.asarray(STYLES[style](rng, type.shape, type.dtype)).astype(type.dtype.numpy)


def draw_feeds(graph: Graph, seed: int, style: str) -> dict[str, HostArray]:
    """Draw an array for each input of the graph, by name.

    Indices of a gather are in range, with negative ones among them. A graph with a cast to integers gets no NaN or
    infinity, because such casts are undefined.
    """
    rng = np.random.default_rng(seed)
    if style == "special" and _casts_to_integers(graph):
        style = "ties"
    feeds: dict[str, HostArray] = {}
    for value in graph.inputs:
        indexed = indexed_sizes(value)
        if indexed:
            low, high = (-min(indexed) if "u" not in value.type.dtype.value else 0), min(indexed)
            feeds[value.name] = rng.integers(low, high, value.type.shape).astype(value.type.dtype.numpy)
        else:
            feeds[value.name] = draw_array(rng, value.type, style)
    return feeds


def _casts_to_integers(graph: Graph) -> bool:
    """Tell if a graph, or a body in it, has a cast to integers."""
    return any(
        n.op.to.is_int if isinstance(n.op, Cast) else isinstance(n.op, Scan) and _casts_to_integers(n.op.body.graph)
        for n in graph.nodes
    )
