"""Test the IR: types, literals, the methods that edit a graph, and the rules that `verify` checks."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fusec.errors import VerifyError
from fusec.ir import (
    NUMBERS,
    Constant,
    DType,
    Graph,
    Literal,
    Node,
    Return,
    TensorType,
    Value,
    channels_last,
    load_all,
    noted_reads,
    positions,
    print_attribute,
    print_graph,
    quote,
)
from fusec.ops import Cast, Reshape, Split, pw
from fusec.passes.layout.precision import Narrow
from fusec.passes.rewriting.derived_constants import Derived

F32 = TensorType((2, 4), DType.F32)


def small() -> Graph:
    """x -> a = relu(x) -> b = add(a, x) -> return b."""
    graph = Graph("g")
    x = graph.add_input("x", F32)
    a = graph.add(pw("relu"), x, name="a")
    graph.set_outputs([graph.add(pw("add"), a, x, name="b")])
    return graph


# types ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", NUMBERS)
def test_dtypes_and_numpy_agree(dtype: DType) -> None:
    assert DType.of(dtype.numpy) is dtype
    assert dtype.itemsize == np.zeros(1, dtype.numpy).nbytes
    assert dtype.is_narrow == (dtype.numpy.isbuiltin == 2 and dtype is not DType.BF16)
    assert dtype.is_narrow_int == (dtype.is_narrow and "int" in dtype.numpy.name)
    assert dtype.is_float == (not dtype.is_narrow and (dtype.numpy.kind == "f" or dtype is DType.BF16))
    assert dtype.is_int == (not dtype.is_narrow and dtype.numpy.kind in "iu")
    assert dtype.epsilon == (float(ml_dtypes.finfo(dtype.numpy).eps) if dtype.is_float else 0.0)


@pytest.mark.parametrize("other", [np.complex64, "datetime64[s]", "U3", object, "no dtype", ml_dtypes.float8_e3m4])
def test_other_element_types_are_refused(other: Any) -> None:
    with pytest.raises(VerifyError, match="is not one fusec knows"):
        DType.of(other)


def test_tensor_type() -> None:
    plain = TensorType((2, 3, 4, 5), DType.F16)
    nhwc = plain.with_order(channels_last(4))
    assert (plain.rank, plain.size, plain.nbytes, plain.strides) == (4, 120, 240, (60, 20, 5, 1))
    assert (nhwc.order, nhwc.strides) == ((0, 2, 3, 1), (60, 1, 15, 3))
    assert str(nhwc) == "f16[2,3,4,5]{0,2,3,1}"
    assert nhwc != plain and nhwc.same_value_type(plain)
    assert not plain.same_value_type(plain.with_dtype(DType.F32))
    assert TensorType((2, 3), DType.F32, (0, 1)) == TensorType((2, 3), DType.F32), "row-major has one spelling"
    assert TensorType((), DType.F32).strides == ()
    assert TensorType((2, 0, 3), DType.F32).strides == (3, 3, 1)


@given(st.permutations(range(4)), st.lists(st.integers(1, 4), min_size=4, max_size=4))
def test_strides_are_those_of_numpy(order: list[int], shape: list[int]) -> None:
    type = TensorType(tuple(shape), DType.F32, tuple(order))
    stored = np.zeros([shape[d] for d in order], np.float32).transpose(np.argsort(order))
    assert tuple(s // 4 for s in stored.strides) == type.strides


@pytest.mark.parametrize(
    ("shape", "order", "reason"),
    [
        ((2, -1), (), r"negative dimension in shape \[2, -1\]"),
        ((2, 3), (0, 0), r"memory order \(0, 0\) does not permute 2 dims"),
        ((2, 3), (1, 2), r"memory order \(1, 2\) does not permute 2 dims"),
        ((2, 3), (1,), r"memory order \(1,\) does not permute 2 dims"),
    ],
)
def test_bad_types_are_refused(shape: tuple[int, ...], order: tuple[int, ...], reason: str) -> None:
    with pytest.raises(VerifyError, match=reason):
        TensorType(shape, DType.F32, order)


# payloads ---------------------------------------------------------------------------------------------


def test_a_literal_is_read_once_and_only_when_needed() -> None:
    reads: list[int] = []

    def load() -> np.ndarray[Any, Any]:
        reads.append(1)
        return np.ones((2, 4), np.float32)

    graph = Graph()
    graph.set_outputs([graph.insert(Constant(Literal(F32, load, "w"))).result])
    graph.verify()
    graph.clone()
    assert not reads
    literal = graph.outputs[0].literal
    assert literal is not None
    assert literal.array is literal.array
    assert literal.digest
    assert len(reads) == 1


def test_large_literals_print_without_being_read() -> None:
    def load() -> np.ndarray[Any, Any]:
        raise AssertionError("read")

    graph = Graph()
    graph.set_outputs([graph.insert(Constant(Literal(TensorType((17,), DType.F32), load, "w"))).result])
    assert 'weight("w") : f32[17]' in print_graph(graph.clone())


def test_a_literal_is_a_read_only_copy() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    literal = Literal.of(array.T)
    array[:] = 0
    assert literal.array.flags.c_contiguous
    np.testing.assert_array_equal(literal.array, [[0, 3], [1, 4], [2, 5]])
    with pytest.raises(ValueError, match="read-only"):
        literal.array[0, 0] = 1
    loaded = Literal(F32, lambda: np.ones((2, 4), np.float32))
    with pytest.raises(ValueError, match="read-only"):
        loaded.array[0, 0] = 1


@pytest.mark.parametrize("array", [np.ones((4, 2), np.float32), np.ones((2, 4)), np.ones(8, np.float32)])
def test_a_literal_whose_data_is_not_as_declared(array: np.ndarray[Any, Any]) -> None:
    literal = Literal(F32, lambda: array, "conv.weight")
    with pytest.raises(VerifyError, match=r"constant 'conv.weight' was declared f32\[2,4\] but its data is"):
        _ = literal.array


def test_digests_tell_type_and_bytes_and_nothing_else() -> None:
    zeros = np.zeros((2, 4), np.float32)
    assert Literal.of(zeros, "a").digest == Literal.of(zeros.copy(), "b").digest
    different = [zeros, zeros.reshape(8), zeros.astype(np.int32), -zeros, zeros + 1, np.zeros((2, 8), np.float16)]
    assert len({Literal.of(a).digest for a in different}) == len(different)
    assert Literal.of(np.zeros((0, 3))).digest != Literal.of(np.zeros((3, 0))).digest


def test_reads_of_a_thread_are_noted_with_what_they_are_computed_from() -> None:
    w, b, within, elsewhere = (Literal.of(np.ones(4, np.float32), name) for name in ("w", "b", "within", "elsewhere"))
    double = Derived(w.type, [w], np.positive, "w")
    with noted_reads() as read:
        assert double.array.any() and b.operand().any()
        threading.Thread(target=lambda: elsewhere.array).start()
        with noted_reads() as inner:
            assert within.digest
    assert read == {double, w, b, within}
    assert inner == {within}
    assert elsewhere.array.any()
    assert elsewhere not in read, "nothing is noted after the block"


def test_data_that_another_thread_has_loaded_is_noted_where_it_is_used() -> None:
    w = Literal(F32, lambda: np.ones((2, 4), np.float32), keep=False)
    narrow = Narrow(w, DType.F16, "w")
    load = narrow.early()
    assert load is not None
    thread = threading.Thread(target=load)
    thread.start()
    thread.join()
    with noted_reads() as read:
        assert narrow.array.all()
    assert read == {narrow, w}


def test_literals_are_compared_by_identity() -> None:
    one, two = Literal.of(1.0), Literal.of(1.0)
    assert Constant(one) == Constant(one)
    assert Constant(one) != Constant(two)


def test_scalar() -> None:
    graph = Graph()
    assert graph.constant(np.full((1, 1), 2.5, np.float16)).scalar() == 2.5
    assert graph.constant(np.array(True)).scalar() == 1.0
    assert graph.constant(np.zeros(2)).scalar() is None
    assert graph.constant(np.zeros(0)).scalar() is None
    assert graph.add_input("x", TensorType((), DType.F32)).scalar() is None


def test_attributes_of_unknown_kinds_do_not_print() -> None:
    with pytest.raises(TypeError, match="attribute of type dict"):
        print_attribute({})
    assert print_attribute((1, 2.0, True, "a", None, DType.F16, (3,))) == '[1, 2.0, true, "a", none, f16, [3]]'
    assert print_attribute(np.float64(0.5)) == "0.5"


# verbs ------------------------------------------------------------------------------------------------


class Edits(RuleBasedStateMachine):
    """Make random edits of a graph; after each, it verifies, and a clone prints the same."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = Graph("g")
        self.graph.add_input("x", F32)
        self.order = 0

    def before(self, data: st.DataObject) -> Node | None:
        return data.draw(st.sampled_from([None, *self.graph.nodes]))

    def visible(self, before: Node | None) -> list[Value]:
        """The values of type F32 that a node placed there may use."""
        place = positions(self.graph)
        limit = place[before or self.graph.return_node]
        made = [v for v in self.graph.values() if v.node is None or place[v.node] < limit]
        return [v for v in made if v.type.same_value_type(F32)]

    @rule(data=st.data(), op=st.sampled_from(["relu", "add", "where", "constant", "split"]))
    def insert(self, data: st.DataObject, op: str) -> None:
        before = self.before(data)
        choose = st.sampled_from(self.visible(before))
        if op == "constant":
            self.graph.constant(np.ones((2, 4), np.float32), data.draw(st.sampled_from(["", "c"])), before)
        elif op == "split":
            self.graph.insert(Split(1, (4, 0)), [data.draw(choose)], before=before, names=["s"], origin=["o"])
        elif op == "where":
            mask = self.graph.add(Cast(DType.BOOL), data.draw(choose), before=before)
            self.graph.insert(pw("where"), [mask, data.draw(choose), data.draw(choose)], before=before)
        else:
            operands = [data.draw(choose) for _ in range(1 if op == "relu" else 2)]
            self.graph.insert(pw(op), operands, before=before, names=["y"])

    @rule(data=st.data())
    @precondition(lambda self: len(self.graph) > 0)
    def set_input(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from(list(self.graph.nodes)))
        places = [i for i, v in enumerate(node.operands) if v.type.same_value_type(F32)]
        if places:
            self.graph.set_input(
                node, data.draw(st.sampled_from(places)), data.draw(st.sampled_from(self.visible(node)))
            )

    @rule(data=st.data())
    @precondition(lambda self: len(self.graph) > 0)
    def replace(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from(list(self.graph.nodes)))
        candidates = self.visible(node)
        for old in node.results:
            if old.type.same_value_type(F32):
                self.graph.replace(old, data.draw(st.sampled_from(candidates)))
                assert not old.uses

    @rule(data=st.data())
    def erase(self, data: st.DataObject) -> None:
        unused = [n for n in self.graph.nodes if not any(v.uses for v in n.results)]
        if unused:
            node, size = data.draw(st.sampled_from(unused)), len(self.graph)
            self.graph.erase(node)
            assert len(self.graph) == size - 1
            assert node not in list(self.graph.nodes)

    @rule(data=st.data())
    def set_outputs(self, data: st.DataObject) -> None:
        values = data.draw(st.lists(st.sampled_from(list(self.graph.values())), max_size=3))
        self.graph.set_outputs(values, [f"y{i}" for i in range(len(values))])

    @rule(data=st.data(), name=st.sampled_from(["", "a", "x", "y"]))
    def rename(self, data: st.DataObject, name: str) -> None:
        self.graph.rename(data.draw(st.sampled_from(list(self.graph.values()))), name)

    @rule()
    def prune(self) -> None:
        size, gone = len(self.graph), self.graph.prune()
        assert len(self.graph) == size - gone
        assert all(any(v.uses for v in n.results) for n in self.graph.nodes)

    @invariant()
    def holds(self) -> None:
        self.graph.verify()
        wanted: dict[Value, set[tuple[Node, int]]] = {v: set() for v in self.graph.values()}
        for node in [*self.graph.nodes, self.graph.return_node]:
            for index, operand in enumerate(node.operands):
                wanted[operand].add((node, index))
        assert {v: set(v.uses) for v in self.graph.values()} == wanted
        assert str(self.graph.clone()) == str(self.graph)


