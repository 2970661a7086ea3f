"""Tell what passes and exporters may compute from constants, and if that is exact."""

from __future__ import annotations

from collections.abc import Set

import numpy as np

from fusec.ir import Constant, Graph, HostArray, Node, Value
from fusec.testing.error_bounds.op_rounding import PRODUCTS, is_move, is_single
from fusec.testing.error_bounds.perturbed import Rounding, in_float64


def constants_exact(graph: Graph, rounding: Rounding, half: bool) -> bool:
    """Tell if all that passes compute from the constants is exact: numbers of few bits, exact ops.

    half: some numbers have 16 bits.
    """
    if not rounding.meaning:
        return not half  # because a spelling may store f32 constants in the 16 bits of the other operand
    if half:
        return False
    constant: set[Value] = set()
    for node in graph.nodes:
        if all(v in constant for v in node.operands):
            constant.update(node.results)
        if isinstance(node.op, Constant):
            if not _few_bits(in_float64(node.op.literal.array)):
                return False
        elif any(v in constant for v in node.operands):
            sums = node.op.name in PRODUCTS or node.op.name in ("reduce", "max_pool")
            if not (sums or is_move(node.op) or is_single(node.op)):
                return False
    return True


# The operands on which a result depends, by place, where it does not depend on all of them.
_DEPENDS_ON: dict[str, dict[int, tuple[int, ...]]] = {
    "batch_norm_backward": {2: (0,)},
    "batch_norm_by_sums": {1: (3, 4), 2: (3, 4)},
    "batch_norm_train": {1: (0,), 2: (0,)},
    "layer_norm_backward": {1: (0, 1), 2: (0,)},
}


def constant_results(node: Node, constant: Set[Value]) -> list[Value]:
    """Return the results of a node that depend on constants alone: passes and importers fold them."""
    if node.op.name == "attention_train":
        operands = [v for i, v in enumerate(node.operands) if i != 2]  # the sums do not depend on v
        return [node.results[1]] if all(v in constant for v in operands) else []
    depends = _DEPENDS_ON.get(node.op.name, {})
    return [
        result
        for i, result in enumerate(node.results)
        if i in depends and all(node.operands[j] in constant for j in depends[i])
    ]


def has_fp32_numbers(node: Node, constant: Set[Value]) -> bool:
    """Tell if ONNX writes an op as single ops with fp32 numbers: its own, or such that are folded."""
    return node.op.name in ("gelu_backward", "gelu_tanh_backward") or folds_single_ops(node, constant)


def folds_single_ops(node: Node, constant: Set[Value]) -> bool:
    """Tell if some of the single ops that ONNX writes for an op have constant operands alone: they fold in fp32."""
    return node.op.name not in PRODUCTS and any(v in constant for v in node.operands)


def folds_a_product(node: Node, constant: Set[Value]) -> bool:
    """Tell if a product inside attention has constant operands alone.

    In ONNX, attention is written as single ops, and such a product is folded in fp32.
    """
    if not node.op.name.startswith("attention"):
        return False
    factors = ((1, 2), (0, 3)) if node.op.name == "attention_backward" else ((0, 1),)
    return any(all(node.operands[i] in constant for i in pair) for pair in factors)


def _few_bits(array: HostArray) -> bool:
    """Tell if every significand has at most 8 bits: products of three such numbers are exact in fp32."""
    mantissa, exponent = np.frexp(array)
    scaled = mantissa * 256
    return bool((scaled == np.rint(scaled)).all() and (np.abs(exponent) < 10).all())
