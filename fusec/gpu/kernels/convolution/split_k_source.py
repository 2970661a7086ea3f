"""Generate the CUDA C of a convolution over few pixels: see `split_k`.

A block has a tile of pixels, some filters and some channels. The pixels that its taps read are in shared memory.
Weights are constants, stored in the order in which threads multiply them; loads of many steps are issued together. Both
operands may permute the depth in the same way, so a thread takes eight neighbours of a pixel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, cuda_template
from fusec.gpu.kernels.codegen.kernel import C_TYPES, CLUSTERS, Arguments, Kernel, ceil_div
from fusec.gpu.kernels.codegen.pointwise_code import PointwiseCode, Space, split_index, stride_along, widest_vector
from fusec.gpu.kernels.convolution.split_k_tiling import (
    COLUMNS,
    DEPTH,
    PACK,
    ROWS,
    Along,
    SplitKTiling,
    along,
    fragments,
    is_flat,
)
from fusec.ir import Node, Value
from fusec.ops import Conv
from fusec.schedule.program import inputs_of
from fusec.system.dataclass import dataclass

HELD = 96  # registers for weights that are being loaded
_CUDA = cuda_template(__package__, "split_k.cuh")


@dataclass(frozen=True, eq=False)
class SplitKSource:
    """A convolution, its epilogue, and what is stored."""

    conv: Node
    rest: Sequence[Node]
    outputs: Sequence[Value]
    tiling: SplitKTiling

    @property
    def op(self) -> Conv:
        assert isinstance(self.conv.op, Conv)
        return self.conv.op

    @cached_property
    def is_flat(self) -> bool:
        """Tell if pixels form one row, in whichever image they are."""
        return is_flat(self.conv)

    @property
    def image(self) -> tuple[int, int, int]:
        """Images and their rows and columns, as tiles see them."""
        n, _, high, wide = self.conv.operands[0].type.shape
        return (1, 1, n * high * wide) if self.is_flat else (n, high, wide)

    @property
    def result(self) -> tuple[int, int, int]:
        n, _, high, wide = self.conv.result.type.shape
        return (1, 1, n * high * wide) if self.is_flat else (n, high, wide)

    @cached_property
    def sides(self) -> tuple[Along, Along]:
        window = self.conv.operands[1].type.shape[2:]
        return along(self.op, 0, window[0], self.tiling.high), along(self.op, 1, window[1], self.tiling.wide)

    @property
    def chunks(self) -> int:
        """Chunks of DEPTH channels of a block."""
        return self.conv.operands[1].type.shape[1] // DEPTH // self.tiling.splits

    @property
    def steps(self) -> int:
        """Taps of a block, times its chunks."""
        high, wide = self.conv.operands[1].type.shape[2:]
        return high * wide * self.chunks

    @property
    def own_steps(self) -> int:
        """Steps of a warp, at most."""
        return ceil_div(self.steps, self.tiling.deep)

    @cached_property
    def pitch(self) -> int:
        """Bytes from one pixel to the next in shared memory.

        It is chosen so that two neighbouring results, of which eight threads read 64 bytes each, are in different
        banks.
        """
        nbytes, apart = 2 * DEPTH * self.chunks, self.sides[1].apart
        pads = range(0, 128, 16)
        return nbytes + min(pads, key=lambda pad: (abs((nbytes + pad) * apart % 128 - 64), pad))

    @property
    def patch_bytes(self) -> int:
        down, right = self.sides
        return ceil_div(down.count * right.count * self.pitch, 128) * 128

    @property
    def sums_pitch(self) -> int:
        """Numbers from the sums of one pixel to those of the next, which are in other banks."""
        return self.tiling.filters + 4

    @property
    def rows_each(self) -> int:
        """Pixels of a tile that a block of a cluster finishes."""
        return ceil_div(self.tiling.pixels, self.tiling.splits if self.tiling.clusters else 1)

    @property
    def resident_bytes(self) -> int:
        tiling = self.tiling
        sums = tiling.deep * tiling.tiles * COLUMNS * self.sums_pitch * 4
        box = tiling.splits * self.rows_each * self.sums_pitch * 4 if self._merges_in_cluster else 0
        return 16 + self.patch_bytes + sums + box

    @property
    def across(self) -> tuple[int, int, int, int]:
        """Blocks: images, rows and columns of tiles, groups of filters."""
        tiling, (n, high, wide) = self.tiling, self.result
        filters = self.conv.result.type.shape[1]
        return n, ceil_div(high, tiling.high), ceil_div(wide, tiling.wide), ceil_div(filters, tiling.filters)

    @property
    def grid(self) -> int:
        n, down, right, groups = self.across
        return n * down * right * groups * self.tiling.splits

    @property
    def _merges_in_cluster(self) -> bool:
        """Tell if the blocks of a cluster merge their sums."""
        return self.tiling.clusters and self.tiling.splits > 1

    @cached_property
    def cuda(self) -> CudaTemplate:
        tiling = self.tiling
        return _CUDA.bind(
            TYPE=C_TYPES[self.conv.result.type.dtype],
            THREADS=tiling.threads,
            DEEP=tiling.deep,
            SPLITS=tiling.splits,
            FILTERS=tiling.filters,
            OCTETS=tiling.filters // PACK,
            PIXELS=tiling.pixels,
            HIGH=tiling.high,
            TILE_COLUMNS=tiling.wide,
            TILES=tiling.tiles,
            ROWS_EACH=self.rows_each,
            SUMS_PITCH=self.sums_pitch,
        )

    def kernel(self) -> Kernel:
        tiling, cuda, arguments = self.tiling, self.cuda, Arguments()
        n, down, right, groups = self.across
        turns = [self._epilogue_code(turn, arguments) for turn in range(self._turns)]
        down_side, right_side = self.sides
        blocks = [("n", n), ("down", down), ("right", right), ("group", groups), ("part", tiling.splits)]
        lines = cuda(
            "kernel",
            ACROSS=tiling.across,
            BLOCK_COORDINATES=split_index("block", blocks),
            PATCH_BYTES=self.patch_bytes,
            BEGIN_CLUSTER=cuda("begin_cluster") if self._merges_in_cluster else [],
            **self._weights(arguments),
            **self._pixels(arguments),
            PITCH=self.pitch,
            LOAD_OPERANDS=[line for loads, _ in turns for line in loads],
            PIXEL_STEP=right_side.apart * self.pitch,
            OWN_STEPS=self.own_steps,
            CHUNKS=self.chunks,
            WINDOW_COLUMNS=self.conv.operands[1].type.shape[3],
            TAP_ROW=down_side.dilation * right_side.count,
            TAP_COLUMN=right_side.dilation,
            RESULT_ROW=down_side.apart * right_side.count,
            RESULT_COLUMN=right_side.apart,
            MERGE=self._merge_sums([epilogue for _, epilogue in turns], arguments),
        )
        name = "+".join(["few_pixels", *(node.op.name for node in self.rest)])
        cluster = tiling.splits if self._merges_in_cluster else 1
        launch = replace(
            arguments.launch("few_pixels", lines, self.grid, tiling.threads, cluster=cluster),
            resident_bytes=self.resident_bytes,
            architecture=CLUSTERS if self._merges_in_cluster else "",
            dependent=self._is_dependent,
        )
        scratch = 0 if self._merges_in_cluster or tiling.splits == 1 else self.grid * tiling.pixels * tiling.filters * 4
        return Kernel(name, (launch,), scratch)

    def _weights(self, arguments: Arguments) -> dict[str, int | str]:
        """Return the figures of the weights that a warp multiplies."""
        w, tiling = self.conv.operands[1].type, self.tiling
        groups = w.shape[0] // ROWS
        row_group = f"(group * {tiling.filters // ROWS}u + side * {tiling.rows}u + m)"
        if w.shape[0] % tiling.filters:  # filters past the last are computed, but not stored
            row_group = f"({row_group} < {groups}u ? {row_group} : {groups - 1}u)"
        return {
            "WEIGHTS": arguments.read(self.conv.operands[1], fragments(w, tiling.splits)),
            "ROW_GROUP": row_group,
            "PART_WEIGHTS": self.steps * ROWS * DEPTH,
            "ROWS": tiling.rows,
            "AHEAD": self._ahead,
            "STEPS": self.steps,
        }

    def _pixels(self, arguments: Arguments) -> dict[str, int | str]:
        """Return the figures of the pixels that a tile reads."""
        x, tiling, (down, right) = self.conv.operands[0], self.tiling, self.sides
        n, _, h, w = (0, 1, 0, x.type.shape[1]) if self.is_flat else x.type.strides
        strides, (top, left) = self.op.strides, self.op.pads[:2]  # of a flat one: ones, and zeros
        octets = DEPTH // PACK * self.chunks
        span = right.count * octets  # copies for a row
        rows, turns = max(1, tiling.threads // span), ceil_div(span, tiling.threads)  # together, and of a row
        conditions = [f"i < {span}u"] if turns * tiling.threads > span else []
        if rows > 1:
            conditions = [f"row < {rows}u"] if rows * span < tiling.threads else []
            conditions += [f"r * {rows} + row < {down.count}u"] if down.count % rows else []
        return {
            "IMAGE": arguments.read(x),
            "IMAGE_ROWS": self.image[1],
            "IMAGE_COLUMNS": self.image[2],
            "IMAGE_STRIDE": n,
            "ROW_STRIDE": h,
            "COLUMN_STRIDE": w,
            "PART_CHANNELS": self.chunks * DEPTH,
            "PIXEL_OCTETS": octets,
            "TURNS": turns,
            "SPAN": span,
            "ROWS_TOGETHER": rows,
            "ROW_TURNS": ceil_div(down.count, rows),
            "IS_COPIED": " && ".join(conditions) or "true",
            "TOP": top,
            "LEFT": left,
            "TILE_DOWN": tiling.high * strides[0],
            "TILE_RIGHT": tiling.wide * strides[1],
            "STRIDE_DOWN": down.stride,
            "STRIDE_RIGHT": right.stride,
            "PATCH_COLUMNS": right.count,
            "ROWS_DOWN": rows * down.stride,
            "ROWS_STRIDE": rows * down.stride * h,
        }

    @property
    def _ahead(self) -> int:
        """Steps of a warp whose weights are loaded together."""
        return max(1, min(self.own_steps, HELD // (8 * self.tiling.rows)))

    def _merge_sums(self, epilogues: Sequence[list[str]], arguments: Arguments) -> list[str]:
        """Merge the sums of warps, and of blocks, in a fixed order; apply the epilogue."""
        tiling, cuda, pitch = self.tiling, self.cuda, self.sums_pitch
        sum_warps = cuda(
            "sum_parts",
            READ="*",
            FROM=f"sums + (pixel * {pitch}u + octet * {PACK}u)",
            COUNT=tiling.deep,
            APART=tiling.tiles * COLUMNS * pitch,
        )
        if tiling.splits == 1:
            return self._finish(epilogues, sum_warps)
        if tiling.clusters:
            sum_blocks = cuda(
                "sum_parts",
                READ="*",
                FROM=f"box + (pixel % {self.rows_each}u * {pitch}u + octet * {PACK}u)",
                COUNT=tiling.splits,
                APART=self.rows_each * pitch,
            )
            return cuda("merge_in_cluster", SUM_WARPS=sum_warps, FINISH=self._finish(epilogues, sum_blocks))
        size, scratch = tiling.pixels * tiling.filters, arguments.scratch()
        sum_blocks = cuda(
            "sum_parts",
            READ="load_fresh",
            FROM=f"{scratch} + (block / {tiling.splits}u * {tiling.splits * size}u + item * {PACK}u)",
            COUNT=tiling.splits,
            APART=size,
        )
        return cuda(
            "merge_in_scratch",
            SUM_WARPS=sum_warps,
            SCRATCH=scratch,
            SIZE=size,
            COUNTERS=arguments.barrier_counters(self.grid // tiling.splits),
            FINISH=self._finish(epilogues, sum_blocks),
        )

    def _finish(self, epilogues: Sequence[list[str]], sum: list[str]) -> list[str]:
        """Sum the parts and apply the epilogue. As in cuDNN's graphs, only stored values are rounded."""
        return [
            line
            for turn, code in enumerate(epilogues)
            for line in self.cuda(
                "finish", IS_RESULT=f"is{turn}", ITEM=f"item{turn}", PIXEL=f"pixel{turn}", SUM=sum, EPILOGUE=code
            )
        ]

    @property
    def _turns(self) -> int:
        """Turns of a thread, which finishes eight results of a pixel in each."""
        return ceil_div(self.rows_each * self.tiling.filters // PACK, self.tiling.threads)

    @cached_property
    def _packs(self) -> bool:
        """Tell if one load or store moves eight neighbours, where they are contiguous."""
        values = (self.conv.result, *inputs_of(self.rest), *self.outputs)
        types = [v.type for v in values if v.type.size != 1]
        steps = [[stride_along(each, 4, 1), *(stride_along(each, 4, d) for d in (0, 2, 3))] for each in types]
        return widest_vector(self.conv.result.type.shape[1], types, steps) == PACK

    @property
    def _is_dependent(self) -> bool:
        """Tell if the launch may be dependent: all that earlier launches may write is loaded after the wait.

        The compiler may move other read-only loads before the wait.
        """
        read = [v.type for v in inputs_of(self.rest) if v.literal is None and v is not self.conv.result]
        return self._packs and all(stride_along(type, 4, 1) == 1 for type in read)

    def _epilogue_code(self, turn: int, arguments: Arguments) -> tuple[list[str], list[str]]:
        """Return the loads of the epilogue's operands, which are issued before the sums are known, and the rest."""
        y, (_, high, wide) = self.conv.result, self.result
        lines = self.cuda(
            "result_place",
            ITEM=f"item{turn}",
            PIXEL=f"pixel{turn}",
            IS_RESULT=f"is{turn}",
            PLACE=f"p{turn}",
            FILTER=f"f{turn}",
            RESULT_Y=f"y{turn}",
            RESULT_X=f"x{turn}",
            FIRST_ITEM=turn * self.tiling.threads,
            FIRST_PIXEL=f"part * {self.rows_each}u" if self._merges_in_cluster else "0u",
            RESULT_ROWS=high,
            RESULT_COLUMNS=wide,
            ALL_FILTERS=y.type.shape[1],
        )
        names: tuple[str, ...] = ("n", f"f{turn}", f"y{turn}", f"x{turn}")
        if self.is_flat:
            n, _, height, width = y.type.shape
            names = (f"n{turn}", f"f{turn}", f"h{turn}", f"w{turn}")
            lines += split_index(f"x{turn}", [(names[0], n), (names[2], height), (names[3], width)])
        space = Space(y.type.shape, names, 1, PACK, packs=self._packs)
        code = PointwiseCode(space, arguments, f"v{turn}_", rounds=False, ahead=True)
        code.define(y, "total.v[j]")
        for node in self.rest:
            code.apply(node)
        loads, code.head = code.head, []
        for value in self.outputs:
            code.store(value)
        return [*lines, *loads], code.lines()
