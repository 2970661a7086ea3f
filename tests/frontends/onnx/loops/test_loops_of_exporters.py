"""Import loops as exporters write them: recurrent cells, decoders, running sums, and results in a sequence."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from frontends.onnx.loops.loop_models import SEQUENCE, STEPS, SUM, body, check, check_loop, loop, make, numbers, whole
from frontends.onnx.models import run
from helpers import assert_close
from onnx import NodeProto, TensorProto

import fusec
from fusec.frontends import load
from fusec.ops import MatMul, Scan


def appended(*, position: bool = False) -> list[NodeProto]:
    """Return a body that appends a row to the sequence s in each step."""
    where = ["end"] if position else []
    return [make("Gather", ["x", "i"], ["r"]), *SUM, make("SequenceInsert", ["s", "row", *where], ["s2"])]


def with_sequence(
    nodes: list[NodeProto], first: list[NodeProto], after: list[NodeProto], rng: np.random.Generator
) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """Make a model of a loop with the carried sequence s, which begins as `first` and is read by `after`."""
    node = loop(nodes, {"v": "w", "s": "s2"}, types={"s": SEQUENCE, "s2": SEQUENCE})
    feeds = {"v0": numbers(rng, 3, 4), "x": numbers(rng, STEPS, 3, 4)}
    held = {"n": np.array(STEPS), "end": np.array(-1), "two": np.array(2)}
    return whole([*first, node, *after], feeds, ["last0", "y"], held), feeds


EMPTY = [make("SequenceEmpty", [], ["s0"])]


@pytest.mark.parametrize(("axis", "new"), [(0, 1), (1, 1), (-1, 1), (0, 0), (1, 0), (-1, 0)])
def test_results_that_a_loop_appends_to_a_sequence_are_rows(axis: int, new: int, rng: np.random.Generator) -> None:
    proto, feeds = with_sequence(
        appended(), EMPTY, [make("ConcatFromSequence", ["last1"], ["y"], axis=axis, new_axis=new)], rng
    )
    ops = check(proto, feeds)
    assert ops["scan"] == 1 and set(ops) <= {"scan", "transpose", "reshape"}


def test_items_of_a_sequence_from_a_loop_are_slices(rng: np.random.Generator) -> None:
    proto, feeds = with_sequence(appended(), EMPTY, [make("SequenceAt", ["last1", "two"], ["y"])], rng)
    assert check(proto, feeds) == {"scan": 1, "slice": 1, "reshape": 1}


def test_a_sequence_that_is_not_empty_before_a_loop(rng: np.random.Generator) -> None:
    after = [make("ConcatFromSequence", ["last1"], ["y"], axis=0)]
    proto, feeds = with_sequence(appended(), [make("SequenceConstruct", ["v0"], ["s0"])], after, rng)
    assert check(proto, feeds)["scan"] == 1


@pytest.mark.parametrize("use", ["position", "length", "item"])
def test_a_sequence_that_a_body_uses_otherwise_is_unrolled(use: str, rng: np.random.Generator) -> None:
    nodes = appended(position=use == "position")
    if use == "length":
        nodes[1:2] = [make("SequenceLength", ["s"], ["l"]), make("Cast", ["l"], ["f"], to=TensorProto.FLOAT),
                      make("Mul", ["r", "f"], ["rf"]), make("Add", ["v", "rf"], ["w"])]  # fmt: skip
    if use == "item":
        nodes[1:2] = [make("SequenceAt", ["s", "end"], ["l"]), make("Mul", ["l", "r"], ["lr"]),
                      make("Add", ["v", "lr"], ["w"])]  # fmt: skip
    after = [make("ConcatFromSequence", ["last1"], ["y"], axis=0)]
    first = [make("SequenceConstruct", ["v0"], ["s0"])]
    proto, feeds = with_sequence(nodes, EMPTY if use == "length" else first, after, rng)
    assert check(proto, feeds)["scan"] == 0


def cell() -> list[NodeProto]:
    """Return an LSTM cell as it is written out: products with the row and with the hidden state, and four gates."""
    return [
        make("Gather", ["x", "i"], ["r"]),
        make("MatMul", ["r", "wx"], ["px"]),
        make("Add", ["px", "bias"], ["pb"]),
        make("MatMul", ["h", "wh"], ["ph"]),
        make("Add", ["pb", "ph"], ["p"]),
        make("Split", ["p"], ["gi", "gf", "gc", "go_"], axis=1, num_outputs=4),
        *(make("Sigmoid", [f"g{k}"], [f"s{k}"]) for k in ("i", "f", "o_")),
        make("Tanh", ["gc"], ["tc"]),
        make("Mul", ["sf", "c"], ["old"]),
        make("Mul", ["si", "tc"], ["new"]),
        make("Add", ["old", "new"], ["c2"]),
        make("Tanh", ["c2"], ["t2"]),
        make("Mul", ["so_", "t2"], ["h2"]),
        make("Identity", ["h2"], ["row"]),
    ]


@pytest.mark.parametrize(("units", "scans"), [(32, 1), (512, 0)])
def test_a_recurrent_cell(units: int, scans: int, rng: np.random.Generator) -> None:
    """Large products are launches of their own."""
    node = loop(cell(), {"h": "h2", "c": "c2"}, ["row"])
    feeds = {"h0": numbers(rng, 2, units), "c0": numbers(rng, 2, units), "x": numbers(rng, STEPS, 2, 48)}
    held = {
        "wx": numbers(rng, 48, 4 * units) / 8,
        "wh": numbers(rng, units, 4 * units) / np.float32(units**0.5),
        "bias": numbers(rng, 4 * units),
    }
    ops = check_loop(node, feeds, held)
    assert ops["scan"] == scans and ops["matmul"] == (1 if scans else 2 * STEPS)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("shape", [(5,), (3, 5), (2, 3, 5)])
def test_products_of_rows_with_weights_are_one_product(
    shape: tuple[int, ...], left: bool, rng: np.random.Generator
) -> None:
    """Weights have fewer or more dims than a row, on either side; what broadcasts stays apart from the steps."""
    shape = (*shape[:-2], 5, shape[-2]) if left and len(shape) > 1 else shape
    factors = ["wl", "neg"] if left else ["neg", "wr"]
    nodes = [
        make("Neg", ["x"], ["neg"]),
        make("MatMul", factors, ["p"]),
        make("Add", ["p", "bias"], ["q"]),
        make("Transpose", ["q"], ["t"]),
        make("Mul", ["v", "t"], ["vt"]),
        make("Tanh", ["vt"], ["w"]),
        make("ReduceSum", ["t"], ["row"], keepdims=0),
    ]
    graph = body(nodes, ["v", "x"], ["w", "row"])
    scan = make("Scan", ["v0", "xs"], ["last", "rows"], body=graph, num_scan_inputs=1)
    product = np.matmul(np.zeros((4, 5)), np.zeros(shape)) if left else np.matmul(np.zeros(shape), np.zeros((5, 4)))
    feeds = {"v0": numbers(rng, *product.T.shape), "xs": numbers(rng, STEPS, *shape)}
    held = {"wl": numbers(rng, 4, 5), "wr": numbers(rng, 5, 4), "bias": numbers(rng, product.shape[-1])}
    proto = whole([scan], feeds, ["last", "rows"], held)
    assert check(proto, feeds)["matmul"] == 1
    (node,) = (n for n in load(proto).nodes if isinstance(n.op, Scan))
    assert isinstance(node.op, Scan) and not any(isinstance(n.op, MatMul) for n in node.op.body.graph.nodes)


def test_weights_of_more_dims_than_a_row(rng: np.random.Generator) -> None:
    nodes = [make("MatMul", ["x", "weights"], ["p"]), make("Mul", ["p", "v"], ["pv"]), make("Sin", ["pv"], ["w"])]
    scan = make("Scan", ["v0", "xs"], ["last"], body=body(nodes, ["v", "x"], ["w"]), num_scan_inputs=1)
    feeds = {"v0": numbers(rng, 2, 3, 4), "xs": numbers(rng, STEPS, 3, 5)}
    ops = check(whole([scan], feeds, ["last"], {"weights": numbers(rng, 2, 5, 4)}), feeds)
    assert ops["scan"] == 1 and ops["matmul"] == 1


def test_a_decoder_of_tags(rng: np.random.Generator) -> None:
    """The best previous tag of each tag, and its score, as conditional random fields decode."""
    nodes = [
        make("Gather", ["emitted", "i"], ["e"]),
        make("Unsqueeze", ["v", "two"], ["v2"]),
        make("Add", ["v2", "moves"], ["all"]),
        make("ArgMax", ["all"], ["best"], axis=1, keepdims=0),
        make("Unsqueeze", ["best", "one"], ["at"]),
        make("GatherElements", ["all", "at"], ["most1"], axis=1),
        make("Squeeze", ["most1", "one"], ["most"]),
        make("Add", ["most", "e"], ["w"]),
    ]
    node = loop(nodes, {"v": "w"}, ["best"], types={"best": TensorProto.INT64})
    feeds = {"v0": numbers(rng, 2, 7), "emitted": numbers(rng, STEPS, 2, 7)}
    held = {"moves": numbers(rng, 7, 7), "one": np.array([1]), "two": np.array([2])}
    assert check_loop(node, feeds, held, types={"rows0": TensorProto.INT64})["scan"] == 1


def test_running_sums_and_averages(rng: np.random.Generator) -> None:
    nodes = [
        make("Add", ["sum", "x"], ["sum2"]),
        make("Mul", ["ema", "c"], ["old"]),
        make("Mul", ["x", "d"], ["new"]),
        make("Add", ["old", "new"], ["ema2"]),
        make("Max", ["most", "x"], ["most2"]),
        *(make("Identity", [f"{k}2"], [f"{k}_row"]) for k in ("sum", "ema", "most")),
    ]
    states = ["sum", "ema", "most"]
    graph = body(nodes, [*states, "x"], [*(f"{k}2" for k in states), *(f"{k}_row" for k in states)])
    names = [*(f"{k}9" for k in states), *(f"{k}s" for k in states)]
    scan = make("Scan", ["a", "b", "c0", "xs"], names, body=graph, num_scan_inputs=1)
    feeds = {n: numbers(rng, 4, 3) for n in ("a", "b", "c0")} | {"xs": numbers(rng, STEPS, 4, 3)}
    held = {"c": np.float32(0.875), "d": np.float32(0.125)}
    assert set(check(whole([scan], feeds, names, held), feeds)) == {"scan"}


def test_a_beam_is_unrolled(rng: np.random.Generator) -> None:
    nodes = [
        make("Gather", ["x", "i"], ["r"]),
        make("Add", ["v", "r"], ["s"]),
        make("Reshape", ["s", "flat"], ["f"]),
        make("TopK", ["f", "beams"], ["top", "at"]),
        make("Reshape", ["top", "column"], ["w"]),
        make("Identity", ["at"], ["row"]),
    ]
    node = loop(nodes, {"v": "w"}, ["row"], types={"row": TensorProto.INT64})
    feeds = {"v0": numbers(rng, 4, 1), "x": numbers(rng, STEPS, 4, 9)}
    held = {"flat": np.array([-1]), "column": np.array([4, 1]), "beams": np.array([4])}
    ops = check_loop(node, feeds, held, types={"rows0": TensorProto.INT64})
    assert ops["scan"] == 0 and ops["top_k"] == STEPS


def test_attention_over_an_outer_memory(rng: np.random.Generator) -> None:
    nodes = [
        make("MatMul", ["v", "keys"], ["scores"]),
        make("Softmax", ["scores"], ["p"]),
        make("MatMul", ["p", "memory"], ["read"]),
        make("Add", ["read", "v"], ["sum"]),
        make("Tanh", ["sum"], ["w"]),
        make("Identity", ["p"], ["row"]),
    ]
    feeds = {"v0": numbers(rng, 2, 8), "memory": numbers(rng, 6, 8)}
    ops = check_loop(loop(nodes, {"v": "w"}, ["row"]), feeds,
                     before=[make("Transpose", ["memory"], ["keys"])])  # fmt: skip
    assert ops == {"transpose": 1, "scan": 1}


@pytest.mark.cudnn
def test_a_compiled_cell_is_one_product_and_one_scan(rng: np.random.Generator) -> None:
    feeds = {"h0": numbers(rng, 2, 32), "c0": numbers(rng, 2, 32), "x": numbers(rng, STEPS, 2, 48)}
    weights = {"wx": numbers(rng, 48, 128) / 8, "wh": numbers(rng, 32, 128) / 8, "bias": numbers(rng, 128)}
    node = loop(cell(), {"h": "h2", "c": "c2"}, ["row"])
    proto = whole([node], feeds, list(node.output), {"n": np.array(STEPS), **weights})
    net = fusec.compile(proto, target="h200", simulate=True)
    assert isinstance(net, fusec.Executable)
    table = str(net.explain())
    rows = [line.split() for line in table.split("\n") if line[:1].isdigit()]
    assert len(rows) == 2 and rows[1][1:4] == ["kernel", "scan", "loop"], table
    for got, want in zip(net.run(None, feeds), run(proto, feeds), strict=True):
        assert_close(got, want, 1e-5)
