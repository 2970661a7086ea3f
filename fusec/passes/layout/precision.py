"""Store floating-point tensors in the precision asked for, with casts only at inputs and outputs.

With fp16 or bf16 every fp32 (and fp64) tensor inside becomes that type, constants at compile time. Inputs and outputs
keep the types of the model's interface, and loops compute in the types of the model (`scan_precision`). With fp32 and
tf32 the model's types stay.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import ml_dtypes
import numpy as np

from fusec.ir import BYTES, Array, Constant, DType, Graph, Literal, Node, Op, Return, Value
from fusec.ops import (
    FORWARD_CONVOLUTIONS,
    AttentionBackward,
    AttentionTrain,
    BatchNormBySums,
    BatchNormTrain,
    Cast,
    ChannelSums,
    MatMul,
    PackedMatMul,
    Pointwise,
)
from fusec.passes.base import Options, Pass
from fusec.passes.layout.scan_precision import cast_around_scans, narrow_rows
from fusec.passes.layout.small_guards import keep_guards
from fusec.passes.rewriting.row_major import converted, row_major
from fusec.passes.rewriting.value_facts import has_extremes, is_pointwise

_WIDE = (DType.F64, DType.F32)
_SIGN = np.uint16(0x8000)
PACKED_SCALES = 2  # the operand of a packed product that may stay in fp32
INFINITE_FROM = 1e30  # a mask's finite constant from here on means infinity
# results that are sums, and operands that expect such sums
SUMS: Mapping[type[Op], tuple[int, ...]] = {AttentionTrain: (1,), ChannelSums: (0, 1)}
READS_SUMS: Mapping[type[Op], tuple[int, ...]] = {AttentionBackward: (5,), BatchNormBySums: (3, 4)}


class Precision(Pass):
    """Store tensors in `Options.storage`; the pass has no options of its own."""

    name = "precision"

    def run(self, graph: Graph, options: Options) -> None:
        storage = options.storage
        if storage is DType.F32:
            return
        keep_guards(graph, storage)
        narrow_rows(graph, storage)
        interface = [v.type.dtype for v in graph.outputs]
        nodes = list(graph.nodes)
        for value in graph.inputs:
            if value.type.dtype in _WIDE:
                _narrow_input(graph, value, storage, nodes[0] if nodes else graph.return_node)
        scales = _packed_scales(graph)
        exempt = between_bytes(graph) | scales
        literals = {node.result: node.op.literal for node in nodes if isinstance(node.op, Constant)}
        narrowed: dict[Literal, Literal] = {}
        for node in nodes:
            _widen_sums(graph, node, literals)
            exempt |= _keep_constant_statistics(graph, node, literals)
            if isinstance(node.op, Constant) and all(user is graph.return_node for user in node.result.users):
                continue
            if isinstance(node.op, Cast) and node.op.to in _WIDE and node.result not in exempt:
                graph.set_op(node, Cast(storage))
            if isinstance(node.op, Constant) and node.op.literal.type.dtype in _WIDE and node.result not in scales:
                literal = node.op.literal
                if literal not in narrowed:
                    narrowed[literal] = Narrow(literal, storage, literal.label or node.result.name)
                graph.set_op(node, Constant(narrowed[literal]))
            for value in node.results:
                if value.type.dtype in _WIDE and value not in exempt:
                    graph.set_type(value, value.type.with_dtype(storage))
            for place in SUMS.get(type(node.op), ()):
                _keep_wide(graph, node.results[place], storage)
        _cast_fp32_values(graph, exempt, literals, storage)
        cast_around_scans(graph, storage, literals)
        last, wide = graph.return_node, dict[Value, Value]()
        for index, (value, dtype) in enumerate(zip(graph.outputs, interface, strict=True)):
            if value.type.dtype is dtype:
                continue
            if value not in wide or wide[value].type.dtype is not dtype:
                wide[value] = graph.add(Cast(dtype), value, name=value.name, before=last)
            graph.set_input(last, index, wide[value])


def between_bytes(graph: Graph) -> set[Value]:
    """Find the fp32 values between products of 8-bit numbers and such numbers, which stay in fp32.

    A sum exceeds the range of fp16 before its scale, and 16 bits would round to the wrong 8 bits near ties.
    They are virtual where a step computes all of them. A value whose range decides its scale is stored, in 16 bits.
    """
    wide, sums = set[Value](), set[Value]()
    nodes = list(graph.nodes)
    for node in nodes:
        if node.results[0].type.dtype is not DType.F32:
            continue
        constants = sum(v.literal is not None for v in node.operands)
        if isinstance(node.op, Cast):
            source = node.operands[0]
            product = source.node is not None and isinstance(source.node.op, (*FORWARD_CONVOLUTIONS, MatMul))
            if source.type.dtype is DType.I32 and product:
                sums.add(node.result)
            if source.type.dtype in (*BYTES, DType.F8E4M3):
                wide.add(node.result)
        elif isinstance(node.op, Pointwise) and any(v in sums for v in node.operands):
            wide.add(node.result)
            if node.op.name in ("add", "sub"):  # a term of a zero point, or a bias before the scale
                sums.add(node.result)
        elif node.op.name in ("mul", "add", "sub") and constants and any(v in wide for v in node.operands):
            wide.add(node.result)
    wide |= sums
    for node in reversed(nodes):
        rounds = isinstance(node.op, Cast) and node.op.to in BYTES
        if rounds or (isinstance(node.op, Pointwise) and node.result in wide):
            wide.update(v for v in node.operands if v.type.dtype is DType.F32 and is_pointwise(v))
    wide -= {v for v in wide - sums if has_extremes(v)}
    return wide.union(*map(_around_fp8, nodes))


def _around_fp8(node: Node) -> Iterator[Value]:
    """Yield the fp32 values next to a product of fp8 or a rounding to fp8: its sums, scaled, and what is rounded.

    Values between them are rounded to 16 bits where they are stored. That changes an 8-bit result by one step at most,
    and cuBLASLt adds a bias in 16 bits only.
    """
    if isinstance(node.op, MatMul) and node.operands[0].type.dtype is DType.F8E4M3:
        yield node.result
        yield from (user.result for user in node.result.users if user.op.name == "mul")
    if node.op == Cast(DType.F8E4M3) and (clip := node.operands[0].node) is not None and clip.op.name == "clip":
        yield clip.result
        scaled = clip.operands[0].node
        if scaled is not None and scaled.op.name in ("div", "mul"):
            yield scaled.result


def _packed_scales(graph: Graph) -> set[Value]:
    """Find the scales of packed weights in fp32: they stay, because rounding them would round whole blocks."""
    products = [node for node in graph.nodes if isinstance(node.op, PackedMatMul)]
    return {v for node in products for v in [node.operands[PACKED_SCALES]] if v.type.dtype is DType.F32}


def _cast_fp32_values(
    graph: Graph, exempt: Collection[Value], literals: Mapping[Value, Literal], storage: DType
) -> None:
    """Cast between values that stay in fp32 and their neighbours in the storage type."""
    casts: dict[tuple[Value, DType], Value] = {}
    for node in [*graph.nodes, graph.return_node]:
        if isinstance(node.op, (Cast, Constant, Return)):
            continue  # a cast reads any type; outputs are cast to theirs
        wanted = DType.F32 if node.results[0] in exempt else storage
        for index, value in enumerate(node.operands):
            if value.type.dtype not in (DType.F32, storage) or value.type.dtype is wanted:
                continue
            if isinstance(node.op, PackedMatMul) and index == PACKED_SCALES:
                continue
            if wanted is storage and value not in exempt:
                continue  # sums that an op reads in fp32
            if (value, wanted) not in casts:
                literal, narrow = literals.get(value), value.node
                if narrow is not None and isinstance(narrow.op, Cast) and narrow.operands[0].type.dtype is wanted:
                    copy = narrow.operands[0]  # an input
                elif literal is not None and literal.type.dtype is wanted:
                    copy = graph.insert(Constant(literal), before=node, names=(value.name,)).result
                else:
                    copy = graph.add(Cast(wanted), value, before=node)
                casts[value, wanted] = copy
            graph.set_input(node, index, casts[value, wanted])


def _keep_wide(graph: Graph, sums: Value, storage: DType) -> None:
    """Keep sums of attention and of channels in f32; readers that are not made for f32 get them rounded."""
    assert sums.node is not None
    readers = [(n, i) for n, i in sums.uses if i not in READS_SUMS.get(type(n.op), ())]
    graph.set_type(sums, sums.type.with_dtype(DType.F32))
    if readers:
        after = next(iter(graph.since(sums.node)), graph.return_node)
        narrow = graph.insert(Cast(storage), [sums], before=after).result
        for node, index in readers:
            graph.set_input(node, index, narrow)


def _widen_sums(graph: Graph, node: Node, literals: Mapping[Value, Literal]) -> None:
    """Cast sums that an op reads to f32, unless they have the type of their source. Constant sums are not narrowed."""
    for place in READS_SUMS.get(type(node.op), ()):
        sums = node.operands[place]
        literal = literals.get(sums)
        if literal is not None and literal.type.dtype is DType.F32:
            wide = graph.insert(Constant(literal), before=node, names=(sums.name,)).result
            graph.set_input(node, place, wide)
        elif sums.type.dtype not in (DType.F32, node.operands[0].type.dtype):
            graph.set_input(node, place, graph.add(Cast(DType.F32), sums, before=node))


def _keep_constant_statistics(graph: Graph, node: Node, literals: Mapping[Value, Literal]) -> set[Value]:
    """Keep constant parameters of a batch norm in f32, as cuDNN takes them; return its statistics, which are as wide.

    Such a norm stands for a normalisation without parameters, and nothing reads its statistics.
    """
    statistics = node.results[1:]
    if not isinstance(node.op, BatchNormTrain) or any(v.uses for v in statistics):
        return set()
    constants = [literals.get(v) for v in node.operands[1:]]
    wide = [literal for literal in constants if literal is not None and literal.type.dtype is DType.F32]
    if len(wide) < len(constants):
        return set()
    for place, literal in enumerate(wide, 1):
        name = node.operands[place].name
        graph.set_input(node, place, graph.insert(Constant(literal), before=node, names=(name,)).result)
    return set(statistics)


def _narrow_input(graph: Graph, value: Value, storage: DType, before: Node) -> None:
    """Insert one cast of an input for all its users.

    The return, casts, and readers of f32 sums read the input itself and lose nothing.
    """
    users = [
        (n, i)
        for n, i in value.uses
        if n is not graph.return_node
        and not isinstance(n.op, Cast)
        and not (value.type.dtype is DType.F32 and i in READS_SUMS.get(type(n.op), ()))
    ]
    if not users:
        return
    narrow = graph.add(Cast(storage), value, name=value.name, before=before)
    for node, index in users:
        graph.set_input(node, index, narrow)


class Narrow(Literal):
    """A literal in a storage type of 16 bits, converted when it is first read.

    Finite numbers stay finite: a mask's lowest number becomes the lowest of the storage type and hides as much, where
    an infinity would make rows of NaN. A warning tells of lost numbers that may have been meant.

    wide: the literal that is converted.
    name: names it in the warning.
    """

    __slots__ = ("_early", "name", "wide")

    def __init__(self, literal: Literal, storage: DType, name: str):
        key = ("narrow", storage, name, literal.key)
        super().__init__(literal.type.with_dtype(storage), self._row_major, literal.label, key, sources=[literal])
        self.wide, self.name = literal, name
        self._early: Future[Array] | None = None

    def _row_major(self) -> Array:
        return self._converted(row_major)

    def _operand(self) -> Array:
        return self._converted(converted)

    def early(self) -> Callable[[], None] | None:
        """Return work that converts the data in the memory order in which it is stored."""
        if self._array is not None or self._early is not None:
            return None
        self._early = early = Future[Array]()

        def work() -> None:
            try:
                early.set_result(self._computed(converted))
            except Exception as error:  # noqa: BLE001  # raised where the data is needed
                early.set_exception(error)

        return work

    def forget_early(self) -> None:
        self._early = None

    def _converted(self, convert: Callable[[Array, np.dtype[Any]], Array]) -> Array:
        early, self._early = self._early, None
        return self._computed(convert) if early is None else convert(early.result(), self.type.dtype.numpy)

    def _computed(self, convert: Callable[[Array, np.dtype[Any]], Array]) -> Array:
        storage = self.type.dtype
        rounded = self.wide.rounded(storage.numpy)
        if rounded is not None and not _has_infinities(rounded, storage):
            return convert(rounded, storage.numpy)  # which may be transposed
        wide = self.wide.operand()
        with np.errstate(over="ignore"):
            narrow = convert(wide, storage.numpy)
        if not _has_infinities(narrow, storage):
            return narrow
        beyond = np.isfinite(wide) & np.isinf(narrow)
        lost = int((beyond & (np.abs(wide) < INFINITE_FROM)).sum())
        if lost:
            warnings.warn(
                f"constant {self.name!r}: {lost} of {wide.size} elements are out of {storage.value}'s range and "
                "became its largest numbers; use precision bf16 or fp32",
                stacklevel=2,
            )
        narrow[beyond] = np.copysign(ml_dtypes.finfo(storage.numpy).max, narrow[beyond])
        return narrow


def _has_infinities(array: Array, storage: DType) -> bool:
    """Tell if an array of 16-bit floats has an infinity.

    Two maxima of its bits, one for each sign, show whether it has infinities or NaN. An array seldom has any. There are
    only two calls, because a thread waits for Python's lock after each.
    """
    bits = array.ravel(order="K").view(np.uint16)
    infinity = np.array(np.inf, storage.numpy).view(np.uint16)
    if not bits.size or (bits.view(np.int16).max() < infinity and bits.max() < infinity | _SIGN):
        return False
    return bool(np.isinf(array).any())
