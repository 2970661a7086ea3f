"""Tell what stays in floats in a quantised model, why, and what it costs.

These are products, operands and results of integer products, and integer products that run in fp16.
"""

from __future__ import annotations

from collections.abc import Iterator

from fusec.diagnostics.explain.data import FloatEdge
from fusec.execution.compilation import Compiled
from fusec.gpu.autotune.step_choices import TunedChoices, step_key
from fusec.ir import DType, Node, Value
from fusec.ops import Cast, Conv, MatMul, PackedMatMul
from fusec.ops.matmul import CODES
from fusec.passes.base import ROUND_ACTIVATIONS
from fusec.passes.partition.cost_model import flops, saved_in_bytes_us
from fusec.passes.partition.equivalent_spellings import IN_HALVES, UNPACKED
from fusec.passes.quantization.integer_products import reasons
from fusec.passes.quantization.keep_packed_weights import KeepPackedWeights, refusal
from fusec.passes.quantization.packed_weights import packed_weights
from fusec.passes.quantization.run_in_integers import RunInIntegers
from fusec.passes.rewriting.value_facts import has_extremes
from fusec.schedule.program import Kind, Partition, display_name, inputs_of

FEW_CHANNELS = 16  # which tensor cores multiply at a time


def float_edges(compiled: Compiled) -> tuple[FloatEdge, ...]:
    """List what stays in floats; nothing for a model that is not quantised."""
    source = compiled.source  # before the passes, where quantised operands can still be recognised
    if not any(map(_is_quantised, source.nodes)):
        return ()
    graph = source.clone()
    for step in (RunInIntegers(), KeepPackedWeights()):
        if step.name not in compiled.options.disable:
            step.run(graph, compiled.options)
    found: list[FloatEdge] = []
    for node, reason in reasons(graph):
        why = reason or _no_operand(compiled, node)
        if ROUND_ACTIVATIONS in compiled.options.disable:
            why = f"activations are not rounded to 8 bits ({ROUND_ACTIVATIONS} is left out)"
        found.append(FloatEdge(node.op.name, node.result.name, why, node.origin, _product_us(compiled, node)))
    for step in compiled.program.steps:
        if UNPACKED in step.spelling:
            node = next(n for n in step.nodes if isinstance(n.op, PackedMatMul))
            why = "its weights are unpacked at compile time: measured to be faster"
            found.append(FloatEdge(node.op.name, node.result.name, why, node.origin))
        product = next((n for n in step.nodes if is_integer_product(n)), None)
        if product is not None and step.kind is not Kind.VIEW:
            found += [*_in_halves(compiled, step, product), *_operands(compiled, step, product)]
            found += _results(compiled, step, product)
    return tuple(found)


def _is_quantised(node: Node) -> bool:
    """Tell if a node makes codes of 4 or 8 bits from floats, or reads constant ones.

    Integers that a model takes are no sign, because they may be the bytes of an image.
    """
    if not isinstance(node.op, Cast):
        return False
    operand, result = node.operands[0], node.result
    if operand.type.dtype not in CODES:
        return operand.type.dtype.is_float and result.type.dtype in CODES
    while operand.node is not None and len(operand.node.operands) == 1:  # a reshape of codes, for example
        operand = operand.node.operands[0]
    return operand.literal is not None


def is_integer_product(node: Node) -> bool:
    """Tell if a node multiplies integers of 8 bits."""
    return isinstance(node.op, (Conv, MatMul)) and node.operands[0].type.dtype is DType.I8


def _no_operand(compiled: Compiled, node: Node) -> str:
    """Tell why no operand of a product is quantised; quantisers leave out convolutions of few channels."""
    why, w = "none of its operands is quantised", node.operands[1].type
    if isinstance(node.op, MatMul) and (found := packed_weights(node.operands[1])) is not None:
        why = (
            refusal(node, found, compiled.options)
            or f"{KeepPackedWeights.name} is left out, or a zero point is no integer"
        )
        return f"its weights alone are quantised, and do not stay packed: {why}"
    if isinstance(node.op, Conv) and w.shape[1] < FEW_CHANNELS:
        return f"{why}: {w.shape[1]} channels{' a group' if node.op.groups > 1 else ''}, not {FEW_CHANNELS} or more"
    return why


def _product_us(compiled: Compiled, node: Node) -> float:
    moved = sum(v.type.size for v in (*node.operands, *node.results))
    return saved_in_bytes_us(moved, flops(node), compiled.options.storage, compiled.target)


def _moved_us(compiled: Compiled, value: Value) -> float:
    """Return what the bytes of a float value cost: it is written once, and read by each user."""
    moved = value.type.size * (1 + len(value.uses))
    return saved_in_bytes_us(moved, 0, value.type.dtype, compiled.target)


def _in_halves(compiled: Compiled, step: Partition, product: Node) -> Iterator[FloatEdge]:
    """Yield the product if its step multiplies in fp16, because that was measured to be faster."""
    if IN_HALVES not in step.spelling:
        return
    tuned, why = compiled.tuned, "in fp16: measured to be faster than in 8 bits"
    if isinstance(tuned, TunedChoices):
        times = tuned.precisions.get(step_key(compiled.program.graph, step))
        if times is not None:
            why = f"in fp16: measured: int8 {times.bytes_us:.0f} µs, fp16 {times.halves_us:.0f} µs"
    yield FloatEdge(product.op.name, product.result.name, why, product.origin)


def _operands(compiled: Compiled, step: Partition, product: Node) -> Iterator[FloatEdge]:
    """Yield the residuals that a step with an integer product reads in floats."""
    for value in inputs_of(step.nodes):
        if value.literal is None and value.type.dtype.is_float and value.type.size == product.result.type.size:
            why = f"in {value.type.dtype.value}: residual not quantised"
            yield FloatEdge(product.op.name, value.name, why, product.origin, _moved_us(compiled, value))


def _results(compiled: Compiled, step: Partition, product: Node) -> Iterator[FloatEdge]:
    """Yield the float results of a step with an integer product, with the ops that read them."""
    for value in step.outputs:
        if not value.type.dtype.is_float:
            continue
        readers = dict.fromkeys(display_name(u) if u.results else "the caller" for u in value.users)
        goal = "until its range is known at run time" if has_extremes(value) else f"for {', '.join(readers)}"
        why = f"its result is stored in {value.type.dtype.value} {goal}"
        yield FloatEdge(product.op.name, value.name, why, product.origin, _moved_us(compiled, value))
