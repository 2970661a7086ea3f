"""Import products of quantised matrices, and products with weights of 2, 4 or 8 bits."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fusec.frontends.onnx.emission.emit import Emitter, OpFunction
from fusec.frontends.onnx.movement.gather_scatter import spread
from fusec.frontends.onnx.ops.matmul import matmul
from fusec.frontends.onnx.ops.quantize import dequantize, matmul_integer, product_scale, quantize, rounded
from fusec.ir import Array, DType, TensorType, Value
from fusec.lowering.packing import from_codes
from fusec.ops import Gather, Reduce, Transpose, pw
from fusec.ops.spec import normalize_axis, require

_CODES: Mapping[int, DType] = {2: DType.U2, 4: DType.U4, 8: DType.U8}


# products of integers ------------------------------------------------------------------------------------------


def matmul_integer_to_float(
    g: Emitter,
    a: Value,
    b: Value,
    a_scale: Value,
    b_scale: Value,
    a_zero: Value | None = None,
    b_zero: Value | None = None,
    bias: Value | None = None,
    /,
) -> Value:
    """Import MatMulIntegerToFloat: the exact product of the integers, times both scales, plus a bias."""
    require(a_scale.type.size == 1, f"the scale of a is of shape {list(a_scale.type.shape)}, not one number")
    scales = g(pw("mul"), _columns(g, b_scale, b), g.reshape(a_scale, ()))
    product = g.cast(matmul_integer(g, a, b, a_zero, b_zero), a_scale.type.dtype)
    y = g(pw("mul"), product, scales)
    return y if bias is None else g(pw("add"), y, bias)


def _columns(g: Emitter, scale: Value, b: Value) -> Value:
    """Reshape a scale of b to broadcast with the product: one number, one for each column, or of more dims."""
    if scale.type.size == 1:
        return g.reshape(scale, ())
    if scale.type.rank == 1:
        require(scale.type.shape == b.type.shape[-1:], f"{scale.type.size} scales for the columns of b {b.type}")
    return scale


def dynamic_quantize_matmul(
    g: Emitter, a: Value, b: Value, b_scale: Value, b_zero: Value | None = None, bias: Value | None = None, /
) -> Value:
    """Import DynamicQuantizeMatMul: quantise a to u8 by its own range, then multiply as integers."""
    require(a.type.dtype is DType.F32, f"takes a in f32, not {a.type.dtype.value}")
    codes, scale, zero = _by_own_range(g, a)
    return matmul_integer_to_float(g, codes, b, scale, b_scale, zero, b_zero, bias)


def _by_own_range(g: Emitter, x: Value) -> tuple[Value, Value, Value]:
    """Quantise x to u8 so that its range and 0 fit. Returns the codes, the scale and the zero point."""
    axes = tuple(range(x.type.rank))
    low = g(pw("min"), g(Reduce("min", axes, False), x), g.scalar(0, x))
    high = g(pw("max"), g(Reduce("max", axes, False), x), g.scalar(0, x))
    width = g(pw("sub"), high, low)
    flat = g(pw("cmp_eq"), width, g.scalar(0, x))
    scale = g(pw("where"), flat, g.scalar(1, x), g(pw("div"), width, g.scalar(255, x)))
    at = g(pw("clip", min=0.0, max=255.0), g(pw("neg"), g(pw("div"), low, scale)))
    zero = rounded(g, at, None, DType.U8)
    return quantize(g, x, scale, zero), scale, zero


def qgemm(
    g: Emitter,
    a: Value,
    a_scale: Value,
    a_zero: Value,
    b: Value,
    b_scale: Value,
    b_zero: Value,
    c: Value | None = None,
    y_scale: Value | None = None,
    y_zero: Value | None = None,
    /,
    *,
    alpha: float = 1.0,
    transA: int = 0,  # noqa: N803 - attributes keep the op's names
    transB: int = 0,  # noqa: N803
) -> Value:
    """Import QGemm in Q/DQ form: alpha * (a @ b + c), where c counts in steps of both scales.

    Without y_scale the result is f32.
    """
    require(a.type.rank == b.type.rank == 2, f"takes matrices, not {a.type} and {b.type}")
    left, right = dequantize(g, a, a_scale, a_zero), dequantize(g, b, b_scale, b_zero, axis=0 if transB else 1)
    y = matmul(g, *(g(Transpose((1, 0)), v) if turn else v for v, turn in ((left, transA), (right, transB))))
    if c is not None:
        require(c.type.dtype is DType.I32, f"takes c in i32, not {c.type.dtype.value}")
        y = g(pw("add"), y, dequantize(g, c, product_scale(g, a_scale, b_scale), axis=-1))
    y = y if alpha == 1.0 else g(pw("mul"), y, g.scalar(alpha, y))
    if y_scale is None:
        return y
    require(y_zero is not None, "needs the zero point of y with its scale")
    return quantize(g, y, y_scale, y_zero)


# weights in blocks ---------------------------------------------------------------------------------------------


def matmul_n_bits(
    g: Emitter,
    a: Value,
    b: Value,
    scales: Value,
    zero_points: Value | None = None,
    g_idx: Value | None = None,
    bias: Value | None = None,
    /,
    *,
    K: int,  # noqa: N803 - attributes keep the op's names
    N: int,  # noqa: N803
    block_size: int,
    bits: int = 4,
    accuracy_level: int = 0,
    weight_prepacked: int = 0,
) -> Value:
    """Import MatMulNBits: a @ dequantised(b)^T, where b[N, K] is in blocks along K that share a scale and zero point.

    b is packed as u8[N, blocks, bytes of a block]. `accuracy_level` allows a reader to round `a` to fewer bits; fusec
    does not.
    """
    require(bits in _CODES, f"bits={bits} is not supported, only 2, 4 and 8")
    require(g_idx is None, "g_idx, which orders the rows of b by group, is not supported: export without act-order")
    require(not weight_prepacked, "weights that are packed for one kernel are not supported: weight_prepacked=1")
    require(block_size >= 16 and block_size & (block_size - 1) == 0, f"block_size {block_size}, not 16, 32, 64, …")
    require(K >= 1 and N >= 1, f"K={K}, N={N}")
    blocks, bytes_ = -(-K // block_size), block_size * bits // 8
    require(b.type.dtype is DType.U8, f"takes b as bytes, not {b.type.dtype.value}")
    require(b.type.size == N * blocks * bytes_, f"b {b.type} has not {N} x {blocks} blocks of {bytes_} bytes")
    require(scales.type.size == N * blocks, f"{scales.type} are not {N} x {blocks} scales")
    require(a.type.rank >= 1 and a.type.shape[-1] == K, f"a {a.type} does not end with K={K}")
    codes = unpacked(g, g.reshape(b, (N, blocks, bytes_)), bits)
    zero = _zero_points(g, zero_points, bits, (N, blocks))
    centred = g(pw("sub"), g.cast(codes, DType.F32), zero)
    weight = g(pw("mul"), centred, g.cast(g.reshape(scales, (N, blocks, 1)), DType.F32))
    weight = g.window(g.reshape(weight, (N, blocks * block_size)), 1, 0, K)
    y = matmul(g, a, g(Transpose((1, 0)), g.cast(weight, a.type.dtype)))
    return y if bias is None else g(pw("add"), y, bias)


def _zero_points(g: Emitter, given: Value | None, bits: int, shape: tuple[int, int]) -> Value:
    """Return the zero points in f32[N, blocks, 1]: packed bytes, floats, or half the range if not given."""
    rows, blocks = shape
    if given is None:
        return g.constant(np.float32(1 << (bits - 1)))
    if given.type.dtype.is_float:
        require(given.type.size == rows * blocks, f"{given.type} are not {rows} x {blocks} zero points")
        return g.cast(g.reshape(given, (rows, blocks, 1)), DType.F32)
    width = -(-blocks * bits // 8)
    require(given.type.dtype is DType.U8, f"takes zero points as bytes or floats, not {given.type.dtype.value}")
    require(given.type.size == rows * width, f"zero points {given.type} are not {rows} x {width} bytes")
    codes = g.window(unpacked(g, g.reshape(given, (rows, width)), bits), 1, 0, blocks)
    return g.cast(g.reshape(codes, (rows, blocks, 1)), DType.F32)


def unpacked(g: Emitter, packed: Value, bits: int) -> Value:
    """Split each byte into 8 / bits numbers, the lowest bits first; the last dim grows by that factor.

    Known bytes become a constant of the type with that many bits, so that it stays small in memory. Other bytes become
    u8.
    """
    each = 8 // bits
    if each == 1:
        return packed
    shape = (*packed.type.shape[:-1], packed.type.shape[-1] * each)
    literal = packed.literal
    if literal is not None:
        type = TensorType(shape, _CODES[bits])

        def load() -> Array:
            return from_codes(literal.array.reshape(-1), type.size, type.dtype).reshape(shape)

        return g.computed(type, load, ("unpacked", type, literal.key), [literal])
    wide = g.reshape(packed, (*packed.type.shape, 1))
    shifts = g.constant(np.arange(0, 8, bits, dtype=np.uint8))
    parts = g(pw("shift_right"), spread(g, wide, (*packed.type.shape, each)), shifts)
    return g.reshape(g(pw("bitwise_and"), parts, g.constant(np.uint8((1 << bits) - 1))), shape)


def gather_block_quantized(
    g: Emitter,
    data: Value,
    indices: Value,
    scales: Value,
    zero_points: Value | None = None,
    /,
    *,
    bits: int = 4,
    block_size: int = 128,
    gather_axis: int = 0,
    quantize_axis: int = 1,
) -> Value:
    """Import GatherBlockQuantized: gather rows of a table in blocks, and dequantise them."""
    require(bits in _CODES, f"bits={bits} is not supported, only 2, 4 and 8")
    axis, along = normalize_axis(gather_axis, data.type.rank), normalize_axis(quantize_axis, data.type.rank)
    require(axis == 0 and along == data.type.rank - 1 > 0, f"gather_axis={gather_axis}, quantize_axis={quantize_axis}")
    packs = data.type.dtype is DType.U8
    table = unpacked(g, data, bits) if packs else data
    length, blocks = table.type.shape[-1], scales.type.shape[-1]
    require(blocks == -(-length // block_size), f"{scales.type} are not the scales of {table.type} by {block_size}")
    codes = g.cast(g(Gather(0), table, indices), DType.F32)

    def by_element(v: Value) -> Value:
        """Gather the entries of the rows, and repeat each for the elements of its block."""
        rows = g.cast(g(Gather(0), v, indices), DType.F32)
        wide = g.reshape(rows, (*rows.type.shape, 1))
        wide = g.reshape(spread(g, wide, (*rows.type.shape, block_size)), (*rows.type.shape[:-1], blocks * block_size))
        return g.window(wide, wide.type.rank - 1, 0, length)

    if zero_points is not None:
        held = unpacked(g, zero_points, bits) if packs else zero_points
        held = g.window(held, held.type.rank - 1, 0, blocks)
        codes = g(pw("sub"), codes, by_element(held))
    elif packs:
        codes = g(pw("sub"), codes, g.scalar(1 << (bits - 1), codes))
    return g.cast(g(pw("mul"), codes, by_element(scales)), scales.type.dtype)


TABLE: Mapping[str, OpFunction] = {
    "MatMulIntegerToFloat": matmul_integer_to_float,
    "DynamicQuantizeMatMul": dynamic_quantize_matmul,
    "QGemm": qgemm,
    "MatMulNBits": matmul_n_bits,
    "GatherBlockQuantized": gather_block_quantized,
}
