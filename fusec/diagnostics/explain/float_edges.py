"""Tell what stays in floats in a quantised model, and why: products, and results of integer products."""

from __future__ import annotations

from fusec.diagnostics.explain.data import FloatEdge
from fusec.ir import DType, Graph, Node
from fusec.ops import Cast, Conv, MatMul
from fusec.passes.base import Options
from fusec.passes.quantization.integer_products import reasons
from fusec.passes.quantization.run_in_integers import RunInIntegers
from fusec.schedule.program import Kind, Partition, Program, display_name

BYTES = (DType.I8, DType.U8)


def float_edges(source: Graph, program: Program, options: Options) -> tuple[FloatEdge, ...]:
    """List what stays in floats; nothing for a model that has no integers of 8 bits.

    source: the model's graph before the passes, in which quantised operands can still be recognised.
    """
    if not any(isinstance(n.op, Cast) and n.operands[0].type.dtype in BYTES for n in source.nodes):
        return ()
    graph = source.clone()
    RunInIntegers().run(graph, options)
    found = [
        FloatEdge(node.op.name, node.result.name, why or "none of its operands is quantised", node.origin)
        for node, why in reasons(graph)
    ]
    for step in program.steps:
        product = next((n for n in step.nodes if is_integer_product(n)), None)
        if product is not None and step.kind is not Kind.VIEW:
            found += _results(step, product)
    return tuple(found)


def is_integer_product(node: Node) -> bool:
    """Tell if a node multiplies integers of 8 bits."""
    return isinstance(node.op, (Conv, MatMul)) and node.operands[0].type.dtype is DType.I8


def _results(step: Partition, product: Node) -> list[FloatEdge]:
    """List the float results of a step with an integer product, with the ops that read them."""
    found: list[FloatEdge] = []
    for value in step.outputs:
        if value.type.dtype in BYTES:
            continue
        readers = dict.fromkeys(display_name(u) if u.results else "the caller" for u in value.users)
        why = f"its result is stored in {value.type.dtype.value} for {', '.join(readers)}"
        found.append(FloatEdge(product.op.name, value.name, why, product.origin))
    return found
