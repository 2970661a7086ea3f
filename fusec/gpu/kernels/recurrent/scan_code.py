"""Generate C for elements of values in the body of a scan: loads where they are in memory, and arithmetic elsewhere.

Views become arithmetic of coordinates. Each result is rounded to its own type, as separate ops would do.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field

from fusec.gpu.kernels.codegen.kernel import HALVES, compute_type
from fusec.gpu.kernels.codegen.op_table import expression, literal
from fusec.gpu.kernels.codegen.pointwise_code import EXACT, cast, rounded_to
from fusec.gpu.kernels.recurrent.scan_views import At, broadcast, element_of_view
from fusec.ir import Constant, Value
from fusec.ops import Cast, Pointwise
from fusec.system.dataclass import dataclass


@dataclass(frozen=True)
class Memory:
    """Describe a value in memory: a pointer in C, and the stride of each dim in elements.

    rows: the dim of which only the rows of the block are there.
    """

    pointer: str
    strides: tuple[int, ...]
    rows: int = -1

    def element(self, at: At) -> str:
        """Return the element at some coordinates, as C that may be assigned."""
        own = (f"({c} - first_row)" if d == self.rows else c for d, c in enumerate(at))
        used = ((c, stride) for c, stride in zip(own, self.strides, strict=True) if stride and c != "0u")
        terms = [f"{c} * {stride}u" if stride > 1 else c for c, stride in used]
        return f"{self.pointer}[{' + '.join(terms) or '0u'}]"


@dataclass
class BodyCode:
    """The C statements that compute elements of values.

    memory: where values are that are in memory.
    lines: the statements so far.
    """

    memory: Mapping[Value, Memory]
    lines: list[str] = field(default_factory=list[str])
    _known: dict[tuple[Value, At], str] = field(default_factory=dict[tuple[Value, At], str])
    _count: int = 0

    @contextmanager
    def block(self, head: str) -> Generator[None]:
        """Put what is generated within into a block. Names from there are unknown after it."""
        outer, self._known = self._known, dict(self._known)
        self.lines.append(f"{head} {{")
        yield
        self.lines.append("}")
        self._known = outer

    def element(self, value: Value, at: At) -> str:
        """Return the name or number of an element, in the type it is computed in."""
        at = tuple("0u" if size == 1 else c for c, size in zip(at, value.type.shape, strict=True))
        if (value, at) not in self._known:
            memory = self.memory.get(value)
            if memory is None or value.literal is not None:
                self._known[value, at] = self.computed(value, at)
            else:
                self._known[value, at] = self.number(f"wide({memory.element(at)})", compute_type(value.type.dtype))
        return self._known[value, at]

    def computed(self, value: Value, at: At) -> str:
        """Compute an element from those of the operands."""
        node, c_type = value.node, compute_type(value.type.dtype)
        assert node is not None
        if isinstance(node.op, Constant):
            number = node.op.literal.array.reshape(-1)[0].item()
            return literal(number, value.type.dtype)
        if not isinstance(node.op, (Pointwise, Cast)):
            return element_of_view(self, node, value, at)
        operands = [self.element(v, broadcast(at, v.type)) for v in node.operands]
        source, dtype = node.operands[-1].type, value.type.dtype
        if isinstance(node.op, Cast):
            text = cast(operands[0], source.dtype, dtype)
        else:
            axis = int(node.op.attributes.get("axis", 0)) if node.op.name == "gen_index" else 0
            text = expression(node.op, source.dtype, operands, at[axis] if at else "0u")
        rounds = dtype in HALVES and node.op.name not in EXACT
        return self.number(rounded_to(text, dtype) if rounds else text, c_type)

    def coordinates(self, index: str, shape: Sequence[int]) -> At:
        """Split an index of a row-major tensor into coordinates."""
        made: list[str] = []
        for d, size in enumerate(shape):
            inner, outer = math.prod(shape[d + 1 :]), math.prod(shape[:d])
            text = f"{index} / {inner}u" if inner > 1 else index
            made.append("0u" if size == 1 else self.number(f"{text} % {size}u" if outer > 1 else text))
        return tuple(made)

    def variable(self, text: str, c_type: str) -> str:
        """Define a variable with its first number."""
        self._count += 1
        self.lines.append(f"{c_type} n{self._count} = {text};")
        return f"n{self._count}"

    def number(self, text: str, c_type: str = "u32") -> str:
        """Define a constant of this type, unless the text is a name or a number."""
        if text.isidentifier() or text.removesuffix("u").isdigit():
            return text
        self._count += 1
        self.lines.append(f"const {c_type} n{self._count} = {text};")
        return f"n{self._count}"
