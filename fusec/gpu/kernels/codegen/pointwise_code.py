"""Generate C for pointwise ops, applied to each element that a kernel reads or is about to write.

A `Space` knows the coordinates of the elements. `PointwiseCode` loads operands, several neighbours in one load where
they are contiguous, applies nodes and stores results. Each result is rounded to its own type, so fusing steps changes
no number.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import field, replace

from fusec.gpu.kernels.codegen.copies_ahead import COPIED_BYTES, CopiesAhead
from fusec.gpu.kernels.codegen.dilated import dilated_names
from fusec.gpu.kernels.codegen.indexing import Strided, View
from fusec.gpu.kernels.codegen.kernel import (
    BLOCK,
    C_TYPES,
    HALVES,
    MAX_VECTOR,
    VECTOR_BYTES,
    Arguments,
    by_value,
    compute_type,
    computed_in,
)
from fusec.gpu.kernels.codegen.op_table import expression, literal, pattern
from fusec.ir import DType, Node, Value, is_scale
from fusec.ops import Cast, Dilate, Pointwise, Relayout
from fusec.schedule.program import inputs_of
from fusec.system.dataclass import dataclass

BYTES = (DType.I8, DType.U8, DType.F8E4M3)  # types of quantised activations
FLOAT8_LARGEST = 448.0  # of f8e4m3
# Results that need no rounding, because they are an operand, its negative, or an integer.
EXACT = frozenset({"identity", "relu", "abs", "neg", "max", "min", "where", "sign", "ceil", "floor", "round"})


@dataclass(frozen=True)
class Space:
    """Elements of a logical shape.

    names: the C expression of each coordinate; None is zero.
    along, vector: a thread handles `vector` neighbours along dim `along`; its coordinate is that of the first.
    packs: contiguous neighbours are moved by one load or store.
    """

    shape: tuple[int, ...]
    names: tuple[str | None, ...]
    along: int = -1
    vector: int = 1
    packs: bool = True

    def offset(self, type: Strided) -> str:
        """Return the offset of the (first) element in a tensor that broadcasts to the shape.

        Negative strides are multiplied in 64 signed bits. An unsigned sum would be right as a whole. But NVRTC (13.5)
        adds the constant part of an index after it widened the rest, which has wrapped around by then.
        """
        lead = len(self.shape) - type.rank
        kind = "(i64)" if any(stride < 0 for stride in type.strides) else ""
        terms = [
            f"{kind}{self.names[lead + d]} * {stride}" if stride != 1 else f"{kind}{self.names[lead + d]}"
            for d, (size, stride) in enumerate(zip(type.shape, type.strides, strict=True))
            if size != 1 and self.names[lead + d] is not None
        ]
        if isinstance(type, View) and type.start:
            terms.append(str(type.start))
        return " + ".join(terms) or "0"

    def is_pack(self, type: Strided) -> bool:
        """Tell if neighbours in a tensor are moved by one load or store."""
        return self.packs and self.vector > 1 and self.stride_along(type) == 1

    def stride_along(self, type: Strided) -> int:
        """Return the distance of neighbours in a tensor that broadcasts to the shape, in elements."""
        return stride_along(type, len(self.shape), self.along) if self.along >= 0 else 0

    def coordinate(self, rank: int, axis: int) -> str:
        """Return the coordinate along an axis of a tensor of that rank that broadcasts to the shape."""
        dim = len(self.shape) - rank + axis
        name = self.names[dim] or "0"
        return f"({name} + j)" if dim == self.along and self.vector > 1 else name


def can_generate(node: Node) -> bool:
    """Tell if `PointwiseCode` can apply a node."""
    types = (*(v.type.dtype for v in node.operands), *(v.type.dtype for v in node.results))
    if any(dtype not in C_TYPES for dtype in types):
        return False
    if isinstance(node.op, Cast):
        return True
    return isinstance(node.op, Pointwise) and pattern(node.op, node.operands[-1].type.dtype) is not None


@dataclass
class PointwiseCode:
    """The C statements for a few neighbouring elements.

    prefix: begins the names of the variables.
    known: the C expression of element `j` of each value.
    narrowed: the same, in the type that the value is stored in.
    head, body, tail: statements before, in and after the loop over neighbours.
    rounds: round each result to its type; else only what is stored.
    ahead: issue loads where `head` is, however late their values are used.
    copies: copy packs to shared memory ahead of their use instead of loading them.
    """

    space: Space
    arguments: Arguments
    prefix: str = "v"
    known: dict[Value, str] = field(default_factory=dict[Value, str])
    narrowed: dict[Value, str] = field(default_factory=dict[Value, str])
    head: list[str] = field(default_factory=list[str])
    body: list[str] = field(default_factory=list[str])
    tail: list[str] = field(default_factory=list[str])
    rounds: bool = True
    ahead: bool = False
    copies: CopiesAhead | None = None

    def apply(self, node: Node) -> None:
        """Compute the result of a node. Operands that are not known are loaded."""
        if isinstance(node.op, Dilate):
            (x,) = node.operands
            self.known[node.result] = self.known[x] if x in self.known else self._load_dilated(node)
            return
        operands = [self.get(v) for v in node.operands]
        result = node.results[0]
        if isinstance(node.op, Relayout):  # another place in memory, the same number
            self.known[result] = operands[0]
            if node.operands[0] in self.narrowed:
                self.narrowed[result] = self.narrowed[node.operands[0]]
            return
        source, dtype = node.operands[-1].type, result.type.dtype
        if (limited := limited_float8(node)) is not None and limited in self.known:
            self._define_narrow(result, f"saturated_e4m3({self.known[limited]})")
            return
        if (whole := whole_number(node)) is not None and whole[0] in self.known:
            rounded, low, high = whole
            text = f"whole_number<{C_TYPES[dtype]}>({self.known[rounded]}, {low}.0f, {high}.0f)"
        elif isinstance(node.op, Cast):
            text = cast(operands[0], source.dtype, dtype)
        else:
            assert isinstance(node.op, Pointwise)
            axis = node.op.attributes.get("axis", 0)
            index = self.space.coordinate(source.rank, int(axis)) if node.op.name == "gen_index" else "0"
            if node.op.name == "gen_index" and source.shape[int(axis)] == 1:
                index = "0"
            text = expression(node.op, source.dtype, operands, index)
        self.define(result, text, rounds=node.op.name not in EXACT)

    def compute(self, nodes: Iterable[Node], stored: Iterable[Value] = ()) -> None:
        """Apply nodes, and store these values."""
        for node in nodes:
            self.apply(node)
        for value in stored:
            self.store(value)

    def define(self, value: Value, text: str, rounds: bool = True) -> None:
        """Set the expression of a value, and round it to the value's type unless `rounds` is false."""
        dtype, name = value.type.dtype, f"{self.prefix}{len(self.known)}"
        rounded = (self.rounds and dtype in HALVES) or dtype.is_narrow
        if rounds and rounded:
            self._define_narrow(value, f"narrow<{C_TYPES[dtype]}>({text})")
            return
        self.body.append(f"const {compute_type(dtype)} {name} = {text};")
        self.known[value] = name

    def _define_narrow(self, value: Value, text: str) -> None:
        """Set the expression of a value as it is stored. A store reuses it, which saves a conversion."""
        dtype, name = value.type.dtype, f"{self.prefix}{len(self.known)}"
        self.body.append(f"const {C_TYPES[dtype]} {name}_stored = {text};")
        self.narrowed[value] = f"{name}_stored"
        self.body.append(f"const {compute_type(dtype)} {name} = wide({name}_stored);")
        self.known[value] = name

    def get(self, value: Value, type: Strided | None = None, memory: Value | None = None) -> str:
        """Return the element of a value, in the type it is computed in.

        type: how it is stored, if not as its own type says.
        memory: the value whose memory is read, if not its own.
        """
        if value not in self.known:
            self.known[value] = self.load(memory or value, type or value.type)
        return self.known[value]

    def store(self, value: Value, known: Value | None = None, type: Strided | None = None) -> None:
        """Store a known value.

        known: the value whose expression is stored, if it is another.
        type: the strides that it is written with, if not its own.
        """
        c_type, vector, type = C_TYPES[value.type.dtype], self.space.vector, type or value.type
        pointer, at = self.arguments.write(value), self.space.offset(type)
        text, step = self.as_stored(known or value), self.space.stride_along(type)
        if value.type.dtype.bits < 8:
            self._store_parts(pointer, at, text, type)
        elif self.space.is_pack(type):
            pack = f"{pointer}_{len(self.tail)}"
            self.head.append(f"Pack<{c_type}, {vector}> {pack};")
            self.body.append(f"{pack}.v[j] = {text};")
            self.tail.append(f"store_pack<{c_type}, {vector}>({pointer} + ({at}), {pack});")
        else:
            self.body.append(f"{pointer}[{at} + j * {step}] = {text};")

    def _store_parts(self, pointer: str, at: str, text: str, type: Strided) -> None:
        """Store an element that shares its byte with others."""
        kind = f"{C_TYPES[type.dtype]}, {self.space.vector}"
        if self.space.is_pack(type) and self.space.vector * type.dtype.bits % 8 == 0:
            pack = f"{pointer}_{len(self.tail)}"
            self.head.append(f"PackedParts<{kind}> {pack} = {{0u}};")
            self.body.append(f"{pack}.set(j, {text});")
            self.tail.append(f"store_parts<{kind}>({pointer}, {at}, {pack});")
        else:
            self.body.append(f"store_part({pointer}, {at} + j * {self.space.stride_along(type)}, {text});")

    def as_stored(self, value: Value) -> str:
        """Return a known value in the type it is stored in."""
        return self.narrowed.get(value) or f"narrow<{C_TYPES[value.type.dtype]}>({self.known[value]})"

    def lines(self) -> list[str]:
        """Return the statements, as a block."""
        unroll = ["#pragma unroll"] if self.space.vector > 1 else []
        loop = [*unroll, f"for (int j = 0; j < {self.space.vector}; ++j) {{", *self.body, "}"]
        return ["{", *self.head, *loop, *self.tail, "}"]

    def load(self, value: Value, type: Strided) -> str:
        """Load the element of a value from memory."""
        number = value.literal.array.reshape(-1)[0] if value.literal is not None and value.type.size == 1 else None
        if number is not None and not is_scale(number):
            kind = computed_in(type.dtype)
            return literal(float(number) if kind.is_float else int(number), kind)
        c_type, vector = C_TYPES[type.dtype], self.space.vector
        pointer, at, step = self.arguments.read(value), self.space.offset(type), self.space.stride_along(type)
        name = f"{self.prefix}{pointer}_{len(self.known)}"
        if type.dtype.bits < 8:
            return self._load_parts(name, pointer, type)
        if self.space.is_pack(type):
            pack = f"Pack<{c_type}, {vector}>"
            load = "load_pack_here" if self.ahead else "load_pack"
            text, item = f"{load}<{c_type}, {vector}>({pointer} + ({at}))", vector * type.dtype.itemsize
            if self.copies is not None and item in COPIED_BYTES:
                text = self.copies.add(pack, item, f"{pointer} + ({at})")
            self.head.append(f"const {pack} {name} = {text};")
            return f"wide({name}.v[j])"
        if vector > 1 and step:
            return f"wide({pointer}[{at} + j * {step}])"
        self.head.append(f"const {compute_type(type.dtype)} {name} = wide({pointer}[{at}]);")
        return name

    def _load_dilated(self, node: Node) -> str:
        """Load the element of a dilate's operand; where there is none, it is zero."""
        (x,), (vector, along) = node.operands, (self.space.vector, self.space.along)
        pointer, c_type = self.arguments.read(x), C_TYPES[x.type.dtype]
        name = f"{self.prefix}{pointer}_{len(self.known)}"
        if self.space.is_pack(x.type) and x.type.shape[along] == self.space.shape[along]:
            names, there = dilated_names(node, self.space.names)
            at = replace(self.space, names=names).offset(x.type)
            self.head.append(f"Pack<{c_type}, {vector}> {name} = {{}};")
            self.head.append(f"if ({there}) {name} = load_pack<{c_type}, {vector}>({pointer} + ({at}));")
            return f"wide({name}.v[j])"
        each = [self.space.coordinate(x.type.rank, d) if n else n for d, n in enumerate(self.space.names)]
        names, there = dilated_names(node, each)
        at = replace(self.space, names=names).offset(x.type)
        kind = compute_type(x.type.dtype)
        self.body.append(f"const {kind} {name} = {there} ? wide({pointer}[{at}]) : {kind}(0);")
        return name

    def _load_parts(self, name: str, pointer: str, type: Strided) -> str:
        """Load an element that shares its byte with others."""
        at, step, vector = self.space.offset(type), self.space.stride_along(type), self.space.vector
        if self.space.is_pack(type) and vector * type.dtype.bits % 8 == 0:
            kind = f"{C_TYPES[type.dtype]}, {vector}"
            self.head.append(f"const PackedParts<{kind}> {name} = load_parts<{kind}>({pointer}, {at});")
            return f"wide({name}.get(j))"
        if vector > 1 and step:
            return f"wide(load_part({pointer}, {at} + j * {step}))"
        self.head.append(f"const {compute_type(type.dtype)} {name} = wide(load_part({pointer}, {at}));")
        return name


