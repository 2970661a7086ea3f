"""Test programs: stored and virtual values, launches, and every rule of `verify`."""

from __future__ import annotations

import numpy as np
import pytest

from fusec.errors import VerifyError
from fusec.ir import DType, Graph, Node, TensorType
from fusec.ops import Reshape, pw
from fusec.schedule.program import Kind, Partition, Program, body_of, display_name, inputs_of, outputs_of


def chain() -> tuple[Graph, list[Node]]:
    """x -> exp -> bias -> relu -> reshape; exp's result is returned too."""
    graph = Graph("chain")
    x = graph.add_input("x", TensorType((2, 3), DType.F32))
    bias = graph.constant(np.ones(3, np.float32), "bias")
    e = graph.add(pw("exp"), x, name="e")
    s = graph.add(pw("add"), e, bias, name="s")
    r = graph.add(pw("relu"), s, name="r")
    v = graph.add(Reshape((6,)), r, name="v")
    graph.set_outputs([v, e], ["out", "inner"])
    return graph, [n for n in graph.nodes if n.op.name != "constant"]


def step(graph: Graph, nodes: list[Node], kind: Kind = Kind.CUDNN) -> Partition:
    return Partition(tuple(nodes), kind, body_of(graph, nodes))


def test_stored_is_what_is_used_outside() -> None:
    graph, nodes = chain()
    fused, view = step(graph, nodes[:3]), step(graph, nodes[3:], Kind.VIEW)
    program = Program(graph, (fused, view))
    program.verify()
    assert [v.name for v in fused.inputs] == ["x"]
    assert [v.name for v in fused.outputs] == ["e", "r"]
    assert [v.name for v in fused.virtual] == ["s"]
    assert fused.virtual_bytes == 2 * 6 * 4
    assert fused.signature == "exp+bias+relu"
    assert program.step_of[nodes[3]] is view
    assert program.launches == 1
    assert [v.name for v in inputs_of(nodes[1:2])] == ["e", "bias"]
    assert [v.name for v in outputs_of(nodes)] == ["e", "v"]


def test_body_has_the_graphs_names_and_its_own_constants() -> None:
    graph, nodes = chain()
    body = body_of(graph, nodes[1:3])
    assert [v.name for v in body.inputs] == ["e"]
    assert list(body.output_names) == ["r"]
    assert [n.op.name for n in body.nodes] == ["constant", "add", "relu"]
    body.verify()


def test_the_printed_program_marks_virtual_values() -> None:
    graph, nodes = chain()
    text = str(Program(graph, (step(graph, nodes[:3]), step(graph, nodes[3:], Kind.VIEW))))
    assert "step 0 cudnn exp+bias+relu {" in text
    assert " ~%s = add" in text
    assert "  %r = relu" in text


def test_display_name() -> None:
    graph = Graph()
    x = graph.add_input("x", TensorType((1, 8), DType.F32))
    vector = graph.constant(np.ones(8, np.float32))
    number = graph.constant(np.float32(1))
    assert display_name(graph.insert(pw("add"), [x, vector])) == "bias"  # one row or many
    assert display_name(graph.insert(pw("add"), [x, number])) == "add"
    assert display_name(graph.insert(pw("add"), [x, x])) == "add"
    assert display_name(graph.insert(pw("mul"), [x, vector])) == "mul"


def test_verify_rejects() -> None:
    graph, nodes = chain()
    first, rest = step(graph, nodes[:2]), step(graph, nodes[2:])
    Program(graph, (first, rest)).verify()
    with pytest.raises(VerifyError, match=r"reads %s before it is made"):
        Program(graph, (rest, first)).verify()
    with pytest.raises(VerifyError, match="is in no step"):
        Program(graph, (first,)).verify()
    with pytest.raises(VerifyError, match="is in two steps"):
        Program(graph, (first, rest, step(graph, nodes[3:]))).verify()
    # two steps that need each other: the outer one reads what is made later
    with pytest.raises(VerifyError, match="before it is made"):
        Program(graph, (step(graph, [nodes[0], nodes[2]]), step(graph, [nodes[1]]), step(graph, nodes[3:]))).verify()
    wrong_inputs = Partition(tuple(nodes[2:]), Kind.CUDNN, body_of(graph, nodes[3:]))
    with pytest.raises(VerifyError, match="its body reads other values"):
        Program(graph, (first, wrong_inputs)).verify()
    less = body_of(graph, nodes[:2])
    less.set_outputs(less.outputs[:1])
    with pytest.raises(VerifyError, match="its body returns other values"):
        Program(graph, (Partition(first.nodes, Kind.CUDNN, less), rest)).verify()
