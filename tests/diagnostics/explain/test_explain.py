"""Test explanations: steps and totals, what is left out and why, refused fusions, targets side by side."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from passes.partition.judges import FAST, AcceptAll, Measured

from fusec import driver
from fusec.diagnostics.explain import STAGES, Explanation, compare, explain
from fusec.diagnostics.refusal_core.variants import variants
from fusec.ir import Constant, Graph
from fusec.lower_cudnn import WITHOUT
from fusec.passes.partition import partition
from fusec.plans.verdict import Legal, Refused, Verdict
from fusec.schedule.program import Program, Refusal
from fusec.targets.target import load
from fusec.text import parse

CONV = "{strides=[1,1], pads=[1,1,1,1], dilations=[1,1]}"
SWISH = f"""
graph "gate" (%x: f32[1,8,6,6]) {{
  %w = constant weight("w") : f32[8,8,3,3]
  %b = constant weight("b") : f32[1,8,1,1]
  %c = conv(%x, %w) {CONV} : f32[1,8,6,6] loc("conv0")
  %d = add(%c, %b) loc("conv0")
  %s = sigmoid(%d) loc("gate0")
  %m = mul(%d, %s) loc("mul0")
  %n = sign(%m) loc("sign0")
  return %n
}}"""
WEIGHTS = {
    "w": np.random.default_rng(1).standard_normal((8, 8, 3, 3)).astype(np.float32),
    "b": np.random.default_rng(2).standard_normal((1, 8, 1, 1)).astype(np.float32),
}


def ops(body: Graph) -> list[str]:
    return [n.op.name for n in body.nodes if not isinstance(n.op, Constant)]


class Rule(AcceptAll):
    """Refuses what `refuse` says and what has no cuDNN operation."""

    def __init__(self, refuse: Callable[[list[str]], bool]):
        super().__init__()
        self.refuse = refuse

    def verdict(self, body: Graph) -> Verdict:
        names = ops(body)
        if any(name in WITHOUT and name != "reshape" for name in names):
            return Refused("lower", "FUSEC", "cuDNN has no such operation")
        if self.refuse(names):
            return Refused("plan", "CUDNN_STATUS_NOT_SUPPORTED", "No valid engine configs")
        return FAST


def cut(judge: AcceptAll, text: str = SWISH) -> Program:
    return partition(parse(text, WEIGHTS), judge, load("h200"))


def no_gate(names: list[str]) -> bool:
    return "conv" in names and "sigmoid" in names


def explained(judge: AcceptAll, text: str = SWISH, cores: bool = True) -> Explanation:
    return explain(cut(judge, text), load("h200"), judge, cores)


def layers(count: int) -> str:
    """So many convolutions, each with a gate and an op cuDNN does not have."""
    lines = [
        f'  %c{i} = conv(%n{i - 1}, %w) {CONV} : f32[1,8,6,6] loc("conv{i}")\n  %d{i} = add(%c{i}, %b)\n'
        f'  %s{i} = sigmoid(%d{i}) loc("gate{i}")\n  %m{i} = mul(%d{i}, %s{i})\n  %n{i} = sign(%m{i}) loc("sign{i}")'
        for i in range(1, count + 1)
    ]
    head = SWISH.splitlines()[2:4]
    return "\n".join(['graph "deep" (%n0: f32[1,8,6,6]) {', *head, *lines, f"  return %n{count}\n}}"])


def test_the_rounding_of_each_value_inside_a_step_is_described() -> None:
    text = """graph "g" (%x: f16[4,8], %w: f16[8,8]) {
  %a = matmul(%x, %w)
  %r = relu(%a)
  %g = gelu(%r)
  return %g
}"""
    program = partition(parse(text), Rule(lambda names: False), load("h200"))
    found = explain(program, load("h200"))
    edges = {(e.value, e.read_by): (e.made_by, e.kept) for step in found.steps for e in step.edges}
    assert edges == {("a", "relu"): ("matmul", "same"), ("r", "gelu"): ("relu", "fp32")}
    assert "inside steps, kept in fp32, not rounded to f16: relu → gelu" in str(found)
    assert found.to_json()["steps"][-1]["edges"][0]["dtype"] == "f16"


def test_steps_and_totals() -> None:
    program = cut(Rule(lambda names: False))
    found = explain(program, load("h200"))
    assert [(s.kind, s.ops) for s in found.steps] == [("cudnn", "conv+bias+sigmoid+mul"), ("kernel", "sign")]
    first, last = found.steps
    assert first.nodes == ("conv0", "gate0", "mul0")
    assert (first.engine, first.plans, first.precompiled) == ("precompiled", 2, 1)
    image = 8 * 6 * 6 * 4
    assert first.virtual_bytes == 3 * 2 * image
    assert first.read_bytes == image + 8 * 8 * 9 * 4 + 8 * 4
    assert first.written_bytes == image
    assert (last.read_bytes, last.written_bytes, last.virtual_bytes) == (image, image, 0)
    assert found.totals == {
        "steps": 2,
        "launches": program.launches,
        "cudnn": 1,
        "precompiled": 1,
        "runtime": 0,
        "cublaslt": 0,
        "kernels": 1,
        "views": 0,
        "read_bytes": first.read_bytes + image,
        "written_bytes": 2 * image,
        "virtual_bytes": first.virtual_bytes,
    }


def test_an_op_without_a_cudnn_operation_is_its_own_core() -> None:
    judge = Rule(lambda names: False)
    found = explained(judge)
    (decline,) = found.left_out
    assert decline.op == "sign"
    assert decline.ours == WITHOUT["sign"]
    assert decline.places == (("sign0",),)
    assert decline.cause is None


def test_a_refused_fusion_has_both_messages_and_its_core() -> None:
    found = explained(Rule(no_gate))
    (decline,) = found.declined
    assert (decline.stage, decline.code) == ("plan", "CUDNN_STATUS_NOT_SUPPORTED")
    assert decline.message == "No valid engine configs"
    assert decline.ours == "no engine of cuDNN supports it"
    assert decline.cause is not None
    assert {"conv", "sigmoid"} <= set(decline.cause.ops.split("+"))
    assert decline.cause.message == decline.message
    assert 0 < decline.cause.questions <= 60
    assert {s.ops for s in found.steps if s.kind == "cudnn"} == {"conv+bias", "sigmoid+mul"}


def test_a_refusal_that_fused_after_all_is_not_listed() -> None:
    """Its nodes run as one step after all, in another spelling."""
    program = cut(Rule(lambda names: False))
    step = program.steps[0]
    refusal = Refusal(step.nodes, step.body, Refused("plan", "CUDNN_STATUS_NOT_SUPPORTED", "not so"))
    program = replace(program, refusals=(*program.refusals, refusal))
    assert explain(program, load("h200")).declined == ()


def test_without_cores_nothing_is_asked() -> None:
    judge = Rule(no_gate)
    program = cut(judge)
    asked = len(judge.asked)
    found = explain(program, load("h200"), judge, cores=False)
    assert all(d.cause is None for d in (*found.left_out, *found.declined))
    assert len(judge.asked) == asked
    assert [s.ops for s in explain(program, load("h200")).steps] == [s.ops for s in found.steps]


def test_equal_refusals_are_one_entry_with_every_place() -> None:
    found = explained(Rule(no_gate), layers(12))
    assert sorted(len(d.places) for d in found.left_out) == [12]
    assert sum(len(d.places) for d in found.declined) == 12
    assert {p for d in found.left_out for (p,) in d.places} == {f"sign{i}" for i in range(1, 13)}
    text = str(found)
    assert text.count("sign × 12") == 1
    for decline in (*found.left_out, *found.declined):  # each place is in one of the steps that the entry names
        named = {node for index in decline.steps for node in found.steps[index].nodes}
        assert {node for place in decline.places for node in place} <= named
    (sign,) = found.left_out
    assert [found.steps[index].ops for index in sign.steps] == ["sign"] * 12
    assert text.count("smallest refused core") == len(found.declined)


def test_a_long_network_stays_readable() -> None:
    few, many = (explained(Rule(no_gate), layers(n), cores=False) for n in (4, 60))
    assert len(many.reasons().splitlines()) == len(few.reasons().splitlines())


def test_str_has_every_part() -> None:
    text = str(explained(Rule(no_gate)))
    assert "\x1b" not in text
    for words in (
        "conv+bias",
        "precompiled",
        "sign0",
        "No valid engine configs",
        "smallest refused core",
        WITHOUT["sign"],
    ):
        assert words in text, words


def test_spellings_are_described_in_words() -> None:
    residual = f"""
    graph "r" (%x: f32[1,8,6,6], %z: f32[1,8,6,6]) {{
      %w = constant weight("w") : f32[8,8,3,3]
      %b = constant weight("b") : f32[1,8,1,1]
      %c = conv(%x, %w) {CONV} : f32[1,8,6,6]
      %d = add(%c, %b)
      %e = add(%d, %z)
      %f = relu(%e)
      return %f
    }}"""
    found = explained(Measured(), residual)
    (step,) = found.steps
    assert step.spelling
    assert all(" " in words or "=" in words for words in step.spelling), "names of rewrites are no words"
    assert "reassociated" in str(found)


STEP = {"index", "kind", "ops", "values", "nodes", "engine", "plans", "precompiled", "spelling"} | {
    "virtual_bytes",
    "read_bytes",
    "written_bytes",
}
DECLINE = {"op", "ops", "stage", "code", "message", "ours", "places", "cause"}
CAUSE = {"ops", "graph", "stage", "code", "message", "accepted", "questions"}
ACCEPTED = {"change", "ops", "graph", "plans", "precompiled", "whole"}


def test_json_schema() -> None:
    found = explained(Rule(no_gate))
    data = json.loads(json.dumps(found.to_json()))
    assert {"target", "totals", "steps", "left_out", "declined"} <= set(data)
    assert data["target"] == "h200"
    for step in data["steps"]:
        assert set(step) >= STEP
    assert len(data["steps"]) == found.totals["steps"], "steps are never grouped in the JSON"
    for decline in (*data["left_out"], *data["declined"]):
        assert set(decline) >= DECLINE
    causes = [d["cause"] for d in data["declined"]]
    assert causes
    for cause in causes:
        assert set(cause) >= CAUSE
        assert cause["accepted"] is None or set(cause["accepted"]) >= ACCEPTED


def test_two_explanations_are_equal() -> None:
    judge = Rule(no_gate)
    program = cut(judge)
    assert explain(program, load("h200"), judge) == explain(program, load("h200"), judge)


def test_progress_reaches_its_end() -> None:
    judge, seen = Rule(no_gate), list[tuple[str, int, int]]()
    explain(cut(judge), load("h200"), judge, True, lambda *event: seen.append(event))
    assert seen
    assert seen[-1][1] == seen[-1][2]
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)


def test_compare_shows_what_differs_and_counts_what_does_not() -> None:
    fused, torn = explained(Rule(lambda names: False), cores=False), explained(Rule(no_gate), cores=False)
    text = compare([("h200", fused), ("t4", torn)])
    header = text.splitlines()[0]
    assert "h200" in header
    assert "t4" in header
    assert "conv+bias+sigmoid+mul (precompiled fused)" in text
    assert "conv+bias (precompiled fused) | sigmoid+mul (precompiled fused)" in text
    assert "1 of 2 groups of ops run the same way on all" in text
    launches = next(line for line in text.splitlines() if line.startswith("launches"))
    assert launches.split()[1:] == ["2", "3"]
    assert "differs" not in compare([("a", fused), ("b", fused)])


def test_the_page_explains_every_column_stage_and_key() -> None:
    page = (Path(__file__).parents[3] / "docs" / "explain.md").read_text()
    columns = ["#", "runs as", "plans", "ops", "model nodes", "read", "written", "never stored"]
    assert str(explained(Rule(no_gate))).splitlines()[0].split() == " ".join(columns).split()
    assert [word for word in (*columns, *STAGES, *STEP, *DECLINE, *CAUSE, *ACCEPTED) if f"`{word}`" not in page] == []


def test_str_fits_120_columns() -> None:
    chain = "".join(f"  %t{i + 1} = tanh(%t{i})\n" for i in range(20))
    text = f'graph "long" (%t0: f32[8,64]) {{\n{chain}  return %t20\n}}'
    for case in (SWISH, layers(12), text):
        assert max(map(len, str(explained(Rule(no_gate), case)).splitlines())) <= 120


@pytest.mark.cudnn
def test_with_the_real_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """In true fp32 no engine runs swish after a convolution that reads row-major memory; alone, each is taken."""
    monkeypatch.setenv("FUSEC_DEVICE", "none")
    compiled = driver.build(parse(SWISH, WEIGHTS), target="h200")
    found = explain(compiled.program, compiled.target, compiled.judge)
    legal = [step.verdict for step in compiled.program.steps if step.verdict is not None]
    told = [(s.engine, s.plans, s.precompiled) for s in found.steps if s.kind == "cudnn"]
    assert told == [(v.kind, len(v.plans), v.precompiled) for v in legal]
    assert "sign" in [d.op for d in found.left_out]
    (decline,) = found.declined
    assert decline.ops == "conv+bias+swish"
    assert decline.cause is not None
    assert decline.cause.ops == "conv+swish", "the bias has no part in it"
    # what is said to be accepted for the whole is, when the judge is asked again
    refused = next(r for r in compiled.program.refusals if ops(r.body)[-1] == "swish")
    accepted = decline.cause.accepted
    assert accepted is not None
    assert accepted.whole
    bodies = [change.body for change in variants(refused.body) if change.words == accepted.change]
    assert compiled.judge is not None
    before, after = compiled.judge.judge([refused.body, *bodies])
    assert isinstance(before, Refused)
    assert isinstance(after, Legal)