def whole_number(node: Node) -> tuple[Value, int, int] | None:
    """Return the operand and limits of `cast(clip(round(x)))` from fp32 to integers of 8 bits; None for other nodes.

    For whole limits that is the same as rounding after the limits, which takes one addition.
    """
    dtype = node.result.type.dtype
    clip = node.operands[0].node if isinstance(node.op, Cast) and dtype in BYTES and dtype.is_int else None
    if clip is None or clip.op.name != "clip" or clip.result.type.dtype is not DType.F32:
        return None
    before, (low, high) = clip.operands[0].node, (clip.op.attributes[k] for k in ("min", "max"))
    if before is None or before.op.name != "round" or max(abs(low), abs(high)) > 255 or low % 1 or high % 1:
        return None
    return before.operands[0], int(low), int(high)


def limited_float8(node: Node) -> Value | None:
    """Return the operand of `cast(clip(x))` from fp32 to f8e4m3, with the limits of that type; None for other nodes.

    The instruction that converts saturates there by itself.
    """
    clip = node.operands[0].node if node.op == Cast(DType.F8E4M3) else None
    if clip is None or clip.op.name != "clip" or clip.result.type.dtype is not DType.F32:
        return None
    limits = clip.op.attributes
    return clip.operands[0] if (limits["min"], limits["max"]) == (-FLOAT8_LARGEST, FLOAT8_LARGEST) else None


