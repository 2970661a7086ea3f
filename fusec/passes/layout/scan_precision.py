"""Let scans compute in the precision of the model where tensors are stored in 16 bits.

A state is rounded in every step, so that its error would grow with their number. Sequences and rows of results are
stored in 16 bits, and the body casts them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from fusec.ir import Body, Constant, DType, Graph, Literal, Node, Return, Value
from fusec.lowering.scan_plan import scan_plan
from fusec.ops import Cast, Scan

WIDE = (DType.F64, DType.F32)


def narrow_rows(graph: Graph, storage: DType) -> None:
    """Let the bodies of scans cast sequences and rows of results, if their kernel still takes them.

    Inputs and outputs of the model, and constants, are not narrowed.
    """
    for node in graph.nodes:
        if isinstance(node.op, Scan):
            states, first = node.op.states, node.op.states + node.op.sequences
            read = {i for i, v in enumerate(node.operands[:first]) if i >= states and _has_storage(v)}
            given = {i for i, v in enumerate(node.results) if i >= states and any(map(_reads_storage, v.users))}
            op = replace(node.op, body=_with_narrow_rows(node.op.body.graph, read, given, storage))
            if scan_plan(op) is not None:
                graph.set_op(node, op)


def _has_storage(value: Value) -> bool:
    """Tell if an operand of a scan is going to have the storage type."""
    return value.node is not None and not isinstance(value.node.op, (Constant, Scan))


def _reads_storage(user: Node) -> bool:
    """Tell if a node reads operands of the storage type. Scans, casts and the outputs of the model read any."""
    return not isinstance(user.op, (Scan, Cast, Return))


def _with_narrow_rows(body: Graph, read: Collection[int], given: Collection[int], storage: DType) -> Body:
    """Return a body with some of its inputs and outputs in the storage type. `read`, `given`: their numbers."""
    graph, made, narrow = Graph(body.name), dict[Value, Value](), list[Value]()
    for index, value in enumerate(body.inputs):
        casts = index in read and value.type.dtype in WIDE
        made[value] = graph.add_input(value.name, value.type.with_dtype(storage) if casts else value.type)
        narrow += [value] if casts else []
    for value in narrow:
        made[value] = graph.add(Cast(value.type.dtype), made[value])
    for node in body.nodes:
        names, types = [v.name for v in node.results], [v.type for v in node.results]
        copied = graph.insert(node.op, [made[v] for v in node.operands], names=names, types=types)
        made.update(zip(node.results, copied.results, strict=True))
    outputs = [made[v] for v in body.outputs]
    for index, value in enumerate(outputs):
        if index in given and value.type.dtype in WIDE:
            outputs[index] = graph.add(Cast(storage), value)
    graph.set_outputs(outputs, body.output_names)
    return Body(graph)


def cast_around_scans(graph: Graph, storage: DType, literals: Mapping[Value, Literal]) -> None:
    """Give scans operands of the types that their bodies read, and all other nodes results of the storage type.

    literals: the constants as they were before they were narrowed.
    """
    scans = [(node, node.op) for node in graph.nodes if isinstance(node.op, Scan)]
    for node, op in scans:
        for value, output in zip(node.results, op.body.graph.outputs, strict=True):
            graph.set_type(value, value.type.with_dtype(output.type.dtype))
    casts: dict[tuple[Value, DType], Value] = {}
    for node, op in scans:
        for index, (value, read) in enumerate(zip(node.operands, op.body.graph.inputs, strict=True)):
            dtype = read.type.dtype
            if value.type.dtype is dtype:
                continue
            if (value, dtype) not in casts:
                casts[value, dtype] = _cast(graph, value, dtype, literals.get(value), node)
            graph.set_input(node, index, casts[value, dtype])
    for node, _ in scans:
        for value in node.results:
            if value.type.dtype in WIDE:
                _narrow_for_readers(graph, node, value, storage)


def _cast(graph: Graph, value: Value, dtype: DType, literal: Literal | None, before: Node) -> Value:
    """Return a value in another type. What had this type before it was narrowed is not rounded."""
    if literal is not None and literal.type.dtype is dtype:
        return graph.insert(Constant(literal), before=before, names=(value.name,)).result
    made = value.node
    if made is not None and isinstance(made.op, Cast) and made.operands[0].type.dtype is dtype:
        return made.operands[0]  # an input
    return graph.add(Cast(dtype), value, before=before)


def _narrow_for_readers(graph: Graph, node: Node, value: Value, storage: DType) -> None:
    """Cast a result for its readers."""
    readers = [(n, i) for n, i in value.uses if _reads_storage(n)]
    if readers:
        after = next(iter(graph.since(node)), graph.return_node)
        narrow = graph.insert(Cast(storage), [value], before=after).result
        for reader, index in readers:
            graph.set_input(reader, index, narrow)