Edits.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestEdits = Edits.TestCase


def test_insert_places_names_and_types() -> None:
    graph = small()
    x = graph.inputs[0]
    b = graph.outputs[0].node
    node = graph.insert(pw("tanh"), [x], before=b, names=["a"], types=[F32.with_order((1, 0))], origin=["p", "p", "q"])
    assert [n.op.name for n in graph.nodes] == ["relu", "tanh", "add"]
    assert (node.result.name, node.result.type.order, node.origin) == ("a.0", (1, 0), ("p", "q"))
    first = graph.insert(pw("exp"), [x], before=next(graph.nodes))
    assert next(graph.nodes) is first
    graph.verify()


def test_insert_refuses_before_it_changes_anything() -> None:
    graph = small()
    x, before = graph.inputs[0], str(graph)
    i = graph.add_input("i", TensorType((2, 4), DType.I32))
    before = str(graph)
    with pytest.raises(VerifyError, match=r"add\(%x: f32\[2,4\], %i: i32\[2,4\]\): operands differ in dtype: f32, i32"):
        graph.insert(pw("add"), [x, i])
    with pytest.raises(VerifyError, match="relu gives 1 results"):
        graph.insert(pw("relu"), [x], names=["a", "b"])
    with pytest.raises(VerifyError, match="relu gives 1 results"):
        graph.insert(pw("relu"), [x], types=[])
    with pytest.raises(AssertionError, match="belongs to another graph"):
        graph.insert(pw("relu"), [small().inputs[0]])
    with pytest.raises(AssertionError, match="not in this graph"):
        graph.insert(pw("relu"), [x], before=next(small().nodes))
    graph.verify()
    assert str(graph) == before
    assert graph.add(pw("relu"), x, name="c").name == "c", "a refused node keeps no name"


