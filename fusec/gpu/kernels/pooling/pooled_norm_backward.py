"""Generate the gradient of a batch norm, of the relu after it and of the max pool after that.

The gradient of the pool is not stored. A first launch visits the windows: it finds the element that each took, and sums
each channel over these elements, because others have no gradient. A last launch finds each element's gradient by the
windows that took it, as the pool's own kernel does, and computes the norm's from that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import BLOCK, C_TYPES, Arguments, Kernel, Launch, ceil_div, with_variants
from fusec.gpu.kernels.codegen.pointwise_code import PointwiseCode, Space, split_index
from fusec.gpu.kernels.codegen.row_plan import Axis, RowPlan
from fusec.gpu.kernels.norm.batch_norm_source import BatchNormSource
from fusec.gpu.kernels.norm.norm_step import match_norm_step
from fusec.gpu.kernels.pooling.max_pool_backward import (
    PoolDim,
    each_element,
    element_number,
    find_largest,
    pool_dims,
    sum_gradients,
)
from fusec.ir import HALVES, Node, Value, channels_last
from fusec.ops import BatchNormBackward, MaxPoolBackward

VECTOR = 8  # channels of a thread
MOST_LANES = 32  # threads for all channels, at most
CLOSED = 255  # stands for a tap where the relu is zero
# Blocks that a multiprocessor must have room for, which bounds the registers of a thread (0: no bound), and blocks for
# each multiprocessor of the launch that sums.
VARIANTS = ((0, 3), (0, 6), (4, 4), (4, 8), (6, 6))
_CUDA, _POOL = cuda_template(__package__, "pooled_norm_backward.cuh"), cuda_template(__package__, "pool.cuh")


def pooled_norm_backward(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of max_pool_backward and a batch_norm_backward that reads its result; None for other steps."""
    if len(nodes) != 2 or nodes[1].op != BatchNormBackward(True):
        return None
    pool, norm = nodes
    if not isinstance(pool.op, MaxPoolBackward):
        return None
    (dy, y), x = pool.operands, norm.operands[1]
    images = (dy, y, x, norm.results[0])
    if norm.operands[0] is not pool.result or pool.result in outputs or x is pool.result:
        return None
    if x.type.rank != 4 or x.type.dtype not in HALVES or any(v.type.order != channels_last(4) for v in images):
        return None
    lanes, odd = divmod(x.type.shape[1], VECTOR)
    if (
        odd
        or lanes > MOST_LANES
        or lanes & (lanes - 1)
        or math.prod(pool.op.window) >= CLOSED
        or x.type.size >= 1 << 31
    ):
        return None
    step = match_norm_step([norm], [v for v in outputs if v.node is norm], norm, 2)
    if step is None:
        return None
    name, kernels = "+".join(node.op.name for node in nodes), list[Kernel]()
    for resident, waves in VARIANTS:
        plan = _plan(x, lanes, waves * figures.processors)
        source = PooledNormBackward(step, plan, plan, pool, resident)
        kernels.append(Kernel(name, source.launches(), source.scratch_bytes))
    return with_variants(kernels)


