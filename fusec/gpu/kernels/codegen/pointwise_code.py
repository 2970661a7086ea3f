"""Pointwise ops as C statements: what a kernel does to each element it reads or is about to write.

A `Space` says where elements lie; a `Chain` reads operands (several neighbours at once where they lie side by side),
applies nodes and stores results. Each result is rounded to its own type, so joining steps changes no number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from fusec.gpu.kernels.codegen.indexing import Laid, View
from fusec.gpu.kernels.codegen.kernel import C_TYPES, HALVES, MAX_VECTOR, VECTOR_BYTES, Arguments, compute_type
from fusec.gpu.kernels.codegen.op_table import expression, literal, pattern
from fusec.ir import DType, Node, Value
from fusec.ops import Cast, Pointwise, Relayout

# Results that are an operand, or its negative, and integers: of a type, they are so already.
EXACT = frozenset({"identity", "relu", "abs", "neg", "max", "min", "where", "sign", "ceil", "floor", "round"})


@dataclass(frozen=True)
class Space:
    """Elements of a logical shape: the C expression of each coordinate (None: zero), and `vector` neighbours along
    dim `along`, whose coordinate is that of the first. `packs`: they may be moved at once where they lie side by
    side."""

    shape: tuple[int, ...]
    names: tuple[str | None, ...]
    along: int = -1
    vector: int = 1
    packs: bool = True

    def offset(self, type: Laid) -> str:
        """Where a tensor that broadcasts to the shape has its (first) element: in 32 bits, where negative strides wrap
        around on the way, so it is added to a pointer as a whole."""
        lead = len(self.shape) - type.rank
        terms = [
            f"{self.names[lead + d]} * {stride}" if stride != 1 else f"{self.names[lead + d]}"
            for d, (size, stride) in enumerate(zip(type.shape, type.strides, strict=True))
            if size != 1 and self.names[lead + d] is not None
        ]
        if isinstance(type, View) and type.start:
            terms.append(str(type.start))
        return " + ".join(terms) or "0"

    def is_pack(self, type: Laid) -> bool:
        """Whether neighbours in a tensor are moved at once."""
        return self.packs and self.vector > 1 and self.step(type) == 1

    def step(self, type: Laid) -> int:
        """How far apart neighbours lie in a tensor that broadcasts to the shape."""
        return step(type, len(self.shape), self.along) if self.along >= 0 else 0

    def coordinate(self, rank: int, axis: int) -> str:
        """Along an axis of a tensor of that rank which broadcasts to the shape."""
        dim = len(self.shape) - rank + axis
        name = self.names[dim] or "0"
        return f"({name} + j)" if dim == self.along and self.vector > 1 else name


def takes(node: Node) -> bool:
    """Whether a chain can apply a node."""
    types = (*(v.type.dtype for v in node.operands), *(v.type.dtype for v in node.results))
    if any(dtype not in C_TYPES for dtype in types):
        return False
    if isinstance(node.op, Cast):
        return True
    return isinstance(node.op, Pointwise) and pattern(node.op, node.operands[-1].type.dtype) is not None


@dataclass
class Chain:
    """Collects statements: `before` the loop over neighbours, `inside` it, and `after`. `known` are values with the
    C expression of their element `j`. rounds: to the type of each result, not only where it is stored. ahead: what is
    read as packs is asked for where `before` stands, however far away it is used."""

    space: Space
    arguments: Arguments
    prefix: str = "v"
    known: dict[Value, str] = field(default_factory=dict[Value, str])
    narrowed: dict[Value, str] = field(default_factory=dict[Value, str])  # known ones as they are stored
    before: list[str] = field(default_factory=list[str])
    inside: list[str] = field(default_factory=list[str])
    after: list[str] = field(default_factory=list[str])
    rounds: bool = True
    ahead: bool = False

    def apply(self, node: Node) -> None:
        """Compute the results of a node; its operands are loaded if they are not known."""
        operands = [self.get(v) for v in node.operands]
        result = node.results[0]
        if isinstance(node.op, Relayout):  # another place in memory, the same number
            self.known[result] = operands[0]
            if node.operands[0] in self.narrowed:
                self.narrowed[result] = self.narrowed[node.operands[0]]
            return
        source, dtype = node.operands[-1].type, result.type.dtype
        if isinstance(node.op, Cast):
            text = cast(operands[0], source.dtype, dtype)
        else:
            assert isinstance(node.op, Pointwise)
            axis = node.op.attributes.get("axis", 0)
            index = self.space.coordinate(source.rank, int(axis)) if node.op.name == "gen_index" else "0"
            if node.op.name == "gen_index" and source.shape[int(axis)] == 1:
                index = "0"
            text = expression(node.op, source.dtype, operands, index)
        self.define(result, text, rounds=node.op.name not in EXACT)

    def define(self, value: Value, text: str, rounds: bool = True) -> None:
        """Make a value known by an expression, rounded to the value's type unless it is so already."""
        dtype, name = value.type.dtype, f"{self.prefix}{len(self.known)}"
        if rounds and self.rounds and dtype in HALVES:  # what is stored is at hand, and not converted back for that
            self.inside.append(f"const {C_TYPES[dtype]} {name}_stored = narrow<{C_TYPES[dtype]}>({text});")
            self.narrowed[value] = f"{name}_stored"
            text = f"wide({name}_stored)"
        self.inside.append(f"const {compute_type(dtype)} {name} = {text};")
        self.known[value] = name

    def get(self, value: Value, type: Laid | None = None, memory: Value | None = None) -> str:
        """The element of a value, in the type it is computed in. It is read from its own memory or another's, as the
        type says if it is not stored as its own."""
        if value not in self.known:
            self.known[value] = self.load(memory or value, type or value.type)
        return self.known[value]

    def store(self, value: Value, known: Value | None = None, type: Laid | None = None) -> None:
        """Write a value that is known, or known by the name of another, where `type` says."""
        c_type, vector, type = C_TYPES[value.type.dtype], self.space.vector, type or value.type
        pointer, at = self.arguments.write(value), self.space.offset(type)
        text, step = self.as_stored(known or value), self.space.step(type)
        if self.space.is_pack(type):
            pack = f"{pointer}_{len(self.after)}"
            self.before.append(f"Pack<{c_type}, {vector}> {pack};")
            self.inside.append(f"{pack}.v[j] = {text};")
            self.after.append(f"store_pack<{c_type}, {vector}>({pointer} + ({at}), {pack});")
        else:
            self.inside.append(f"{pointer}[{at} + j * {step}] = {text};")

    def as_stored(self, value: Value) -> str:
        """A known value in the type it is stored in."""
        return self.narrowed.get(value) or f"narrow<{C_TYPES[value.type.dtype]}>({self.known[value]})"

    def lines(self) -> list[str]:
        """The statements, as a block."""
        loop = [f"for (int j = 0; j < {self.space.vector}; ++j) {{", *(f"  {line}" for line in self.inside), "}"]
        if self.space.vector > 1:
            loop.insert(0, "#pragma unroll")
        return ["{", *(f"  {line}" for line in (*self.before, *loop, *self.after)), "}"]

    def load(self, value: Value, type: Laid) -> str:
        """The element of a value read from memory."""
        number = value.literal.array.reshape(-1)[0] if value.literal is not None and value.type.size == 1 else None
        if number is not None:
            return literal(float(number) if type.dtype.is_float else number.item(), type.dtype)
        c_type, vector = C_TYPES[type.dtype], self.space.vector
        pointer, at, step = self.arguments.read(value), self.space.offset(type), self.space.step(type)
        name = f"{self.prefix}{pointer}_{len(self.known)}"
        if self.space.is_pack(type):
            pack = f"Pack<{c_type}, {vector}>"
            load = "load_pack_here" if self.ahead else "load_pack"
            self.before.append(f"const {pack} {name} = {load}<{c_type}, {vector}>({pointer} + ({at}));")
            return f"wide({name}.v[j])"
        if vector > 1 and step:
            return f"wide({pointer}[{at} + j * {step}])"
        self.before.append(f"const {compute_type(type.dtype)} {name} = wide({pointer}[{at}]);")
        return name


