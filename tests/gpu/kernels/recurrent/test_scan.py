"""Test the kernel of scans against the reference, through the emulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from gpu.kernels.cases import FIGURES, Case, build, check, rows
from gpu.kernels.emulator import needs_compiler

from fusec.gpu.kernels import find
from fusec.ir import Body, DType, Graph, Op, TensorType, Value
from fusec.lowering.scan_plan import scan_plan
from fusec.ops import (
    Cast,
    Concat,
    Expand,
    Gather,
    MatMul,
    Pad,
    Reduce,
    Relayout,
    Reshape,
    Scan,
    Slice,
    Split,
    Transpose,
    pw,
)

F32, F16, BF16, F64, I64, I32, BOOL = DType.F32, DType.F16, DType.BF16, DType.F64, DType.I64, DType.I32, DType.BOOL
Step = Callable[..., Sequence[Value]]


def drawn(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    """Draw small numbers, so that sums of many steps stay small; integers are indices."""
    if not type.dtype.is_float:
        return rng.integers(0, 2, type.shape).astype(type.dtype.numpy)
    return rng.uniform(-0.9, 0.9, type.shape).astype(type.dtype.numpy)


def scan_op(
    steps: int, types: Sequence[TensorType], states: int, sequences: int, step: Step
) -> tuple[Op, list[TensorType]]:
    """Make a scan whose body `step` builds, and the types of its operands. types: of the body's inputs."""
    graph = Graph("body")
    inputs = [graph.add_input(f"x{i}", type) for i, type in enumerate(types)]
    outputs = step(graph, *inputs)
    graph.set_outputs(outputs, [f"y{i}" for i in range(len(outputs))])
    first = states + sequences
    whole = [TensorType((steps, *t.shape), t.dtype) if states <= i < first else t for i, t in enumerate(types)]
    return Scan(Body(graph), steps, states, sequences), whole


def case(
    name: str, steps: int, types: Sequence[TensorType], counts: tuple[int, int], step: Step, exact: bool = False
) -> Case:
    """A case of a scan. counts: of states and of sequences."""
    op, whole = scan_op(steps, types, *counts, step)
    return build(f"scan {name}", whole, lambda g, *v: g.insert(op, v).results, drawn, exact)


def moved(g: Graph, h: Value, op: Op, *more: Value) -> list[Value]:
    """Add a view of a state, brought back to the state's shape, to the state."""
    view = g.add(op, h, *more)
    flat = g.add(Reshape((view.type.size,)), view)
    size = h.type.size
    if view.type.size < size:
        flat = g.add(Pad((0, size - view.type.size), "constant", 0.25), flat)
    back = g.add(Reshape(h.type.shape), g.add(Slice((0,), (size,), (1,)), flat))
    return [g.add(pw("mul"), g.add(pw("add"), h, back), g.constant(np.array(0.4, h.type.dtype.numpy)))]


def averages(g: Graph, h: Value, x: Value, share: Value) -> list[Value]:
    """The exponential moving average of a sequence, and how far each row is from it."""
    far = g.add(pw("sub"), x, h)
    return [g.add(pw("add"), h, g.add(pw("mul"), far, share)), far]


def alignments(g: Graph, alpha: Value, x: Value, skips: Value) -> list[Value]:
    """The forward variable of connectionist temporal classification: sums over three paths, in logarithms."""
    shape = alpha.type.shape
    low = -1e4
    one, two = (g.add(Slice((0, 0), shape, (1, 1)), g.add(Pad((0, n, 0, 0), "constant", low), alpha)) for n in (1, 2))
    never = g.add(Expand(shape), g.constant(np.array(low, alpha.type.dtype.numpy)))
    paths = (alpha, one, g.add(pw("where"), skips, two, never))
    stack = g.add(Concat(0), *(g.add(Reshape((1, *shape)), v) for v in paths))
    total = g.add(pw("add"), g.add(Reduce("log_sum_exp", (0,), False), stack), x)
    best = g.add(Reduce("max", (1,), True), total)
    return [g.add(pw("sub"), total, best), best]


def best_tags(g: Graph, score: Value, x: Value, transitions: Value) -> list[Value]:
    """One step of Viterbi: the best score for each tag, and the tag before it."""
    batch, tags = score.type.shape
    paths = g.add(pw("add"), g.add(Reshape((batch, tags, 1)), score), transitions)
    best = g.add(Reduce("max", (1,), True), paths)
    index = g.add(pw("gen_index", axis=1), g.add(Cast(I64), paths))
    place = g.add(pw("where"), g.add(pw("cmp_eq"), paths, best), index, g.constant(np.array(tags, np.int64)))
    return [
        g.add(pw("add"), g.add(Reshape((batch, tags)), best), x),
        g.add(Reduce("min", (1,), False), place),
    ]


