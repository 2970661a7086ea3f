"""Write a graph of fusec as a JAX function, as users of JAX write such a model.

Batch norms are folded. Convolutions and activations are calls of `jax.lax` and `jax.nn`. What JAX spells as NumPy does
is taken from the definition of the op. Values keep their logical dims N, C, H, W. XLA stores images of convolutions in
16 bits as NHWC. The inputs, outputs and filters of the function are stored in that order already, so that the
transposes next to them move nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from fusec.ir import INLINE_ELEMENTS, Graph, Node, Op, Value
from fusec.ops import (
    Attention,
    AvgPool,
    Cast,
    Conv,
    ConvTranspose,
    FlippedConv,
    Gather,
    MatMul,
    MaxPool,
    Pointwise,
    Resize,
    TopK,
)
from fusec.ops.pooling import Pool
from fusec.passes import EARLY_PASSES
from fusec.passes.base import Options, run
from fusec.passes.layout.precision import Precision

Function = Callable[[Mapping[str, Any], Sequence[Any]], tuple[Any, ...]]

ATTENTION = ("plain", "cudnn")
# Activations as JAX spells them, because XLA looks for some of them after convolutions and matrix products.
ACTIVATIONS: Mapping[str, Callable[..., Any]] = {
    "relu": lambda op, x: jax.nn.relu(x),
    "clip": lambda op, x: jnp.clip(x, op.min, op.max),
    "leaky_relu": lambda op, x: jax.nn.leaky_relu(x, op.alpha),
    "elu": lambda op, x: jax.nn.elu(x, op.alpha),
    "sigmoid": lambda op, x: jax.nn.sigmoid(x),
    "swish": lambda op, x: x * jax.nn.sigmoid(op.beta * x),
    "hard_swish": lambda op, x: jax.nn.hard_swish(x),
    "softplus": lambda op, x: jax.nn.softplus(x),
    "gelu": lambda op, x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda op, x: jax.nn.gelu(x, approximate=True),
    "erf": lambda op, x: lax.erf(x),
}
# Ops that are computed in 16 bits where fusec's definition widens, because XLA fuses the bare op into a convolution.
PLAIN = {"add", "sub", "mul", "div", "max", "min", "neg", "abs"}


def prepared(graph: Graph, precision: str = "fp16") -> Graph:
    """Run the passes that a user of XLA does by hand: activations, norms and attention as one op, batch norms folded.

    The rest of the pipeline is left out, because it serves cuDNN's graphs.
    """
    last = next(i for i, each in enumerate(EARLY_PASSES) if isinstance(each, Precision))
    return run(EARLY_PASSES[: last + 1], graph.clone(), Options(precision))


def images_last(rank: int) -> tuple[int, ...]:
    """Return the transposition from N, C, H, W to N, H, W, C; the identity for other ranks."""
    return (0, 2, 3, 1) if rank == 4 else tuple(range(rank))


def images_first(rank: int) -> tuple[int, ...]:
    """Return the transposition back from `images_last`."""
    return (0, 3, 1, 2) if rank == 4 else tuple(range(rank))


def _is_filter(value: Value) -> bool:
    """Tell if only convolutions of images use a constant, as their filter."""
    return value.type.rank == 4 and all(isinstance(node.op, Conv) and i == 1 for node, i in value.uses)


def weights(graph: Graph) -> dict[str, np.ndarray[Any, Any]]:
    """Return the constants that are arguments of the function, by name; filters are K, window, C.

    Constants of few elements are part of the function instead.
    """
    found = {v: v.literal.array for v in graph.values() if v.literal is not None and v.type.size > INLINE_ELEMENTS}
    return {v.name: np.ascontiguousarray(a.transpose(images_last(4))) if _is_filter(v) else a for v, a in found.items()}


def function_of(graph: Graph, attention: str = "plain") -> Function:
    """Return the graph as a function of its weights by name and its inputs. Images are N, H, W, C.

    attention: one of ATTENTION: matrix products and a softmax, or cuDNN's by `jax.nn.dot_product_attention`.
    """

    def function(constants: Mapping[str, Any], inputs: Sequence[Any]) -> tuple[Any, ...]:
        held: dict[Value, Any] = {}
        for value, array in zip(graph.inputs, inputs, strict=True):
            held[value] = array.transpose(images_first(array.ndim))
        for node in graph.nodes:
            if (literal := node.results[0].literal) is None:
                results = _results(node, [held[v] for v in node.operands], attention)
                held.update(zip(node.results, results, strict=True))
                continue
            value = node.result
            held[value] = jnp.asarray(constants.get(value.name, literal.array))
            if value.name in constants and _is_filter(value):
                held[value] = held[value].transpose(images_first(4))
        return tuple(held[v].transpose(images_last(held[v].ndim)) for v in graph.outputs)

    return function


def _results(node: Node, operands: list[Any], attention: str) -> tuple[Any, ...]:
    op = node.op
    if isinstance(op, Attention):
        return (_attention(op, attention, *operands),)
    if isinstance(op, Pointwise):
        name = op.row.name
        if name in ACTIVATIONS:
            return (ACTIVATIONS[name](op, *operands),)
        return (op.row.reference(jnp, op, *operands),) if name in PLAIN else op.reference(jnp, *operands)
    if type(op) in SPELLED:
        results = SPELLED[type(op)](op, *operands)
        return results if isinstance(results, tuple) else (results,)
    return op.reference(jnp, *operands)


def _attention(op: Attention, form: str, q: Any, k: Any, v: Any, *bias: Any) -> Any:
    """Call cuDNN's attention, which takes batch, sequence, heads, features; or compute the scores in memory."""
    if form == "cudnn" and (op.seen or not op.guarded):
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        given: dict[str, Any] = {"scale": op.scale, "is_causal": op.causal, "implementation": form}
        return jax.nn.dot_product_attention(q, k, v, *bias, **given).swapaxes(1, 2)
    (b, h, s, _), (_, g, t, _) = q.shape, k.shape
    scores = op.scores(jnp, q, k, *bias).astype(jnp.float32)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype).reshape(b, g, h // g, s, t)
    if op.guarded:
        weights = jnp.where(jnp.isnan(weights), 0, weights)
    return jnp.matmul(weights, v[:, :, None]).reshape(b, h, s, v.shape[-1])


def _conv(op: Conv, x: Any, w: Any) -> Any:
    pads = _ends(op.pads)
    return lax.conv_general_dilated(
        x, w, op.strides, pads, rhs_dilation=op.dilations, feature_group_count=op.groups
    )  # of the dims N, C, spatial and K, C, window, which are JAX's default


def _conv_flipped(op: FlippedConv, x: Any, w: Any) -> Any:
    return _conv(op.unflipped, x, jnp.flip(w, tuple(range(2, w.ndim))))


def _conv_transpose(op: ConvTranspose, x: Any, w: Any) -> Any:
    """Convolve x with zeros between its elements by the flipped filters, which XLA runs as cuDNN's data gradient."""
    spatial = tuple(range(2, x.ndim))
    filters = w.reshape(op.groups, w.shape[0] // op.groups, *w.shape[1:]).swapaxes(1, 2)
    filters = jnp.flip(filters.reshape(op.groups * w.shape[1], *filters.shape[2:]), spatial)
    reach = [d * (k - 1) for d, k in zip(op.dilations, w.shape[2:], strict=True)]
    pads = [
        (r - before, r - after + more)
        for r, (before, after), more in zip(reach, _ends(op.pads), op.output_padding, strict=True)
    ]
    ones = (1,) * len(spatial)
    return lax.conv_general_dilated(
        x, filters, ones, pads, lhs_dilation=op.strides, rhs_dilation=op.dilations, feature_group_count=op.groups
    )


def _ends(pads: Sequence[int]) -> list[tuple[int, int]]:
    """Return the pads of each dim, from a list of all starts, then all ends."""
    n = len(pads) // 2
    return list(zip(pads[:n], pads[n:], strict=True))


def _windows(op: Pool, x: Any, start: Any, combine: Callable[..., Any]) -> Any:
    before = op.pads[: x.ndim - 2]
    sizes = zip(x.shape[2:], before, op.padded(x.shape[2:]), strict=True)
    pads = [(0, 0), (0, 0), *((p, padded - size - p) for size, p, padded in sizes)]
    window, strides, dilations = ((1, 1, *each) for each in (op.window, op.strides, op.dilations))
    return lax.reduce_window(x, start, combine, window, strides, pads, window_dilation=dilations)


def _max_pool(op: MaxPool, x: Any) -> Any:
    start = -np.inf if jnp.issubdtype(x.dtype, jnp.floating) else jnp.iinfo(x.dtype).min
    return _windows(op, x, np.array(start, x.dtype), lax.max)


def _avg_pool(op: AvgPool, x: Any) -> Any:
    total = _windows(op, x.astype(jnp.float32), np.float32(0), lax.add)
    return (total / op.weights(np, x.shape[2:], np.float32)).astype(x.dtype)


def _gather(op: Gather, x: Any, indices: Any) -> Any:
    indices = jnp.where(indices < 0, indices + x.shape[op.axis], indices)
    return jnp.take(x, indices, axis=op.axis, mode="clip")


def _resize(op: Resize, x: Any) -> Any:
    """Repeat elements where the size is a multiple; else multiply by the matrix of each dim, as `jax.image` does."""
    for dim, (size, scale) in enumerate(zip(op.sizes, op.scales, strict=True)):
        count = x.shape[dim]
        if size == count and scale == 1.0:
            continue
        one = replace(op, sizes=(size, count), scales=(scale, 1.0))
        (matrix,) = one.reference(np, np.eye(count, dtype=np.float32))
        if size % count == 0 and np.array_equal(matrix, np.repeat(np.eye(count), size // count, axis=0)):
            x = jnp.repeat(x, size // count, axis=dim)
        else:
            x = jnp.moveaxis(jnp.tensordot(x, matrix.astype(x.dtype), ((dim,), (1,))), -1, dim)
    return x


def _top_k(op: TopK, x: Any) -> tuple[Any, Any]:
    x = jnp.moveaxis(x, op.axis, -1)
    order = lax.top_k(x, op.k)[1] if op.largest else jnp.argsort(x, stable=True)[..., : op.k]
    values = jnp.take_along_axis(x, order, axis=-1)
    return jnp.moveaxis(values, -1, op.axis), jnp.moveaxis(order, -1, op.axis)


# Ops whose definition writes into arrays or reads them by strides, or asks for more than JAX's users do.
SPELLED: Mapping[type[Op], Callable[..., Any]] = {
    Conv: _conv,
    FlippedConv: _conv_flipped,
    ConvTranspose: _conv_transpose,
    MatMul: lambda op, a, b: jnp.matmul(a, b),
    MaxPool: _max_pool,
    AvgPool: _avg_pool,
    Gather: _gather,
    Resize: _resize,
    TopK: _top_k,
    Cast: lambda op, x: x.astype(jax.dtypes.canonicalize_dtype(op.to.numpy)),
}
