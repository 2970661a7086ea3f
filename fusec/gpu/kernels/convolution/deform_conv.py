"""Generate deformable convolutions: products of filters with elements that each window reads at places of its own.

A block reads elements of the windows of its pixels, tap by tap, and interpolates them between pixels of the image. They
go to shared memory in the type of the image, with the filters. Tensor cores multiply them in 16 bits, and threads in
other types. All filters of a block share what was read, because reading takes longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, Filling, cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import C_TYPES, Arguments, Kernel, Launch, by_value, compute_type, with_variants
from fusec.gpu.kernels.codegen.mma_tiles import can_follow
from fusec.gpu.kernels.codegen.op_table import literal
from fusec.gpu.kernels.codegen.pointwise_code import PointwiseCode, Space, split_index, strides_from
from fusec.gpu.kernels.convolution.deform_conv_tiling import OWN, THREADS, DeformTiling, takes, tilings
from fusec.ir import Node, Value
from fusec.ops import DeformConv
from fusec.schedule.program import inputs_of
from fusec.system.dataclass import dataclass

FILTERS_LAST = (2, 3, 1, 0)  # the memory order of constant filters, whose loads are then contiguous
THREADS_PER_PROCESSOR = 512  # that registers must suffice for
_CUDA = cuda_template(__package__, "deform_conv.cuh")


def deform_conv(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of a deformable convolution and its epilogue; None for other steps."""
    conv, rest = nodes[0], nodes[1:]
    if not isinstance(conv.op, DeformConv) or not all(map(can_follow, rest)) or not takes(conv.result.type.dtype):
        return None
    x, y = conv.operands[0].type, conv.result.type
    if any(v.type.shape != y.shape for v in outputs):
        return None
    reach = (size + sum(conv.op.pads) for size in x.shape[2:])
    if max(*(v.type.span for v in (*inputs_of(nodes), conv.result, *outputs)), *reach) >= 1 << 31:
        return None
    name = "+".join(node.op.name for node in nodes)
    if y.size == 0:
        return Kernel(name, ())
    sources = [_Source(conv, rest, outputs, tiling) for tiling in tilings(conv, figures)]
    return with_variants(Kernel(name, (source.launch(),)) for source in sources)


