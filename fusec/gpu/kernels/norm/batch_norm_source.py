"""The CUDA C of a batch norm in training and its backward: sums by chunks, the sums put together, the elements again.

Sums of squares are taken around each chunk's first element, so that a large mean costs no digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fusec.gpu.kernels.codegen.channel_parts import Part
from fusec.gpu.kernels.codegen.kernel import Arguments, Launch, compute_type
from fusec.gpu.kernels.codegen.loops import Merge, begun, coordinates, loop
from fusec.gpu.kernels.codegen.op_table import literal
from fusec.gpu.kernels.codegen.pointwise_code import Chain, Space, stored
from fusec.gpu.kernels.codegen.row_plan import Plan
from fusec.ir import DType, TensorType, Value
from fusec.ops import BatchNormBackward, BatchNormBySums, BatchNormTrain, ChannelSums

BACKWARDS = True  # what was written last is read first, as it may still be in the cache


@dataclass(frozen=True)
class ChannelSource:
    """Launches for a step: `sums` and `write` share out the elements for the two passes."""

    part: Part
    sums: Plan
    write: Plan

    @property
    def forward(self) -> bool:
        return not isinstance(self.part.anchor.op, BatchNormBackward)

    @property
    def kind(self) -> str:
        return compute_type(self.part.x.type.dtype)

    @property
    def channels(self) -> int:
        return self.part.x.type.shape[1]

    @property
    def count(self) -> int:
        return self.part.x.type.size // self.channels

    @property
    def scratch_bytes(self) -> int:
        """Two numbers of each chunk and channel, then the factors of each channel."""
        return (2 * self.sums.chunks + self.factors) * self.channels * (8 if self.kind == "double" else 4)

    @property
    def masked(self) -> bool:
        """Whether a relu's gradient is taken by what the norm gave, which is computed again."""
        op = self.part.anchor.op
        return isinstance(op, BatchNormBackward) and op.relu

    @property
    def factors(self) -> int:
        if isinstance(self.part.anchor.op, ChannelSums):
            return 0
        return 3 if self.forward else 6 if self.masked else 4

    def _passed(self, dy: str, centred: str, factor: str, bias: str) -> str:
        """dy where the norm's result, as it is stored, is positive."""
        text = stored(f"{centred} * {factor} + {bias}", self.part.y.type.dtype)
        return f"({text} > {self.kind}(0) ? {dy} : {self.kind}(0))"

    def launches(self) -> tuple[Launch, ...]:
        elements = () if not (self.part.late or self.part.behind) else (self._elements(),)
        return (self._sums(), self._together(), *elements)

    def _sums(self) -> Launch:
        """Of each chunk: forward its mean and squares around that; backward the sums of dy and of dy times x."""
        plan, kind, arguments, part = self.sums, self.kind, Arguments(), self.part
        lines = begun(plan, kind, backwards=BACKWARDS)
        lines += self.centre(plan, arguments, "begin")
        chain = Chain(space_of(part.x.type, plan), arguments)
        self.added(plan, chain)
        lines += loop(plan, chain.lines())
        reduced = f"reduce_threads<{plan.block}, {plan.threads}, {1 if plan.row else plan.lanes}, {plan.width}>"
        lines += [f"{reduced}(acc{n}, shared, Add());" for n in range(2)]
        size = f"{kind}((end - begin) * {plan.vector if plan.row else 1}u)"
        lines += self.handed_over(plan, arguments, "chunk" if plan.chunks > 1 else "0u", size)
        return arguments.launch(f"{self.name}_sums", lines, plan.blocks * plan.chunks, plan.block)

    def centre(self, plan: Plan, arguments: Arguments, first_row: str) -> list[str]:
        """Sums at zero, and the number of each channel that they are taken around: forward, of one of its elements."""
        kind, part, place = self.kind, self.part, "0" if plan.row else "j"
        lines: list[str] = []
        lines += [f"{kind} acc0[{plan.width}], acc1[{plan.width}], around[{plan.width}];"]
        lines += [f"for (int w = 0; w < {plan.width}; ++w) acc0[w] = acc1[w] = {kind}(0);"]
        if self.forward:
            first = Chain(space_of(part.x.type, plan), arguments, "f")
            for node in part.before:
                first.apply(node)
            # of neighbours along a row only the first counts, which the last to be written is
            first.inside.append(f"const {kind} e = {first.get(part.x)};")
            guard = "if (j == 0) " if plan.row else ""
            first.inside.append(f"{guard}around[{place}] = fabs(e) < {kind}(INFINITE) ? e : {kind}(0);")
            lines += ["{", f"  const u32 r = {first_row};", *coordinates(plan, "r", reduced=True), *first.lines(), "}"]
        else:
            mean = Chain(space_of(part.x.type, plan, reduced=False), arguments, "m")
            scale, around, inverse, *bias = (mean.get(v, _along_channels(v, part.x.type)) for v in part.parameters)
            mean.inside.append(f"around[{place}] = {around};")
            if self.masked:
                lines.append(f"{kind} factor[{plan.width}], shift[{plan.width}];")
                mean.inside += [f"factor[{place}] = {inverse} * {scale};", f"shift[{place}] = {bias[0]};"]
            lines += mean.lines()
        return lines

    def added(self, plan: Plan, chain: Chain) -> None:
        """What a thread does to each element: the nodes before, and two sums."""
        kind, part, place = self.kind, self.part, "0" if plan.row else "j"
        for node in part.before:
            chain.apply(node)
        for value in part.early:  # every lane that is not live repeats what the last one does
            chain.store(value)
        e = chain.get(part.x)
        if self.forward:
            chain.inside += [f"const {kind} d = {e} - around[{place}];"]
            chain.inside += [f"acc0[{place}] += d;", f"acc1[{place}] += d * d;"]
        else:
            dy = chain.get(part.anchor.operands[0])
            chain.inside.append(f"const {kind} d = {e} - around[{place}];")
            if self.masked:
                dy = self._passed(dy, "d", f"factor[{place}]", f"shift[{place}]")
            chain.inside += [f"const {kind} loss = {dy};", f"acc0[{place}] += loss;", f"acc1[{place}] += loss * d;"]

    def handed_over(self, plan: Plan, arguments: Arguments, chunk: str, size: str) -> list[str]:
        """What a chunk of so many elements came to, into the scratch memory."""
        pointer = arguments.scratch(self.kind)
        lines = ["if (live && t == 0)", f"  for (int w = 0; w < {plan.width}; ++w) {{"]
        lines += [f"    {line}" for line in self.concluded("acc0[w]", "acc1[w]", "around[w]", size)]
        for number in range(2):
            at = f"({number * plan.chunks}u + {chunk}) * {self.channels}u + at * {plan.width}u + w"
            lines.append(f"    {pointer}[{at}] = acc{number}[w];")
        return [*lines, "  }"]

    def concluded(self, total: str, squares: str, around: str, size: str) -> list[str]:
        """Forward, what was added up around a number becomes the mean of so many elements, and squares around that."""
        kind = self.kind
        if not self.forward:
            return []
        return [
            f"const {kind} size = {size};",
            f"const {kind} squares = {squares} - {total} * {total} / size;",
            f"{total} = {around} + {total} / size;",
            f"{squares} = nmax(squares, {kind}(0));",
        ]

    @property
    def name(self) -> str:
        return self.part.anchor.op.name

    def _together(self) -> Launch:
        """The sums of all chunks, what is made of them, and the factors for the second pass."""
        plan, kind, arguments, part = self.sums, self.kind, Arguments(), self.part
        channels, chunks = self.channels, plan.chunks
        pointer = arguments.scratch(kind)
        merge = Merge(channels, chunks)
        lines = merge.begun(kind, 2)
        by = plan.vector if plan.row else 1
        rest = plan.count - (chunks - 1) * plan.each
        size = f"s == {chunks - 1}u ? {kind}({rest * by}) : {kind}({plan.each * by})"
        parts = (f"{pointer}[s * {channels}u + c]", f"{pointer}[({chunks}u + s) * {channels}u + c]")
        turns = f"for (u32 s = t; s < {chunks}u; s += {merge.threads}u)"
        lines += self.merged(turns, size, f"{pointer}[c]", parts)
        lines += merge.ended(2)
        chain = Chain(Space((channels,), ("c",)), arguments)
        factors = self.on_forward(chain) if self.forward else self.on_backward(chain)
        for number, factor in enumerate(factors):
            chain.inside.append(f"{pointer}[{(2 * chunks + number) * channels}u + c] = {factor};")
        for node in part.small:
            chain.apply(node)
        for value in part.kept:
            chain.store(value)
        lines += ["if (live && t == 0) {", *(f"  {line}" for line in chain.lines()), "}"]
        return arguments.launch(f"{self.name}_together", lines, merge.blocks, merge.block)

    def merged(self, turns: str, size: str, around: str, parts: tuple[str, str], unrolled: int = 4) -> list[str]:
        """What chunks of such sizes came to, added up by the threads of a channel."""
        kind, lines = self.kind, list[str]()
        if self.forward:
            lines.append(f"{kind} around = {around};")
            lines.append(f"if (!(fabs(around) < {kind}(INFINITE))) around = {kind}(0);")
        lines += [f"#pragma unroll {unrolled}", f"{turns} {{"]
        if self.forward:
            lines.append(f"  const {kind} size = {size};")
            lines.append(f"  const {kind} d = {parts[0]} - around;")
            lines.append(f"  acc0[0] += size * d; acc1[0] += size * d * d + {parts[1]};")
        else:
            lines.append(f"  acc0[0] += {parts[0]}; acc1[0] += {parts[1]};")
        return [*lines, "}"]

    def on_forward(self, chain: Chain) -> tuple[str, ...]:
        """Mean and inverse deviation, and the factors mean, scale by that, bias."""
        op, kind = self.part.anchor.op, self.kind
        chain.inside.append(f"const {kind} mean = around + acc0[0] / {kind}({self.count});")
        spread = f"(acc1[0] - acc0[0] * acc0[0] / {kind}({self.count})) / {kind}({self.count})"
        if isinstance(op, ChannelSums):
            chain.define(self.part.anchor.results[0], f"mean * {kind}({self.count})")
            # An infinity, or a square that overflows, leaves NaN around the mean. The sum tells it from a real NaN.
            chain.inside.append(f"const {kind} squares = ({spread} + mean * mean) * {kind}({self.count});")
            infinite = f"squares != squares && mean == mean ? {kind}(INFINITE) : squares"
            chain.define(self.part.anchor.results[1], infinite)
            return ()
        assert isinstance(op, (BatchNormTrain, BatchNormBySums))
        epsilon = literal(op.epsilon, DType.F64 if kind == "double" else DType.F32)
        scale, bias = (chain.get(v) for v in self.part.parameters)
        chain.inside.append(f"const {kind} inverse = {kind}(1) / sqrt(nmax({spread}, {kind}(0)) + {epsilon});")
        chain.define(self.part.anchor.results[1], "mean")
        chain.define(self.part.anchor.results[2], "inverse")
        return "mean", f"inverse * {scale}", bias

    def on_backward(self, chain: Chain) -> tuple[str, ...]:
        """Gradients of scale and bias, and the factors that leave of dy what the statistics do not take."""
        kind, count = self.kind, self.count
        scale, mean, inverse, *bias = (chain.get(v) for v in self.part.parameters)
        chain.define(self.part.anchor.results[1], f"acc1[0] * {inverse}")
        chain.define(self.part.anchor.results[2], "acc0[0]")
        along = f"acc1[0] * {inverse} * {inverse} / {kind}({count})"
        mask = (f"{inverse} * {scale}", *bias) if self.masked else ()
        return mean, f"acc0[0] / {kind}({count})", along, f"{scale} * {inverse}", *mask

    def _elements(self) -> Launch:
        """The second pass: each element again, and what becomes of it."""
        plan, kind, arguments, part = self.write, self.kind, Arguments(), self.part
        place = "0" if plan.row else "j"
        lines = begun(plan, kind)
        pointer = arguments.scratch(f"const {kind}")
        for number in range(self.factors):
            at = f"{(2 * self.sums.chunks + number) * self.channels}u + at * {plan.width}u"
            pack = f"Pack<{kind}, {plan.width}>"
            lines.append(f"const {pack} f{number} = load_pack<{kind}, {plan.width}>({pointer} + ({at}));")
        chain = Chain(space_of(part.x.type, plan), arguments)
        self._pass(chain, place)
        lines += ["if (live) {", *loop(plan, chain.lines()), "}"]
        return arguments.launch(f"{self.name}_elements", lines, plan.blocks * plan.chunks, plan.block)

    def _pass(self, chain: Chain, place: str) -> None:
        """What becomes of each element, the nodes before applied again."""
        for node in self.part.again:
            chain.apply(node)
        self.normed(chain, place)
        for node in self.part.behind:
            chain.apply(node)
        for value in self.part.late:
            chain.store(value)

    def normed(self, chain: Chain, place: str) -> None:
        """The norm's result for an element, from the factors of its channel."""
        kind, part = self.kind, self.part
        mean, *by = (f"f{number}.v[{place}]" for number in range(self.factors))
        chain.inside.append(f"const {kind} centred = {chain.get(part.x)} - {mean};")
        if self.forward:
            text = f"centred * {by[0]} + {by[1]}"
        else:
            dy = chain.get(part.anchor.operands[0])
            dy = self._passed(dy, "centred", by[3], by[4]) if self.masked else dy
            text = f"({dy} - {by[0]} - centred * {by[1]}) * {by[2]}"
        chain.define(part.y, text)


