"""Generate LSTM, GRU and RNN: one launch runs all steps of a layer.

A block has some units, for some sequences, and keeps the recurrent weights of their gates in registers. A step is a
product of these with the states of all units, then the activations. Blocks send states to each other through the L2
cache. Each word comes with the number of its step, and a reader asks until that number is there. So a step costs one
trip through the cache, and no barrier. All blocks must run at the same time. So the launch is cooperative, and has at
most as many blocks as the GPU has multiprocessors. Variants with fewer blocks are for smaller GPUs; a batch for which
there are not enough blocks takes several launches.

16-bit floats are multiplied on tensor cores, 32-bit floats one by one. Sums are fp32. The states that blocks exchange
are rounded to the type of the operands; each block's own states are not.

cuDNN's RNN API (`cudnnRNNForward`) is not used. It takes neither peepholes nor other activations than those of its
cells, and packs weights in a layout of its own. Its calls have no plan that can be stored or checked without a GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from fusec.gpu.kernels.codegen.cuda_template import CudaTemplate, cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.kernel import (
    C_TYPES,
    HALVES,
    Arguments,
    Kernel,
    Launch,
    by_value,
    ceil_div,
)
from fusec.gpu.kernels.codegen.op_table import expression, literal
from fusec.gpu.kernels.recurrent.recurrent_plan import LOADED_WORDS, RecurrentPlan
from fusec.ir import DType, Node, TensorType, Value
from fusec.ops import Recurrent, pw
from fusec.ops.recurrent import Activation, compose

_CUDA = cuda_template(__package__, "recurrent.cuh")
# Fragments by the unit that multiplies: weights, weights held in registers, product, and what a block sends.
TILES = ("tile_weights", "tile_held", "tile_product", "tile_send")  # tensor cores
ROWS = ("row_weights", "row_held", "row_product", "row_send")


def recurrent(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of a recurrent layer; None for other steps, for fp64, and where no block could be made."""
    node = nodes[0]
    if len(nodes) != 1 or not isinstance(node.op, Recurrent):
        return None
    x, r = (v.type for v in node.operands[:2])
    if x.dtype not in (DType.F32, *HALVES) or not x.size or not r.size:
        return None
    if any(v.type.size >= 1 << 31 for v in (*node.operands, *node.results)):
        return None
    counts = itertools.product(_unit_counts(node), (1, 2, 4))
    plans = (_RecurrentSource(node, outputs, *each, figures.processors, figures.dynamic_bytes) for each in counts)
    best = min((plan for plan in plans if plan.is_possible), key=lambda plan: plan.cycles, default=None)
    return None if best is None else Kernel("recurrent", best.launches(), best.scratch_bytes)


def _unit_counts(node: Node) -> list[int]:
    size = node.operands[1].type.shape[2]
    counts = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)
    return [units for i, units in enumerate(counts) if i == 0 or counts[i - 1] < size]


