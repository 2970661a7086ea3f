"""Generate the CUDA C of batch norm in training and its backward: sums by chunks, their merge, and the elements.

Squares are summed around each chunk's first element, because a large mean would otherwise cost digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, cuda_template
from fusec.gpu.kernels.codegen.kernel import Arguments, Launch, compute_type
from fusec.gpu.kernels.codegen.loops import ChunkMerge, coordinates, loop, thread_setup
from fusec.gpu.kernels.codegen.op_table import literal
from fusec.gpu.kernels.codegen.pointwise_code import PointwiseCode, Space, rounded_to
from fusec.gpu.kernels.codegen.row_plan import RowPlan
from fusec.gpu.kernels.norm.norm_step import NormStep
from fusec.ir import DType, TensorType, Value
from fusec.ops import BatchNormBackward, BatchNormBySums, BatchNormTrain, ChannelSums
from fusec.system.dataclass import dataclass

# Half of the least positive number of a type: what is larger is rounded to a positive number.
LEAST_POSITIVE = {DType.F16: "0x1p-25f", DType.BF16: "0x1p-134f"}
BACKWARDS = True  # the end is read first, because it was written last and may still be in the cache
_CUDA = cuda_template(__package__, "batch_norm.cuh")


@dataclass(frozen=True)
class BatchNormSource:
    """The launches of a step.

    sums, write: how threads share the elements in the first and in the second pass.
    """

    step: NormStep
    sums: RowPlan
    write: RowPlan

    @property
    def forward(self) -> bool:
        return not isinstance(self.step.anchor.op, BatchNormBackward)

    @property
    def kind(self) -> str:
        return compute_type(self.step.x.type.dtype)

    @property
    def channels(self) -> int:
        return self.step.x.type.shape[1]

    @property
    def count(self) -> int:
        return self.step.x.type.size // self.channels

    @property
    def scratch_bytes(self) -> int:
        """Bytes for the sums of each chunk and channel, and the factors of each channel."""
        return (self.totals * self.sums.chunks + self.factors) * self.channels * (8 if self.kind == "double" else 4)

    @property
    def masked(self) -> bool:
        """Tell if a relu's gradient masks dy; the mask is computed from the norm's result again."""
        op = self.step.anchor.op
        return isinstance(op, BatchNormBackward) and op.relu

    @property
    def factors(self) -> int:
        if isinstance(self.step.anchor.op, ChannelSums):
            return 0
        return 3 if self.forward else 6 if self.masked else 4 * len(self.step.anchors)

    @property
    def totals(self) -> int:
        """Sums of a channel: that of dy, and one for each norm (backward)."""
        return 1 + len(self.step.anchors)

    def for_each_total(self, statement: str) -> list[str]:
        """Repeat a statement of C for each sum, whose number stands for `#`."""
        return [statement.replace("#", str(number)) for number in range(self.totals)]

    def _masked_gradient(self, dy: str, centred: str, factor: str, bias: str) -> str:
        """Return dy where the norm's result, as stored, is positive, else zero."""
        dtype, text = self.step.y.type.dtype, f"{centred} * {factor} + {bias}"
        # what exceeds half of the least number that the type holds is rounded to more than zero
        least = LEAST_POSITIVE.get(dtype, f"{self.kind}(0)")
        text = text if dtype in LEAST_POSITIVE else rounded_to(text, dtype)
        return f"({text} > {least} ? {dy} : {self.kind}(0))"

    def launches(self) -> tuple[Launch, ...]:
        elements = () if not (self.step.epilogue_outputs or self.step.epilogue) else (self._elements(),)
        return (self._sums(), self._merge_chunks(), *elements)

    @cached_property
    def _cuda(self) -> CudaTemplate:
        return _CUDA.bind(KIND=self.kind, CHANNELS=self.channels, WIDTH=self.sums.width, PLACE=self._place)

    @property
    def _place(self) -> str:
        """Number of the current element's channel among those of a thread, as C."""
        return "0" if self.sums.row else "j"

    def _sums(self) -> Launch:
        """Return the launch that sums chunks.

        Forward: the mean of each chunk, and squares around it. Backward: the sums of dy and of dy * x.
        """
        plan, kind, arguments, step = self.sums, self.kind, Arguments(), self.step
        lines = thread_setup(plan, kind, backwards=BACKWARDS)
        lines += self.load_centre(arguments, "begin")
        code = PointwiseCode(space_of(step.x.type, plan), arguments)
        self.accumulate(code)
        lines += loop(plan, code.lines())
        reduced = f"reduce_threads<{plan.block}, {plan.threads}, {1 if plan.row else plan.lanes}, {plan.width}>"
        lines += self.for_each_total(f"{reduced}(acc#, shared, Add());")
        size = f"{kind}((end - begin) * {plan.vector if plan.row else 1}u)"
        scratch, chunk = arguments.scratch(kind), "chunk" if plan.chunks > 1 else "0u"
        place = f"(#u * {plan.chunks}u + {chunk}) * {self.channels}u + at * {plan.width}u + w"
        lines += self._cuda(
            "store_chunk",
            STATISTICS=self.chunk_statistics("acc0[w]", "acc1[w]", "around[w]", size),
            STORES=self.for_each_total(f"{scratch}[{place}] = acc#[w];"),
        )
        return arguments.early_launch(f"{self.name}_sums", lines, plan.blocks * plan.chunks, plan.block)

    def load_centre(self, arguments: Arguments, first_row: str) -> list[str]:
        """Zero the sums, and load the number of each channel that they are taken around.

        Forward it is an element of the channel, backward the mean.
        """
        plan, kind, step, place = self.sums, self.kind, self.step, self._place
        lines = self._cuda("declare_sums")
        if self.forward:
            first = PointwiseCode(space_of(step.x.type, plan), arguments, "f")
            first.compute(step.prologue)
            # of neighbours along a row only the first counts
            first.body.append(f"const {kind} e = {first.get(step.x)};")
            guard = "if (j == 0) " if plan.row else ""
            first.body.append(f"{guard}around[{place}] = fabs(e) < {kind}(INFINITE) ? e : {kind}(0);")
            where = coordinates(plan, "r", reduced=True)
            return lines + self._cuda("first_element", FIRST_ROW=first_row, COORDINATES=where, LOAD=first.lines())
        mean = PointwiseCode(space_of(step.x.type, plan, reduced=False), arguments, "m")
        scale, around, inverse, *others = (mean.get(v, _along_channels(v, step.x.type)) for v in step.parameters)
        mean.body.append(f"around[{place}] = {around};")
        if step.second is not None:
            lines += self._cuda("declare_second")
            mean.body.append(f"around2[{place}] = {others[1]};")
        if self.masked:
            lines.append(f"{kind} factor[{plan.width}], shift[{plan.width}];")
            mean.body += [f"factor[{place}] = {inverse} * {scale};", f"shift[{place}] = {others[0]};"]
        return lines + mean.lines()

    def accumulate(self, code: PointwiseCode) -> None:
        """Apply the prologue to each element, and add it to the two sums."""
        step, place = self.step, self._place
        # lanes that are not live repeat the last one's stores
        code.compute(step.prologue, step.prologue_outputs)
        e = code.get(step.x)
        if self.forward:
            code.body += self._cuda("add_forward", ELEMENT=e)
            return
        dy = code.get(step.anchor.operands[0])
        code.body.append(f"const {self.kind} d = {e} - around[{place}];")
        if self.masked:
            dy = self._masked_gradient(dy, "d", f"factor[{place}]", f"shift[{place}]")
        code.body += self._cuda("add_backward", LOSS=dy)
        if step.second is not None:
            code.body += self._cuda("add_second", ELEMENT=code.get(step.elements[-1]))

    def chunk_statistics(self, total: str, squares: str, around: str, size: str) -> list[str]:
        """Turn sums around a number into the mean of `size` elements and squares around it (forward)."""
        if not self.forward:
            return []
        return self._cuda("chunk_statistics", TOTAL=total, SQUARES=squares, AROUND=around, SIZE=size)

    @property
    def name(self) -> str:
        return self.step.anchor.op.name

    def _merge_chunks(self) -> Launch:
        """Return the launch that merges chunks and computes statistics, and factors for the second pass."""
        plan, kind, arguments, step = self.sums, self.kind, Arguments(), self.step
        channels, chunks = self.channels, plan.chunks
        pointer = arguments.scratch(kind)
        merge = ChunkMerge(channels, chunks)
        lines = merge.setup(kind, self.totals)
        by = plan.vector if plan.row else 1
        rest = plan.count - (chunks - 1) * plan.each
        size = f"s == {chunks - 1}u ? {kind}({rest * by}) : {kind}({plan.each * by})"
        parts = self.for_each_total(f"{pointer}[(#u * {chunks}u + s) * {channels}u + c]")
        turns = f"for (u32 s = t; s < {chunks}u; s += {merge.threads}u)"
        lines += [*self.merge_centre(f"{pointer}[c]"), *self.merge_loop(turns, size, parts)]
        lines += merge.reduce(self.totals)
        code = PointwiseCode(Space((channels,), ("c",)), arguments)
        factors = self.forward_factors(code) if self.forward else self.backward_factors(code)
        for number, factor in enumerate(factors):
            code.body.append(f"{pointer}[{(self.totals * chunks + number) * channels}u + c] = {factor};")
        code.compute(step.statistics_nodes, step.statistics)
        lines += ["if (live && t == 0) {", *code.lines(), "}"]
        return arguments.early_launch(f"{self.name}_together", lines, merge.blocks, merge.block)

    def merge_centre(self, around: str) -> list[str]:
        """Define the number that squares of a channel are merged around (forward)."""
        return self._cuda("merge_centre", AROUND=around) if self.forward else []

    def merge_loop(self, turns: str, size: str, parts: Sequence[str], unrolled: int = 4) -> list[str]:
        """Add up the chunks of a channel, each thread some of them."""
        cuda = self._cuda.bind(TURNS=turns, UNROLLED=unrolled)
        if self.forward:
            return cuda("merge_forward", SIZE=size, MEAN=parts[0], SQUARES=parts[1])
        return cuda("merge_backward", ADDITIONS=[f"acc{number}[0] += {part};" for number, part in enumerate(parts)])

    def forward_factors(self, code: PointwiseCode) -> tuple[str, ...]:
        """Define mean and inverse deviation, and return the factors: mean, scale / deviation, bias."""
        op, kind = self.step.anchor.op, self.kind
        code.body.append(f"const {kind} mean = around + acc0[0] / {kind}({self.count});")
        spread = f"(acc1[0] - acc0[0] * acc0[0] / {kind}({self.count})) / {kind}({self.count})"
        if isinstance(op, ChannelSums):
            code.define(self.step.anchor.results[0], f"mean * {kind}({self.count})")
            # An infinity, or a square that overflows, leaves NaN around the mean. The sum tells it from a real NaN.
            code.body.append(f"const {kind} squares = ({spread} + mean * mean) * {kind}({self.count});")
            infinite = f"squares != squares && mean == mean ? {kind}(INFINITE) : squares"
            code.define(self.step.anchor.results[1], infinite)
            return ()
        assert isinstance(op, (BatchNormTrain, BatchNormBySums))
        epsilon = literal(op.epsilon, self.step.x.type.dtype)
        scale, bias = (code.get(v) for v in self.step.parameters)
        code.body.append(f"const {kind} inverse = {kind}(1) / sqrt(nmax({spread}, {kind}(0)) + {epsilon});")
        code.define(self.step.anchor.results[1], "mean")
        code.define(self.step.anchor.results[2], "inverse")
        return "mean", f"inverse * {scale}", bias

    def backward_factors(self, code: PointwiseCode) -> tuple[str, ...]:
        """Define the gradients of scale and bias, and return the factors of dx, of each norm."""
        kind, count, factors = self.kind, self.count, list[str]()
        for number, anchor in enumerate(self.step.anchors, 1):
            scale, mean, inverse, *bias = (code.get(v) for v in anchor.operands[2:])
            total, slope = f"acc{number}[0]", f"slope{number}"
            code.define(anchor.results[1], f"{total} * {inverse}")
            code.define(anchor.results[2], "acc0[0]")
            code.body.append(f"const {kind} {slope} = {scale} * {inverse};")
            along = f"-{slope} * ({total} * {inverse} * {inverse} / {kind}({count}))"
            mask = (f"{inverse} * {scale}", *bias) if self.masked else ()
            factors += [mean, f"-{slope} * (acc0[0] / {kind}({count}))", along, slope, *mask]
        return tuple(factors)

    def _elements(self) -> Launch:
        """Return the launch of the second pass, which computes and stores the elements."""
        plan, kind, arguments, step = self.write, self.kind, Arguments(), self.step
        place = "0" if plan.row else "j"
        lines = thread_setup(plan, kind)
        pointer = arguments.scratch(f"const {kind}")
        for number in range(self.factors):
            at = f"{(self.totals * self.sums.chunks + number) * self.channels}u + at * {plan.width}u"
            pack = f"Pack<{kind}, {plan.width}>"
            lines.append(f"const {pack} f{number} = load_pack<{kind}, {plan.width}>({pointer} + ({at}));")
        code = PointwiseCode(space_of(step.x.type, plan), arguments)
        self._apply_step(code, place)
        lines += ["if (live) {", *loop(plan, code.lines()), "}"]
        return arguments.early_launch(f"{self.name}_elements", lines, plan.blocks * plan.chunks, plan.block)

    def _apply_step(self, code: PointwiseCode, place: str) -> None:
        """Apply the second prologue, the norm and the epilogue to an element, and store it."""
        code.compute(self.step.second_prologue)
        self.normalise(code, place)
        code.compute(self.step.epilogue, self.step.epilogue_outputs)

    def normalise(self, code: PointwiseCode, place: str) -> None:
        """Compute the norm's result for an element, from the factors of its channel."""
        kind, step = self.kind, self.step
        mean, *by = (f"f{number}.v[{place}]" for number in range(self.factors))
        code.body.append(f"const {kind} centred = {code.get(step.x)} - {mean};")
        if self.forward:
            text = f"centred * {by[0]} + {by[1]}"
        else:
            dy = code.get(step.anchor.operands[0])
            dy = self._masked_gradient(dy, "centred", by[3], by[4]) if self.masked else dy
            text = f"{dy} * {by[2]} + (centred * {by[1]} + {by[0]})"
        code.define(step.y, text)
        if step.second is not None:
            mean, *by = (f"f{number}.v[{place}]" for number in range(4, 8))
            dy, centred = code.get(step.anchor.operands[0]), f"({code.get(step.elements[-1])} - {mean})"
            code.define(step.second.results[0], f"{dy} * {by[2]} + ({centred} * {by[1]} + {by[0]})")


