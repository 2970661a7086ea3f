"""Generate convolutions of 3 x 3 over many pixels with few channels, whose filters stay in shared memory (Hopper).

Images are one sequence of positions: a row has one position of padding before it, an image one row of padding. So the
operands of all nine taps are the same positions, shifted. A block visits neighbouring positions. It copies each once
to a ring in shared memory, where warpgroups read it nine times. Results of padding are computed, but not stored.
Zeros in shared memory complete channels and filters to numbers that products take.
The gradient of the image is such a convolution, too, with filters that are transposed while they are loaded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from fusec.gpu.kernels.codegen import wgmma
from fusec.gpu.kernels.codegen.byte_code import BYTE_PRODUCT, ByteCode
from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, Filling, c_bool, cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import C_TYPES, HALVES, Arguments, Kernel, Launch, ceil_div, with_variants
from fusec.gpu.kernels.codegen.mma_tiles import can_follow
from fusec.gpu.kernels.codegen.pointwise_code import PointwiseCode, Space, moves_packs
from fusec.ir import DType, Node, TensorType, Value, channels_last
from fusec.ops import Conv, ConvTranspose
from fusec.schedule.program import inputs_of
from fusec.system.dataclass import dataclass

WINDOW, TAPS = (3, 3), 9
FILTERS = (64, 32)  # of a block: the first number that divides those of the convolution
GROUP = 64  # positions of a warpgroup
GROUPS = (4, 3, 2)  # warpgroups of a block, of the variants
MIN_PIXELS = 256  # a bound of what is tried; tuning times the kernel
OCTET_BYTES = 16  # of one copy
DTYPES = {*((dtype, dtype) for dtype in HALVES), (DType.I8, DType.I32)}  # of an image, and of a sum
_MOVES = re.compile(r"\bc[023]\b")  # coordinates that change from one position to the next
_CUDA = cuda_template(__package__, "resident_filters.cuh")


@dataclass(frozen=True, eq=False)
class ResidentFiltersSource:
    """A convolution, its epilogue, and what is stored.

    groups: warpgroups of a block.
    """

    conv: Node
    rest: Sequence[Node]
    outputs: Sequence[Value]
    figures: GpuFigures
    groups: int

    @property
    def x(self) -> TensorType:
        return self.conv.operands[0].type

    @property
    def y(self) -> TensorType:
        return self.conv.result.type

    @property
    def is_padded(self) -> bool:
        """True if zeros in shared memory complete the channels or the filters."""
        return self.x.shape[1] != self.octets * self.pack or self.y.shape[1] != self.across * self.filters

    @property
    def filters(self) -> int:
        """Filters of a block."""
        return next(count for count in FILTERS if self._all_filters % count == 0)

    @property
    def across(self) -> int:
        """Blocks that share positions."""
        return self._all_filters // self.filters

    @property
    def _all_filters(self) -> int:
        return ceil_div(self.y.shape[1], FILTERS[-1]) * FILTERS[-1]

    @property
    def own(self) -> int:
        """Neighbours of a result that a thread handles together: 16 bytes, unless these are more than it has."""
        return 16 if self.x.dtype is DType.I8 and self.filters == FILTERS[0] else 8

    @property
    def pack(self) -> int:
        """Channels of 16 bytes."""
        return OCTET_BYTES // self.x.dtype.itemsize

    @property
    def octets(self) -> int:
        """Copies of 16 bytes of a position; a product reads two at a time."""
        return ceil_div(self.x.shape[1], 2 * self.pack) * 2

    @property
    def wide(self) -> int:
        """Bytes of a row of swizzled memory. The channels of a position fill one row in each panel."""
        return next(wide for wide in wgmma.SWIZZLES if self.octets * OCTET_BYTES % wide == 0)

    @property
    def panels(self) -> int:
        return self.octets * OCTET_BYTES // self.wide

    @property
    def positions(self) -> int:
        """Positions of a block in one step, and of a part of the ring."""
        return self.groups * GROUP

    @property
    def pitch(self) -> int:
        """Positions from one row to the next."""
        return self.x.shape[3] + 1

    @property
    def image(self) -> int:
        """Positions from one image to the next."""
        return (self.x.shape[2] + 1) * self.pitch

    @property
    def ahead(self) -> int:
        """Parts that are copied before the first step: those that its taps read, and one more."""
        return 2 + ceil_div(2 * self.pitch + 2, self.positions)

    @property
    def slots(self) -> int:
        """Parts of the ring. While one is copied, warps that are late still read the part before the first."""
        return self.ahead + 2

    @property
    def ring(self) -> int:
        """Positions of the ring, without those that are stored twice."""
        return self.slots * self.positions

    @property
    def panel_bytes(self) -> int:
        return (self.ring + GROUP) * self.wide

    @property
    def filter_bytes(self) -> int:
        return TAPS * self.filters * self.octets * OCTET_BYTES

    @property
    def resident_bytes(self) -> int:
        alignment, gate = 1024, 16
        return alignment + self.filter_bytes + self.panels * self.panel_bytes + gate

    @property
    def steps(self) -> int:
        """Steps of a block."""
        return ceil_div(self._all_steps, max(1, self.figures.processors // self.across))

    @property
    def _all_steps(self) -> int:
        return ceil_div(self.x.shape[0] * self.image, self.positions)

    def launch(self) -> Launch:
        arguments, cuda = Arguments(), self._cuda
        load_filters = self._load_filters(cuda, arguments)
        strides = dict(zip(("STRIDE_N", "STRIDE_H", "STRIDE_W"), (self.x.strides[d] for d in (0, 2, 3)), strict=True))
        copy_part = cuda("copy_part", IMAGE_POINTER=arguments.read(self.conv.operands[0]), **strides)
        load_fixed, store = self._store(cuda, arguments)
        begin = arguments.begin()  # after all pointers are named
        is_constant = self.conv.operands[1].literal is not None
        lines = cuda(
            "kernel",
            BEGIN=[*load_filters, *begin] if is_constant else [*begin, *load_filters],
            COPY_PART=copy_part,
            ARRIVE_FIRST=cuda("arrive", LEFT=1),
            ARRIVE_NEXT=cuda("arrive", LEFT=0),
            MULTIPLY=self._multiply(cuda),
            LOAD_FIXED=load_fixed,
            STORE=store,
        )
        launch = arguments.launch(
            "resident_filters",
            lines,
            ceil_div(self._all_steps, self.steps) * self.across,
            128 * self.groups,
            preamble=wgmma.product_of_rows(C_TYPES[self.x.dtype], self.filters, self.wide),
            resident=1,
        )
        bound = {"resident_bytes": self.resident_bytes, "architecture": wgmma.ARCHITECTURE, "dependent": True}
        return replace(launch, **bound)

    @cached_property
    def _cuda(self) -> CudaTemplate:
        threads = 128 * self.groups
        each = threads // self.octets  # positions that the threads of a block copy together
        n, _, rows, columns = self.y.shape
        return _CUDA.bind(
            TYPE=C_TYPES[self.x.dtype],
            SUM="i32" if self.x.dtype is DType.I8 else "float",
            THREADS=threads,
            ACROSS=self.across,
            FILTERS=self.filters,
            FILTER_BYTES=self.filter_bytes,
            RING_BYTES=self.panels * self.panel_bytes,
            CHANNELS=self.x.shape[1],
            OCTETS=self.octets,
            REAL_OCTETS=self.x.shape[1] // self.pack,
            ALL_FILTERS=self.y.shape[1],
            FILTERS_FIT=c_bool(self.y.shape[1] == self._all_filters),
            PACK=self.pack,
            PAIRS=self.own // 2,
            TAPS=TAPS,
            WIDE=self.wide,
            PANELS=self.panels,
            PANEL_OCTETS=self.wide // OCTET_BYTES,
            PANEL_BYTES=self.panel_bytes,
            STEPS=self.steps,
            POSITIONS=self.positions,
            AHEAD=self.ahead,
            PARTS=self.steps + self.ahead - 2,
            SLOTS=self.slots,
            RING=self.ring,
            PITCH=self.pitch,
            IMAGE=self.image,
            IMAGES=n,
            ROWS=rows,
            COLUMNS=columns,
            EACH=each,
            TURNS=ceil_div(self.positions, each),
            PARTS_FIT=c_bool(self.positions % each == 0 and threads % self.octets == 0),
        )

    def _load_filters(self, cuda: CudaTemplate, arguments: Arguments) -> list[str]:
        w = self.conv.operands[1]
        stored = w.type.with_order(channels_last(4)) if w.literal is not None else w.type
        holes: dict[str, Filling] = {"POINTER": arguments.read(w, stored), "STRIDE": stored.strides[0]}
        if isinstance(self.conv.op, ConvTranspose):
            return cuda("load_transposed", ROW=w.type.shape[1], **holes)
        return cuda("load_filters", **holes)

    def _multiply(self, cuda: CudaTemplate) -> list[str]:
        """Issue the products of all taps."""
        lines: list[str] = []
        for tap in range(TAPS):
            shift = tap // WINDOW[1] * self.pitch + tap % WINDOW[1]
            product = f"ENTRY_{self.filters}_of_rows"
            lines += cuda("multiply", TAP=tap, SHIFT=shift, PRODUCT=product, IS_FIRST=c_bool(tap == 0))
        return lines

    def _store(self, cuda: CudaTemplate, arguments: Arguments) -> tuple[list[str], list[str]]:
        """Apply the epilogue to the results of a thread's two positions. Only stored values are rounded.

        Return the loads of what is the same at all positions, and the rest.
        """
        fixed: list[str] = []
        stores: list[str] = []
        for half in range(2):
            codes: list[str] = []
            for part in range(self.filters // (4 * self.own)):
                code = self._epilogue(half, part, arguments)
                loads = [line for line in code.head if line.startswith("const ") and not _MOVES.search(line)]
                code.head = [line for line in code.head if line not in loads]
                if not half:
                    fixed += cuda("channel", PLACE=f"place{part}", CHANNEL=f"channel{part}", PART=part, OWN=self.own)
                fixed += loads
                codes += cuda("real_filters", PLACE=f"place{part}", RESULTS=code.lines())
            stores += cuda("store", ROW=8 * half, EPILOGUE=codes)
        return fixed, stores

    def _epilogue(self, half: int, part: int, arguments: Arguments) -> PointwiseCode:
        """Return the code of a thread's neighbours in one of its positions.

        half: which of the two positions.
        part: which of its groups of neighbours.
        """
        channel = f"channel{part}"
        space = Space(self.y.shape, ("c0", channel, "c2", "c3"), 1, self.own)
        total, prefix = f"done[{part * self.own // 2} + j / 2][{2 * half} + j % 2]", f"y{half}_{part}_"
        if self.x.dtype is DType.I8:
            code = ByteCode(space, arguments, prefix)
            code.define_bounded(self.conv.result, total, float(TAPS * self.x.shape[1] * BYTE_PRODUCT))
        else:
            code = PointwiseCode(space, arguments, prefix, rounds=False)
            code.define(self.conv.result, total)
        code.compute(self.rest, self.outputs)
        return code


def resident_filters(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of a convolution of 3 x 3 with few channels and its epilogue; None for other steps.

    Filters that are no constants have to be stored channels last.
    """
    convs = [node for node in nodes if isinstance(node.op, (Conv, ConvTranspose))]
    if len(convs) != 1 or not figures.has(wgmma.ARCHITECTURE):
        return None
    (conv,), rest = convs, [node for node in nodes if node is not convs[0]]
    y = conv.result
    if not all(map(can_follow, rest)) or not _fits(conv, rest):
        return None
    if any(v.type.shape != y.type.shape for v in (*outputs, *(v for node in rest for v in node.results))):
        return None
    *sources, small = [ResidentFiltersSource(conv, rest, outputs, figures, groups) for groups in (*GROUPS, 1)]
    if not moves_packs(y, rest, outputs, small.own):
        return None
    name = "+".join(node.op.name for node in nodes)
    fit = [source for source in sources if source.resident_bytes <= figures.dynamic_bytes]
    if small.is_padded:  # networks with such channels have many shapes, and each variant is compiled and timed
        fit = sorted(fit, key=lambda source: source.steps * source.groups)[:2]
    if not fit and small.across == 1 and small.resident_bytes <= figures.dynamic_bytes:
        fit = [small]  # copies of many channels take the memory; blocks that share them would load them too often
    return with_variants(Kernel(name, (source.launch(),)) for source in fit)


