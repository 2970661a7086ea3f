"""Generate the check that many tensors are finite.

Each block checks a part of a tensor. Then one block combines their answers.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusec.gpu.kernels.codegen.kernel import (
    BLOCK,
    C_TYPES,
    MAX_VECTOR,
    VECTOR_BYTES,
    Arguments,
    Kernel,
    Launch,
    ceil_div,
    compute_type,
)
from fusec.gpu.kernels.elementwise.multi_tensor import MAX_POINTERS, select_block
from fusec.ir import DType, Node, Value
from fusec.ops import AllFinite

PER_THREAD = 64  # elements


def finite(nodes: Sequence[Node], outputs: Sequence[Value]) -> Kernel | None:
    """Return the kernel of an all_finite; None for other steps."""
    if len(nodes) != 1 or not isinstance(nodes[0].op, AllFinite):
        return None
    kinds: dict[DType, list[Value]] = {}
    for value in dict.fromkeys(nodes[0].operands):
        if value.type.size:
            kinds.setdefault(value.type.dtype, []).append(value)
    launches: list[Launch] = []
    done = 0
    for dtype, values in kinds.items():
        for first in range(0, len(values), MAX_POINTERS):
            launch, done = _look(dtype, values[first : first + MAX_POINTERS], done)
            launches.append(launch)
    return Kernel("all_finite", (*launches, _conclude(nodes[0].result, done)), 4 * max(done, 1))


def _look(dtype: DType, values: Sequence[Value], done: int) -> tuple[Launch, int]:
    """Return the launch that stores one number per block from place `done` on, 1 where an element is not finite."""
    arguments = Arguments()
    vector = min(MAX_VECTOR, VECTOR_BYTES // dtype.itemsize)
    chunk, c_type, kind = BLOCK * PER_THREAD, C_TYPES[dtype], compute_type(dtype)
    leaves: list[list[str]] = []
    ends: list[int] = []
    total = 0
    for value in values:
        leaves.append([f"m = {arguments.read(value)};", f"size = {value.type.size}ull;", f"b -= {total}u;"])
        total += ceil_div(value.type.size, chunk)
        ends.append(total)
    look = [
        f"    const Pack<{c_type}, {vector}> pack = load_pack<{c_type}, {vector}>(m + at);",
        f"    for (int j = 0; j < {vector}; ++j)",
        f"      if (!(wide(pack.v[j]) * {kind}(0) == {kind}(0))) bad[0] = 1.0f;",
    ]
    lines = [
        f"const {c_type}* m;",
        "u64 size;",
        "u32 b = blockIdx.x;",
        *select_block(leaves, ends),
        "float bad[1] = {0.0f};",
        f"const bool whole = ((u64)b + 1u) * {chunk}u <= size;",
        "if (whole) {  // what several read is asked for at once",
        "  #pragma unroll",
        f"  for (u32 n = 0; n < {PER_THREAD // vector}u; ++n) {{",
        f"    const u64 at = (u64)b * {chunk}u + (n * {BLOCK}u + threadIdx.x) * {vector}u;",
        *look,
        "  }",
        "}",
        f"for (u32 n = 0; !whole && n < {PER_THREAD // vector}u; ++n) {{",
        f"  const u64 at = (u64)b * {chunk}u + (n * {BLOCK}u + threadIdx.x) * {vector}u;",
        f"  if (at + {vector}u <= size) {{",
        *look,
        "  } else {",
        "    for (u64 last = at; last < size; ++last)",
        f"      if (!(wide(m[last]) * {kind}(0) == {kind}(0))) bad[0] = 1.0f;",
        "  }",
        "}",
        f"__shared__ float shared[{BLOCK}];",
        f"reduce_threads<{BLOCK}, {BLOCK}, 1>(bad, shared, Largest());",
        f"if (threadIdx.x == 0) {arguments.scratch()}[{done}u + blockIdx.x] = bad[0];",
    ]
    return arguments.launch("finite", lines, total), done + total


def _conclude(result: Value, count: int) -> Launch:
    arguments = Arguments()
    lines = [
        "float bad[1] = {0.0f};",
        f"for (u32 i = threadIdx.x; i < {count}u; i += {BLOCK}u) bad[0] = nmax(bad[0], {arguments.scratch()}[i]);",
        f"__shared__ float shared[{BLOCK}];",
        f"reduce_threads<{BLOCK}, {BLOCK}, 1>(bad, shared, Largest());",
        f"if (threadIdx.x == 0) {arguments.write(result)}[0] = bad[0] == 0.0f;",
    ]
    return arguments.launch("finite_all", lines, 1)
