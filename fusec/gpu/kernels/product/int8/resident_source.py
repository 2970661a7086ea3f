"""Generate the launch of a product of 8-bit integers whose weights stay in shared memory (Hopper).

A block has some columns, and their weights for the whole depth. Its teams of warpgroups work by themselves, each at
tiles of 64 rows. A team copies parts of rows to a ring and multiplies them (wgmma). While one team finishes and stores
its sums, others multiply. What epilogues read is loaded while products run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fusec.gpu.kernels.codegen import wgmma
from fusec.gpu.kernels.codegen.byte_code import BYTE_PRODUCT, ByteCode
from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, c_bool, cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import Arguments, Launch, ceil_div
from fusec.gpu.kernels.codegen.pointwise_code import Space, split_index
from fusec.gpu.kernels.product.product_step import ProductStep
from fusec.ir import Value
from fusec.system.dataclass import dataclass

TILE, GROUP_THREADS, LANES, OCTET_BYTES = 64, 128, 4, 16
LINE_BYTES = 128  # of the cache
MAX_SLOTS, MIN_SLOTS = 8, 4
_CUDA = cuda_template(__package__, "resident_weights.cuh")


@dataclass(frozen=True)
class Tiling:
    """The shares of a block's warpgroups.

    columns: columns of a warpgroup.
    width: warpgroups of a team, which share rows.
    teams: teams of a block.
    """

    columns: int
    width: int
    teams: int


@dataclass(frozen=True, eq=False)
class ResidentSource:
    """The launch of a product."""

    step: ProductStep
    outputs: Sequence[Value]
    figures: GpuFigures
    tiling: Tiling

    @property
    def vector(self) -> int:
        """Neighbours of a result that a thread stores: 16 bytes."""
        return 16 if all(value.type.dtype.itemsize == 1 for value in self.outputs) else 8

    @property
    def row_bytes(self) -> int:
        """Bytes of a row that a part has."""
        return next(nbytes for nbytes in wgmma.SWIZZLES if self.step.depth % nbytes == 0)

    @property
    def parts(self) -> int:
        return self.step.depth // self.row_bytes

    @property
    def block_columns(self) -> int:
        return self.tiling.columns * self.tiling.width

    @property
    def column_blocks(self) -> int:
        """Blocks that share rows."""
        return self.step.columns // self.block_columns

    @property
    def tiles(self) -> int:
        return ceil_div(self.step.rows, TILE)

    @property
    def turns(self) -> int:
        """Tiles of a team."""
        return ceil_div(self.tiles, max(1, self.figures.processors // self.column_blocks) * self.tiling.teams)

    @property
    def row_blocks(self) -> int:
        """Blocks that share columns."""
        return ceil_div(self.tiles, self.turns * self.tiling.teams)

    @property
    def weight_bytes(self) -> int:
        return self.block_columns * self.step.depth

    @property
    def slots(self) -> int:
        """Parts of a ring. While one is copied, warps that are late still read the two before the next."""
        alignment, gates = 1024, 8 * self.tiling.teams
        room = self.figures.dynamic_bytes - alignment - gates - self.weight_bytes
        return max(0, min(MAX_SLOTS, room // (self.tiling.teams * TILE * self.row_bytes)))

    @property
    def fits(self) -> bool:
        return self.step.columns % self.block_columns == 0 and self.slots >= MIN_SLOTS

    def launch(self) -> Launch:
        step, tiling, arguments = self.step, self.tiling, Arguments()
        octets, stage_bytes = self.row_bytes // OCTET_BYTES, TILE * self.row_bytes
        team_threads = tiling.width * GROUP_THREADS
        cuda = _CUDA.bind(
            TEAMS=tiling.teams,
            WIDTH=tiling.width,
            COLUMNS=tiling.columns,
            BLOCK_COLUMNS=self.block_columns,
            COLUMN_BLOCKS=self.column_blocks,
            THREADS=team_threads * tiling.teams,
            TEAM_THREADS=team_threads,
            ROWS=step.rows,
            ROWS_FIT=c_bool(step.rows % TILE == 0),
            TILES=self.tiles,
            TURNS=self.turns,
            APART=self.row_blocks * tiling.teams,
            ROW_BYTES=self.row_bytes,
            OCTETS=octets,
            PAIRS=self.vector // 2,
            PARTS=self.parts,
            STAGE_BYTES=stage_bytes,
            SLOTS=self.slots,
            AHEAD=self.slots - 2,
            RING_BYTES=self.slots * stage_bytes,
            WEIGHT_BYTES=self.weight_bytes,
            COPIES=ceil_div(TILE * octets, team_threads),
            COPIES_FIT=c_bool(TILE * octets % team_threads == 0),
            EACH=team_threads // octets,
            PRODUCT=f"ENTRY_{tiling.columns}_of_rows",
        )
        load_weights = self._load_weights(cuda, arguments)
        copy_part = self._copy_part(cuda, arguments)
        codes = self._codes(arguments)
        early = [load for code in codes.values() for load in _taken_early(code)]
        stores: list[str] = []
        for (_, half), code in codes.items():
            stores += cuda("store", PLACE=f"place{half}", EPILOGUE=code.lines())
        step_lines = cuda("step", COPY_PART=copy_part)
        lines = cuda(
            "kernel",
            LOAD_WEIGHTS=load_weights,
            COPY_PART=copy_part,
            STEP=step_lines,
            ARRIVE=cuda("arrive"),
            COORDINATES=list(self._rows_written(cuda)),
            LOAD_EARLY=early,
            FETCH_NEXT=list(self._fetched(cuda, arguments)),
            STORES=stores,
            BEGIN=arguments.begin(),  # after all pointers are named
        )
        launch = arguments.launch(
            "resident_weights",
            lines,
            self.row_blocks * self.column_blocks,
            team_threads * tiling.teams,
            preamble=wgmma.product_of_rows("i8", tiling.columns, self.row_bytes),
            resident=1,
        )
        nbytes = 1024 + self.weight_bytes + tiling.teams * (self.slots * stage_bytes + 8)
        return replace(launch, resident_bytes=nbytes, architecture=wgmma.ARCHITECTURE, dependent=True)

    def _load_weights(self, cuda: CudaTemplate, arguments: Arguments) -> list[str]:
        step = self.step
        type = step.weights
        dims = (0, 1) if step.along == 1 and type.rank > 2 else (type.rank - 1, type.rank - 2)
        pointer, (stride, inner) = arguments.read(step.product.operands[1], type), (type.strides[d] for d in dims)
        assert inner == 1, "weights are stored as products take them"
        return cuda("load_weights", POINTER=pointer, STRIDE=stride)

    def _copy_part(self, cuda: CudaTemplate, arguments: Arguments) -> list[str]:
        step, x = self.step, self.step.product.operands[0]
        linear = all(size == 1 for size in step.steps) and step.is_linear([x.type])
        names: list[str | None] = []
        for d in range(step.y.rank):
            if d == step.along:
                names.append("k")
            elif linear:
                names.append("row" if d == step.inner else None)
            else:
                names.append(f"(row_{d} * {step.steps[d]}u)" if step.steps[d] != 1 else f"row_{d}")
        split = [] if linear else split_index("row", [(f"row_{d}", step.y.shape[d]) for d in step.row_dims])
        space = Space(step.x.shape, tuple(names), step.along, 1)
        return cuda("copy_part", ROW_COORDINATES=split, IMAGE=arguments.read(x), AT=space.offset(x.type))

    def _fetched(self, cuda: CudaTemplate, arguments: Arguments) -> Iterator[str]:
        """Fetch the rows that the epilogue of the next tile reads."""
        step = self.step
        for value in step.residuals:
            line = LINE_BYTES // value.type.dtype.itemsize
            yield from cuda(
                "fetch_next",
                LINES=ceil_div(self.block_columns, line),
                LINE=line,
                PITCH=value.type.shape[step.along],
                POINTER=arguments.read(value),
            )

    def _rows_written(self, cuda: CudaTemplate) -> Iterator[str]:
        for half in range(2):
            yield from cuda("row_written", PLACE=f"place{half}", ROW=f"row{half}", FIRST=8 * half)
        yield f"const u32 column = first + side * {self.tiling.columns}u + lane % 4u * {self.vector}u;"

    def _codes(self, arguments: Arguments) -> Mapping[tuple[int, int], ByteCode]:
        """Return the code of a thread's neighbours, by their group of columns and their half of the rows."""
        groups = range(self.tiling.columns // (LANES * self.vector))
        return {(n, half): self._code(n, half, arguments) for n, half in itertools.product(groups, (0, 1))}

    def _code(self, n: int, half: int, arguments: Arguments) -> ByteCode:
        step = self.step
        column, row = f"(column + {n * LANES * self.vector}u)", f"row{half}"
        names = tuple(column if d == step.along else row if d == step.inner else None for d in range(step.y.rank))
        space, prefix = Space(step.y.shape, names, step.along, self.vector), f"y{n}_{half}_"
        sums = f"sums[{n * self.vector // 2} + j / 2][{half * 2} + j % 2]"
        code = ByteCode(space, arguments, prefix)
        code.define_bounded(step.product.result, sums, float(step.depth * BYTE_PRODUCT))
        code.compute(step.epilogue, self.outputs)
        return code


def _taken_early(code: ByteCode) -> list[str]:
    """Take the loads of bytes out of the code of a result."""
    loads = [f"const {load.type} {load.name} = {load.text};" for load in code.early]
    code.early = []
    return loads