class _RecurrentSource(RecurrentPlan):
    """The launches of a plan, and their CUDA source."""

    def launches(self) -> tuple[Launch, ...]:
        """Write the launches, of one source."""
        return tuple(self._launch(number * self.groups) for number in range(self.rounds))

    def _launch(self, first_group: int) -> Launch:
        arguments = Arguments()
        cuda = self._cuda(arguments).bind(FIRST_GROUP=by_value(first_group))
        lines = cuda("kernel", **self._parts(cuda, arguments))
        # one block a multiprocessor, so that a thread may use all registers that there are for it
        made = arguments.launch("recurrent", lines, self.grid, 32 * self.warps, resident=1)
        return replace(made, resident_bytes=self.shared_bytes, cooperative=True)

    def _cuda(self, arguments: Arguments) -> CudaTemplate:
        node, op, threads = self.node, self.op, 32 * self.warps
        x, r, h = node.operands[:3]
        steps = x.type.shape[0]
        loaded = max(n for n in (1, 2, 4) if n <= self.columns and (n == 1 or n * self.depth <= LOADED_WORDS))
        words = ceil_div(self.depth * self.batch, 64)
        entries = loaded * self.depth if self.on_tensor_cores else min(8, words)
        return _CUDA.bind(
            ALL_WORDS=2 * self.sent_words * op.directions * self.groups,
            LOADED=loaded,
            BATCH=self.batch,
            BLOCKS=self.blocks,
            CHUNK=self.depth * self.batch,
            COLUMNS=self.columns,
            COUNT=self.units * self.batch,
            DEPTH=self.depth,
            DEPTHS=self.depths,
            ENTRIES=entries,
            FIRST_STATE=_element(arguments, h, "d", "b", "u"),
            GATES=op.gates,
            GRID_THREADS=self.grid * threads,
            GROUPS=self.groups,
            ITEMS=self.items,
            MESSAGES=steps * self.halves,
            NEXT_WEIGHT=_element(arguments, r, "d", f"(number * {self.size}u + u)", "(k + 1u)"),
            PAIRS=ceil_div(self.size, 2),
            PARTS=self.part_words,
            SECOND_STATE=_element(arguments, h, "d", "b", "(u + 1u)"),
            SENT=self.sent_words,
            SEQUENCES=self.sequences,
            SIZE=self.size,
            SLOTS=self.slots,
            STATES_AT=2 * self.part_words,
            STEPS=steps,
            STRIDE=self.stride,
            TEAM=self.blocks * self.groups,
            THREADS=threads,
            TILES=self.tiles,
            TURNS=words,
            TWICE=2 * self.sent_words,
            TYPE=C_TYPES[self.dtype],
            UNITS=self.units,
            UNROLLED=(self.tiles if self.on_tensor_cores else self.depth) if self.is_held else self.streamed,
            WARPS=self.warps,
            WEIGHT=_element(arguments, r, "d", f"(number * {self.size}u + u)", "k"),
            WORDS=arguments.scratch("u64"),
        )

    def _parts(self, cuda: CudaTemplate, arguments: Arguments) -> dict[str, list[str] | str]:
        weights_of, held_of, product, send = TILES if self.on_tensor_cores else ROWS
        held = "held[m][i]" if self.is_held else ""
        taken = {f"TAKEN_{k}": f"{held}[{k}]" if held else f"weight(m, i, {k}u)" for k in range(4)}
        steps = self.node.operands[0].type.shape[0]
        weights = [*cuda(weights_of), *(cuda(held_of) if self.is_held else [])]
        return {
            "WEIGHTS": weights,
            "PRODUCT": cuda(product, TAKEN_ROW=held or "weight(m, i)", **taken),
            "SEND": cuda(send),
            "PLACE": cuda("place"),
            "ACTIVATIONS": self._activations(),
            "WAIT_FOR_BLOCKS": f"wait_for_blocks({arguments.barrier_counters(1)}, {self.grid}u, blockIdx.x == 0u);"
            if steps * self.halves > 1
            else "__syncthreads();",
            "TIME": self._time("s" if self.halves == 1 else "(s / 2u)"),
            "IS_LAST": "true" if self.halves == 1 else "s % 2u == 1u",
            "NEXT_STEP": "s + 1u" if self.halves == 1 else "s / 2u + 1u",
            "LOAD_INPUT": cuda(
                "load_input",
                INPUT=_element(
                    arguments,
                    self.node.operands[0],
                    f"({self._time('step')})",
                    "b",
                    f"((d * {self.op.gates}u + k) * {self.size}u + u)",
                ),
            ),
            **self._cell(cuda, arguments),
        }

    def _time(self, step: str) -> str:
        """Return the place in the sequence that a step is for, as C."""
        last = f"{self.node.operands[0].type.shape[0] - 1}u - {step}"
        return {"forward": step, "reverse": last, "bidirectional": f"(d ? {last} : {step})"}[self.op.direction]

    def _activations(self) -> list[str]:
        """Define each activation as a function of one number, which depends on the direction only if they differ."""
        op = self.op
        lines: list[str] = []
        for place, functions in enumerate(zip(*op.functions(), strict=True)):
            each = [self._activation(f) for f in functions]
            returned = each[0] if len(set(each)) == 1 else f"d ? {each[1]} : {each[0]}"
            clips = op.clip and place < 2
            limit = literal(op.clip, DType.F32)
            begin = [f"z = clipped(z, -{limit}, {limit});"] if clips else []
            lines += [f"auto activate{place} = [&](float z) -> float {{", *begin, f"return {returned};", "};"]
        return lines

    def _activation(self, activation: Activation) -> str:
        if activation[0] == "tanh" and self.on_tensor_cores:
            return "quick_tanh(z)"

        def apply(name: str, *operands: str, **attributes: float) -> str:
            return f"({expression(pw(name, **attributes), self.dtype, list(operands), '')})"

        return compose(activation, "z", apply, lambda number: literal(number, self.dtype))

    def _cell(self, cuda: CudaTemplate, arguments: Arguments) -> dict[str, list[str] | str]:
        """Write what depends on the cell: its formula, and what it reads and stores."""
        op, node = self.op, self.node
        places = op.places([v.type.dtype for v in node.operands])
        parameter, lengths = (None if at is None else node.operands[at] for at in places)
        declared, begin, runs = list[str](), list[str](), "live"
        if op.cell == "lstm":
            begin.append(f"cell[i] = live ? wide({_element(arguments, node.operands[3], 'd', 'b', 'u')}) : 0.0f;")
        peeps = ["0.0f"] * 3
        if parameter is not None:
            count = 3 if op.cell == "lstm" else 1
            declared.append(f"float peep[ITEMS][{count}];".replace("ITEMS", str(self.items)))
            for k in range(count):
                own = _element(arguments, parameter, "d", f"({k * self.size}u + u)")
                begin.append(f"peep[i][{k}] = live ? wide({own}) : 0.0f;")
            peeps = [f"peep[i][{k}]" + (" * cell[i]" if op.cell == "lstm" else "") for k in range(count)]
        if lengths is not None:
            declared.append(f"i64 ends[{self.items}];")
            begin.append(f"ends[i] = live ? (i64){_element(arguments, lengths, 'b')} : 0;")
            runs = "live && (i64)time < ends[i]"
        if self.halves > 1:
            declared.append(f"float update[{self.items}];")
        forget = f"activate0(gate[i][2] + total[2] + {peeps[-1]})" if op.cell == "lstm" else ""
        if op.input_forget:
            forget = "1.0f - enter"
        out = peeps[1].replace("cell[i]", "c") if op.cell == "lstm" else ""
        formula = cuda(
            "gru_twice" if self.halves > 1 else op.cell, PEEP_IN=peeps[0], PEEP_OUT=out, FORGET=forget, BIAS=peeps[0]
        )
        return {"PARAMETERS": declared, "BEGIN": begin, "RUNS": runs, "CELL": formula, **self._stores(arguments)}

    def _stores(self, arguments: Arguments) -> dict[str, list[str] | str]:
        type, (y, *last) = C_TYPES[self.dtype], self.node.results
        store, end = list[str](), list[str]()
        if y in self.outputs:
            place = _element(arguments, y, "time", "b", f"(d * {self.size}u + u)", written=True)
            store.append(f"{place} = narrow<{type}>(runs ? h : 0.0f);")
        for value, name in zip(last, ("state", "cell"), strict=False):
            if value in self.outputs:
                place = _element(arguments, value, "d", "b", "u", written=True)
                end.append(f"{place} = narrow<{type}>({name}[i]);")
        return {"STORE": store, "END": end}


def _element(arguments: Arguments, value: Value, *at: str, written: bool = False) -> str:
    """Return an element of a value as C, from its coordinates as C."""
    type: TensorType = value.type
    pointer = arguments.write(value) if written else arguments.read(value)
    terms = [c if step == 1 else f"{c} * {step}u" for c, step in zip(at, type.strides, strict=True)]
    return f"{pointer}[{' + '.join(terms)}]"
