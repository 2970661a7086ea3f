"""Find the first maximum of each window of a max pool, which its gradient goes to."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate
from fusec.gpu.kernels.codegen.kernel import BLOCK, Arguments, ceil_div
from fusec.gpu.kernels.codegen.pointwise_code import Space, thread_index
from fusec.ir import Value
from fusec.ops.pooling import Pool
from fusec.system.dataclass import dataclass

UNROLLED = 256  # taps of all windows of a thread; the compiler decides about larger loops


@dataclass(frozen=True)
class WindowDim:
    """One spatial dim.

    size, count: elements of x, and windows.
    """

    size: int
    count: int
    window: int
    stride: int
    dilation: int
    pad: int

    @property
    def tiles(self) -> int:
        """Threads along the dim."""
        return (self.size - 1 + self.pad) // self.stride + 1

    @property
    def windows(self) -> int:
        """Windows that overlap the elements of a thread."""
        return self.dilation * (self.window - 1) // self.stride + 1


def window_dims(op: Pool, image: Sequence[int], pooled: Sequence[int]) -> list[WindowDim]:
    """Return the spatial dims of a pool. image, pooled: the spatial dims of its operand and result."""
    spatial = zip(
        image, pooled, op.window, op.strides, op.dilations, op.pads, strict=False
    )  # op.pads: the starts first
    return [WindowDim(*each) for each in spatial]


def unrolled(dims: Sequence[WindowDim]) -> str:
    """Return the pragma of loops over windows and taps."""
    return "#pragma unroll" if math.prod(d.windows * d.window for d in dims) <= UNROLLED else ""


@dataclass(frozen=True)
class Threads:
    """A thread for each place in space and vector of channels.

    batch, channels: dims of the image.
    packs: neighbouring channels lie side by side, and neighbouring threads have them.
    """

    batch: int
    channels: int
    vector: int
    packs: bool

    def setup(self, names: Sequence[str], counts: Sequence[int]) -> tuple[list[str], int]:
        """Declare the threads' coordinates; return the grid, too. names, counts: of the spatial coordinates."""
        pack = ("pack", self.channels // self.vector)
        sizes = [("c0", self.batch), *zip(names, counts, strict=True)]
        sizes = [*sizes, pack] if self.packs else [sizes[0], pack, *sizes[1:]]
        total = math.prod(size for _, size in sizes)
        return [*thread_index(total, sizes), f"const u32 c1 = pack * {self.vector}u;"], ceil_div(total, BLOCK)


def index_in(letter: str, dims: Sequence[WindowDim], extent: str) -> str:
    """Return the row-major index of a tap, or element, from its coordinates."""
    text = f"{letter}0"
    for d, dim in enumerate(dims[1:], 1):
        text = f"({text}) * {getattr(dim, extent)} + {letter}{d}"
    return text


def find_largest(x: Value, dims: Sequence[WindowDim], cuda: CudaTemplate, arguments: Arguments) -> list[str]:
    """Find the first of the largest taps of the window at o0, o1 and so on, as `where`."""
    return cuda("find_largest", EACH_TAP=each_tap("compare_tap", x, dims, cuda, arguments))


def each_tap(fragment: str, x: Value, dims: Sequence[WindowDim], cuda: CudaTemplate, arguments: Arguments) -> list[str]:
    """Return loops over the taps of the window at o0, o1 and so on, with a fragment that reads a tap's elements."""
    at = Space(x.type.shape, ("c0", "c1", *(f"p{d}" for d in range(len(dims))))).offset(x.type)
    tap = index_in("k", dims, "window")
    body = cuda(fragment, ELEMENTS=f"{arguments.read(x)} + ({at})", TAP_NUMBER=tap)
    for d, dim in reversed(tuple(enumerate(dims))):
        place = f"(int)o{d} * {dim.stride} + k{d} * {dim.dilation} - {dim.pad}"
        outside = f"(u32)p{d} >= {dim.size}u"
        body = cuda("each_tap", TAP=f"k{d}", TAPS=dim.window, PIXEL=f"p{d}", PLACE=place, OUTSIDE=outside, BODY=body)
    return body