def cell(g: Graph, h: Value, c: Value, x: Value, w: Value) -> list[Value]:
    """The cell of an LSTM, with its products."""
    size = h.type.shape[1]
    i, f, o, n = g.insert(Split(1, (size,) * 4), [g.add(pw("add"), x, g.add(MatMul(), h, w))]).results
    i, f, o = (g.add(pw("sigmoid"), v) for v in (i, f, o))
    kept = g.add(pw("add"), g.add(pw("mul"), f, c), g.add(pw("mul"), i, g.add(pw("tanh"), n)))
    h = g.add(pw("mul"), o, g.add(pw("tanh"), kept))
    return [h, kept, h]


def wandering(g: Graph, at: Value, table: Value) -> list[Value]:
    """A state that is a place in a table, which says where to go next."""
    following = g.add(Gather(0), table, at)
    return [following, g.add(Cast(F32), following)]


def swapped(g: Graph, a: Value, b: Value) -> list[Value]:
    """States that change places, and an output that is a constant."""
    return [b, a, a, g.constant(np.array(0.75, np.float32))]


def reduced(kind: str, axes: tuple[int, ...], keepdims: bool) -> Step:
    def step(g: Graph, h: Value) -> list[Value]:
        total = g.add(Reduce(kind, axes, keepdims), h)
        shape = tuple(1 if d in axes else n for d, n in enumerate(h.type.shape))
        total = total if keepdims else g.add(Reshape(shape), total)
        small = g.add(pw("tanh"), total) if h.type.dtype.is_float else g.add(pw("mod"), total, _seven(g))
        return [g.add(pw("sub"), h, small), total]

    return step


def _seven(g: Graph) -> Value:
    return g.constant(np.array(7, np.int32))


VIEWS: list[tuple[str, Op]] = [
    ("reshape", Reshape((4, 2, 5))),
    ("merged and split", Reshape((5, 8))),
    ("transpose", Transpose((1, 0))),
    ("relayout", Relayout((1, 0))),
    ("slice", Slice((1, 3), (2, 2), (2, -2))),
    ("pad", Pad((1, 0, 0, 2), "constant", -0.5)),
    ("expand", Expand((2, 4, 10))),
]


def loop_cases() -> list[Case]:
    """Every kind of body: rows for each block, and one block for all; views, sums, products, and kinds of results."""
    pair = [rows(F32, 4, 10)]
    return [
        *(case(f"average {t.value}", 9, [rows(t, 3, 5), rows(t, 3, 5), rows(t)], (1, 1), averages) for t in (F32, F16)),
        *(case(f"average {t.value}", 4, [rows(t, 6), rows(t, 6), rows(t, 6)], (1, 1), averages) for t in (BF16, F64)),
        case("of sequences that are not copied", 3, [rows(F32, 1, 4000), *[rows(F32, 1, 4000)] * 2], (1, 1), averages),
        case("of sequences copied in turns", 41, [rows(F32, 1, 300), rows(F32, 1, 300), rows(F32)], (1, 1), averages),
        case("of many rows", 5, [rows(F32, 600, 3), rows(F32, 600, 3), rows(F32)], (1, 1), averages),
        case("alignments", 9, [rows(F32, 3, 7), rows(F32, 3, 7), rows(BOOL, 3, 7)], (1, 1), alignments),
        case("alignments of one", 5, [rows(F32, 1, 77), rows(F32, 1, 77), rows(BOOL, 1, 77)], (1, 1), alignments),
        case("alignments in fp16", 5, [rows(F16, 2, 40), rows(F16, 2, 40), rows(BOOL, 2, 40)], (1, 1), alignments),
        case("best tags", 6, [rows(F32, 3, 5), rows(F32, 3, 5), rows(F32, 5, 5)], (1, 1), best_tags),
        case("cell", 5, [rows(F32, 2, 6), rows(F32, 2, 6), rows(F32, 2, 24), rows(F32, 6, 24)], (2, 1), cell),
        case("best tags of many", 3, [rows(F32, 3, 33), rows(F32, 3, 33), rows(F32, 33, 33)], (1, 1), best_tags),
        case("cell of one", 3, [rows(F32, 1, 19), rows(F32, 1, 19), rows(F32, 1, 76), rows(F32, 19, 76)], (2, 1), cell),
        case("places", 6, [rows(I64, 3), rows(I64, 2)], (1, 0), wandering),
        *(case("swapped states", steps, [rows(F32, 7), rows(F32, 7)], (2, 0), swapped, exact=True) for steps in (1, 4)),
        *(case(name, 3, pair, (1, 0), lambda g, h, op=op: moved(g, h, op)) for name, op in VIEWS),
        *(
            case(f"{kind} over {axes}", 3, pair, (1, 0), reduced(kind, axes, keep))
            for kind in ("sum", "mean", "max", "min", "prod", "l1", "l2", "sum_square", "log_sum_exp")
            for axes, keep in (((1,), True), ((0,), False), ((0, 1), True))
        ),
        *(
            case(f"{kind} of {t.value}", 2, [rows(t, 2, 70)], (1, 0), reduced(kind, (1,), True))
            for kind in ("sum", "max", "log_sum_exp")
            for t in (F32, F16, F64)
        ),
        *(case(f"{kind} of i32", 2, [rows(I32, 3, 40)], (1, 0), reduced(kind, (1,), True)) for kind in ("sum", "min")),
        *(
            case(f"{kind} of {count} rows of {t.value}", 2, [rows(t, count, 3)], (1, 0), reduced(kind, (0,), True))
            for kind, t in (("sum", F32), ("mean", F16), ("log_sum_exp", F64), ("max", I32))
            for count in (16, 40, 140)
        ),
    ]


