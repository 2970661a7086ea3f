"""Generate C for pointwise ops that read or store numbers of 8 bits, with fewer conversions.

A GPU converts between integers and floats slowly, and NaN costs a maximum more instructions. Sums of 8-bit products
and what follows them have known bounds. Within these, integers become floats through the bits of a large float, and no
NaN occurs. Results are the same, bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field

import numpy as np

from fusec.gpu.kernels.codegen.kernel import HALVES
from fusec.gpu.kernels.codegen.op_table import literal
from fusec.gpu.kernels.codegen.pointwise_code import EXACT, PointwiseCode
from fusec.ir import DType, Node, Value
from fusec.ops import Cast, Pointwise
from fusec.passes.rewriting.value_facts import is_rounded_to_integers
from fusec.system.dataclass import dataclass

SMALL = float(1 << 22)  # integers up to here are exact in the bits of a float near 1.5 * 2^23
START = 0x4B400000  # the bits of 1.5 * 2^23; sums that begin here become floats by one subtraction
BYTE_PRODUCT = 1 << 14  # the largest product of two numbers of 8 bits
UNIT = "6.103515625e-05f"  # 2^-14
MIN_FACTOR = 2.0**-100  # of what is multiplied by it, so that the product is no denormal
UNKNOWN = float("inf")
_SLACK = 1.0 + 2.0**-20  # more than the rounding of one op
_FLOATS = (DType.F32, *HALVES)
_BYTES = {DType.I8: 128.0, DType.U8: 255.0}


@dataclass(frozen=True)
class EarlyLoad:
    """A load of words: the C type, the variable and the expression."""

    type: str
    name: str
    text: str


@dataclass
class ByteCode(PointwiseCode):
    """The statements of pointwise ops with bounds of their values. It rounds no intermediate result.

    bounds: the largest size of each value; a value with a bound is never NaN.
    integers: the C of element `j` of float values that are integers.
    bytes: the C of element `j` of values of 8 bits, as an i32 that is still to be saturated.
    units: the same of values that are at least zero, as `rounded_unit` gives them.
    loaded: values of 8 bits that are loaded as words.
    early: these loads. A kernel may take them out, and place them before work that hides their time.
    """

    rounds: bool = False
    bounds: dict[Value, float] = field(default_factory=dict[Value, float])
    integers: dict[Value, str] = field(default_factory=dict[Value, str])
    bytes: dict[Value, str] = field(default_factory=dict[Value, str])
    units: dict[Value, str] = field(default_factory=dict[Value, str])
    loaded: set[Value] = field(default_factory=set[Value])
    early: list[EarlyLoad] = field(default_factory=list["EarlyLoad"])

    def define_bounded(self, value: Value, text: str, bound: float) -> None:
        """Set the expression of a value whose size is at most `bound`."""
        self.bounds[value] = bound
        self.define(value, text, rounds=False)

    def bound(self, value: Value) -> float:
        """Return the largest size of a value; infinity if none is known, or if it may be NaN."""
        if value not in self.bounds:
            self.bounds[value] = _BYTES.get(value.type.dtype, UNKNOWN)
            if value.literal is not None and value.type.dtype in _FLOATS:
                largest = float(np.abs(value.literal.array.astype(np.float64)).max(initial=0.0))
                self.bounds[value] = largest if np.isfinite(largest) else UNKNOWN
        return self.bounds[value]

    def apply(self, node: Node) -> None:
        """Compute the result of a node, by its bounds where that is faster."""
        result = node.results[0]
        bound = self._bound_of(node)
        text = self._text(node)
        if text is None:
            super().apply(node)
        else:
            self.define(result, text, rounds=node.op.name not in EXACT)
        self.bounds[result] = bound
        self._find_integers(node)

    def store(self, value: Value, known: Value | None = None, type: object = None) -> None:
        """Store a known value; bytes that are still to be saturated are packed by fours."""
        vector = self.space.vector
        if (
            known is None
            and type is None
            and value in self.bytes
            and vector % 4 == 0
            and self.space.is_pack(value.type)
        ):
            pointer, name = self.arguments.write(value), f"{self.prefix}bytes{len(self.tail)}"
            c_type, store = ("u32", "store_units") if value in self.units else ("i32", "store_bytes")
            self.head.append(f"{c_type} {name}[{vector}];")
            self.body.append(f"{name}[j] = {self.units.get(value) or self.bytes[value]};")
            self.tail.append(f"{store}<{vector}>({pointer} + ({self.space.offset(value.type)}), {name});")
        else:
            super().store(value, known)

    def lines(self) -> list[str]:
        """Return the statements, as a block."""
        first, *rest = super().lines()
        return [first, *(f"const {load.type} {load.name} = {load.text};" for load in self.early), *rest]

    def loads(self) -> list[str]:
        """Return the loads, for a kernel that places them before work that hides their time."""
        early = [f"const {load.type} {load.name} = {load.text};" for load in self.early]
        return early + [line for line in self.head if line.startswith("const ")]

    def after_loads(self, condition: str) -> list[str]:
        """Return the other statements, as a block. Packs are stored where a condition holds."""
        declared = [line for line in self.head if not line.startswith("const ")]
        loop = ["#pragma unroll", f"for (int j = 0; j < {self.space.vector}; ++j) {{", *self.body, "}"]
        return ["{", *declared, *loop, *(f"if ({condition}) {line}" for line in self.tail), "}"]

    def _bound_of(self, node: Node) -> float:
        rule = _BOUNDS.get(node.op.name) if isinstance(node.op, Pointwise) else None
        bounds = [self.bound(v) for v in node.operands]
        if isinstance(node.op, Cast) and node.results[0].type.dtype in _FLOATS:
            return bounds[0]
        if rule is None or node.results[0].type.dtype not in _FLOATS or not all(map(np.isfinite, bounds)):
            return UNKNOWN
        bound = rule(node, bounds) * _SLACK
        return bound if bound < 1e37 else UNKNOWN

    def _text(self, node: Node) -> str | None:
        """Return the C of a node's result by the bounds of its operand; None if they do not help."""
        operand, result = node.operands[0], node.results[0]
        if result.type.dtype not in _FLOATS or not np.isfinite(self.bound(operand)):
            return None
        if isinstance(node.op, Cast):
            if operand.type.dtype is DType.I32 and self.bound(operand) <= SMALL:
                return f"small_to_f32({self.get(operand)})"
            return self._bytes_read(operand) if operand.type.dtype is DType.I8 else None
        if node.op.name == "gelu" and is_rounded_to_integers(result):
            return f"gelu_for_bytes({self.get(operand)})"
        if node.op.name == "relu" and operand.type.dtype in _FLOATS:
            return f"larger({self.get(operand)}, 0.0f)"
        if node.op.name == "clip" and operand.type.dtype in _FLOATS and isinstance(node.op, Pointwise):
            low, high = (literal(limit, DType.F32) for limit in _limits(node.op))
            return f"smaller(larger({self.get(operand)}, {low}), {high})"
        return None

    def _bytes_read(self, value: Value) -> str | None:
        """Load neighbouring bytes as words, and return one of them as a float."""
        vector = self.space.vector
        if value in self.known or value.literal is not None or vector % 4 or not self.space.is_pack(value.type):
            return None
        pointer, count = self.arguments.read(value), vector // 4
        name = f"{self.prefix}{pointer}_words"
        if value not in self.loaded:
            self.loaded.add(value)
            at = f"(const u32*)({pointer} + ({self.space.offset(value.type)}))"
            self.early.append(EarlyLoad(f"Pack<u32, {count}>", name, f"load_now<u32, {count}>({at})"))
        return f"byte_to_f32({name}, j)"

    def _find_integers(self, node: Node) -> None:
        """Note that a result is an integer, or a byte that a store saturates: the end of a quantisation."""
        operand, result = node.operands[0], node.results[0]
        if node.op.name == "round" and operand.type.dtype in _FLOATS:
            rint = "small_rint" if self.bound(operand) < SMALL else "rint_to_i32"
            self.integers[result] = f"{rint}({self.get(operand)})"
        elif operand not in self.integers:
            return
        elif node.op == Cast(DType.I8) and operand in self.bytes:
            self.bytes[result] = self.bytes[operand]
            if operand in self.units:
                self.units[result] = self.units[operand]
        elif isinstance(node.op, Pointwise) and node.op.name == "clip" and _limits(node.op) == (-128.0, 127.0):
            self.integers[result] = self.bytes[result] = self.integers[operand]
            unit = self._unit(operand)
            if unit is not None:
                self.units[result] = unit

    def _unit(self, rounded: Value) -> str | None:
        """Return the C of `rounded` in few instructions where it is `round(relu(x))` or `round(relu(x) * scale)`.

        Saturation is part of the multiplication, and replaces `relu`. Powers of two change no rounding.
        """
        (value,) = rounded.node.operands if rounded.node is not None else (rounded,)
        scale, node = "", value.node
        if node is not None and node.op.name == "mul" and value.type.dtype is DType.F32:
            others = [v for v in node.operands if not _is_positive_scalar(v)]
            if len(others) != 1:
                return None
            (factor,) = (v for v in node.operands if v is not others[0])
            scale, node = f"{self.get(factor)} * ", others[0].node
        if node is None or node.op.name != "relu" or node.operands[0] not in self.known:
            return None
        return f"rounded_unit({self.known[node.operands[0]]} * ({scale}{UNIT}))"


def _is_positive_scalar(value: Value) -> bool:
    if value.literal is None or value.type.size != 1:
        return False
    return MIN_FACTOR < float(value.literal.array.reshape(-1)[0]) < UNKNOWN


def _limits(op: Pointwise) -> tuple[float, float]:
    return float(op.attributes["min"]), float(op.attributes["max"])


def _clipped(node: Node, bounds: Sequence[float]) -> float:
    assert isinstance(node.op, Pointwise)
    low, high = _limits(node.op)
    return max(min(bounds[0], max(abs(low), abs(high))), abs(low) if low > 0 else 0.0, abs(high) if high < 0 else 0.0)


_BOUNDS: dict[str, Callable[[Node, Sequence[float]], float]] = {
    "add": lambda node, bounds: bounds[0] + bounds[1],
    "sub": lambda node, bounds: bounds[0] + bounds[1],
    "mul": lambda node, bounds: bounds[0] * bounds[1],
    "relu": lambda node, bounds: bounds[0],
    "gelu": lambda node, bounds: bounds[0],
    "clip": _clipped,
    "round": lambda node, bounds: bounds[0] + 1.0,
}