def test_input_names_are_part_of_the_interface() -> None:
    graph = small()
    with pytest.raises(VerifyError, match=r"graph 'g': two values are named %x"):
        graph.add_input("x", F32)
    with pytest.raises(VerifyError, match=r"graph 'g': two values are named %a"):
        graph.add_input("a", F32)
    with pytest.raises(VerifyError, match="an input has an empty name"):
        graph.add_input("", F32)


def test_replace_unites_the_origins() -> None:
    graph = small()
    x = graph.inputs[0]
    old = graph.insert(pw("relu"), [x], origin=["p", "q"]).result
    new = graph.insert(pw("relu"), [x], origin=["q", "r"])
    graph.set_outputs([old, old], ["y", "z"])
    graph.replace(old, new.result)
    assert new.origin == ("p", "q", "r")
    assert graph.outputs == (new.result, new.result)
    assert graph.output_names == ("y", "z"), "the public names stay"
    graph.replace(new.result, x)
    assert graph.outputs == (x, x)


def test_nodes_in_use_are_not_erased() -> None:
    graph = small()
    relu, add = graph.nodes
    with pytest.raises(AssertionError, match="is in use"):
        graph.erase(relu)
    with pytest.raises(AssertionError, match="not in this graph"):
        graph.erase(graph.return_node)
    graph.set_outputs([graph.inputs[0]])
    graph.erase(add)
    with pytest.raises(AssertionError, match="not in this graph"):
        graph.erase(add)
    with pytest.raises(AssertionError):
        small().erase(relu)
    with pytest.raises(AssertionError):
        graph.set_input(add, 0, graph.inputs[0])