def _plan(x: Value, lanes: int, chunks: int) -> RowPlan:
    """Plan the sums of channels over windows in so many blocks."""
    sizes = x.type.shape
    axes = [*(Axis(f"c{dim}", dim, sizes[dim], True) for dim in (0, 2, 3)), Axis("c1", 1, sizes[1] // VECTOR, False)]
    count = math.prod(axis.size for axis in axes if axis.reduced)
    return RowPlan(tuple(axes), False, VECTOR, BLOCK // lanes, lanes, count, lanes, chunks=chunks)


@dataclass(frozen=True)
class PooledNormBackward(BatchNormSource):
    """The launches of a step.

    pool: the node of the pool's gradient.
    resident: blocks that a multiprocessor must have room for; 0 for any number.
    """

    pool: Node
    resident: int

    def launches(self) -> tuple[Launch, ...]:
        return (self._sum_windows(), self.merge_chunks(), self._write_tiles())

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the numbers of channels, and of the tap that each window took."""
        return self._numbers_bytes + self.pool.operands[0].type.size

    @property
    def _numbers_bytes(self) -> int:
        return ceil_div(super().scratch_bytes, 16) * 16

    @cached_property
    def _dims(self) -> list[PoolDim]:
        op = self.pool.op
        assert isinstance(op, MaxPoolBackward)
        return pool_dims(op, self.pool.operands[1].type, self.pool.operands[0].type)

    @cached_property
    def _pooled_cuda(self) -> CudaTemplate:
        plan, x = self.sums, self.step.x.type
        return _CUDA.bind(BLOCK=plan.block, LANES=plan.lanes, ROWS=plan.threads, TYPE=C_TYPES[x.dtype], VECTOR=VECTOR)

    @cached_property
    def _pool_cuda(self) -> CudaTemplate:
        kind = C_TYPES[self.step.x.type.dtype]
        return _POOL.bind(TYPE=kind, NUMBER="float", VECTOR=VECTOR, UNROLL="#pragma unroll", INDEX="u8")

    def _taps(self, scratch: str) -> str:
        return f"(u8*)({scratch}) + {self._numbers_bytes}"

    def _sum_windows(self) -> Launch:
        """Return the launch that visits windows."""
        plan, arguments, (dy, y), dims = self.sums, Arguments(), self.pool.operands, self._dims
        begin = self.load_centre(arguments, "0u")
        windows = Space(dy.type.shape, ("c0", "c1", "o0", "o1"))
        sizes = [("c0", dy.type.shape[0]), ("o0", dims[0].count), ("o1", dims[1].count)]
        numbers = {
            f"{name}{d}": getattr(dim, name.lower()) for d, dim in enumerate(dims) for name in ("STRIDE", "PAD", "SIZE")
        }
        scratch = arguments.scratch("float")
        lines = self._pooled_cuda(
            "sum_windows",
            BEGIN=begin,
            STEP=plan.chunks * plan.threads,
            WINDOWS=dy.type.size // self.channels,
            COORDINATES=split_index("window", sizes),
            FIND=find_largest(y, dims, self._pool_cuda, arguments),
            LOSS=f"{arguments.read(dy)} + ({windows.offset(dy.type)})",
            WIDTH=dims[1].window,
            ELEMENTS=arguments.read(self.step.x),
            PLACE=Space(self.step.x.type.shape, ("c0", "c1", "p0", "p1")).offset(self.step.x.type),
            OPEN=self.is_positive("d", "factor[j]", "shift[j]"),
            CLOSED=CLOSED,
            TAPS=f"{self._taps(scratch)} + ({windows.offset(dy.type)})",
            SCRATCH=scratch,
            CHANNELS=self.channels,
            CHUNKS=plan.chunks,
            **numbers,
        )
        return arguments.early_launch("pooled_norm_sums", lines, plan.chunks, plan.block, resident=self.resident)

    def _write_tiles(self) -> Launch:
        """Return the launch that computes and stores the norm's gradient."""
        plan, arguments, dims, step = self.sums, Arguments(), self._dims, self.step
        scratch = arguments.scratch("float")
        factors: list[str] = []
        for number in range(4):
            at = f"{(2 * plan.chunks + number) * self.channels}u + c1"
            pack = f"Pack<float, {VECTOR}>"
            factors.append(f"const {pack} f{number} = load_pack<float, {VECTOR}>({scratch} + ({at}));")
        tiles = [("c0", step.x.type.shape[0]), *((f"i{d}", dim.tiles) for d, dim in enumerate(dims))]
        lines = sum_gradients(self.pool, dims, self._pool_cuda, arguments, "u8", self._taps(scratch))
        code = PointwiseCode(Space(step.x.type.shape, ("c0", "c1", "c2", "c3"), 1, VECTOR), arguments)
        code.body.append(f"const float centred = {code.get(step.x)} - f0.v[j];")
        total = f"sums[{element_number(dims)}][j]"
        code.define(step.y, f"{total} * f3.v[j] + (centred * f2.v[j] + f1.v[j])")
        code.compute((), step.epilogue_outputs)
        lines += each_element(dims, self._pool_cuda, code.lines())
        count = math.prod(size for _, size in tiles)
        coordinates = split_index("tile", tiles)
        lines = self._pooled_cuda("write_tiles", FACTORS=factors, TILES=count, COORDINATES=coordinates, BODY=lines)
        blocks = ceil_div(count, plan.threads)
        return arguments.early_launch("pooled_norm_elements", lines, blocks, plan.block, resident=self.resident)
