"""Generate the CUDA C of the gradients of layer and RMS norm: rows, and the sums over rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import C_TYPES, Arguments, Launch, ceil_div, compute_type
from fusec.gpu.kernels.codegen.loops import TOGETHER, ChunkMerge, coordinates
from fusec.gpu.kernels.codegen.op_table import literal
from fusec.gpu.kernels.codegen.pointwise_code import PointwiseCode, Space
from fusec.gpu.kernels.codegen.row_plan import RowPlan
from fusec.gpu.kernels.norm.norm_step import NormStep
from fusec.ir import DType, Value
from fusec.ops import LayerNormBackward
from fusec.schedule.program import inputs_of
from fusec.system.dataclass import dataclass

_CUDA = cuda_template(__package__, "layer_norm_backward.cuh")
AHEAD_BYTES = 200 << 10  # for rows copied ahead, at most; the figures bound it on GPUs that have less
SUMS = 3  # of a row, at most


def columns_bytes(step: NormStep) -> int:
    """Return the bytes of one number for each column, in the type that is computed in."""
    return step.parameters[0].type.size * (8 if step.x.type.dtype is DType.F64 else 4)


@dataclass(frozen=True)
class LayerNormBackwardSource:
    """The launches of a step.

    most: blocks, at most.
    ahead: rows that are copied before their turn.
    """

    step: NormStep
    plan: RowPlan
    most: int
    ahead: int
    figures: GpuFigures

    @property
    def is_possible(self) -> bool:
        """Tell if rows can be copied before their turn, as far as that is wanted."""
        sizes = {self.plan.vector * value.type.dtype.itemsize for value in self._copied_values}
        most = min(AHEAD_BYTES, self.figures.shared_bytes - self._static_bytes)
        return not self.ahead or (bool(sizes) and sizes <= {4, 8, 16} and self._ahead_bytes <= most)

    @property
    def _static_bytes(self) -> int:
        """Bytes of the sums of threads, and of the columns of lanes."""
        plan = self.plan
        numbers = SUMS * plan.block + (plan.lanes * self.size if plan.lanes > 1 else 0)
        return numbers * (8 if self.kind == "double" else 4)

    @property
    def _copied_values(self) -> list[Value]:
        """The values of which rows are copied: those that are read by packs."""
        step, read = self.step, list[Value]()
        for value in (*inputs_of([*step.prologue, step.anchor]), *inputs_of(step.epilogue)):
            if value.type.shape == step.x.type.shape and self._space.is_pack(value.type) and value is not step.y:
                read.append(value)
        return list(dict.fromkeys(read)) if self.ahead else []

    @property
    def _ahead_bytes(self) -> int:
        return (self.ahead + 1) * sum(self._row_bytes(value) for value in self._copied_values)

    def _row_bytes(self, value: Value) -> int:
        """Return the bytes of the rows that a block works on."""
        return self.plan.turns * self.plan.block * self.plan.vector * value.type.dtype.itemsize

    @property
    def rounds(self) -> int:
        return ceil_div(self.plan.groups, self.blocks * self.plan.lanes)

    @cached_property
    def _cuda(self) -> CudaTemplate:
        plan = self.plan
        return _CUDA.bind(
            AHEAD=self.ahead,
            BLOCK=plan.block,
            COUNT=plan.count,
            GRID=self.blocks,
            KIND=self.kind,
            LANES=plan.lanes,
            ROUNDS=self.rounds,
            SIZE=self.size,
            THREADS=plan.threads,
            TURNS=plan.turns,
            VECTOR=plan.vector,
        )

    def _find_row(self) -> list[str]:
        """Declare the row of round `now`, and its coordinates."""
        groups = self.plan.groups
        found = self._cuda("find_row", ROUND="now", ROWS=groups, LAST_ROW=groups - 1)
        return [*found, *coordinates(self.plan, "at", reduced=False)]

    def _place(self, value: Value) -> str:
        """Return the place that a vector of round `now`, turn `turn` is copied to."""
        copied, plan = self._copied_values, self.plan
        start = (self.ahead + 1) * sum(self._row_bytes(each) for each in copied[: copied.index(value)])
        pack = f"Pack<{C_TYPES[value.type.dtype]}, {plan.vector}>"
        at = f"(now % {self.ahead + 1}u * {plan.turns}u + turn) * {plan.block}u + threadIdx.x"
        return f"reinterpret_cast<{pack}*>(rows + {start}u)[{at}]"

    def _define_fetch(self, arguments: Arguments) -> list[str]:
        """Define the function that copies the rows of a round, and copy the first rounds."""
        if not self.ahead:
            return []
        body: list[str] = []
        for value in self._copied_values:
            nbytes = self.plan.vector * value.type.dtype.itemsize
            source = f"{arguments.read(value)} + ({self._space.offset(value.type)})"
            body.append(f"copy_ahead<{nbytes}>(&{self._place(value)}, {source});")
        return self._cuda("fetch_ahead", COPY=[*self._find_row(), *self._loop(body)])

    def _row_code(self, arguments: Arguments, prefix: str = "v") -> PointwiseCode:
        """Return the code for elements of a row; copied rows are read from shared memory."""
        code = PointwiseCode(self._space, arguments, prefix)
        for number, value in enumerate(self._copied_values):
            pack = f"const Pack<{C_TYPES[value.type.dtype]}, {self.plan.vector}>"
            code.head.append(f"{pack} row{number} = {self._place(value)};")
            code.known[value] = f"wide(row{number}.v[j])"
        return code

    @property
    def kind(self) -> str:
        return compute_type(self.step.x.type.dtype)

    @property
    def size(self) -> int:
        return self.step.parameters[0].type.size

    @property
    def blocks(self) -> int:
        return min(self.most, self.plan.blocks)

    @property
    def sums(self) -> int:
        return len(self.step.anchor.results) - 1 + len(self.step.sum_nodes)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the column sums of all blocks."""
        return self.sums * self.blocks * self.size * (8 if self.kind == "double" else 4)

    @property
    def may_be_cooperative(self) -> bool:
        """Tell if blocks can merge the sums themselves: there is a block for all columns."""
        return self._merge(self.plan.block // TOGETHER).blocks <= self.blocks and self.plan.block >= 32

    def _merge(self, threads: int = 0) -> ChunkMerge:
        return ChunkMerge(self.size, self.blocks, threads)

    def rows(self) -> Launch:
        """Return the launch that computes rows and the column sums of each block."""
        arguments = Arguments()
        return self._make_launch("norm_backward_rows", self._rows(arguments), arguments)

    def columns(self) -> Launch:
        """Return the launch that merges the sums and computes on them."""
        arguments, merge = Arguments(), self._merge()
        return arguments.early_launch(
            "norm_backward_columns", self._columns(arguments, merge), merge.blocks, merge.block
        )

    def one_launch(self) -> Launch:
        """Return one launch for both, whose blocks wait for each other in between."""
        arguments, merge = Arguments(), self._merge(self.plan.block // TOGETHER)
        lines = [
            *self._rows(arguments),
            f"wait_for_blocks({arguments.barrier_counters(1)}, {self.blocks}u, blockIdx.x == 0u);",
        ]
        lines += ["{", *self._columns(arguments, merge, waited=True), "}"]
        return replace(self._make_launch("norm_backward", lines, arguments), cooperative=True)

    def _make_launch(self, name: str, lines: Sequence[str], arguments: Arguments) -> Launch:
        launch = arguments.early_launch(name, lines, self.blocks, self.plan.block)
        return replace(launch, resident_bytes=self._ahead_bytes) if self.ahead else launch

    def _rows(self, arguments: Arguments) -> list[str]:
        step, kind, op = self.step, self.kind, self.step.anchor.op
        assert isinstance(op, LayerNormBackward)
        names, sums, before = self._column_sums, 3 if op.centred else 2, list[str]()
        fetch = self._define_fetch(arguments)
        load = self._load_code(arguments)
        if op.centred:
            load.body.append("sum[0] += e[turn][j];")
            before = [*self._loop(load.lines()), *self._cuda("subtract_mean")]
            load = PointwiseCode(self._space, arguments, "s")
            load.body.append("e[turn][j] -= mean;")
        inner = f"loss[turn][j] * {load.get(step.parameters[0])}"
        load.body += [f"const {kind} inner = {inner};", "sums[0] += e[turn][j] * e[turn][j];"]
        load.body += ["sums[1] += inner * e[turn][j];", *(["sums[2] += inner;"] if op.centred else [])]
        rows = self._cuda(
            "rows",
            SHARED=self.plan.block * SUMS,
            DECLARE_COLUMN_SUMS=[f"{kind} {name}[{self.plan.turns}][{self.plan.vector}];" for name in names],
            ZERO_COLUMN_SUMS=" ".join(f"{name}[turn][j] = {kind}(0);" for name in names),
            FETCH=fetch,
            FIND_ROW=[*(self._cuda("wait_for_row") if self.ahead else []), *self._find_row()],
            LOAD=before,
            SUMS=sums,
            ZEROS=", ".join([f"{kind}(0)"] * sums),
            SUM=self._loop(load.lines()),
            EPSILON=literal(op.epsilon, step.x.type.dtype),
            WRITE=self._loop(self._write_code(arguments, op).lines()),
        )
        return [*rows, *self._store_columns(arguments)]

    def _load_code(self, arguments: Arguments) -> PointwiseCode:
        """Return the code that applies the prologue and loads the row's elements and their gradients."""
        step, code = self.step, self._row_code(arguments)
        # lanes that are not live repeat the last one's stores
        code.compute(step.prologue, step.prologue_outputs)
        code.body.append(f"e[turn][j] = {code.get(step.x)};")
        code.body.append(f"loss[turn][j] = {code.get(step.elements[0])};")
        return code

    def _write_code(self, arguments: Arguments, op: LayerNormBackward) -> PointwiseCode:
        """Return the code that computes and stores the row's results, and adds to the sums of columns."""
        step, count, code = self.step, f"{self.kind}({self.size})", self._row_code(arguments, "w")
        code.body.append(f"const {self.kind} normal = e[turn][j] * inverse;")
        adds = ["by_scale[turn][j] += loss[turn][j] * normal;", "by_bias[turn][j] += loss[turn][j];"]
        code.body += adds[: len(step.anchor.results) - 1]
        if step.epilogue_outputs or step.sum_nodes:
            mean = f" - sums[2] / {count}" if op.centred else ""
            inner = f"loss[turn][j] * {code.get(step.parameters[0])}"
            code.define(step.y, f"({inner}{mean} - normal * along) * inverse")
            code.compute(step.epilogue)
            for number, node in enumerate(step.sum_nodes):
                code.body.append(f"by_sum{number}[turn][j] += {code.get(node.operands[0])};")
            for value in step.epilogue_outputs:
                code.store(value)
        return code

    @property
    def _column_sums(self) -> tuple[str, ...]:
        """Names of the sums of columns: the gradients of scale and bias, and those of sum nodes."""
        own = ("by_scale", "by_bias")[: len(self.step.anchor.results) - 1]
        return (*own, *(f"by_sum{number}" for number in range(len(self.step.sum_nodes))))

    def _store_columns(self, arguments: Arguments) -> list[str]:
        """Store the block's sums of columns: those of its lanes, added through shared memory.

        The memory of copied rows has room for all sums together. Else there is memory for those of one kind.
        """
        plan, kind, scratch, names = self.plan, self.kind, arguments.scratch(self.kind), self._column_sums
        sums = [f"({scratch} + ({number * self.blocks}u + blockIdx.x) * {self.size}u)" for number in range(len(names))]
        column = f"r * {plan.vector}u + j"
        if plan.lanes == 1:
            pairs = zip(names, sums, strict=True)
            return [
                x for name, to in pairs for x in self._cuda("keep_columns", PLACE=f"{to}[{column}]", COLUMN_SUM=name)
            ]
        together = self._ahead_bytes >= len(names) * plan.lanes * columns_bytes(self.step)
        lines = [f"{kind}* const columns = ({kind}*)rows;"] if together else []
        lines += ["__syncthreads();"] if together else [f"__shared__ {kind} columns[{plan.lanes * self.size}];"]
        keep, add = list[list[str]](), list[list[str]]()
        for number, (name, to) in enumerate(zip(names, sums, strict=True)):
            lanes = f"(columns + {number * plan.lanes * self.size * together}u)"
            keep.append(self._cuda("keep_columns", PLACE=f"{lanes}[lane * {self.size}u + {column}]", COLUMN_SUM=name))
            add.append(self._cuda("add_lanes", LANE_SUMS=lanes, SUMS=to))
        wait = ["__syncthreads();"]
        if together:
            return [*lines, *(x for each in keep for x in each), *wait, *(x for each in add for x in each)]
        return [*lines, *(x for each in zip(keep, add, strict=True) for x in [*each[0], *wait, *each[1], *wait])]

    def _columns(self, arguments: Arguments, merge: ChunkMerge, waited: bool = False) -> list[str]:
        step, kind, pointer = self.step, self.kind, arguments.scratch(self.kind)
        lines = merge.setup(kind, self.sums)
        places = (f"({pointer} + (({number * self.blocks}u + s) * {self.size}u + c))" for number in range(self.sums))
        adds = [f"acc{number}[0] += {'load_fresh' if waited else '*'}{place};" for number, place in enumerate(places)]
        lines += [*self._cuda("add_blocks", MERGING=merge.threads, ADD=adds), *merge.reduce(self.sums)]
        shape = step.parameters[0].type.shape
        names = _places(shape)
        if len(names) > 1:
            lines += [f"const u32 {name} = {text};" for name, text in names if name]
        code = PointwiseCode(Space(shape, tuple(name or None for name, _ in names)), arguments)
        for number, value in enumerate((*step.anchor.results[1:], *(node.result for node in step.sum_nodes))):
            code.define(value, f"acc{number}[0]")
        code.compute(step.statistics_nodes, step.statistics)
        return [*lines, "if (live && t == 0) {", *code.lines(), "}"]

    @property
    def _space(self) -> Space:
        names: list[str | None] = [None] * self.step.x.type.rank
        for axis in self.plan.axes:
            names[axis.dim] = axis.name
        return Space(self.step.x.type.shape, tuple(names), self.plan.along, self.plan.vector)

    def _loop(self, body: Sequence[str]) -> list[str]:
        """Loop over the vectors of the row that a thread keeps."""
        plan = self.plan
        skip = [f"if (r >= {plan.count}u) continue;"] if plan.turns * plan.threads != plan.count else []
        return self._cuda("each_vector", SKIP=skip, BODY=[*coordinates(plan, "r", reduced=True), *body])


def _places(shape: tuple[int, ...]) -> list[tuple[str, str]]:
    """Return for each dim the name of its coordinate (empty if its size is 1), and the coordinate of column c."""
    if len(shape) == 1:
        return [("c" if shape[0] != 1 else "", "")]
    return [
        (f"q{d}" if size != 1 else "", f"c / {math.prod(shape[d + 1 :])}u % {size}u") for d, size in enumerate(shape)
    ]
