"""Make variants of a refused body that cuDNN may accept, the smallest change first, and describe each change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fusec.diagnostics.refusal_core.rebuild import retyped, with_dtype, with_order, with_outputs, with_sizes
from fusec.ir import Constant, DType, Graph, TensorType, Value, channels_last, quote
from fusec.ops import Reduce
from fusec.system.dataclass import dataclass

_FLOATS = {DType.F16: "fp16", DType.BF16: "bf16", DType.F32: "fp32"}
TF32 = "with operands rounded to tf32"
_ALIGNED = 8  # elements of 16 bits in the 16 bytes that cuDNN's vector loads require


@dataclass(frozen=True)
class Change:
    """Description of a change, and the changed body.

    rounds: operands may be rounded, so a judge that allows tensor cores is asked.
    """

    words: str
    body: Graph
    rounds: bool = False


def variants(body: Graph, strict: bool = False) -> Iterator[Change]:
    """Return changes of outputs, layout, precision, operands and sizes. `strict`: the judge demands true fp32."""
    for words, changed in (*_outputs(body), *_layouts(body)):
        if changed is not None:
            yield Change(words, changed)
    if strict:
        yield Change(TF32, body, rounds=True)
    for dtype, name in _FLOATS.items():
        if _floats(body) - {dtype} and (changed := with_dtype(body, dtype)) is not None:
            yield Change(f"in {name}", changed, rounds=dtype is not DType.F32)
    for words, changed in (*_operands(body), *_reductions(body), *_sizes(body)):
        if changed is not None:
            yield Change(words, changed)


def _outputs(body: Graph) -> Iterator[tuple[str, Graph | None]]:
    if len(body.outputs) > 1:
        last = body.outputs[-1]
        yield "without the other outputs", with_outputs(body, [last])


def _layouts(body: Graph) -> Iterator[tuple[str, Graph | None]]:
    spatial = [v for v in body.values() if v.type.rank >= 3]
    if any(v.type.order != channels_last(v.type.rank) for v in spatial):
        yield "with channels last in memory", with_order(body, _channels_last)
    if any(v.type.order for v in spatial):
        yield "with every tensor row-major", with_order(body, lambda t: ())


def _channels_last(type: TensorType) -> tuple[int, ...]:
    return channels_last(type.rank) if type.rank >= 3 else ()


def _floats(body: Graph) -> set[DType]:
    return {v.type.dtype for v in body.values() if v.type.dtype.is_float}


def _operands(body: Graph) -> Iterator[tuple[str, Graph | None]]:
    """Give a broadcast operand the full shape, or one number per channel."""
    for value in body.values():
        users = [node for node, _ in value.uses if len(node.results) == 1]
        if (value.node is not None and value.literal is None) or len(users) != 1 or value.type.size == 1:
            continue
        result = users[0].result.type
        if users[0].op.name in ("conv", "conv_flipped", "conv_transpose", "matmul") or value.type.shape == result.shape:
            continue
        name = quote(value.name)
        if len(value.type.shape) <= result.rank:
            yield f"with {name} in the full shape {list(result.shape)}", _reshaped(body, value, result)
        if result.rank >= 3:
            shape = tuple(d if i == 1 else 1 for i, d in enumerate(result.shape))
            if shape != value.type.shape and result.shape[1] > 1:
                channel = TensorType(shape, result.dtype)
                yield f"with {name} one number per channel {list(shape)}", _reshaped(body, value, channel)


def _reshaped(body: Graph, value: Value, type: TensorType) -> Graph | None:
    target = TensorType(type.shape, value.type.dtype, type.order)
    changed = retyped(body, lambda v: target if v is value else v.type)
    return changed if changed is not None and _same_results(body, changed) else None


def _same_results(a: Graph, b: Graph) -> bool:
    return [v.type.shape for v in a.outputs] == [v.type.shape for v in b.outputs]


def _reductions(body: Graph) -> Iterator[tuple[str, Graph | None]]:
    """Replace a mean by a sum, which needs a factor afterwards; reduce over the dims that are last in memory."""
    if any(isinstance(n.op, Reduce) and n.op.kind == "mean" for n in body.nodes):
        changed = body.clone()
        for node in changed.nodes:
            if isinstance(node.op, Reduce) and node.op.kind == "mean":
                changed.set_op(node, replace(node.op, kind="sum"))
        yield "as a sum (and a factor after it)", changed
        row_major = with_order(changed, lambda t: ())
        yield "as a sum in row-major memory (and a factor after it)", row_major
        if row_major is not None:
            yield "as a sum in row-major memory in fp32 (and a factor after it)", with_dtype(row_major, DType.F32)


def _sizes(body: Graph) -> Iterator[tuple[str, Graph | None]]:
    """Round dims up to multiples of 8, which half of cuDNN's kernels on older GPUs require."""
    sizes = {
        d
        for v in body.values()
        if v.type.size > 1 and not (v.node is not None and isinstance(v.node.op, Constant) and v.type.rank == 1)
        for d in v.type.shape
        if d > 1
    }
    odd = {d: -(-d // _ALIGNED) * _ALIGNED for d in sizes if d % _ALIGNED}
    if odd:
        yield f"with every dim a multiple of {_ALIGNED}", with_sizes(body, odd)
