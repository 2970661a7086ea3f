"""Import loops of a known number of steps, and compare them with onnxruntime.

They become one scan if a kernel can run it.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest
from frontends.onnx.loops.loop_models import (
    BOOL,
    I64,
    STEPS,
    SUM,
    Types,
    body,
    check,
    check_loop,
    loop,
    make,
    numbers,
    whole,
)
from frontends.onnx.models import run
from helpers import assert_close
from onnx import NodeProto, TensorProto, numpy_helper

from fusec.errors import ModelError
from fusec.frontends import load
from fusec.frontends.onnx.ops.loop_as_scan import LEAST_STEPS
from fusec.ops import Scan
from fusec.reference import evaluate

# Scan --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backward", [0, 1])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_scans_read_and_write_along_any_axis_in_both_directions(
    axis: int, backward: int, rng: np.random.Generator
) -> None:
    nodes = [
        make("Mul", ["a", "x"], ["ax"]),
        make("Add", ["ax", "y"], ["a2"]),
        make("Sub", ["b", "a2"], ["b2"]),
        make("Max", ["x", "b2"], ["row"]),
        make("Identity", ["a2"], ["also"]),
    ]
    graph = body(nodes, ["a", "b", "x", "y"], ["a2", "b2", "row", "also"])
    scan = make("Scan", ["a0", "b0", "xs", "ys"], ["a9", "b9", "rows", "more"], body=graph, num_scan_inputs=2,
                scan_input_axes=[axis, 1], scan_input_directions=[backward, 1 - backward],
                scan_output_axes=[-1, axis], scan_output_directions=[1 - backward, backward])  # fmt: skip
    feeds = {
        "a0": numbers(rng, 3, 5),
        "b0": numbers(rng, 3, 5),
        "xs": np.moveaxis(numbers(rng, STEPS, 3, 5), 0, axis).copy(),
        "ys": numbers(rng, 3, STEPS, 5),
    }
    ops = check(whole([scan], feeds, ["a9", "b9", "rows", "more"]), feeds)
    assert ops["scan"] == 1 and set(ops) <= {"scan", "transpose", "slice"}


def test_a_scan_of_version_8_has_one_scan_for_each_image(rng: np.random.Generator) -> None:
    graph = body([make("Add", ["v", "x"], ["w"]), make("Mul", ["w", "x"], ["row"])], ["v", "x"], ["w", "row"])
    scan = make("Scan", ["", "v0", "xs"], ["last", "rows"], body=graph, num_scan_inputs=1, directions=[1])
    feeds = {"v0": numbers(rng, 2, 3), "xs": numbers(rng, 2, STEPS, 3)}
    ops = check(whole([scan], feeds, ["last", "rows"], opset=8), feeds)
    assert ops["scan"] == 2 and ops["add"] == ops["mul"] == 0


def test_a_map_is_computed_for_all_steps_together(rng: np.random.Generator) -> None:
    graph = body([make("Mul", ["x", "x"], ["xx"]), make("Add", ["xx", "c"], ["row"])], ["x"], ["row"])
    scan = make("Scan", ["xs"], ["rows"], body=graph, num_scan_inputs=1)
    feeds = {"xs": numbers(rng, STEPS, 3), "c": numbers(rng, 4, 1)}
    assert check(whole([scan], feeds, ["rows"]), feeds) == {"reshape": 1, "mul": 1, "add": 1}


# Loop --------------------------------------------------------------------------------------------------


def test_the_number_of_a_step_takes_part_in_its_arithmetic(rng: np.random.Generator) -> None:
    nodes = [
        make("Cast", ["i"], ["f"], to=TensorProto.FLOAT),
        make("Mul", ["v", "f"], ["vf"]),
        make("Sub", ["vf", "v"], ["w"]),
        make("Add", ["i", "i"], ["row"]),
    ]
    node = loop(nodes, {"v": "w"}, ["row"], types={"row": I64})
    assert check_loop(node, {"v0": numbers(rng, 2, 3) / 8}, types={"rows0": I64})["scan"] == 1


@pytest.mark.parametrize("more", [0, 3])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_rows_that_are_read_by_number_become_a_sequence(axis: int, more: int, rng: np.random.Generator) -> None:
    node = loop([make("Gather", ["x", "i"], ["r"], axis=axis), *SUM], {"v": "w"}, ["row"])
    feeds = {"v0": numbers(rng, 4), "x": np.moveaxis(numbers(rng, STEPS + more, 4), 0, axis).copy()}
    ops = check_loop(node, feeds)
    assert ops["scan"] == 1 and ops["gather"] == 0 and set(ops) <= {"scan", "slice", "transpose"}


def test_rows_that_are_read_by_a_list_of_one_number_become_a_sequence(rng: np.random.Generator) -> None:
    nodes = [
        make("Unsqueeze", ["i", "zero"], ["at"]),
        make("Cast", ["at"], ["at32"], to=TensorProto.INT32),
        make("Gather", ["x", "at32"], ["r"], axis=1),
        *SUM,
    ]
    node = loop(nodes, {"v": "w"}, ["row"])
    feeds = {"v0": numbers(rng, 4, 1), "x": numbers(rng, 4, STEPS)}
    held = {"n": np.array(STEPS), "zero": np.array([0])}
    graph = load(whole([node], feeds, ["last0"], held))
    (scan,) = (n for n in graph.nodes if n.op.name == "scan")
    assert " gather(" not in repr(scan), "the row is an operand of the step"
    assert check_loop(node, feeds, held)["scan"] == 1


def test_a_state_may_be_read_by_the_number_of_the_step(rng: np.random.Generator) -> None:
    """Its row changes from step to step, so it is no row of the first state."""
    nodes = [make("Gather", ["v", "i"], ["r"]), make("Mul", ["v", "half"], ["h"]), make("Add", ["h", "r"], ["w"]),
             make("Identity", ["r"], ["row"])]  # fmt: skip
    ops = check_loop(loop(nodes, {"v": "w"}, ["row"]), {"v0": numbers(rng, STEPS)}, {"half": np.float32(0.5)})
    assert ops["scan"] == 1


def test_a_tensor_may_be_read_whole_and_by_number(rng: np.random.Generator) -> None:
    nodes = [
        make("Gather", ["x", "i"], ["one"]),
        make("ReduceMax", ["x", "zero"], ["most"], keepdims=0),
        make("Sub", ["last", "i"], ["j"]),
        make("Gather", ["x", "j"], ["other"]),
        make("Max", ["one", "most", "other", "v"], ["r"]),
        *SUM,
    ]
    feeds = {"v0": numbers(rng, 3), "x": numbers(rng, STEPS, 3)}
    ops = check_loop(loop(nodes, {"v": "w"}, ["row"]), feeds, {"zero": np.array([0]), "last": np.array(STEPS - 1)})
    assert ops["scan"] == 1 and ops["reduce"] == 1, "what no step changes is computed before the loop"


def test_states_that_never_change_are_no_states(rng: np.random.Generator) -> None:
    nodes = [
        make("Identity", ["c"], ["same"]),
        make("Gather", ["c", "i"], ["r"]),
        make("Identity", ["c"], ["seen"]),
        *SUM,
    ]
    node = loop(nodes, {"c": "same", "v": "w", "u": "c2"}, ["row", "seen"])
    node.attribute[0].g.node.append(make("Identity", ["c"], ["c2"]))
    feeds = {"c0": numbers(rng, STEPS, 3), "v0": numbers(rng, 3), "u0": numbers(rng, STEPS, 3)}
    graph = load(whole([node], feeds, list(node.output), {"n": np.array(STEPS)}))
    (scan,) = (n for n in graph.nodes if n.op.name == "scan")
    assert scan.op.states == 2  # type: ignore[attr-defined]
    assert check_loop(node, feeds)["scan"] == 1


def test_states_may_change_places(rng: np.random.Generator) -> None:
    nodes = [make("Identity", ["a"], ["b2"]), make("Identity", ["b"], ["a2"]), make("Identity", ["a"], ["row"])]
    feeds = {"a0": numbers(rng, 3), "b0": numbers(rng, 3)}
    assert check_loop(loop(nodes, {"a": "a2", "b": "b2"}, ["row"]), feeds) == {"scan": 1}


@pytest.mark.parametrize("given", [("n", "yes"), ("n", "")])
@pytest.mark.parametrize(
    "computed",
    [
        [make("Cast", ["go"], ["on"], to=BOOL)],
        [make("Constant", [], ["on"], value=numpy_helper.from_array(np.array(True)))],
        [make("Shape", ["v"], ["s"]), make("ReduceMax", ["s"], ["m"], keepdims=0), make("Less", ["zero", "m"], ["on"])],
        [make("Identity", ["yes"], ["on"])],
    ],
)
def test_a_condition_may_be_a_constant(
    computed: list[NodeProto], given: tuple[str, str], rng: np.random.Generator
) -> None:
    node = loop([make("Gather", ["x", "i"], ["r"]), *SUM, *computed], {"v": "w"}, ["row"], given=[*given, "v0"])
    feeds = {"v0": numbers(rng, 3), "x": numbers(rng, STEPS, 3)}
    assert check_loop(node, feeds, {"zero": np.array(0)}) == {"scan": 1}


def less(a: str, b: str) -> NodeProto:
    return make("Less", [a, b], ["on"])


NEXT, DOWN, SAME = make("Add", ["k", "one"], ["k2"]), make("Sub", ["m", "one"], ["m2"]), make("Identity", ["m"], ["m2"])


@pytest.mark.parametrize(
    ("nodes", "first", "steps"),
    [
        ([NEXT, SAME, less("i", "eight")], 0, 9),
        ([NEXT, SAME, less("k2", "eight")], 0, 8),
        ([NEXT, SAME, less("k", "m")], 0, 9),
        ([NEXT, DOWN, less("k2", "m2")], -5, 7),
        ([NEXT, DOWN, less("k2", "m2")], -9, 9),
        ([make("Sub", ["m", "one"], ["k2"]), make("Sub", ["k", "one"], ["m2"]), less("one", "m2")], 20, 8),
        ([NEXT, SAME, less("one", "k2"), make("Not", ["on"], ["off"])], 0, 1),
        ([NEXT, SAME, less("k2", "many")], 0, STEPS),
    ],
)
def test_a_condition_that_depends_on_counters_ends_a_loop(
    nodes: list[NodeProto], first: int, steps: int, rng: np.random.Generator
) -> None:
    """As tf2onnx writes while loops."""
    states = {"v": "w", "k": "k2", "m": "m2"}
    types: dict[str, int] = dict.fromkeys(("k", "k2", "m", "m2"), I64)
    node = loop([make("Add", ["v", "v"], ["w"]), *nodes], states, types=types)
    held = {"one": np.array(1), "eight": np.array(8), "many": np.array(300), "k0": np.array(first), "m0": np.array(8)}
    feeds = {"v0": numbers(rng, 3)}
    proto = whole([node], feeds, ["last0", "last1"], {"n": np.array(STEPS), **held}, types={"last1": I64})
    found = check(proto, feeds)
    assert found["scan"] == (steps >= LEAST_STEPS)
    assert [n.op.steps for n in load(proto).nodes if isinstance(n.op, Scan)] == [steps] * (steps >= LEAST_STEPS)
    assert steps >= LEAST_STEPS or found["add"] == steps


def test_a_while_loop_has_no_number_of_trips(rng: np.random.Generator) -> None:
    nodes = [make("Add", ["v", "v"], ["w"]), NEXT, less("k2", "many")]
    node = loop(nodes, {"v": "w", "k": "k2"}, types={"k": I64, "k2": I64}, given=["", "yes", "v0", "k0"])
    held = {"one": np.array(1), "many": np.array(90), "k0": np.array(0), "yes": np.array(True)}
    feeds = {"v0": numbers(rng, 3) / 2**60}
    proto = whole([node], feeds, ["last0"], held)
    assert check(proto, feeds)["scan"] == 1
    assert [n.op.steps for n in load(proto).nodes if isinstance(n.op, Scan)] == [90]


def test_a_while_loop_has_a_bounded_number_of_steps(rng: np.random.Generator) -> None:
    nodes = [make("Add", ["v", "v"], ["w"]), NEXT, less("k2", "many")]
    node = loop(nodes, {"v": "w", "k": "k2"}, types={"k": I64, "k2": I64}, given=["", "yes", "v0", "k0"])
    held = {"one": np.array(1), "many": np.array(5000), "k0": np.array(0), "yes": np.array(True)}
    with pytest.raises(ModelError, match="more than 4096 trips"):
        load(whole([node], {"v0": numbers(rng, 3)}, ["last0"], held))


def test_a_condition_of_other_values_is_computed_by_the_host(rng: np.random.Generator) -> None:
    nodes = [make("Add", ["v", "v"], ["w"]), make("ReduceMax", ["w"], ["most"], keepdims=0), less("most", "limit")]
    node = loop(nodes, {"v": "w"})
    proto = whole([node], {"v0": numbers(rng, 3)}, ["last0"], {"n": np.array(STEPS), "limit": np.float32(50)})
    with pytest.raises(ModelError, match="the end of its loop"):
        load(proto)


@pytest.mark.parametrize("steps", [1, LEAST_STEPS - 1, LEAST_STEPS])
def test_few_steps_are_unrolled(steps: int, rng: np.random.Generator) -> None:
    node = loop([make("Add", ["v", "v"], ["w"])], {"v": "w"})
    found = check_loop(node, {"v0": numbers(rng, 3)}, steps=steps)
    assert found == ({"scan": 1} if steps == LEAST_STEPS else {"add": steps})


def test_more_steps_than_may_be_unrolled_are_a_scan(rng: np.random.Generator) -> None:
    node = loop([make("Mul", ["v", "c"], ["w"])], {"v": "w"})
    assert check_loop(node, {"v0": numbers(rng, 3)}, {"c": np.float32(0.999)}, steps=6000) == {"scan": 1}


@pytest.mark.parametrize(("steps", "scans"), [(4096, 0), (4097, 1)])
def test_long_loops_of_constants_are_not_computed_at_import(steps: int, scans: int) -> None:
    node = loop([make("Mul", ["v", "c"], ["w"])], {"v": "w"})
    held = {"n": np.array(steps), "v0": np.ones(2, np.float32), "c": np.float32(0.999)}
    graph = load(whole([node, make("Add", ["last0", "x"], ["y"])], {"x": np.ones(2, np.float32)}, ["y"], held))
    assert Counter(n.op.name for n in graph.nodes)["scan"] == scans


def test_loops_without_steps_give_their_first_states(rng: np.random.Generator) -> None:
    v0 = numbers(rng, 3)
    assert check_loop(loop([make("Add", ["v", "v"], ["w"])], {"v": "w"}), {"v0": v0}, steps=0) == {}


# Bodies ------------------------------------------------------------------------------------------------


def test_names_of_a_body_hide_outer_names(rng: np.random.Generator) -> None:
    """onnxruntime refuses that, so it runs the model with other names in the body."""
    held = {"n": np.array(STEPS)}
    feeds = {"v0": numbers(rng, 3), "x": numbers(rng, 3)}
    inner = numbers(rng, 3) / 4

    def proto(x: str, w: str) -> onnx.ModelProto:
        nodes = [make("Mul", ["v", x], ["z"]), make("Add", ["z", "v"], [w]), make("Identity", [w], ["row"])]
        node = loop(nodes, {"v": w}, ["row"], {x: inner})
        before = [make("Neg", ["x"], ["w"])]
        after = [make("Add", ["last0", "w"], ["y"]), make("Mul", ["rows0", "x"], ["u"])]
        return whole([*before, node, *after], feeds, ["y", "u"], held)

    graph = load(proto("x", "w"))
    got = evaluate(graph, feeds)
    assert "scan" in [n.op.name for n in graph.nodes]
    for name, want in zip(("y", "u"), run(proto("x2", "w2"), feeds), strict=True):
        assert_close(got[name], want, 1e-5)


@pytest.mark.parametrize("size", [3, 100])
@pytest.mark.parametrize("inside", [False, True])
def test_weights_are_read_by_steps(inside: bool, size: int, rng: np.random.Generator) -> None:
    held = {"c": numbers(rng, size) / 4}
    node = loop([make("Mul", ["v", "c"], ["vc"]), make("Add", ["vc", "c"], ["w"])], {"v": "w"}, (),
                held if inside else None)  # fmt: skip
    assert check_loop(node, {"v0": numbers(rng, size)}, {} if inside else held) == {"scan": 1, "constant": 1}


@pytest.mark.parametrize("refused", ["CumSum", "Add"])
def test_weights_that_a_body_is_first_to_read_are_there_for_later_nodes(refused: str, rng: np.random.Generator) -> None:
    """Also if no kernel runs the loop, so that what its import added is erased."""
    nodes = [make("Mul", ["v", "c"], ["vc"]), make(refused, ["vc", "one"], ["w"])]
    node = loop(nodes, {"v": "w"})
    one = np.array(0) if refused == "CumSum" else np.float32(1)
    feeds = {"v0": numbers(rng, 3)}
    held = {"n": np.array(STEPS), "c": numbers(rng, 3) / 4, "one": one}
    after = make("Add", ["last0", "c"], ["y"])
    ops = check(whole([node, after], feeds, ["y"], held), feeds)
    assert ops["scan"] == (refused == "Add") and ops["cumulate"] == (0 if refused == "Add" else STEPS)


def test_outputs_of_a_body_may_be_anything_that_it_sees(rng: np.random.Generator) -> None:
    nodes = [
        make("Add", ["v", "x"], ["w"]),
        make("Identity", ["w"], ["again"]),
        make("Identity", ["w"], ["twice"]),
        make("Identity", ["x"], ["passed"]),
        make("Identity", ["outer"], ["of_outer"]),
        make("Constant", [], ["number"], value_float=2.5),
        make("Neg", ["x"], ["unread"]),
        make("Identity", ["v"], ["old"]),
    ]
    outputs = ["w", "again", "twice", "passed", "of_outer", "number", "unread", "old"]
    names = ["last", *(f"y{k}" for k in range(len(outputs) - 1))]
    graph = body(nodes, ["v", "x"], outputs)
    scan = make("Scan", ["v0", "xs"], names, body=graph, num_scan_inputs=1)
    feeds = {"v0": numbers(rng, 3), "xs": numbers(rng, STEPS, 3), "outer": numbers(rng, 2)}
    used = [n for n in names if n != "y5"]
    proto = whole([scan], feeds, used)
    assert check(proto, feeds) == {"scan": 1}


def test_an_output_of_a_body_may_be_an_outer_value_by_its_own_name(rng: np.random.Generator) -> None:
    """onnxruntime wants an Identity there."""
    node = loop([make("Add", ["v", "c"], ["w"])], {"v": "w"}, ["x", "c"])
    feeds = {"v0": numbers(rng, 3), "x": numbers(rng, 2)}
    graph = load(whole([node], feeds, list(node.output), {"n": np.array(STEPS), "c": np.float32(0.5)}))
    got = evaluate(graph, feeds)
    assert [n.op.name for n in graph.nodes] == ["scan"]
    assert_close(got["last0"], feeds["v0"] + STEPS / 2, 1e-5)
    assert_close(got["rows0"], np.stack([feeds["x"]] * STEPS), 0)
    assert_close(got["rows1"], np.full(STEPS, 0.5, np.float32), 0)


def test_last_results_of_a_loop_may_be_left_out(rng: np.random.Generator) -> None:
    node = loop([make("Gather", ["x", "i"], ["r"]), *SUM, make("Neg", ["w"], ["other"])], {"v": "w"}, ["row", "other"])
    feeds = {"v0": numbers(rng, 3), "x": numbers(rng, STEPS, 3)}
    want = run(whole([node], feeds, list(node.output), held := {"n": np.array(STEPS)}), feeds)
    del node.output[2:]  # onnxruntime wants all of them
    graph = load(whole([node], feeds, list(node.output), held))
    assert [(n.op.name, len(n.results)) for n in graph.nodes] == [("scan", 2)]
    for name, one in evaluate(graph, feeds).items():
        assert_close(one, want[("last0", "rows0").index(name)], 1e-5)


def test_branches_in_a_body(rng: np.random.Generator) -> None:
    def branch(op: str, name: str) -> onnx.GraphProto:
        return body([make(op, ["v", "x"], [name])], [], [name])

    nodes = [
        make("ReduceSum", ["v"], ["sum"], keepdims=0),
        make("Less", ["sum", "limit"], ["c"]),
        make("If", ["c"], ["w"], then_branch=branch("Add", "a"), else_branch=branch("Sub", "b")),
    ]
    feeds = {"v0": numbers(rng, 3), "x": np.abs(numbers(rng, 3))}
    assert check_loop(loop(nodes, {"v": "w"}), feeds, {"limit": np.float32(2)})["scan"] == 1


@pytest.mark.parametrize(("outer", "inner"), [(STEPS, 3), (3, STEPS), (STEPS, STEPS + 1)])
def test_loops_in_loops(outer: int, inner: int, rng: np.random.Generator) -> None:
    """A loop of few steps is unrolled in the body of the other; otherwise the outer one is."""
    nodes = [make("Cast", ["i2"], ["f"], to=TensorProto.FLOAT), make("Mul", ["s", "c"], ["sc"]),
             make("Add", ["f", "sc"], ["s0"]), make("Add", ["s0", "v"], ["s2"]),
             make("Identity", ["go2"], ["on2"])]  # fmt: skip
    graph = body(nodes, ["i2", "go2", "s"], ["on2", "s2"], types={"i2": I64, "go2": BOOL, "on2": BOOL})
    node = loop(
        [make("Loop", ["m", "", "v"], ["u"], body=graph), make("Mul", ["u", "c"], ["w"]),
         make("Identity", ["u"], ["row"])],
        {"v": "w"}, ["row"],
    )  # fmt: skip
    ops = check_loop(node, {"v0": numbers(rng, 3)}, {"m": np.array(inner), "c": np.float32(0.125)}, steps=outer)
    assert ops["scan"] == (1 if outer == STEPS and inner == 3 else outer)


def test_random_numbers_differ_from_step_to_step(rng: np.random.Generator) -> None:
    node = loop([make("RandomNormalLike", ["v"], ["r"]), *SUM], {"v": "w"}, ["row"])
    feeds = {"v0": numbers(rng, 3)}
    graph = load(whole([node], feeds, ["rows0"], {"n": np.array(STEPS)}))
    ops = Counter(n.op.name for n in graph.nodes)
    assert ops["scan"] == 0 and ops["random_bits"] == STEPS


def test_shapes_that_change_are_unrolled(rng: np.random.Generator) -> None:
    node = loop([make("Concat", ["v", "x"], ["w"], axis=0)], {"v": "w"})
    feeds = {"v0": numbers(rng, 3), "x": numbers(rng, 2)}
    assert check_loop(node, feeds) == {"concat": STEPS}


def test_states_without_elements_are_unrolled(rng: np.random.Generator) -> None:
    node = loop([make("Add", ["v", "v"], ["w"]), make("Add", ["u", "c"], ["u2"])], {"v": "w", "u": "u2"}, ["w"])
    feeds = {"v0": numbers(rng, 0, 3), "u0": numbers(rng, 2)}
    assert check_loop(node, feeds, {"c": np.float32(1)})["scan"] == 0


@pytest.mark.parametrize("changing", [False, True])
def test_strings_that_change_are_unrolled(changing: bool, rng: np.random.Generator) -> None:
    op = make("StringConcat", ["t", "suffix"], ["t2"]) if changing else make("Identity", ["t"], ["t2"])
    types: Types = dict.fromkeys(("t", "t2", "last1"), TensorProto.STRING)
    node = loop([op, make("Add", ["v", "c"], ["w"])], {"v": "w", "t": "t2"}, types=types)
    feeds = {"v0": numbers(rng, 3)}
    proto = whole([node], feeds, ["last0", "last1"], {"n": np.array(STEPS), "c": np.float32(0.5)}, types=types)
    for name, text in (("t0", b"a"), ("suffix", b"b")):
        proto.graph.initializer.add(name=name, dims=[1], data_type=TensorProto.STRING, string_data=[text])
    graph = load(proto)
    assert Counter(n.op.name for n in graph.nodes if n.operands) == ({"add": STEPS} if changing else {"scan": 1})
    numbers_, text = run(proto, feeds)
    assert_close(evaluate(graph, feeds)["last0"], numbers_, 1e-5)
    literal = graph.outputs[1].literal
    assert literal is not None and literal.array.tolist() == text.tolist()


def test_eight_bit_floats_are_unrolled(rng: np.random.Generator) -> None:
    nodes = [
        make("Cast", ["v"], ["f"], to=TensorProto.FLOAT),
        make("Mul", ["f", "c"], ["g"]),
        make("Cast", ["g"], ["w"], to=TensorProto.FLOAT8E4M3FN),
        make("Identity", ["g"], ["row"]),
    ]
    narrow = TensorProto.FLOAT8E4M3FN
    before = [make("Cast", ["v0"], ["v1"], to=narrow)]
    node = loop(nodes, {"v": "w"}, ["row"], types={"v": narrow, "w": narrow}, given=["n", "", "v1"])
    feeds = {"v0": numbers(rng, 3)}
    held = {"n": np.array(STEPS), "c": np.float32(0.75)}
    ops = check(whole([*before, node], feeds, ["rows0"], held), feeds)
    assert ops["scan"] == 0 and ops["mul"] == STEPS


@pytest.mark.parametrize("op", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("half", [False, True])
def test_softmax_in_a_body_becomes_its_parts(op: str, half: bool, rng: np.random.Generator) -> None:
    kind = TensorProto.FLOAT16 if half else TensorProto.FLOAT
    node = loop([make(op, ["v"], ["p"], axis=0), make("Add", ["p", "x"], ["w"]), make("Identity", ["p"], ["row"])],
                {"v": "w"}, ["row"], types=dict.fromkeys(["v", "w", "row"], kind))  # fmt: skip
    dtype = np.float16 if half else np.float32
    feeds = {"v0": numbers(rng, 3, 4).astype(dtype), "x": (3 * numbers(rng, 3, 4)).astype(dtype)}
    proto = whole([node], feeds, list(node.output), {"n": np.array(STEPS)}, types=dict.fromkeys(node.output, kind))
    assert check(proto, feeds, 4e-3 if half else 1e-5) == {"scan": 1}