def test_set_op_changes_attributes_in_place() -> None:
    graph = small()
    clip = graph.insert(pw("clip"), [graph.inputs[0]])
    graph.set_op(clip, pw("clip", max=6.0))
    assert clip.op.attributes["max"] == 6.0
    with pytest.raises(AssertionError):
        graph.set_op(clip, pw("relu"))


def test_outputs_are_checked() -> None:
    graph = small()
    with pytest.raises(VerifyError, match="1 outputs but 2 names"):
        graph.set_outputs([graph.inputs[0]], ["a", "b"])
    with pytest.raises(AssertionError, match="belongs to another graph"):
        graph.set_outputs([small().inputs[0]])
    assert graph.output_names == ("b",)


def test_values_are_found_by_name() -> None:
    graph = small()
    assert graph.value("a").node is next(graph.nodes)
    with pytest.raises(VerifyError, match="graph 'g' has no value %nope"):
        graph.value("nope")


def test_users_and_uses() -> None:
    graph = Graph()
    x = graph.add_input("x", F32)
    twice = graph.insert(pw("mul"), [x, x])
    assert x.uses == [(twice, 0), (twice, 1)]
    assert x.users == [twice]


def test_fresh_names_do_not_collide() -> None:
    graph = Graph()
    graph.add_input("v0", F32)
    graph.add_input("a.1", F32)
    names = [graph.fresh_name(hint) for hint in ["", "a", "a", "a", "v0"]]
    assert len({*names, "v0", "a.1"}) == 7


