"""Remove casts around ops that compute in fp32 anyway, and casts through integers whose values floats hold."""

from __future__ import annotations

import numpy as np

from fusec.ir import HALVES, DType, Graph, Literal, Node, Value
from fusec.ops import Cast, GroupNorm, InstanceNorm, LayerNorm, RmsNorm, Softmax, pw
from fusec.passes.rewriting.derived_constants import EAGER_BYTES
from fusec.passes.rewriting.rewriter import NoMatch, Rewriter, local, single_use

WIDE = (LayerNorm, RmsNorm, GroupNorm, InstanceNorm, Softmax)  # of 16 bits: computed in fp32, rounded once
SMALL = (DType.I16, DType.U16)  # fp32 holds all their numbers; integers of 8 bits stay, a quarter of its bytes


@local(
    "cast", equation="cast(norm(cast(x, f32), s), f16) = norm(x, cast(s, f16)) for norms and softmax, s exact in f16"
)
def norm_between_casts(graph: Graph, node: Node) -> Value | None:
    """Drop the casts, because the result is rounded once at the end in both spellings."""
    outer, (y,) = node.op, node.operands
    inner = y.node
    assert isinstance(outer, Cast)
    if inner is None or not isinstance(inner.op, WIDE) or y.type.dtype is not DType.F32 or outer.to not in HALVES:
        return None
    x, *parameters = (_narrow(v, outer.to) for v in inner.operands)
    if not single_use(y) or x is None or x.literal is not None or any(p is None for p in parameters):
        raise NoMatch("used elsewhere too, or not of 16 bits before", y)
    operands = [p if p.type.dtype is outer.to else graph.add(Cast(outer.to), p, before=node) for p in parameters if p]
    return graph.add(inner.op, x, *operands, before=node)


def _narrow(value: Value, dtype: DType) -> Value | None:
    """Return the value before it was widened, or a constant that 16 bits hold exactly."""
    node, literal = value.node, value.literal
    if literal is not None and literal.type.nbytes <= EAGER_BYTES:
        with np.errstate(over="ignore"):
            same = literal.array.astype(dtype.numpy).astype(np.float32) == literal.array
        return value if same.all() else None
    if node is not None and isinstance(node.op, Cast) and node.operands[0].type.dtype is dtype:
        return node.operands[0]
    return None


@local("cast", equation="cast(cast(clip(round(x) + z), i16), f32) = clip(round(x) + z) within the integer's range")
def through_integers(graph: Graph, node: Node) -> Value | None:
    """Drop quantisation that is undone immediately: whole numbers in range are the same in fp32."""
    whole = node.operands[0].node
    if not _is_cast(node, DType.F32) or whole is None or not isinstance(whole.op, Cast) or whole.op.to not in SMALL:
        return None
    x = whole.operands[0]
    info = np.iinfo(whole.op.to.numpy)
    clip = x.node
    if clip is None or clip.op.name != "clip" or x.type.dtype is not DType.F32:
        raise NoMatch("not limited to the integer's range", x)
    limits = (clip.op.attributes["min"], clip.op.attributes["max"])
    if not info.min <= limits[0] <= limits[1] <= info.max or any(v != round(v) for v in limits):
        raise NoMatch("not limited to the integer's range", x)
    if not _is_whole(clip.operands[0]):
        raise NoMatch("not rounded to whole numbers", x)
    return x if x.type == node.result.type else None


def _is_cast(node: Node, to: DType) -> bool:
    return isinstance(node.op, Cast) and node.op.to is to


def _is_whole(value: Value) -> bool:
    """Tell if every finite element is a whole number: rounded, and perhaps a whole number added."""
    node = value.node
    if node is None:
        return False
    if node.op.name == "add":
        constant = node.operands[1].literal
        return constant is not None and _has_small_whole_numbers(constant) and _is_whole(node.operands[0])
    return node.op.name in ("round", "floor", "ceil")


def _has_small_whole_numbers(literal: Literal) -> bool:
    if literal.type.nbytes > EAGER_BYTES:
        return False
    return bool((np.abs(literal.array) < 1 << 16).all()) and literal.has_whole_numbers


@local("add", equation="clip(round(x) + z, a, b) - z = clip(round(x), a - z, b - z) for a whole number z")
def zero_point_and_back(graph: Graph, node: Node) -> Value | None:
    """Move the limits by a zero point that is added before them and subtracted after them."""
    y, back = node.operands
    clip = y.node
    if clip is None or clip.op.name != "clip" or not single_use(y) or y.type.dtype is not DType.F32:
        return None
    shifted = clip.operands[0].node
    away = back.scalar()
    if shifted is None or shifted.op.name != "add" or not single_use(clip.operands[0]) or away is None:
        return None
    x, zero = shifted.operands
    if zero.scalar() != -away or away != round(away) or abs(away) >= 1 << 16 or not _is_whole(x):
        raise NoMatch("not a zero point that is taken away again", back)
    if x.type != node.result.type:
        return None
    low, high = (clip.op.attributes[k] + away for k in ("min", "max"))
    return graph.add(pw("clip", min=low, max=high), x, before=node)


RULES: tuple[Rewriter, ...] = (norm_between_casts, through_integers, zero_point_and_back)
