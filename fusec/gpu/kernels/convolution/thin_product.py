"""Generate products of many rows with few weights, which memory bounds: 1x1 convolutions and matmuls.

A row is read once, passes the prologue, is multiplied by tensor cores, passes the epilogue, and is written. Weights are
in shared memory as fragments of `mma.sync`. Both operands may permute the depth in the same way, so a thread takes
eight neighbours of a row, and of a result, which one load or store moves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusec.gpu.kernels.codegen.gpu_figures import PROCESSORS, SHARED_BYTES
from fusec.gpu.kernels.codegen.kernel import BLOCK, C_TYPES, HALVES, Arguments, Kernel, Launch, ceil_div
from fusec.gpu.kernels.codegen.pointwise_code import (
    PointwiseCode,
    Space,
    can_generate,
    split_index,
    stride_along,
    widest_vector,
)
from fusec.ir import Node, TensorType, Value, channels_last
from fusec.ops import Conv, MatMul
from fusec.schedule.program import inputs_of

PACK = 8  # neighbours of a row that a thread handles
COLUMNS, DEPTH, ROWS = 32, 32, 16  # of one product of a warp
WARPS = BLOCK // 32
MAX_WIDTH = 4  # groups of columns of a block, because sums are in registers
MAX_INTENSITY = 170  # multiplications for each number moved; with more, cuDNN's engines are faster
MIN_ROWS = 512
BLOCKS = (4 * PROCESSORS, 2 * PROCESSORS)  # at most: they fill a GPU, or read weights less often


def thin_product(nodes: Sequence[Node], outputs: Sequence[Value]) -> Kernel | None:
    """Return the kernel of such a product with pointwise ops around it; None for other steps."""
    products = [node for node in nodes if isinstance(node.op, (Conv, MatMul))]
    if len(products) != 1 or not all(can_generate(node) or node is products[0] for node in nodes):
        return None
    step = match_product(nodes, products[0])
    if step is None or any(v not in step.results for v in outputs) or not step.fits:
        return None
    name = "+".join(node.op.name for node in nodes)
    groups = ceil_div(step.columns, COLUMNS)
    most = min(MAX_WIDTH, groups, max(1, SHARED_BYTES // (COLUMNS * ceil_div(step.depth, DEPTH) * DEPTH * 2)))
    widths = sorted(range(1, most + 1), key=lambda n: (ceil_div(groups, n) * n, abs(n - 3)))[:3]
    kernels = [Kernel(name, (ThinSource(step, outputs, n, b).launch(),)) for n in widths for b in BLOCKS]
    others = {kernel.key: kernel for kernel in kernels[1:] if kernel.key != kernels[0].key}
    return replace(kernels[0], others=tuple(others.values())) if kernels else None


@dataclass(frozen=True, eq=False)
class ProductStep:
    """A product with the prologue of its first operand and the epilogue of its result."""

    product: Node
    prologue: Sequence[Node]
    epilogue: Sequence[Node]

    @property
    def x(self) -> TensorType:
        return self.product.operands[0].type

    @property
    def y(self) -> TensorType:
        return self.product.result.type

    @property
    def along(self) -> int:
        """The dim along which rows are multiplied."""
        return 1 if isinstance(self.product.op, Conv) else self.x.rank - 1

    @property
    def depth(self) -> int:
        return self.x.shape[self.along]

    @property
    def columns(self) -> int:
        return self.y.shape[self.along]

    @property
    def rows(self) -> int:
        return self.x.size // max(1, self.depth)

    @property
    def results(self) -> set[Value]:
        """The values that may be stored."""
        return {self.product.result, *(v for node in self.epilogue for v in node.results)}

    @property
    def weights(self) -> TensorType:
        """The type of the weights as they are stored: contiguous along the depth."""
        w = self.product.operands[1].type
        return w.with_order((*range(w.rank - 2), w.rank - 1, w.rank - 2)) if self.along != 1 or w.rank == 2 else w

    @property
    def fits(self) -> bool:
        """Tell if rows are moved by packs, and memory rather than arithmetic bounds the product."""
        k, n = self.depth, self.columns
        if k % PACK or n % PACK or self.rows < MIN_ROWS or max(self.x.size, self.y.size) >= 1 << 31:
            return False
        if k * n > MAX_INTENSITY * (k + n):
            return False
        front = [v.type for v in inputs_of([*self.prologue, self.product]) if v is not self.product.operands[1]]
        back = [v.type for v in (*inputs_of(self.epilogue), *self.results) if v.type.size != 1]
        sides = ((self.x, k, front if self.prologue else [self.x]), (self.y, n, back))
        return all(self._packs(space, size, [t for t in types if t.size != 1]) for space, size, types in sides)

    def _packs(self, space: TensorType, size: int, types: Sequence[TensorType]) -> bool:
        rank = space.rank
        others = [d for d in range(rank) if d != self.along]
        steps = [[stride_along(t, rank, self.along), *(stride_along(t, rank, d) for d in others)] for t in types]
        return widest_vector(size, types, steps) == PACK


def match_product(nodes: Sequence[Node], product: Node) -> ProductStep | None:
    """Sort the nodes into prologue, product and epilogue; None if they are not that."""
    x, w = product.operands
    y = product.result
    if x.type.dtype not in HALVES or y.type.dtype is not x.type.dtype or w.literal is None or not y.type.size:
        return None
    if isinstance(product.op, Conv):
        op, usual = product.op, channels_last(x.type.rank)
        plain = set(op.strides) == {1} and not any(op.pads) and op.groups == 1 and math.prod(w.type.shape[2:]) == 1
        if not plain or x.type.order != usual or y.type.order != usual:
            return None
    elif w.type.size != math.prod(w.type.shape[-2:]) or x.type.rank < 2 or x.type.order or y.type.order:
        return None
    at = list(nodes).index(product)
    prologue: list[Node] = []
    wanted = {x}
    for node in reversed(nodes[:at]):
        if not wanted.isdisjoint(node.results):
            prologue.insert(0, node)
            wanted.update(node.operands)
    epilogue = [node for node in nodes if node is not product and node not in prologue]
    if any(v.type.shape != x.type.shape for node in prologue for v in node.results):
        return None
    if any(v.type.shape != y.type.shape for node in epilogue for v in node.results):
        return None
    made = {v for node in prologue for v in node.results}
    if any(v in made for node in epilogue for v in node.operands) or w in made:
        return None
    return ProductStep(product, prologue, epilogue)


@dataclass(frozen=True, eq=False)
class ThinSource:
    """The launch of a product.

    width: groups of columns of a block.
    blocks: the number of blocks to aim at.
    """

    step: ProductStep
    outputs: Sequence[Value]
    width: int
    blocks: int

    def launch(self) -> Launch:
        step, width, arguments = self.step, self.width, Arguments()
        depths, across = ceil_div(step.depth, DEPTH), ceil_div(step.columns, width * COLUMNS)
        phases = ceil_div(
            depths * width * COLUMNS * DEPTH * 2, SHARED_BYTES
        )  # in which weights are read, because they may exceed shared memory
        depths = ceil_div(depths, phases)
        tiles = ceil_div(step.rows, ROWS * WARPS)
        turns = ceil_div(tiles, max(1, min(tiles, self.blocks // across)))
        down = ceil_div(tiles, turns)
        lines = ["const u32 lane = threadIdx.x % 32u, warp = threadIdx.x / 32u, g = lane / 4u, q = lane % 4u;"]
        lines.append(f"const u32 first = blockIdx.x % {across}u * {width * COLUMNS}u;")
        lines.append(f"__shared__ Pack<u32, 4> weights[{width * 4 * depths * 32}];")
        weights = [*self._load_weights(depths, arguments), "__syncthreads();"]
        if phases == 1:
            lines += ["const u32 start = 0;", *weights]
        lines += ["#pragma unroll 1", f"for (u32 turn = 0; turn < {turns}u; ++turn) {{"]
        body = [f"const u32 tile = ((blockIdx.x / {across}u + turn * {down}u) * {WARPS}u + warp) * {ROWS}u + g;"]
        for half in range(2):
            row = f"tile + {half * ROWS // 2}u"
            body.append(f"const u32 row{half} = {row} < {step.rows}u ? {row} : {step.rows - 1}u;")
            sizes = [(f"r{half}_{d}", step.x.shape[d]) for d in range(step.x.rank) if d != step.along]
            body += split_index(f"row{half}", sizes)
        body += [f"float acc[{width}][4][4];", "#pragma unroll", f"for (int n = 0; n < {width}; ++n)"]
        body += ["  for (int t = 0; t < 4; ++t) for (int e = 0; e < 4; ++e) acc[n][t][e] = 0.0f;"]
        if phases > 1:
            body += ["#pragma unroll 1", f"for (u32 start = 0; start < {phases * depths}u; start += {depths}u) {{"]
            body += ["  __syncthreads();", *(f"  {line}" for line in weights)]
        body += ["#pragma unroll", f"for (int depth = 0; depth < {depths}; ++depth) {{"]
        checked = step.depth % (phases * depths * DEPTH) != 0
        body += [f"  {line}" for half in range(2) for line in self._load_row(half, checked, arguments)]
        kind = C_TYPES[step.x.dtype]
        body += ["  #pragma unroll", f"  for (int n = 0; n < {width}; ++n) {{", "    #pragma unroll"]
        body += ["    for (int t = 0; t < 4; ++t) {"]
        body.append(f"      const Pack<u32, 4> w = weights[((n * 4 + t) * {depths} + depth) * 32 + lane];")
        for i in (0, 2):
            words = f"x0.v[{i}], x1.v[{i}], x0.v[{i + 1}], x1.v[{i + 1}], w.v[{i}], w.v[{i + 1}]"
            body.append(f"      multiply_tile<{kind}>(acc[n][t], {words});")
        body += ["    }", "  }", "}", *(["}"] if phases > 1 else [])]
        for half in range(2):
            body += self._store_rows(half, arguments)
        lines += [*(f"  {line}" for line in body), "}"]
        return arguments.launch("thin_product", lines, across * down)

    def _load_weights(self, depths: int, arguments: Arguments) -> list[str]:
        """Load the weights of the block's columns into shared memory; past the end, zeros."""
        step, width = self.step, self.width
        type = step.weights
        dims = (0, 1) if step.along == 1 and type.rank > 2 else (type.rank - 1, type.rank - 2)
        pointer, (own, inner) = arguments.read(step.product.operands[1], type), (type.strides[d] for d in dims)
        assert inner == 1, "weights are stored as products take them"
        count = width * 4 * depths * 32
        lines = [f"for (u32 i = threadIdx.x; i < {count}u; i += {BLOCK}u) {{"]
        lines.append(f"  const u32 c = i / 4u % 8u, group = i / {32 * depths}u;")
        lines.append(f"  const u32 k = ((start + i / 32u % {depths}u) * 4u + i % 4u) * 8u;")
        lines.append("  const u32 o = first + group / 4u * 32u + c / 2u * 8u + group % 4u * 2u + c % 2u;")
        lines.append("  Pack<u32, 4> w = {{0u, 0u, 0u, 0u}};")
        lines.append(f"  if (o < {step.columns}u && k < {step.depth}u)")
        lines.append(f"    w = load_pack<u32, 4>((const u32*)({pointer} + (o * {own} + k)));")
        return [*lines, "  weights[i] = w;", "}"]

    def _load_row(self, half: int, checked: bool, arguments: Arguments) -> list[str]:
        """Load eight neighbours of a row into words x0 or x1.

        checked: the depth may end before them.
        """
        step = self.step
        kind, value = C_TYPES[step.x.dtype], step.product.operands[0]
        code = PointwiseCode(self._space(step.x, half, "k"), arguments, f"x{half}_")
        lines = [f"const u32 k{half} = (start + depth) * {DEPTH}u + q * {PACK}u;"]
        lines.append(f"Pack<u32, 4> x{half} = {{{{0u, 0u, 0u, 0u}}}};")
        lines.append(f"if (k{half} < {step.depth}u) {{" if checked else "{")
        if not step.prologue:
            at = code.space.offset(value.type)
            lines.append(f"  x{half} = load_pack<u32, 4>((const u32*)({arguments.read(value)} + ({at})));")
            return [*lines, "}"]
        for node in step.prologue:
            code.apply(node)
        code.body.append(f"taken.v[j] = {code.as_stored(value)};")
        lines += [f"  Pack<{kind}, {PACK}> taken;", *(f"  {line}" for line in code.lines())]
        return [*lines, f"  for (int i = 0; i < 4; ++i) x{half}.v[i] = word_of(taken, i);", "}"]

    def _store_rows(self, half: int, arguments: Arguments) -> list[str]:
        """Apply the epilogue to eight results of a row, and store them.

        As in cuDNN's graphs, only what is stored is rounded.
        """
        step = self.step
        code = PointwiseCode(self._space(step.y, half, "o"), arguments, f"y{half}_", rounds=False)
        code.define(step.product.result, f"acc[n][j / 2][{2 * half} + j % 2]")
        for node in step.epilogue:
            code.apply(node)
        for value in self.outputs:
            code.store(value)
        lines = [f"if (tile + {half * ROWS // 2}u < {step.rows}u) {{", "  #pragma unroll"]
        lines += [
            f"  for (int n = 0; n < {self.width}; ++n) {{",
            f"    const u32 o{half} = first + n * 32u + q * {PACK}u;",
        ]
        if step.columns % (self.width * COLUMNS):
            lines.append(f"    if (o{half} >= {step.columns}u) break;")
        return [*lines, *(f"    {line}" for line in code.lines()), "  }", "}"]

    def _space(self, type: TensorType, half: int, name: str) -> Space:
        names = [f"r{half}_{d}" if d != self.step.along else f"{name}{half}" for d in range(type.rank)]
        return Space(type.shape, tuple(names), self.step.along, PACK)