@dataclass(frozen=True)
class BatchNormBySumsSource(BatchNormSource):
    """A norm by given sums, in one launch that visits the elements once."""

    @property
    def scratch_bytes(self) -> int:
        return 0

    def launches(self) -> tuple[Launch, ...]:
        plan, kind, arguments, step = self.write, self.kind, Arguments(), self.step
        lines = thread_setup(plan, kind, backwards=BACKWARDS)
        if step.epilogue_outputs or step.epilogue:
            place = "0" if plan.row else "j"
            lines.append(f"Pack<{kind}, {plan.width}> {', '.join(f'f{number}' for number in range(self.factors))};")
            numbers = PointwiseCode(space_of(step.x.type, plan, reduced=False), arguments, "m")
            given = [numbers.get(v, _along_channels(v, step.x.type)) for v in step.parameters]
            for number, factor in enumerate(self._of_sums(numbers, given)):
                numbers.body.append(f"f{number}.v[{place}] = {factor};")
            code = PointwiseCode(space_of(step.x.type, plan), arguments)
            self._apply_step(code, place)
            lines += [*numbers.lines(), "if (live) {", *loop(plan, code.lines()), "}"]
        if step.statistics:
            lines += self._statistics(arguments)
        return (arguments.early_launch(f"{self.name}_elements", lines, plan.blocks * plan.chunks, plan.block),)

    def _of_sums(self, code: PointwiseCode, given: Sequence[str]) -> tuple[str, str, str]:
        """Return the factors of a channel, in double because subtracting squares costs digits."""
        op = self.step.anchor.op
        assert isinstance(op, BatchNormBySums)
        scale, bias, total, squares = given
        epsilon = literal(op.epsilon, self.step.x.type.dtype)
        code.body += self._cuda("statistics_of_sums", TOTAL=total, SQUARES=squares, COUNT=self.count, EPSILON=epsilon)
        return "mean", f"inverse * {scale}", bias

    def _statistics(self, arguments: Arguments) -> list[str]:
        """Store the statistics of each channel, by one thread of the first chunk."""
        plan, step = self.write, self.step
        code = PointwiseCode(Space((self.channels,), ("c",)), arguments, "q")
        self._of_sums(code, [code.get(v) for v in step.parameters])
        code.define(step.anchor.results[1], "mean")
        code.define(step.anchor.results[2], "inverse")
        code.compute(step.statistics_nodes, step.statistics)
        stores = "live && t == 0 && chunk == 0u" if plan.chunks > 1 else "live && t == 0"
        return self._cuda("store_statistics", STORES=stores, STORE=code.lines())


def space_of(x: TensorType, plan: RowPlan, reduced: bool = True) -> Space:
    """Return the coordinates of the elements, or only of the channels (`reduced` false)."""
    names: list[str | None] = [None] * x.rank
    for axis in plan.axes:
        if reduced or not axis.reduced:
            names[axis.dim] = axis.name
    vector = plan.vector if reduced or not plan.row else 1
    return Space(x.shape, tuple(names), plan.along, vector)


def _along_channels(value: Value, x: TensorType) -> TensorType:
    return TensorType((x.shape[1], *(1,) * (x.rank - 2)), value.type.dtype)
