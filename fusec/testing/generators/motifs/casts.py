"""Draw norms between casts, quantised values, and casts that lose precision."""

from __future__ import annotations

from fusec.ir import HALVES, DType
from fusec.ops import Cast, LayerNorm, RmsNorm, Softmax
from fusec.testing.generators.graph_builder import RandomGraph
from fusec.testing.generators.motifs.attention_motifs import number_like

SIGNED = (DType.F8E4M3, DType.F8E5M2, DType.I4, DType.F4E2M1)


def norm_between_casts(b: RandomGraph) -> None:
    """Draw a norm or softmax in 32 bits between 16-bit tensors, or a quantised and dequantised value."""
    if b.chance(50):
        half = b.pick(HALVES)
        x = b.add(Cast(half), b.float_value(2, 4))
        wide = b.add(Cast(DType.F32), x)
        parameter = b.constant(wide.type.shape[-1:], half if b.chance(60) else DType.F32)
        if parameter.type.dtype is half:
            parameter = b.add(Cast(DType.F32), parameter)
        kind = b.below(3)
        y = b.add(Softmax(-1), wide) if kind == 0 else b.add((RmsNorm, LayerNorm)[kind - 1](), wide, parameter)
        b.add(Cast(b.pick([half, half, DType.F32])), y)
        return
    x = b.some(lambda t: t.dtype is DType.F32)
    scale, zero = number_like(b, x, b.pick([0.5, 0.05, 2.0])), b.pick([0.0, 3.0, -7.0, 0.5])
    y = b.pointwise(b.pick(["round", "round", "floor"]), b.pointwise("div", x, scale))
    y = b.pointwise("add", y, number_like(b, x, zero)) if zero else y
    low, high = b.pick([(-128.0, 127.0), (0.0, 255.0), (-128.0, 128.0)])
    integer = b.pick([DType.I8, DType.U8, DType.I16])
    if b.chance(40):  # a type of 8 bits or fewer, which holds these numbers
        low, high = b.pick([(-4.0, 4.0), (0.0, 4.0)])
        integer = b.pick(SIGNED if low < 0 else (*SIGNED, DType.U4))
    y = b.add(Cast(DType.F32), b.add(Cast(integer), b.pointwise("clip", y, min=low, max=high)))
    y = b.pointwise("add", y, number_like(b, x, -zero)) if zero else y
    b.pointwise("mul", y, scale)


def cast_and_back(b: RandomGraph) -> None:
    """Draw a cast to another dtype and back, which no pass may remove if the first cast rounds."""
    x = b.some(lambda t: t.dtype.is_float)
    narrow = b.add(Cast(b.pick([DType.F16, DType.BF16, DType.F32, DType.F64])), x)
    b.add(Cast(x.type.dtype), narrow)