# iteration --------------------------------------------------------------------------------------------


def chain(length: int) -> Graph:
    graph = Graph("chain")
    value = graph.add_input("x", F32)
    for _ in range(length):
        value = graph.add(pw("relu"), value)
    graph.set_outputs([value])
    return graph


def test_the_current_node_may_be_erased() -> None:
    graph = chain(10)
    seen = 0
    for node in graph.nodes:
        seen += 1
        graph.replace(node.result, node.operands[0])
        graph.erase(node)
    assert (seen, len(graph)) == (10, 0)
    graph.verify()


@settings(deadline=None)
@given(st.lists(st.integers(0, 9)), st.integers(0, 9))
def test_any_nodes_may_be_erased_while_iterating(gone: list[int], at: int) -> None:
    graph = chain(10)
    nodes = list(graph.nodes)
    left: set[Node] = set(nodes)
    seen: list[Node] = []
    for node in graph.nodes:
        seen.append(node)
        if node is nodes[at]:
            for victim in dict.fromkeys(nodes[i] for i in gone):
                graph.replace(victim.result, victim.operands[0])
                graph.erase(victim)
                left.discard(victim)
    graph.verify()
    assert list(graph.nodes) == [n for n in nodes if n in left]
    assert seen == [n for i, n in enumerate(nodes) if i <= at or n in left]


def test_iteration_reaches_nodes_inserted_after_the_current_one() -> None:
    graph = chain(2)
    seen: list[str] = []
    for node in graph.nodes:
        seen.append(node.op.name)
        if node.op.name == "relu" and len(graph) < 4:
            graph.add(pw("tanh"), graph.inputs[0])
    assert seen == ["relu", "relu", "tanh", "tanh"]


def test_prune_keeps_what_outputs_need() -> None:
    graph = small()
    x = graph.inputs[0]
    dead = graph.add(pw("exp"), graph.add(pw("log"), x))
    half, _ = graph.insert(Split(1, (4, 0)), [x]).results
    graph.set_outputs([*graph.outputs, half])
    assert dead.node in list(graph.nodes)
    assert graph.prune() == 2
    assert [n.op.name for n in graph.nodes] == ["relu", "add", "split"]
    assert graph.prune() == 0
    assert graph.inputs == (x,)
    assert graph.fresh_name(dead.name) == dead.name, "its name is free again"


# copies -----------------------------------------------------------------------------------------------


