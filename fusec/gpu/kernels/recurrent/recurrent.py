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
from dataclasses import dataclass, replace
from functools import cached_property

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
from fusec.ir import DType, Node, TensorType, Value
from fusec.ops import Recurrent, pw
from fusec.ops.recurrent import Activation, compose

WARPS = 8
HELD_REGISTERS = 96  # of a thread, for weights
ASKED_WORDS = 12  # that a thread asks for at the same time, of 16 bytes each
MAX_TILES = 16  # of 16 rows, of a block of tensor cores: one more is four more sums of a thread
MAX_DEPTH = 32  # steps of 16 of a warp: each is a word of 16 bytes that a thread asks for
MAX_ROW_SUMS = 64  # of a thread, for 32-bit floats
TRIP_CYCLES = 900  # of a state through the second-level cache to another block, estimated
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
    plans = (RecurrentPlan(node, outputs, *each, figures.processors, figures.dynamic_bytes) for each in counts)
    best = min((plan for plan in plans if plan.is_possible), key=lambda plan: plan.cycles, default=None)
    return None if best is None else Kernel("recurrent", best.launches(), best.scratch_bytes)


def _unit_counts(node: Node) -> list[int]:
    size = node.operands[1].type.shape[2]
    counts = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)
    return [units for i, units in enumerate(counts) if i == 0 or counts[i - 1] < size]


@dataclass(frozen=True)
class RecurrentPlan:
    """Launches whose blocks have `units` units of 8 * `columns` sequences.

    processors: the most blocks of a launch, because all must be on the GPU at the same time.
    most_shared_bytes: of shared memory of a block.
    """

    node: Node
    outputs: Sequence[Value]
    units: int
    columns: int
    processors: int
    most_shared_bytes: int

    @property
    def op(self) -> Recurrent:
        assert isinstance(self.node.op, Recurrent)
        return self.node.op

    @property
    def dtype(self) -> DType:
        return self.node.operands[0].type.dtype

    @property
    def on_tensor_cores(self) -> bool:
        return self.dtype in HALVES

    @property
    def size(self) -> int:
        return self.node.operands[1].type.shape[2]

    @property
    def batch(self) -> int:
        """Return the sequences of a block."""
        return 8 * self.columns

    @property
    def groups(self) -> int:
        """Return the groups of sequences of one launch. A large batch needs several, one after the other."""
        room = self.processors // (self.op.directions * self.blocks)
        return max(1, min(room, ceil_div(self.sequences, self.batch)))

    @property
    def rounds(self) -> int:
        return ceil_div(self.sequences, self.batch * self.groups)

    @property
    def sequences(self) -> int:
        return self.node.operands[0].type.shape[1]

    @property
    def blocks(self) -> int:
        """Return the blocks that share the units of a direction."""
        return ceil_div(self.size, self.units)

    @property
    def grid(self) -> int:
        return self.op.directions * self.groups * self.blocks

    @property
    def slots(self) -> int:
        """Return the rows of a unit: four also for three gates, so that a thread reads them at the same time."""
        return 1 if self.op.gates == 1 else 4

    @property
    def tiles(self) -> int:
        """Return how often a warp computes its rows: 16 on tensor cores, otherwise 32."""
        return ceil_div(self.units * self.slots, 16 if self.on_tensor_cores else 32)

    @property
    def stride(self) -> int:
        """Return the numbers from one sequence to the next in shared memory, so that no two lanes share a bank."""
        return self.tiles * (16 if self.on_tensor_cores else 32) + 4

    @property
    def depths(self) -> int:
        """Return the steps of a product: of 16 on tensor cores, otherwise of one."""
        return ceil_div(self.size, 16) if self.on_tensor_cores else self.size

    @property
    def warps(self) -> int:
        return min(WARPS, self.depths)

    @property
    def depth(self) -> int:
        """Return the steps of a product that one warp makes."""
        return ceil_div(self.depths, self.warps)

    @property
    def items(self) -> int:
        """Return the states that a thread finishes."""
        return ceil_div(self.units * self.batch, 32 * self.warps)

    @property
    def is_held(self) -> bool:
        """Tell if weights stay in registers; otherwise each step reads them from the cache."""
        return self.tiles * self.depth * (4 if self.on_tensor_cores else 1) <= HELD_REGISTERS

    @property
    def halves(self) -> int:
        """Return the products of a step, one after the other: two if a GRU multiplies states that were reset."""
        return 2 if self.op.cell == "gru" and not self.op.linear_before_reset else 1

    @property
    def streamed(self) -> int:
        """Return how often a loop over weights is unrolled that reads them from the cache, for short compilation."""
        return 1 if self.on_tensor_cores else 4

    @property
    def part_words(self) -> int:
        return self.warps * self.batch * self.stride

    @property
    def shared_bytes(self) -> int:
        """Return the shared memory of a block: sums of two steps, and the states that warps read in fp32."""
        return 4 * (2 * self.part_words + (0 if self.on_tensor_cores else self.warps * self.depth * self.batch))

    @property
    def sent_words(self) -> int:
        """Return the words that blocks send to the blocks of a group in one step."""
        if self.on_tensor_cores:
            return self.columns * self.depths * 64
        return self.warps * self.depth * self.batch

    @property
    def scratch_bytes(self) -> int:
        return 8 * 2 * self.sent_words * self.op.directions * self.groups

    @property
    def is_possible(self) -> bool:
        fits = self.shared_bytes <= self.most_shared_bytes and self.items <= 8 and self.grid <= self.processors
        if self.on_tensor_cores:
            return fits and self.tiles <= MAX_TILES and self.depth <= MAX_DEPTH
        return fits and self.tiles * self.batch <= MAX_ROW_SUMS

    @cached_property
    def cycles(self) -> float:
        """Estimate the cycles of a step of all launches: a trip, words, products, weights, and sums over warps."""
        rows, sequences = self.units * self.slots, self.batch
        words = self.sent_words * 8 / 64
        if self.on_tensor_cores:
            products = 1.6 * self.tiles * self.depths * self.columns
        else:
            products = self.tiles * 32 * self.size * sequences / 128
        weights = 0.0 if self.is_held else rows * self.size * self.dtype.itemsize / 40
        sums = self.part_words / 16 + 40 * self.items
        return self.rounds * self.halves * (TRIP_CYCLES + words + products + weights + sums)

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
        asked = max(n for n in (1, 2, 4) if n <= self.columns and (n == 1 or n * self.depth <= ASKED_WORDS))
        words = ceil_div(self.depth * self.batch, 64)
        entries = asked * self.depth if self.on_tensor_cores else min(8, words)
        return _CUDA.bind(
            ALL_WORDS=2 * self.sent_words * op.directions * self.groups,
            ASKED=asked,
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
            "MEET": f"meet({arguments.doors(1)}, {self.grid}u);" if steps * self.halves > 1 else "__syncthreads();",
            "TIME": self._time("s" if self.halves == 1 else "(s / 2u)"),
            "IS_LAST": "true" if self.halves == 1 else "s % 2u == 1u",
            "NEXT_STEP": "s + 1u" if self.halves == 1 else "s / 2u + 1u",
            "ASK_INPUT": cuda(
                "ask_input",
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
