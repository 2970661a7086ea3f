"""List the C expression of each pointwise op. A test holds the table complete; the meaning is that of `ops.pointwise`.

x, y, z are the operands in the type they are computed in, T is that type, and attributes have their own names. Helper
functions are in prelude.cuh.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from fusec.gpu.kernels.codegen.kernel import HALVES, compute_type
from fusec.ir import DType
from fusec.ops import Pointwise

ANY: Mapping[str, str] = {
    "identity": "{x}",
    "relu": "nmax({x}, {T}(0))",
    "gen_index": "{T}({index})",
    "clip": "clipped({x}, {min}, {max})",
    "sign": "sign({x})",
    "max": "nmax({x}, {y})",
    "min": "nmin({x}, {y})",
    "cmp_eq": "{x} == {y}",
    "cmp_neq": "{x} != {y}",
    "cmp_gt": "{x} > {y}",
    "cmp_ge": "{x} >= {y}",
    "cmp_lt": "{x} < {y}",
    "cmp_le": "{x} <= {y}",
    "where": "{x} ? {y} : {z}",
    "logical_not": "!{x}",
    "logical_and": "{x} && {y}",
    "logical_or": "{x} || {y}",
    "logical_xor": "{x} != {y}",
}
FLOAT: Mapping[str, str] = {
    "abs": "fabs({x})",
    "ceil": "ceil({x})",
    "cos": "cos({x})",
    "erf": "erf({x})",
    "exp": "exp({x})",
    "floor": "floor({x})",
    "log": "log({x})",
    "neg": "-({x})",
    "reciprocal": "{T}(1) / {x}",
    "rsqrt": "{T}(1) / sqrt({x})",
    "sigmoid": "sigmoid({x})",
    "sin": "sin({x})",
    "softplus": "softplus({x})",
    "sqrt": "sqrt({x})",
    "tan": "tan({x})",
    "tanh": "tanh({x})",
    "elu": "elu({x}, {alpha})",
    "gelu": "{x} * gelu_cdf({x})",
    "gelu_tanh": "{x} * gelu_tanh_cdf({x})",
    "swish": "{x} * sigmoid({beta} * {x})",
    "leaky_relu": "{x} >= {T}(0) ? {x} : {alpha} * {x}",
    "hard_sigmoid": "clipped({alpha} * {x} + {beta}, {T}(0), {T}(1))",
    "hard_swish": "{x} * clipped({x} / {T}(6) + {T}(0.5), {T}(0), {T}(1))",
    "selu": "{gamma} * elu({x}, {alpha})",
    "celu": "celu({x}, {alpha})",
    "mish": "{x} * tanh(softplus({x}))",
    "softsign": "{x} / ({T}(1) + fabs({x}))",
    "thresholded_relu": "{x} > {alpha} ? {x} : {T}(0)",
    "round": "rint({x})",
    "acos": "acos({x})",
    "asin": "asin({x})",
    "atan": "atan({x})",
    "cosh": "cosh({x})",
    "sinh": "sinh({x})",
    "acosh": "acosh({x})",
    "asinh": "asinh({x})",
    "atanh": "atanh({x})",
    "is_nan": "{x} != {x}",
    "is_inf": "fabs({x}) == {T}(INFINITE)",
    "add": "{x} + {y}",
    "add_square": "{x} + {y} * {y}",
    "sub": "{x} - {y}",
    "mul": "{x} * {y}",
    "div": "{x} / {y}",
    "mod": "fmod({x}, {y})",
    "pow": "pow({x}, {y})",
    "floor_mod": "float_floor_mod({x}, {y})",
    "prelu": "{x} >= {T}(0) ? {x} : {y} * {x}",
    "relu_backward": "{y} > {T}(0) ? {x} : {T}(0)",
    "leaky_relu_backward": "{y} > {T}(0) ? {x} : {alpha} * {x}",
    "sigmoid_backward": "{x} * sigmoid({y}) * sigmoid(-({y}))",
    "tanh_backward": "{x} / square(cosh({y}))",
    "elu_backward": "{y} > {T}(0) ? {x} : {x} * {alpha} * exp(nmin({y}, {T}(0)))",
    "gelu_backward": "gelu_gradient({x}, {y})",
    "gelu_tanh_backward": "gelu_tanh_gradient({x}, {y})",
    "softplus_backward": "{x} * sigmoid({y})",
    "swish_backward": "swish_gradient({x}, {y}, {beta})",
}
# These replace the entries of FLOAT where results are rounded to 16 bits. The GPU's approximations are faster, and
# exact to 18 bits or more.
HALF: Mapping[str, str] = {
    "exp": "quick_exp({x})",
    "sigmoid": "quick_sigmoid({x})",
    "gelu": "{x} * quick_gelu_cdf({x})",
    "gelu_tanh": "{x} * quick_gelu_tanh_cdf({x})",
    "swish": "{x} * quick_sigmoid({beta} * {x})",
    "hard_swish": "{x} * clipped({x} * (1.0f / 6.0f) + 0.5f, 0.0f, 1.0f)",
    "mish": "{x} * quick_tanh_softplus({x})",
    "sigmoid_backward": "{x} * quick_sigmoid({y}) * quick_sigmoid(-({y}))",
    "gelu_backward": "quick_gelu_gradient({x}, {y})",
    "gelu_tanh_backward": "quick_gelu_tanh_gradient({x}, {y})",
    "softplus_backward": "{x} * quick_sigmoid({y})",
    "swish_backward": "quick_swish_gradient({x}, {y}, {beta})",
}
INTEGER: Mapping[str, str] = {
    "abs": "wrap_abs({x})",
    "neg": "wrap_neg({x})",
    "bitwise_not": "{T}(~{x})",
    "add": "wrap_add({x}, {y})",
    "add_square": "wrap_add({x}, wrap_mul({y}, {y}))",
    "sub": "wrap_sub({x}, {y})",
    "mul": "wrap_mul({x}, {y})",
    "div": "int_div({x}, {y})",
    "mod": "int_mod({x}, {y})",
    "pow": "int_pow({x}, {y})",
    "floor_mod": "int_floor_mod({x}, {y})",
    "bitwise_and": "{T}({x} & {y})",
    "bitwise_or": "{T}({x} | {y})",
    "bitwise_xor": "{T}({x} ^ {y})",
    "shift_left": "shift_left({x}, {y})",
    "shift_right": "shift_right({x}, {y})",
}


def pattern(op: Pointwise, dtype: DType) -> str | None:
    """Return the expression of an op whose last operand has this dtype; None if there is none."""
    if dtype in HALVES and op.name in HALF:
        return HALF[op.name]
    own = FLOAT if dtype.is_float else INTEGER if dtype.is_int else {}
    return own.get(op.name) or ANY.get(op.name)


def expression(op: Pointwise, dtype: DType, operands: list[str], index: str) -> str:
    """Return the C of an op.

    operands: the operands as C.
    index: the coordinate along the axis of a gen_index.
    """
    text = pattern(op, dtype)
    assert text is not None, f"{op} of {dtype.value} has no expression"
    names = dict(zip("xyz", operands, strict=False))
    attributes = {k: literal(v, dtype) for k, v in op.attributes.items()} if op.name != "clip" else _bounds(op, dtype)
    return text.format(T=compute_type(dtype), index=index, **names, **attributes)


def literal(number: float | int | bool, dtype: DType) -> str:
    """Return a number as C of the type that elements of this dtype are computed in."""
    if dtype is DType.BOOL:
        return "true" if number else "false"
    if not dtype.is_float:
        kind = compute_type(dtype)
        return f"{kind}({int(number)}ull)" if number >= 0 else f"{kind}(-{-int(number) - 1}ll - 1)"
    value = float(number) if dtype is DType.F64 else float(np.float32(number))
    if math.isnan(value):
        return f"{compute_type(dtype)}(INFINITE - INFINITE)"
    if math.isinf(value):
        return f"{compute_type(dtype)}({'' if value > 0 else '-'}INFINITE)"
    return f"{value!r}{'' if dtype is DType.F64 else 'f'}"


def _bounds(op: Pointwise, dtype: DType) -> dict[str, str]:
    """Return the bounds of a clip; integers take the nearest bounds that their type holds."""
    low, high = op.attributes["min"], op.attributes["max"]
    if not dtype.is_float:
        info = np.iinfo(dtype.numpy)
        low = math.ceil(min(max(low, int(info.min)), int(info.max)))
        high = math.floor(min(max(high, int(info.min)), int(info.max)))
    elif dtype is not DType.F64:  # in the type computed in, as the reference does
        with np.errstate(over="ignore"):
            low, high = float(np.float32(low)), float(np.float32(high))
    return {"min": literal(low, dtype), "max": literal(high, dtype)}