def test_a_clone_is_equal_and_independent() -> None:
    graph = small()
    graph.insert(pw("relu"), [graph.inputs[0]], types=[F32.with_order((1, 0))], origin=["n"])
    graph.constant(np.ones(3), "c")
    graph.set_outputs([graph.outputs[0]], ["out"])
    copy = graph.clone()
    text = print_graph(graph, locations=True)
    assert print_graph(copy, locations=True) == text
    assert copy.value("c").literal is graph.value("c").literal
    graph.erase(graph.insert(pw("exp"), [graph.inputs[0]]))
    assert graph.clone().fresh_name() == graph.fresh_name(), "a name that went is not given again"
    copy.prune()
    copy.verify()
    assert print_graph(graph, locations=True) == text


def test_extract_takes_a_part() -> None:
    graph = small()
    relu, add = graph.nodes
    part = graph.extract([relu.result, graph.inputs[0]], [add], [add.result], ["sum"])
    part.verify()
    assert str(part) == (
        'graph "g" (%a: f32[2,4], %x: f32[2,4]) {\n  %b = add(%a, %x) : f32[2,4]\n  return %b as "sum"\n}'
    )
    assert graph.extract([graph.inputs[0]], [relu], []).output_names == ()


def test_graphs_are_freed() -> None:
    """No other object references a graph. Its own links are cycles, which the garbage collector frees."""
    graph = chain(10)
    gone = weakref.ref(graph)
    del graph
    gc.collect()
    assert gone() is None


def test_positions() -> None:
    graph = small()
    relu, add = graph.nodes
    assert positions(graph) == {relu: 0, add: 1, graph.return_node: 2}


def rewriting_s(size: int) -> float:
    """Return the processor time to build a sequence of nodes, replace each one, and verify the graph."""
    gc.collect()
    gc.disable()  # its full collections walk whatever else the test process holds
    try:
        started = time.process_time()
        graph = chain(size)
        for node in graph.nodes:
            graph.replace(node.result, graph.add(pw("tanh"), node.operands[0], before=node))
            graph.erase(node)
        graph.verify()
        taken = time.process_time() - started
    finally:
        gc.enable()
    assert len(graph) == size
    assert all(n.op.name == "tanh" for n in graph.nodes)
    return taken


@pytest.mark.slow
def test_rewriting_takes_time_in_proportion_to_the_nodes() -> None:
    """Sixteen times as long for four times the nodes would be quadratic; how fast the machine is does not count."""
    small, large = (min(rewriting_s(size) for _ in range(3)) for size in (5_000, 20_000))
    assert large < 12 * small, f"{large:.2f} s for 20,000 nodes, {small:.2f} s for 5,000"


# verify: each rule with the state that breaks it -------------------------------------------------------


def _unknown_value(g: Graph) -> None:
    stray = small().inputs[0]
    node = next(g.nodes)
    node._operands[0] = stray
    stray._uses[node, 0] = None


def _used_before_made(g: Graph) -> None:
    relu, add = g.nodes
    g.set_input(relu, 0, add.result)


def _lost_use(g: Graph) -> None:
    g.value("a")._uses.clear()


def _use_too_many(g: Graph) -> None:
    g.value("a")._uses[next(g.nodes), 0] = None


def _use_beyond_the_operands(g: Graph) -> None:
    g.value("a")._uses[next(g.nodes), 7] = None


def _use_by_an_erased_node(g: Graph) -> None:
    node = g.insert(pw("exp"), [g.value("a")])
    g.erase(node)
    g.value("a")._uses[node, 0] = None


def _wrong_shape(g: Graph) -> None:
    g.set_type(g.value("a"), TensorType((4, 2), DType.F32))


def _wrong_type_of_last(g: Graph) -> None:
    g.set_type(g.value("b"), F32.with_dtype(DType.F16))


def _refused_operands(g: Graph) -> None:
    g.set_type(g.inputs[0], TensorType((2, 4), DType.BOOL))


def _results_too_few(g: Graph) -> None:
    g.insert(pw("relu"), [g.inputs[0]]).results = ()


def _two_of_a_name(g: Graph) -> None:
    g.value("a").name = "x"


def _unknown_name(g: Graph) -> None:
    g.value("a").name = "alpha"


def _value_of_another_node(g: Graph) -> None:
    g.value("a").node = g.outputs[0].node


