"""Generate scans: a block runs all steps of a loop, whose states stay in shared memory.

States have two places there, because threads read those before a step while others write those after it. Rows of
sequences are copied a few steps at a time, so that a step seldom waits for memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fusec.gpu.kernels.codegen.cuda_template import cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import C_TYPES, Arguments, Kernel, Launch
from fusec.gpu.kernels.recurrent.scan_code import BodyCode, Memory
from fusec.gpu.kernels.recurrent.scan_memory import BlockMemory
from fusec.gpu.kernels.recurrent.scan_sums import sum_code
from fusec.ir import Node, Value
from fusec.lowering.scan_plan import WARP, ScanPlan, scan_plan
from fusec.ops import MatMul, Reduce, Scan
from fusec.system.dataclass import dataclass

_CUDA = cuda_template(__package__, "scan.cuh")


def scan(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of a scan; None for other steps."""
    node = nodes[0]
    plan = scan_plan(node.op) if len(nodes) == 1 and isinstance(node.op, Scan) else None
    if plan is None or max(v.type.span for v in (*node.operands, *node.results)) >= 1 << 31:
        return None
    return Kernel("scan", (_Scan(node, plan, outputs).launch(),))


@dataclass
class _Scan:
    """A scan, and those of its results that are stored."""

    node: Node
    plan: ScanPlan
    outputs: Sequence[Value]

    def launch(self) -> Launch:
        op, arguments = self.plan.op, Arguments()
        block = BlockMemory(self.plan, self.node.operands, arguments)
        inputs, first = op.body.graph.inputs, op.states + op.sequences
        states = [block.state(index, value) for index, value in enumerate(inputs[: op.states])]
        nexts = [replace(state, pointer=f"next{index}") for index, state in enumerate(states)]
        memory = dict(zip(inputs, states, strict=False))
        for index, value in enumerate(self.plan.stored):
            memory[value] = block.place(f"v{index}", value)
        memory.update((v, nexts[numbers[0]]) for v, numbers in self.plan.next_states.items() if v.node is not None)
        for index, value in enumerate(inputs[op.states :], op.states):
            memory[value] = block.sequence(index, value) if index < first else block.shared(index, value)
        code = BodyCode(memory)
        for phase in self.plan.phases:
            for value in phase:
                own = [memory[value]] if value in self.plan.stored else []
                following = (nexts[number] for number in self.plan.next_states.get(value, ()))
                self._compute(code, block, value, [*own, *following, *self._rows(value, arguments)])
            code.lines.append("__syncthreads();")
        after: list[str] = []
        for index, value in enumerate(inputs[: op.states]):
            if (result := self.node.results[index]) in self.outputs:
                last = replace(states[index], pointer=f"(places{index} + {op.steps % 2 * self.plan.size(value)}u)")
                block.copy(after, value, Memory(arguments.write(result), result.type.strides), last)
        fillings = {"BEFORE": block.before, "IN_STEP": block.in_step, "STEP": code.lines, "AFTER": after}
        lines = _CUDA("kernel", STEPS=op.steps, **fillings)
        launch = arguments.launch("scan", lines, self.plan.blocks, self.plan.threads)
        return replace(launch, resident_bytes=block.used)

    def _rows(self, value: Value, arguments: Arguments) -> Iterator[Memory]:
        """Return the rows of results that a step stores a value in."""
        states = self.plan.op.states
        outputs = self.plan.op.body.graph.outputs[states:]
        for result, output in zip(self.node.results[states:], outputs, strict=True):
            if output is value and result in self.outputs:
                along, *strides = result.type.strides
                yield Memory(f"({arguments.write(result)} + (u64)step * {along}u)", tuple(strides))

    def _compute(self, code: BodyCode, block: BlockMemory, value: Value, places: Sequence[Memory]) -> None:
        """Add the statements that compute a block's part of a value, and store it in these places."""
        if not places:
            return
        node, lanes, size = value.node, self.plan.lanes(value), self.plan.size(value)
        each = WARP // lanes  # elements that a warp computes at a time
        uneven = lanes > 1 and size % each != 0
        # all threads of a warp take as many turns, so some compute and store the last element as others do
        end, index = (-(-size // each) * each, f"i < {size}u ? i : {size - 1}u") if uneven else (size, "i")
        first = f"threadIdx.x / {lanes}u" if lanes > 1 else "threadIdx.x"
        with code.block(f"for (u32 i = {first}; i < {end}u; i += {self.plan.threads // lanes}u)"):
            at = block.at(code, value, code.number(index))
            if node is not None and isinstance(node.op, (Reduce, MatMul)):
                element = sum_code(code, node, at, lanes)
            else:
                element = code.computed(value, at) if node is not None else code.element(value, at)
            stored = f"narrow<{C_TYPES[value.type.dtype]}>({element})"
            store = [f"{place.element(at)} = {stored};" for place in places]
            code.lines.extend([f"if (threadIdx.x % {lanes}u == 0u) {{", *store, "}"] if lanes > 1 else store)