def stored(text: str, dtype: DType) -> str:
    """An expression rounded to a storage type, in the type that is computed in."""
    return f"rounded<{C_TYPES[dtype]}>({text})" if dtype in HALVES else text


def cast(text: str, source: DType, to: DType) -> str:
    """An element converted to another type, in the types that are computed in; to 16 bits it is not rounded yet."""
    if to is source:
        return text
    if to is DType.BOOL:
        return f"{text} != 0"
    if to in HALVES:
        return text if source.is_float and not (source is DType.F64 and to is DType.BF16) else f"(float)({text})"
    if source.is_float and to.itemsize < 4:  # through a wider one, as processors do
        return f"({C_TYPES[to]})(i32)({text})"
    return f"({C_TYPES[to]})({text})"


def widest(size: int, types: Sequence[Laid], steps: Sequence[Sequence[int]], exact: bool = True) -> int:
    """How many neighbours along a dim of that size can be moved at once. steps: for each type how far apart elements
    lie along the dim and, behind that, along all others. exact: the dim must divide into as many."""
    smallest = min((t.dtype.itemsize for t in types), default=1)
    vector = min(MAX_VECTOR, max(1, VECTOR_BYTES // smallest))
    while vector > 1:
        whole = not exact or size % vector == 0
        if whole and all(own != 1 or all(s % vector == 0 for s in others) for own, *others in steps):
            return vector
        vector //= 2
    return 1


def step(type: Laid, rank: int, dim: int) -> int:
    """How far apart elements of a tensor lie along a dim of a shape of that rank that it broadcasts to."""
    own = dim - (rank - type.rank)
    return type.strides[own] if own >= 0 and type.shape[own] != 1 else 0


def merged(shape: tuple[int, ...], order: Sequence[int], types: Sequence[Laid]) -> list[list[int]]:
    """The dims that are not 1 in memory order; together those that all the types walk through as if they were one."""
    groups: list[list[int]] = []
    for dim in order or range(len(shape)):
        if shape[dim] == 1:
            continue
        if groups and types:
            outer = groups[-1][-1]
            if all(step(t, len(shape), outer) == step(t, len(shape), dim) * shape[dim] for t in types):
                groups[-1].append(dim)
                continue
        groups.append([dim])
    return groups


def decoded(index: str, sizes: Sequence[tuple[str, int]], wide: bool = False) -> list[str]:
    """Statements that split an index into coordinates, the innermost last in `sizes`."""
    c_type, suffix = ("u64", "ull") if wide else ("u32", "u")
    lines = [f"{c_type} {index}_rest = {index};"]
    for position, (name, size) in enumerate(reversed(sizes)):
        last = position == len(sizes) - 1
        value = f"{index}_rest" if last else f"{index}_rest % {size}{suffix}"
        lines.append(f"const {c_type} {name} = {value};")
        if not last:
            lines.append(f"{index}_rest /= {size}{suffix};")
    return lines
