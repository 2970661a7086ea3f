"""Test coverage: counts, merging and holes; its lists of values agree with the ops."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from dataclasses import fields
from pathlib import Path

import pytest

from fusec.ir import DType, Graph, TensorType
from fusec.ops import BY_NAME, MatMul, Pad, Reduce, Resize, Slice, Softmax, pw, reduction
from fusec.ops.indexing import REDUCTIONS
from fusec.testing.case import Case
from fusec.testing.fuzz import fuzz
from fusec.testing.runner.coverage import CHOICES, Coverage, expected

PLANTED = Path(__file__).parents[1] / "planted.py"


def one(build: object) -> Coverage:
    coverage = Coverage()
    assert isinstance(build, Graph)
    coverage.observe(build, Case())
    return coverage


def diamond() -> Graph:
    graph = Graph("g")
    x = graph.add_input("x", TensorType((2, 3), DType.F16))
    y = graph.add(pw("relu"), x)
    left, right = graph.add(pw("tanh"), y), graph.add(pw("neg"), y)
    both = graph.add(pw("add"), left, right)
    graph.set_outputs([graph.add(Softmax(-1), both), both])
    return graph


def test_coverage_counts_ops_types_and_features() -> None:
    found = one(diamond()).sections
    assert found["ops"] == {"relu": 1, "tanh": 1, "neg": 1, "add": 1, "softmax": 1}
    assert found["dtypes"] == {"f16": 6}
    assert found["ranks"] == {"2": 6}
    assert set(found["features"]) == {"diamond", "fan-out", "several outputs", "output used inside"}
    assert found["attributes"] == {"softmax.axis=<0": 1, "softmax.log=false": 1}
    assert found["styles"] == {"normal": 1}


def test_coverage_counts_no_features_of_a_plain_graph() -> None:
    graph = Graph("g")
    x = graph.add_input("x", TensorType((2, 3), DType.F32))
    graph.set_outputs([graph.add(pw("add"), graph.add(pw("relu"), x), x)])  # two ways from an input
    assert set(one(graph).sections["features"]) == {"diamond"}
    graph = Graph("g")
    x = graph.add_input("x", TensorType((2, 3), DType.F32))
    graph.set_outputs([graph.add(MatMul(), x, graph.add_input("y", TensorType((3, 4), DType.F32)))])
    assert set(one(graph).sections["features"]) == set()


def test_counters_merge_and_are_plain_data() -> None:
    total = one(diamond())
    total.merge(one(diamond()))
    assert total.sections["ops"]["relu"] == 2
    again = Coverage.from_json(json.loads(json.dumps(total.to_json())))
    assert again.to_json() == total.to_json()
    assert str(again) == str(total)


def test_holes_come_first_and_disappear_when_filled() -> None:
    coverage = one(diamond())
    holes = coverage.holes()
    assert "conv" in holes["ops"]
    assert "relu" not in holes["ops"]
    assert "softmax.log=true" in holes["attributes"]
    text = str(coverage)
    assert text.startswith("holes\n  ops ")
    assert text.index("conv_transpose") < text.index("relu 1")
    assert max(map(len, text.splitlines())) <= 120
    full = Coverage({section: dict.fromkeys(keys, 1) for section, keys in expected().items()})
    assert full.holes() == {}
    assert str(full).startswith("no holes")


@pytest.mark.parametrize("key", CHOICES)
def test_listed_values_are_those_that_the_op_accepts(key: str) -> None:
    name, attribute = key.split(".")
    if key == "reduce.kind":
        assert set(CHOICES[key]) == set(reduction._KINDS)
        return
    if key == "scatter.reduction":
        assert CHOICES[key] == REDUCTIONS
        return
    source = ast.parse(textwrap.dedent(inspect.getsource(BY_NAME[name].infer)))
    taken = {
        tuple(ast.literal_eval(node.comparators[0]))
        for node in ast.walk(source)
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In)
        if isinstance(node.left, ast.Attribute) and node.left.attr == attribute
    }
    assert taken == {CHOICES[key]}


def test_the_number_of_steps_of_a_loop_is_not_expected() -> None:
    """Steps of slices are tuples with a few kinds of values."""
    ops = {key.split(".")[0] for key in expected()["attributes"] if ".steps=" in key}
    assert "slice" in ops and "scan" not in ops


def test_every_text_or_bool_attribute_is_expected() -> None:
    for op in BY_NAME.values():
        for item in fields(op):  # type: ignore[arg-type]
            if item.type in ("str", "bool"):
                assert any(key.startswith(f"{op.name}.{item.name}=") for key in expected()["attributes"]), op.name


def test_attributes_are_counted_by_kind() -> None:
    def of(op: object) -> set[str]:
        graph = Graph("g")
        x = graph.add_input("x", TensorType((1, 2, 4, 4), DType.F32))
        graph.set_outputs([graph.add(op, x)])  # type: ignore[arg-type]
        return set(one(graph).sections["attributes"])

    assert of(Pad((0, 0, 1, 1, 0, 0, 1, 1), "reflect")) >= {"pad.pads=even", "pad.mode=reflect", "pad.value=default"}
    assert of(Pad((0, 0, 0, 1, 0, 0, 0, 0), value=2.0)) >= {"pad.pads=uneven", "pad.value=other"}
    assert of(Reduce("max", (2, 3), False)) == {"reduce.kind=max", "reduce.axes=several", "reduce.keepdims=false"}
    assert "slice.steps=<0" in of(Slice((0, 0, 3, 0), (1, 2, 4, 4), (1, 1, -1, 1)))
    assert "resize.mode=linear" in of(Resize((1, 2, 8, 8), (1.0, 1.0, 2.0, 2.0), "linear"))


def test_run_counts_what_fired_in_the_compiler(tmp_path: Path) -> None:
    report = fuzz([f"{PLANTED}:compiles"], examples=100, workers=1, database=tmp_path, findings=tmp_path / "found")
    assert report.ok, report.findings
    found = report.coverage.sections
    assert len(found["ops"]) > 50
    assert found["passes"]["assign_layout"] > 0
    assert found["rules"]["canonicalise.constants_right"] > 0
    assert found["steps"]["cudnn"] > 0
    assert any(name.startswith("conv+") for name in found["partitions"])
    assert found["calls"]["conv_fprop"] > 0
    assert not set(found["rules"]) - set(expected()["rules"])
    assert not set(found["passes"]) - set(expected()["passes"])