def _fits(conv: Node, rest: Sequence[Node]) -> bool:
    """Tell if a convolution has a window of 3 x 3 that moves by one pixel, and channels that copies move in octets."""
    op, (x, w), y = conv.op, conv.operands, conv.result
    assert isinstance(op, (Conv, ConvTranspose))
    if x.type.rank != 4 or (x.type.dtype, y.type.dtype) not in DTYPES or op.groups != 1:
        return False
    if w.literal is None and w.type.strides != w.type.with_order(channels_last(4)).strides:
        return False
    if isinstance(op, ConvTranspose) and any(op.output_padding):
        return False
    plain = w.type.shape[2:] == WINDOW and op.pads == (1, 1, 1, 1) and {*op.strides, *op.dilations} == {1}
    pack = OCTET_BYTES // x.type.dtype.itemsize
    can_pad = isinstance(op, Conv) and x.type.dtype in HALVES
    depth, filters = (pack, pack) if can_pad else (2 * pack, FILTERS[-1])
    if not plain or x.type.shape[1] % depth or y.type.shape[1] % filters or any(x in node.results for node in rest):
        return False
    n, _, high, wide = y.type.shape
    if n * high * wide < MIN_PIXELS or max(v.type.span for v in (x, y, *inputs_of(rest))) >= 1 << 31:
        return False
    others = (stride for dim, stride in enumerate(x.type.strides) if dim != 1)
    return x.type.strides[1] == 1 and not any(stride % pack for stride in others)