def _value_of_another_place(g: Graph) -> None:
    g.value("a").index = 1


def _input_with_a_node(g: Graph) -> None:
    g.inputs[0].node = next(g.nodes)


def _value_of_another_graph(g: Graph) -> None:
    g.value("a").graph = Graph()


def _node_of_another_graph(g: Graph) -> None:
    next(g.nodes).graph = Graph()


def _broken_link(g: Graph) -> None:
    g.return_node._prev = next(g.nodes)


def _miscounted(g: Graph) -> None:
    g._size += 1


def _two_outputs_of_a_name(g: Graph) -> None:
    g.set_outputs([g.inputs[0], g.value("a")], ["y", "y"])


def _names_too_few(g: Graph) -> None:
    g.return_node.op = Return(())


def _reshape(g: Graph) -> None:
    node = g.insert(Reshape((8,)), [g.inputs[0]])
    g.set_op(node, Reshape((9,)))


BROKEN: list[tuple[Callable[[Graph], None], str]] = [
    (_unknown_value, r"%a = relu\(%x\) : f32\[2,4\]: operand %x is not defined before its use"),
    (_used_before_made, r"%a = relu\(%b\) : f32\[2,4\]: operand %b is not defined before its use"),
    (_lost_use, r"%b = add\(%a, %x\) : f32\[2,4\]: operand %a does not know of this use"),
    (_use_too_many, "%a has a use in relu that is not there"),
    (_use_beyond_the_operands, "%a has a use in relu that is not there"),
    (_use_by_an_erased_node, "%a has a use in exp that is not there"),
    (_wrong_shape, r"%a = relu\(%x\) : f32\[4,2\]: %a is f32\[4,2\] but the op gives f32\[2,4\]"),
    (_wrong_type_of_last, r"%b is f16\[2,4\] but the op gives f32\[2,4\]"),
    (_refused_operands, r"%a = relu\(%x\) : f32\[2,4\]: relu takes numbers, not bool"),
    (_results_too_few, "has 0 results, the op gives 1"),
    (_two_of_a_name, "two values are named %x"),
    (_unknown_name, "graph 'g' does not know the name %alpha"),
    (_value_of_another_node, "%a does not know where it is made"),
    (_value_of_another_place, "%a does not know where it is made"),
    (_input_with_a_node, "%x does not know where it is made"),
    (_value_of_another_graph, "%a does not know where it is made"),
    (_node_of_another_graph, "%a = relu.*is not linked to the node before it"),
    (_broken_link, "return %b: is not linked to the node before it"),
    (_miscounted, "graph 'g' counts 3 nodes but holds 2"),
    (_two_outputs_of_a_name, "two outputs have the same name"),
    (_names_too_few, "1 outputs but 0 names"),
    (_reshape, r"\[2, 4\] has 8 elements, \[9\] 9"),
]


@pytest.mark.parametrize(("breaks", "reason"), BROKEN, ids=lambda p: p.__name__.strip("_") if callable(p) else "")
def test_verify_finds(breaks: Callable[[Graph], None], reason: str) -> None:
    graph = small()
    graph.verify()
    breaks(graph)
    with pytest.raises(VerifyError, match=reason):
        graph.verify()


@pytest.mark.parametrize(
    ("name", "quoted"),
    [("a.b/c:0", "%a.b/c:0"), ("a:", '%"a:"'), ("a b", '%"a b"'), ('"', '%"\\""'), ("\n", '%"\\x0a"'), ("", '%""')],
)
def test_names_are_quoted_where_needed(name: str, quoted: str) -> None:
    assert quote(name) == quoted