@needs_compiler
def test_scans(rng: np.random.Generator) -> None:
    check(loop_cases(), rng)


@needs_compiler
def test_operands_and_results_in_other_memory_orders(rng: np.random.Generator) -> None:
    op, types = scan_op(7, [rows(F32, 3, 5), rows(F32, 3, 5), rows(F32)], 1, 1, averages)
    types = [types[0].with_order((1, 0)), types[1].with_order((2, 0, 1)), types[2]]

    def make(g: Graph, *operands: Value) -> list[Value]:
        results = g.insert(op, operands).results
        g.set_type(results[0], results[0].type.with_order((1, 0)))
        g.set_type(results[1], results[1].type.with_order((1, 2, 0)))
        return list(results)

    check([build("scan of other orders", types, make, drawn)], rng)


@needs_compiler
def test_results_that_nothing_reads_are_not_written(rng: np.random.Generator) -> None:
    op, types = scan_op(7, [rows(F32, 3, 5), rows(F32, 3, 5), rows(F32)], 1, 1, averages)
    made = [build("scan", types, lambda g, *v, i=i: g.insert(op, v).results[i], drawn) for i in (0, 1)]
    check(made, rng)
    for each in made:
        assert each.kernel is not None and len(each.kernel.written) == 1


def test_a_block_runs_each_row_of_a_batch() -> None:
    for made, blocks in (
        ("alignments", 3),
        ("of many rows", 200),
        ("best tags", 3),
        ("cell", 2),
        ("pad", 1),
        ("transpose", 1),
    ):
        found = next(c for c in loop_cases() if c.name == f"scan {made}")
        assert found.kernel is not None
        assert [launch.grid for launch in found.kernel.launches] == [blocks], made


def test_other_steps_are_left_to_other_kernels() -> None:
    op, types = scan_op(3, [rows(F32, 4, 4096), rows(F32, 4096, 4096)], 1, 0, lambda g, h, w: [g.add(MatMul(), h, w)])
    assert isinstance(op, Scan) and scan_plan(op) is None
    large = build("large", types, lambda g, *v: g.insert(op, v).results)
    assert large.kernel is None
    op, types = scan_op(3, [rows(F32, 4)], 1, 0, lambda g, h: [g.add(pw("exp"), h)])
    two = build("two", types, lambda g, *v: g.add(pw("relu"), g.insert(op, v).results[0]))
    assert find(two.nodes, two.outputs, FIGURES) is None


@pytest.mark.parametrize("steps", [1, 2])
def test_the_source_does_not_grow_with_the_steps(steps: int) -> None:
    sources = []
    for count in (steps * 40, steps * 4000):
        op, types = scan_op(count, [rows(F32, 3, 5), rows(F32, 3, 5), rows(F32)], 1, 1, averages)
        kernel = build("scan", types, lambda g, *v, op=op: g.insert(op, v).results).kernel
        assert kernel is not None
        sources.append(len(kernel.launches[0].source))
    assert abs(sources[0] - sources[1]) < 40