@dataclass(frozen=True)
class BySumsSource(ChannelSource):
    """One launch, whose threads make of given sums what they need, and go through the elements once."""

    @property
    def scratch_bytes(self) -> int:
        return 0

    def launches(self) -> tuple[Launch, ...]:
        plan, kind, arguments, part = self.write, self.kind, Arguments(), self.part
        lines = begun(plan, kind, backwards=BACKWARDS)
        if part.late or part.behind:
            place = "0" if plan.row else "j"
            lines.append(f"Pack<{kind}, {plan.width}> {', '.join(f'f{number}' for number in range(self.factors))};")
            numbers = Chain(space_of(part.x.type, plan, reduced=False), arguments, "m")
            given = [numbers.get(v, _along_channels(v, part.x.type)) for v in part.parameters]
            for number, factor in enumerate(self._of_sums(numbers, given)):
                numbers.inside.append(f"f{number}.v[{place}] = {factor};")
            chain = Chain(space_of(part.x.type, plan), arguments)
            self._pass(chain, place)
            lines += [*numbers.lines(), "if (live) {", *loop(plan, chain.lines()), "}"]
        if part.kept:
            lines += self._statistics(arguments)
        return (arguments.launch(f"{self.name}_elements", lines, plan.blocks * plan.chunks, plan.block),)

    def _of_sums(self, chain: Chain, given: Sequence[str]) -> tuple[str, str, str]:
        """The factors of a channel. Where squares of the mean are taken off, digits are left in double."""
        op, kind = self.part.anchor.op, self.kind
        assert isinstance(op, BatchNormBySums)
        scale, bias, total, squares = given
        epsilon = literal(op.epsilon, DType.F64 if kind == "double" else DType.F32)
        chain.inside.append(f"const double middle = double({total}) / {self.count}.0;")
        chain.inside.append(f"const {kind} spread = {kind}(double({squares}) / {self.count}.0 - middle * middle);")
        chain.inside.append(f"const {kind} mean = {kind}(middle);")
        chain.inside.append(f"const {kind} inverse = {kind}(1) / sqrt(nmax(spread, {kind}(0)) + {epsilon});")
        return "mean", f"inverse * {scale}", bias

    def _statistics(self, arguments: Arguments) -> list[str]:
        """What is kept of the channels, by one thread of the first chunk for each."""
        plan, part = self.write, self.part
        chain = Chain(Space((self.channels,), ("c",)), arguments, "q")
        self._of_sums(chain, [chain.get(v) for v in part.parameters])
        chain.define(part.anchor.results[1], "mean")
        chain.define(part.anchor.results[2], "inverse")
        for node in part.small:
            chain.apply(node)
        for value in part.kept:
            chain.store(value)
        first = " && chunk == 0u" if plan.chunks > 1 else ""
        head = [f"if (live && t == 0{first})", f"  for (int w = 0; w < {plan.width}; ++w) {{"]
        return [*head, f"    const u32 c = at * {plan.width}u + w;", *(f"    {line}" for line in chain.lines()), "  }"]


def space_of(x: TensorType, plan: Plan, reduced: bool = True) -> Space:
    """The elements of a walk; reduced: not only the channels."""
    names: list[str | None] = [None] * x.rank
    for axis in plan.axes:
        if reduced or not axis.reduced:
            names[axis.dim] = axis.name
    vector = plan.vector if reduced or not plan.row else 1
    return Space(x.shape, tuple(names), plan.along, vector)


def _along_channels(value: Value, x: TensorType) -> TensorType:
    return TensorType((x.shape[1], *(1,) * (x.rank - 2)), value.type.dtype)