def test_literals_are_loaded_once_however_many_threads_ask() -> None:
    loads: list[str] = []

    def load(name: str, *sources: Literal) -> np.ndarray:
        loads.append(name)
        time.sleep(0.01)
        return np.asarray(sum((source.array for source in sources), np.full(3, 2.0, np.float32)))

    type = TensorType((3,), DType.F32)
    first = Literal(type, lambda: load("first"))
    derived = [Literal(type, partial(load, f"derived {i}", first)) for i in range(8)]
    load_all([*derived, *derived])
    assert sorted(loads) == ["derived 0", *(f"derived {i}" for i in range(1, 8)), "first"]
    assert all((literal.array == 4.0).all() for literal in derived)
    wrong = Literal(type, lambda: np.zeros(4, np.float32), "w")
    with pytest.raises(VerifyError, match="constant 'w' was declared"):
        load_all([first, wrong])
    load_all([])


def test_an_edit_empties_the_memo() -> None:
    graph = Graph()
    x = graph.add_input("x", TensorType((2, 3), DType.F32))
    y = graph.add(pw("relu"), x)
    graph.set_outputs([y])
    graph.memo["the answer"] = 42
    assert graph.memo == {"the answer": 42} and graph.clone().memo == {}
    graph.set_type(y, TensorType((2, 3), DType.F32, (1, 0)))
    assert graph.memo == {}
    graph.memo["the answer"] = 43
    assert graph.memo == {"the answer": 43}


def test_an_op_is_asked_again_only_for_other_types(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = Graph()
    x = graph.add_input("x", TensorType((2, 3), DType.F32))
    graph.set_outputs([graph.add(pw("relu"), x)])
    asked: list[tuple[TensorType, ...]] = []
    relu = type(graph.outputs[0].node.op)  # type: ignore[union-attr]  # made by a node
    infer = relu.infer

    def counted(self: Any, *types: TensorType) -> Any:
        asked.append(types)
        return infer(self, *types)

    monkeypatch.setattr(relu, "infer", counted)
    graph.verify()
    graph.verify()
    graph.clone().verify()
    assert asked == [], "nothing has changed since it was inserted"
    graph.set_type(x, TensorType((2, 4), DType.F32))
    with pytest.raises(VerifyError, match=r"is f32\[2,3\] but the op gives f32\[2,4\]"):
        graph.verify()
    with pytest.raises(VerifyError, match="but the op gives"):  # what failed is not taken for agreed
        graph.verify()
    graph.set_type(graph.outputs[0], TensorType((2, 4), DType.F32))
    graph.verify()
    graph.set_op(graph.outputs[0].node, pw("relu"))  # type: ignore[arg-type]  # made by a node
    before = len(asked)
    graph.verify()
    graph.verify()
    assert len(asked) == before + 1, "another op"
    graph.insert(pw("relu"), [x], types=[x.type.with_order((1, 0))])
    graph.verify()
    assert len(asked) == before + 3, "types that were given are compared"


def test_changes_are_verified_once() -> None:
    graph = small()
    graph.verify_changes()
    edits = graph.edits
    graph.verify_changes()
    assert graph.edits == edits, "to look is no change"
    broken = graph.outputs[0]
    verbs: list[Callable[[], object]] = [
        lambda: graph.set_type(broken, TensorType((9,), DType.F32)),
        lambda: graph.set_input(broken.node, 0, broken),  # type: ignore[arg-type]  # made by a node
    ]
    for verb in verbs:
        verb()
        for _ in range(2):
            with pytest.raises(VerifyError):
                graph.verify_changes()
        graph = small()
        broken = graph.outputs[0]


def test_every_verb_is_an_edit() -> None:
    graph = small()
    x, (relu, add) = graph.inputs[0], graph.nodes
    verbs: list[Callable[[], object]] = [
        lambda: graph.add_input("z", F32),
        lambda: graph.add(pw("exp"), x, name="e"),
        lambda: graph.set_input(add, 1, graph.value("e")),
        lambda: graph.set_type(relu.result, F32.with_order((1, 0))),
        lambda: graph.set_op(relu, pw("relu")),
        lambda: graph.rename(relu.result, "r"),
        lambda: graph.replace(relu.result, x),
        lambda: graph.erase(relu),
        lambda: graph.set_outputs([x]),
        lambda: graph.prune(),
    ]
    for place, verb in enumerate(verbs):
        before = graph.edits
        verb()
        assert graph.edits > before, place
