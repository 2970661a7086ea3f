"""Generate convolution of videos of up to four channels by products of warpgroups, which Hopper has.

A block holds all filters in shared memory, or half of them. Each of its warpgroups has a tile of 8 x 8 results, and
computes it for one frame after the other. A ring in shared memory holds the frames of a window and the next one, so
that windows share what is loaded. The depth of a product is the taps of all frames. Videos of three channels get the
fourth on the way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from fusec.gpu.kernels.codegen import wgmma
from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, c_bool, cuda_template
from fusec.gpu.kernels.codegen.kernel import C_TYPES, Arguments, Kernel, by_value, ceil_div, with_variants
from fusec.gpu.kernels.codegen.pointwise_code import split_index
from fusec.gpu.kernels.convolution.few_channels.few_channels_step import FewChannels
from fusec.gpu.kernels.convolution.few_channels.image_tile import (
    OCTET,
    PAIR,
    THREADS,
    ImageTile,
    TilePlace,
    can_share_windows,
)
from fusec.system.dataclass import dataclass

GROUPS = (4, 3, 2, 1)  # warpgroups of a block: as many as fit
ENOUGH = 3  # warpgroups that multiply while another one stores: with these, filters are not divided
SIDES = (1, 2)  # blocks that share the filters
STRIDES = (1, 2)  # columns from one window to the next
TURNS = 2  # pairs of pixels that a thread loads before it stores them, at most
GATE_BYTES = 8
LOADED = 4  # frames that are only loaded while one is computed: an estimate
FAR = 1 << 20  # rows before the image, where a frame that is not there begins
_CUDA, _FILTERS = (cuda_template(__package__, f"{name}_products.cuh") for name in ("frame", "group"))


@dataclass(frozen=True)
class _FrameProducts:
    """A tile of a video, and how warpgroups share its frames.

    sides: blocks that share the filters.
    groups: warpgroups of a block.
    frames: frames of results that a warpgroup computes one after the other.
    """

    tile: ImageTile
    sides: int
    groups: int
    frames: int = 1

    @property
    def step(self) -> FewChannels:
        return self.tile.step

    @property
    def filters(self) -> int:
        """Filters of a block."""
        return self.step.filters // self.sides

    @property
    def own(self) -> int:
        """Neighbouring results of a thread."""
        return 8 if self.filters % 32 == 0 else 4

    @property
    def slots(self) -> int:
        """Blocks that run at the same time and have the same filters."""
        return max(1, self.step.figures.processors // self.sides)

    @property
    def window(self) -> int:
        """Frames of a window."""
        return self.step.conv.operands[1].type.shape[2]

    @property
    def extent(self) -> int:
        """Frames from the first to the last one of a window."""
        return (self.window - 1) * self.step.op.dilations[0] + 1

    @property
    def pairs(self) -> int:
        """Pairs of taps of a window."""
        return self.window * self.tile.count

    @property
    def filter_bytes(self) -> int:
        return self.pairs * self.filters * PAIR

    @property
    def ring_bytes(self) -> int:
        """Shared memory of the frames of a window and one more."""
        return (self.extent + 1) * self.tile.nbytes

    @property
    def shared_bytes(self) -> int:
        return self.filter_bytes + self.groups * (self.ring_bytes + GATE_BYTES)

    @property
    def steps(self) -> int:
        """Frames that a warpgroup loads for its frames of results."""
        return (self.frames - 1) * self.step.op.strides[0] + self.extent

    @property
    def dims(self) -> list[tuple[str, int]]:
        """Videos, parts of their frames, and tiles of a frame from top to bottom and from left to right."""
        count, _, frames, high, across = self.step.conv.result.type.shape
        parts = ceil_div(frames, self.frames)
        return [("c0", count), ("part", parts), ("down", ceil_div(high, OCTET)), ("right", ceil_div(across, OCTET))]

    @property
    def units(self) -> int:
        """Parts of all tiles."""
        return math.prod(size for _, size in self.dims)

    @property
    def cost(self) -> float:
        """Estimate the time, which decides the number of frames: rounds of units, times the work of a unit."""
        rounds = ceil_div(self.units, self.slots * self.groups)
        return rounds * (self.frames + (self.steps + 1 - self.frames) / LOADED)

    def kernel(self) -> Kernel:
        """Return the kernel."""
        step, arguments, (*_, high, across) = self.step, Arguments(), self.step.conv.result.type.shape
        kind, threads = C_TYPES[step.conv.operands[0].type.dtype], THREADS * self.groups
        blocks = min(ceil_div(self.units, self.groups), self.slots)
        load = [
            line for section in self.tile.sections(TURNS) for part in self._load(arguments, section) for line in part
        ]
        filters = _FILTERS.bind(
            TYPE=kind,
            THREADS=threads,
            OWN=self.own,
            PART_FILTERS=4 * self.own,
            PAIRS=self.pairs,
            ROW_PAIRS=self.tile.pairs,
            COUNT=self.filters,
            FIRST_FILTER="first_filter",
            ROW_AT=step.row_at(f"(pair / {self.tile.pairs}u)"),
            HALF=self.own // 2,
            WINDOW_COLUMNS=step.window[1],
            NO_TAPS=f"{self.tile.no_taps}u",
        )
        store_results = _CUDA(
            "store_results",
            ROWS_FIT=c_bool(high % OCTET == 0),
            COLUMNS_FIT=c_bool(across % OCTET == 0),
            RESULT_ROWS=high,
            RESULT_COLUMNS=across,
            PARTS=self.filters // (4 * self.own),
            PART_FILTERS=4 * self.own,
            OWN=self.own,
            EPILOGUE=step.epilogue(arguments, self.own, f"acc[part * {self.own // 2}u + j / 2][h * 2u + j % 2]"),
        )
        lines = self._cuda(
            "kernel",
            UNITS=by_value(self.units),
            BLOCKS=by_value(blocks),
            UNIT_COORDINATES=[*split_index("unit", self.dims), f"const u32 begin = part * {self.frames}u;"],
            LOADED=self.tile.loaded(TURNS),
            LOAD=load,
            LOAD_FILTERS=step.load_filters(filters, arguments),
            FRAME_PLACES=[self._frame_place(frame) for frame in range(self.window)],
            PRODUCTS=list(self._products()),
            STORE_RESULTS=store_results,
        )
        functions = wgmma.product_of_tiles(kind, self.filters, self.tile.stride)
        launch = arguments.launch("few_channels", lines, blocks * self.sides, threads, preamble=functions, resident=1)
        launch = replace(launch, resident_bytes=self.shared_bytes, architecture=wgmma.ARCHITECTURE)
        return Kernel(step.name, (launch,))

    @property
    def _cuda(self) -> CudaTemplate:
        return _CUDA.bind(
            GROUPS=self.groups,
            SIDES=self.sides,
            FILTERS=self.filters,
            FILTER_BYTES=self.filter_bytes,
            RING_BYTES=self.ring_bytes,
            FRAME_BYTES=self.tile.nbytes,
            FILTER_OCTETS=self.filters // OCTET,
            STEPS=self.steps,
            EXTENT=self.extent,
            STRIDE=self.step.op.strides[0],
            RESULT_FRAMES=self.step.conv.result.type.shape[2],
        )

    def _load(self, arguments: Arguments, section: range) -> tuple[list[str], list[str]]:
        """Return the code that loads a section of frame `at`, and the code that stores it in `image`.

        A frame that is not there has zeros, as rows before the image have.
        """
        stride, pad = self.step.op.strides[0], self.step.op.pads[0]
        coordinates = [
            f"const int moment = (int)(begin * {stride}u + at) - {pad};",
            f"const bool is_frame = (u32)moment < {self.step.conv.operands[0].type.shape[2]}u;",
            "const u32 frame = is_frame ? (u32)moment : 0u;",
        ]
        top, left = f"is_frame ? (int)down * {OCTET} : -{FAR}", f"(int)right * {OCTET}"
        return self.tile.load(arguments, TilePlace(coordinates, top, left, f"threadIdx.x % {THREADS}u"), section)

    def _frame_place(self, frame: int) -> str:
        """Return the code of the place of a frame of the window. The oldest one is in the slot after the next one's."""
        slot = f"(slot + {1 + frame * self.step.op.dilations[0]}u) % {self.extent + 1}u"
        return f"const u8* const frame_{frame} = ring + {slot} * {self.tile.nbytes}u;"

    def _products(self) -> Iterator[str]:
        """Generate the products of a window's frames, two pairs of taps at a time."""
        lead, count = self.filters * PAIR, self.filters
        for pair in range(0, self.pairs, 2):
            frame, own = divmod(pair, self.tile.count)
            first, second = self.tile.place(own), self.tile.place(own + 1)
            image = f"frame_{frame}, {first}u, {second - first}u"
            yield f"ENTRY_{count}_of_tiles(acc, {image}, filters, {pair * lead}u, {lead}u, {int(pair > 0)});"


def frame_products(step: FewChannels) -> Kernel | None:
    """Return the kernels of a step, that of most warpgroups first.

    None for windows that products cannot share or that have no room, and for another GPU.
    """
    if not step.figures.has(wgmma.ARCHITECTURE) or not can_share_windows(step, STRIDES):
        return None
    frames, found = step.conv.result.type.shape[2], list[_FrameProducts]()
    for sides in (sides for sides in SIDES if step.filters % (16 * sides) == 0):
        sources = [_FrameProducts(ImageTile(step, 1), sides, groups) for groups in GROUPS]
        found += [s for s in sources if s.shared_bytes <= step.figures.dynamic_bytes and step.stores(s.own)][:1]
        if found and found[-1].groups >= ENOUGH:
            break
    parts = sorted({ceil_div(frames, count) for count in range(1, frames + 1)})
    found.sort(key=lambda source: -source.groups)
    return with_variants(min((replace(s, frames=n) for n in parts), key=lambda s: s.cost).kernel() for s in found)