@dataclass(frozen=True, eq=False)
class _Source:
    """A deformable convolution, its epilogue, and what is stored."""

    conv: Node
    rest: Sequence[Node]
    outputs: Sequence[Value]
    tiling: DeformTiling

    def launch(self) -> Launch:
        t, arguments, dtype = self.tiling, Arguments(), self.conv.result.type.dtype
        cuda = _CUDA.bind(
            TYPE=C_TYPES[dtype],
            NUMBER=compute_type(dtype),
            PIXELS=t.pixels,
            ROWS=t.rows,
            COLUMNS=t.down or 4,
            DOWN=t.down,
            THREADS=t.threads,
            FILTERS=t.filters,
            TURN_FILTERS=t.turn_filters,
            GROUP_FILTERS=t.group_filters,
            GROUP_CHANNELS=t.group_channels,
            DEPTH=t.depth,
            TAPS=t.taps,
            READ_PITCH=t.read_pitch,
            FILTER_PITCH=t.filter_pitch,
        )
        body = {"COPY_FILTERS": self._copy_filters(cuda, arguments), "READ_IMAGE": self._read_image(cuda, arguments)}
        code = PointwiseCode(Space(self.conv.result.type.shape, ("c0", "c1", "c2", "c3")), arguments)
        code.define(self.conv.result, "total")
        code.compute(self.rest, self.outputs)
        lines = cuda(
            "kernel",
            **body,
            **self._places(),
            MULTIPLY=cuda("multiply_tiles" if t.down else "multiply_numbers"),
            EPILOGUE=code.lines(),
        )
        resident = THREADS_PER_PROCESSOR // t.threads
        launch = arguments.launch("deform_conv", lines, t.grid, t.threads, resident=resident)
        return replace(launch, resident_bytes=t.nbytes)

    def _places(self) -> dict[str, Filling]:
        """Return which pixels and filters a block and its threads have."""
        t = self.tiling
        batch, _, rows, columns = t.y.shape
        inner, outer = ("%", "/") if self._is_packed else ("/", "%")  # neighbouring threads read channels, or pixels
        threads = THREADS if self._is_packed else t.pixels
        size, (by_filter, by_pixel) = (t.turn_filters, "%/") if t.by_filter else (t.pixels, "/%")
        if t.down:
            sum_filter = f"warp % {t.down}u * 16u + e / 2u * 8u + lane / 4u"
            sum_pixel = f"(warp / {t.down}u * {t.down}u + n) * 8u + lane % 4u * 2u + e % 2u"
        else:
            sum_filter, sum_pixel = (f"threadIdx.x {op} {t.pixels // OWN}u * {OWN}u" for op in "/%")
            sum_filter, sum_pixel = f"{sum_filter} + n", f"{sum_pixel} + e"
        return {
            "THREAD_PIXEL": f"threadIdx.x {outer} {threads}u",
            "THREAD_RUN": f"threadIdx.x {inner} {threads}u",
            "SIDES": t.sides,
            "FILTER_BLOCKS": t.sides // t.op.groups,
            "ALL_PIXELS": by_value(t.all_pixels),
            "CHUNKS": t.chunks,
            "STAGE_SIZE": t.stage_size,
            "READ_SIZE": t.read_size,
            "OWN_SUMS": OWN,
            "SUM_FILTER": f"({sum_filter})",
            "SUM_PIXEL": sum_pixel,
            "SUMS_PITCH": t.sums_pitch,
            "ITEM_FILTER": f"item {by_filter} {size}u",
            "ITEM_PIXEL": f"item {by_pixel} {size}u",
            "READ_COORDINATES": split_index("read_pixel", [("image", batch), ("down", rows), ("right", columns)]),
            "PIXEL_COORDINATES": split_index("pixel", [("c0", batch), ("c2", rows), ("c3", columns)]),
        }

    def _copy_filters(self, cuda: CudaTemplate, arguments: Arguments) -> list[str]:
        """Return the code that copies a chunk of the filters, several together where they are contiguous."""
        t, w = self.tiling, self.conv.operands[1]
        type = w.type if w.literal is None else w.type.with_order(FILTERS_LAST)
        first, *others = strides_from(type, 4, 0)
        is_packed = first == 1 and not any(stride % t.pack for stride in (*others, t.group_filters))
        columns = type.shape[3]
        at = Space(type.shape, ("c0", "channel", f"(tap / {columns}u)", f"(tap % {columns}u)")).offset(type)
        copy = cuda("copy_pack" if is_packed else "copy_one", WEIGHTS=arguments.read(w, type), WEIGHTS_AT=at)
        return cuda("copy_filters", PACK=t.pack if is_packed else 1, COPY=copy)

    def _read_image(self, cuda: CudaTemplate, arguments: Arguments) -> list[str]:
        """Return the code that reads a chunk of the windows' elements."""
        t, op, (x, w, offset, *mask) = self.tiling, self.tiling.op, self.conv.operands
        cuda = cuda.bind(RUN=t.run, CHANNEL_STRIDE=strides_from(x.type, 4, 1)[0])
        multiply: list[str] = []
        for value in mask:
            at = Space(value.type.shape, ("image", "moved", "down", "right")).offset(value.type)
            multiply = cuda("multiply_by_mask", MASK=arguments.read(value), MASK_AT=at)
        offsets = (
            Space(offset.type.shape, ("image", moved, "down", "right")).offset(offset.type)
            for moved in ("(2u * moved)", "(2u * moved + 1u)")
        )
        return cuda(
            "read_image",
            **dict(zip(("ROW_OFFSET", "COLUMN_OFFSET"), offsets, strict=True)),
            TURNS=t.depth // t.run // THREADS,
            RUNS=t.depth // t.run,
            GROUP_DEPTH=t.group_channels * t.taps,
            OFFSET_CHANNELS=t.offset_channels,
            STRIDE_DOWN=op.strides[0],
            STRIDE_RIGHT=op.strides[1],
            WINDOW_COLUMNS=w.type.shape[3],
            DILATION_DOWN=op.dilations[0],
            DILATION_RIGHT=op.dilations[1],
            PAD_TOP=op.pads[0],
            PAD_LEFT=op.pads[1],
            OFFSETS=arguments.read(offset),
            LAST_ROW=literal(x.type.shape[2] - 1, x.type.dtype),
            LAST_COLUMN=literal(x.type.shape[3] - 1, x.type.dtype),
            IMAGE=arguments.read(x),
            IMAGE_AT=Space(x.type.shape, ("image", "channel", "r", "c")).offset(x.type),
            ADD=cuda("add_pack" if self._is_packed else "add_each"),
            MULTIPLY_BY_MASK=multiply,
            STORE=cuda("store_run" if t.down else "store_each"),
        )

    @property
    def _is_packed(self) -> bool:
        """Tell if one load moves a run of channels."""
        first, *others = strides_from(self.tiling.x, 4, 1)
        return first == 1 and not any(stride % self.tiling.run for stride in others)
