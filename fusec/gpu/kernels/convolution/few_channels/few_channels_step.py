"""Describe a step that convolves an image of up to four channels, and generate what all its kernels share."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fusec.gpu.kernels.codegen.byte_code import ByteCode
from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, c_bool, cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import C_TYPES, Arguments
from fusec.gpu.kernels.codegen.pointwise_code import PointwiseCode, Space, move_packs, strides_from
from fusec.ir import Node, TensorType, Value, channels_last
from fusec.ops import Conv, Pad
from fusec.system.dataclass import dataclass

CHANNELS = 4  # those of the image, and zeros
_NAMES = {4: ("c0", "c1", "(u32)row", "(u32)column"), 5: ("c0", "c1", "frame", "(u32)row", "(u32)column")}  # by rank
_CUDA = cuda_template(__package__, "pixel.cuh")


@dataclass(frozen=True)
class FewChannels:
    """A convolution of four channels with its prologue and epilogue; that of a video may have three channels."""

    prologue: Sequence[Node]
    conv: Node
    rest: Sequence[Node]
    outputs: Sequence[Value]
    figures: GpuFigures

    @property
    def op(self) -> Conv:
        assert isinstance(self.conv.op, Conv)
        return self.conv.op

    @property
    def source(self) -> Value:
        """The value that is read: the image, before a pad to four channels that is part of this kernel."""
        return self.prologue[0].operands[0] if self.prologue else self.conv.operands[0]

    @property
    def rank(self) -> int:
        """Dims of the image; a video has frames before its rows."""
        return self.conv.result.type.rank

    @property
    def window(self) -> tuple[int, ...]:
        """Rows and columns of a filter."""
        return self.conv.operands[1].type.shape[-2:]

    @property
    def strides(self) -> tuple[int, ...]:
        """Rows and columns from one window to the next."""
        return self.op.strides[-2:]

    @property
    def dilations(self) -> tuple[int, ...]:
        """Rows and columns from one tap to the next."""
        return self.op.dilations[-2:]

    @property
    def pads(self) -> tuple[int, ...]:
        """Rows and columns of padding before the image."""
        return self.op.pads[self.rank - 4 : self.rank - 2]

    @property
    def taps(self) -> int:
        return math.prod(self.window)

    @property
    def filters(self) -> int:
        return self.conv.result.type.shape[1]

    @property
    def name(self) -> str:
        """The name of a kernel that runs it."""
        nodes = (*self.prologue, self.conv, *self.rest)
        return "+".join("few_channels" if node is self.conv else node.op.name for node in nodes)

    def stores(self, own: int, after: Sequence[Node] = ()) -> bool:
        """Tell if one store can move `own` results of a thread, or if they are stored one by one.

        after: the nodes after a pool
        """
        values = (*self.outputs, *(v for node in (*self.rest, *after) for v in node.operands))
        types = [v.type for v in values if v.type.size != 1]
        return move_packs((strides_from(t, self.rank, 1) for t in types), own)

    def load_filters(self, cuda: CudaTemplate, arguments: Arguments) -> list[str]:
        """Return the code of the fragment `load_filters`."""
        w, stored = self.conv.operands[1], self._stored_filters
        filter_stride, channel_stride, *steps = stored.strides
        is_packed = channel_stride == 1 and not any(step % CHANNELS for step in (filter_stride, *steps))
        return cuda(
            "load_filters",
            FILTERS=arguments.read(w, stored),
            CONTIGUOUS=c_bool(is_packed and w.type.shape[1] == CHANNELS),
            FILTER_STRIDE=filter_stride,
            CHANNEL_STRIDE=channel_stride,
            CHANNELS=w.type.shape[1],
            ROW_STRIDE=steps[-2],
            COLUMN_STRIDE=steps[-1],
        )

    def row_at(self, row: str) -> str:
        """Return where a row of a filter begins, as C; row: its number among those of all frames."""
        *_, frame_stride, row_stride, _ = self._stored_filters.strides
        if self.rank == 4:
            return f"{row} * {row_stride}"
        return f"{row} / {self.window[0]}u * {frame_stride} + {row} % {self.window[0]}u * {row_stride}"

    def load_pixel(self, arguments: Arguments) -> list[str]:
        """Return the code that loads the pixel at a row and column of the image."""
        if self.in_words or self._is_packed:
            at = self._first.offset(self.source.type)
            return self._cuda("load_words" if self.in_words else "load_pixel", IMAGE=arguments.read(self.source), AT=at)
        return self._channels(PointwiseCode(Space(self.source.type.shape, _NAMES[self.rank]), arguments, "p"))

    @property
    def raw(self) -> tuple[str, int]:
        """The C type and number of what `request_pixel` loads."""
        if self.in_words or self._is_packed:
            return "u32", 2
        return C_TYPES[self.source.type.dtype], self.source.type.shape[1]

    def request_pixel(self, arguments: Arguments) -> list[str]:
        """Return the code that loads what is stored of the pixel at a row and column into `raw`."""
        image, type = arguments.read(self.source), self.source.type
        if self.in_words or self._is_packed:
            fragment = "request_words" if self.in_words else "request_pixel"
            return self._cuda(fragment, IMAGE=image, AT=self._first.offset(type))
        at = Space(type.shape, _NAMES[self.rank]).offset(type)
        return self._cuda("request_channels", CHANNELS=type.shape[1], IMAGE=image, AT=at)

    def deliver_pixel(self, arguments: Arguments) -> list[str]:
        """Return the code that computes a pixel from `raw`."""
        if self.in_words or self._is_packed:
            fragment = "deliver_words" if self.in_words else "deliver_pixel"
            return self._cuda(fragment, AT=self._first.offset(self.source.type))
        space = Space(self.source.type.shape, _NAMES[self.rank])
        code = PointwiseCode(space, arguments, "p", known={self.source: "wide(raw[c1])"})
        code.narrowed[self.source] = "raw[c1]"
        return self._channels(code)

    def _channels(self, code: PointwiseCode) -> list[str]:
        """Return the code that computes the channels of a pixel one by one."""
        last = self.conv.operands[0]
        for node in self.prologue:
            if isinstance(node.op, Pad):
                last = node.operands[0]
                break
            code.apply(node)
        code.get(last)
        code.body.append(f"pixel.v[c1] = {code.as_stored(last)};")
        return self._cuda("load_channels", CHANNELS=self.source.type.shape[1], PROLOGUE=code.lines())

    def epilogue(self, arguments: Arguments, own: int, result: str) -> list[str]:
        """Return the code of the epilogue of `own` neighbouring results of a thread.

        result: the C of result `j` of the convolution.
        """
        y = self.conv.result
        names = tuple(f"c{d}" for d in range(self.rank))
        code = ByteCode(Space(y.type.shape, names, 1, own), arguments, rounds=True)
        code.define(y, result)
        code.compute(self.rest, self.outputs)
        return code.lines()

    @property
    def in_words(self) -> bool:
        """Tell if two words contain a pixel of three contiguous numbers.

        The last word must end where the image does.
        """
        type, kind = self.source.type, self.conv.operands[0].type.dtype
        is_read_first = not self.prologue or isinstance(self.prologue[0].op, Pad)
        if not is_read_first or type.dtype is not kind or type.within or type.size % 2:
            return False
        return type.shape[1] == 3 and type.order == channels_last(self.rank)

    @property
    def _stored_filters(self) -> TensorType:
        """The filters as they are stored; constants are stored as this kernel reads them."""
        w = self.conv.operands[1]
        return w.type if w.literal is None else w.type.with_order(channels_last(self.rank))

    @property
    def _is_packed(self) -> bool:
        """Tell if one load moves the channels of a pixel."""
        first, *others = strides_from(self.source.type, self.rank, 1)
        is_whole = not self.prologue and self.source.type.shape[1] == CHANNELS
        return is_whole and first == 1 and not any(stride % CHANNELS for stride in others)

    @property
    def _first(self) -> Space:
        """The first channel of the pixel."""
        image, _, *others = _NAMES[self.rank]
        return Space(self.source.type.shape, (image, None, *others))

    @property
    def _cuda(self) -> CudaTemplate:
        return _CUDA.bind(TYPE=C_TYPES[self.conv.operands[0].type.dtype])
