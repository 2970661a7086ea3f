"""Test the judges: they refuse bodies that do not lower, accept different shares, and are deterministic."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from fusec.gpu.cudnn.legality import judges as offline
from fusec.ir import Constant, Graph
from fusec.passes.partition import partition
from fusec.plans.verdict import Legal, Refused
from fusec.schedule.program import Kind, Program
from fusec.targets.target import load
from fusec.testing.case import Case
from fusec.testing.properties import judges
from fusec.testing.properties.judges import JUDGES
from fusec.text import parse

CHAIN = """graph "g" (%x: f32[2,4,5,5]{0,2,3,1}) {
  %w = constant weight("w") : f32[4,4,1,1]
  %v = conv(%x, %w) {strides=[1, 1], pads=[0, 0, 0, 0], dilations=[1, 1], groups=1} : f32[2,4,5,5]{0,2,3,1}
  %r = relu(%v) : f32[2,4,5,5]{0,2,3,1}
  %t = sigmoid(%r) : f32[2,4,5,5]{0,2,3,1}
  %y = sign(%t) : f32[2,4,5,5]{0,2,3,1}
  return %y
}"""


def chain() -> Graph:
    import numpy as np

    return parse(CHAIN, {"w": np.ones((4, 4, 1, 1), np.float32)})


def body(*ops: str) -> Graph:
    lines, last = list[str](), "x"
    for index, op in enumerate(ops):
        lines.append(f"%v{index} = {op}(%{last}) : f32[2,3]")
        last = f"v{index}"
    return parse(f'graph "g" (%x: f32[2,3]) {{\n{chr(10).join(lines)}\nreturn %{last}\n}}')


def shapes(program: Program) -> list[int]:
    return [len(step.nodes) for step in program.steps if step.kind is Kind.CUDNN]


@pytest.mark.parametrize("name", [n for n in JUDGES if n != "cudnn"])
def test_bodies_that_do_not_lower_are_refused(name: str) -> None:
    (verdict,) = JUDGES[name](Case()).judge([body("relu", "sign")])
    assert isinstance(verdict, Refused)
    assert verdict.stage == "lower" and "sign" in verdict.message


@pytest.mark.parametrize(("name", "kind"), [("lowers", "precompiled"), ("runtime", "runtime")])
def test_bodies_that_lower_are_legal(name: str, kind: str) -> None:
    (verdict,) = JUDGES[name](Case()).judge([body("relu", "tanh")])
    assert isinstance(verdict, Legal)
    assert verdict.kind == kind


def test_hazards_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offline, "deadly", lambda graph: "would kill")
    (verdict,) = JUDGES["lowers"](Case()).judge([body("relu")])
    assert verdict == Refused("validate", "FUSEC_HAZARD", "would kill")


def test_a_body_is_lowered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Graph] = []
    lower = offline.lower

    def counted(graph: Graph, tensor_cores: bool = True) -> object:
        asked.append(graph)
        return lower(graph, tensor_cores)

    monkeypatch.setattr(offline, "lower", counted)
    judge = JUDGES["moody"](Case())
    first = judge.judge([body("relu"), body("tanh"), body("relu")])
    assert judge.judge([body("tanh"), body("relu")]) == [first[1], first[0]]
    assert len(asked) == 2


def test_moody_verdicts_depend_only_on_seed_and_body() -> None:
    bodies = [body(*ops) for ops in (("relu",), ("tanh",), ("exp",), ("relu", "tanh"), ("abs", "exp"), ("neg",))]

    def verdicts(seed: int) -> Sequence[object]:
        return JUDGES["moody"](Case(seed)).judge(bodies)

    seen = [v for seed in range(40) for v in verdicts(seed)]
    assert {judges.PRECOMPILED, judges.GENERIC, judges.RUNTIME, judges.DECLINED} == set(seen)
    assert 0.2 < sum(v == judges.DECLINED for v in seen) / len(seen) < 0.4
    assert list(verdicts(3)) == list(verdicts(3))


def test_anchors_judge_accepts_only_single_anchors() -> None:
    graph, target = chain(), load("h200")
    assert shapes(partition(graph, JUDGES["lowers"](Case()), target)) == [3]
    alone = partition(graph, JUDGES["anchors"](Case()), target)
    assert shapes(alone) == [1]
    assert sum(step.kind is Kind.KERNEL for step in alone.steps) == 3
    cut = {tuple(shapes(partition(graph, JUDGES["moody"](Case(seed)), target))) for seed in range(240)}
    assert len(cut) >= 4, "shapes that a judge who accepts all never gives"


def test_verdicts_depend_on_tensor_cores() -> None:
    """A convolution in true fp32 and one in tf32 have different verdicts."""
    graph = chain()
    for precision in ("fp32", "tf32"):
        program = partition(graph, JUDGES["lowers"](Case(precision=precision)), load("h200"))
        assert shapes(program) == [3]
    assert any(isinstance(n.op, Constant) for n in graph.nodes)


@pytest.mark.cudnn
def test_cudnn_judge_asks_cudnn() -> None:
    legal, refused = JUDGES["cudnn"](Case()).judge([body("relu", "tanh"), body("sign")])
    assert isinstance(legal, Legal)
    assert isinstance(refused, Refused)