def rounded_to(text: str, dtype: DType) -> str:
    """Round an expression to a storage type; its C type stays the one that is computed in."""
    return f"rounded<{C_TYPES[dtype]}>({text})" if dtype in HALVES or dtype.is_narrow else text


def cast(text: str, source: DType, to: DType) -> str:
    """Convert an element, in the types that are computed in. A result of 16 bits or fewer is not rounded yet."""
    if to is source:
        return text
    if to.is_narrow or source.is_narrow:
        kinds = computed_in(source), computed_in(to)
        return text if kinds[0] is kinds[1] else cast(text, *kinds)
    if to is DType.BOOL:
        return f"{text} != 0"
    if to in HALVES:
        return text if source.is_float and not (source is DType.F64 and to is DType.BF16) else f"(float)({text})"
    if source.is_float and to.itemsize < 4:  # through a wider one, as processors do
        return f"({C_TYPES[to]})(i32)({text})"
    return f"({C_TYPES[to]})({text})"


def widest_vector(
    size: int, types: Sequence[Strided], steps: Sequence[Sequence[int]], exact: bool = True, most: int = MAX_VECTOR
) -> int:
    """Return how many neighbours along a dim one load or store can move.

    steps: for each type its stride along the dim, and then its strides along all other dims, as from `strides_from`.
    exact: the vector must divide `size`.
    most: limit of the number of neighbours.
    """
    smallest = min((t.dtype.itemsize for t in types), default=1)
    vector = min(most, max(1, VECTOR_BYTES // smallest))
    while vector > 1:
        if (not exact or size % vector == 0) and move_packs(steps, vector):
            return vector
        vector //= 2
    return 1


def move_packs(steps: Iterable[Sequence[int]], vector: int) -> bool:
    """Tell if one load or store of each tensor moves `vector` neighbours along a dim, or all are the same element.

    steps: for each tensor its stride along the dim, and then its strides along all other dims, as from `strides_from`.
    """
    return all(own != 1 or all(stride % vector == 0 for stride in others) for own, *others in steps)


def moves_packs(result: Value, rest: Sequence[Node], outputs: Sequence[Value], vector: int) -> bool:
    """Tell if one load or store moves `vector` neighbouring channels of what an epilogue reads and a step stores.

    result: the first result, of a convolution. It is in registers, so the epilogue does not load it.
    rest: the epilogue.
    """
    read = [v for v in inputs_of(rest) if v is not result]
    types = [v.type for v in (*read, *outputs) if v.type.size != 1]
    return move_packs((strides_from(type, result.type.rank, 1) for type in types), vector)


def stride_along(type: Strided, rank: int, dim: int) -> int:
    """Return the stride of a tensor along dim `dim` of a shape of rank `rank` that it broadcasts to."""
    own = dim - (rank - type.rank)
    return type.strides[own] if own >= 0 and type.shape[own] != 1 else 0


def strides_from(type: Strided, rank: int, along: int) -> list[int]:
    """Return the stride of a tensor along dim `along` of such a shape, and then its strides along the other dims."""
    return [stride_along(type, rank, along), *(stride_along(type, rank, d) for d in range(rank) if d != along)]


def merged_dims(shape: tuple[int, ...], order: Sequence[int], types: Sequence[Strided]) -> list[list[int]]:
    """Group the dims that are not 1, in memory order; a group acts as one dim in all the types."""
    groups: list[list[int]] = []
    for dim in order or range(len(shape)):
        if shape[dim] == 1:
            continue
        if groups and types:
            outer = groups[-1][-1]
            if all(stride_along(t, len(shape), outer) == stride_along(t, len(shape), dim) * shape[dim] for t in types):
                groups[-1].append(dim)
                continue
        groups.append([dim])
    return groups


def thread_index(total: int, sizes: Sequence[tuple[str, int]] = ()) -> list[str]:
    """Generate `i`, the number of a thread of `total`, and its coordinates of these sizes."""
    lines = [f"const u32 i = blockIdx.x * {BLOCK}u + threadIdx.x;", f"if (i >= {by_value(total)}) return;"]
    return [*lines, *split_index("i", sizes)] if sizes else lines


def split_index(index: str, sizes: Sequence[tuple[str, int]], wide: bool = False) -> list[str]:
    """Generate the statements that split an index into coordinates.

    sizes: names and sizes, the innermost last.
    wide: in 64 bits.
    """
    c_type, suffix = ("u64", "ull") if wide else ("u32", "u")
    lines = [f"{c_type} {index}_rest = {index};"]
    for position, (name, size) in enumerate(reversed(sizes)):
        last = position == len(sizes) - 1
        value = f"{index}_rest" if last else f"{index}_rest % {size}{suffix}"
        lines.append(f"const {c_type} {name} = {value};")
        if not last:
            lines.append(f"{index}_rest /= {size}{suffix};")
    return lines
