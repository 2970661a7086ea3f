"""Test reasons in an explanation, each given once, and tables that fit their width."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from passes.partition.judges import AcceptAll, Measured

from fusec.diagnostics.explain import Explanation, compare, explain
from fusec.diagnostics.text_table import bytes_text, listed, shortened, table, wrapped
from fusec.ir import Constant, Graph
from fusec.passes.partition import Judge, partition
from fusec.plans.verdict import Legal, Plan, Refused, Verdict
from fusec.targets.target import load
from fusec.text import parse

WINDOW = "{strides=[1,1], pads=[0,0,0,0], dilations=[1,1]}"
WEIGHTS = """
  %w = constant [0.5, 1.0, 1.5, 2.0, 0.5, 1.0, 1.5, 2.0, 0.5, 1.0, 1.5, 2.0, 0.5, 1.0, 1.5, 2.0] : f32[4,4,1,1]
  %b = constant [1.0, 2.0, 3.0, 4.0] : f32[1,4,1,1]"""
NET = f"""
graph "g" (%x: f32[1,4,6,6], %z: f32[1,4,6,6]) {{{WEIGHTS}
  %c = conv(%x, %w) {WINDOW} : f32[1,4,6,6] loc("stem")
  %d = add(%c, %b) loc("stem")
  %e = add(%d, %z) loc("join")
  %f = relu(%e) loc("act")
  %g = sign(%f) loc("odd")
  %h = reshape(%g) {{shape=[1,144]}} loc("flat")
  %s = softmax(%h) {{axis=1}} loc("probabilities")
  return %s
}}"""


def explained(text: str = NET, judge: Judge | None = None) -> Explanation:
    judge = judge or Measured()
    return explain(partition(parse(text), judge, load("h200")), load("h200"), judge)


class Refuses(AcceptAll):
    """Refuses bodies that hold all the ops named."""

    def __init__(self, *ops: str, stage: str = "plan"):
        super().__init__()
        self.ops = set(ops)
        self.stage = stage

    def verdict(self, body: Graph) -> Verdict:
        names = {n.op.name for n in body.nodes if not isinstance(n.op, Constant)}
        if self.ops <= names:
            return Refused(self.stage, "CUDNN_STATUS_NOT_SUPPORTED", f"engine 7: no {' with '.join(sorted(self.ops))}")
        return super().verdict(body)


def test_a_spelling_is_described_by_its_equation() -> None:
    explanation = explained()
    assert explanation.steps[0].spelling == ("conv + bias + z -> conv + z + bias",)
    assert "reassociated: conv + bias + z -> conv + z + bias (as in conv+bias+add+relu)" in str(explanation)


def test_views_cost_nothing() -> None:
    (view,) = [s for s in explained().steps if s.ops == "reshape"]
    assert (view.runs_as, view.read_bytes, view.written_bytes, view.virtual_bytes) == ("view", 0, 0, 0)


def test_ops_without_a_cudnn_operation_need_no_question() -> None:
    judge = Measured()
    program = partition(parse(NET), judge, load("h200"))
    judge.asked.clear()
    left = {d.op: d.ours for d in explain(program, load("h200"), judge).left_out}
    assert set(left) == {"sign", "softmax"}
    assert left["softmax"] == "a reduction may not feed another op of the same cuDNN graph"
    assert judge.asked == []


def test_an_op_that_cudnn_refuses_alone_has_its_message_and_a_core() -> None:
    explanation = explained(judge=Refuses("conv"))
    (conv,) = [d for d in explanation.left_out if d.op == "conv"]
    assert (conv.stage, conv.message, conv.ours) == ("plan", "engine 7: no conv", "no engine of cuDNN supports it")
    assert conv.cause is not None
    assert conv.cause.accepted is None
    assert "no accepted change found" in str(explanation)
    assert explanation.declined == (), "fusions with it follow from it"


def test_a_copy_is_not_called_a_view() -> None:
    text = 'graph "g" (%x: f32[2,3,4]) {\n  %y = transpose(%x) {perm=[2,1,0]}\n  return %y\n}'
    (decline,) = explained(text).left_out
    assert decline.op == "transpose"
    assert "no view" in decline.ours


def test_the_accepted_variant_of_a_core_has_its_anchor() -> None:
    (decline,) = explained(judge=Refuses("conv", "relu")).declined
    assert decline.ops == "conv+bias+add+relu"
    assert decline.cause is not None
    assert decline.cause.ops == "conv+relu"
    assert decline.cause.graph.startswith("relu(conv(f32[")
    assert decline.cause.accepted is not None
    assert (decline.cause.accepted.change, decline.cause.accepted.ops) == ("without relu", "conv")


def test_a_refusal_that_follows_from_a_smaller_one_is_not_repeated() -> None:
    text = NET.replace("%g = sign(%f)", "%f2 = tanh(%f)\n  %g = sign(%f2)")
    judge = Refuses("conv", "relu")
    program = partition(parse(text), judge, load("h200"))
    assert len(program.refusals) > 1, "the longer candidate was declined too"
    assert [d.ops for d in explain(program, load("h200"), judge).declined] == ["conv+bias+add+relu"]


def test_equal_declined_fusions_need_one_search() -> None:
    layers, last = "", "x"
    for i in range(12):
        layers += f'  %c{i} = conv(%{last}, %w) {WINDOW} loc("conv{i}")\n  %r{i} = relu(%c{i}) loc("relu{i}")\n'
        last = f"r{i}"
    judge = Refuses("conv", "relu")
    program = partition(
        parse(f'graph "g" (%x: f32[1,4,6,6]) {{{WEIGHTS}\n{layers}  return %{last}\n}}'), judge, load("h200")
    )
    judge.asked.clear()
    (decline,) = explain(program, load("h200"), judge).declined
    assert len(decline.places) == 12
    assert len(judge.asked) <= 120, "sixty bodies in two spellings at most"


def test_a_crash_is_reported_as_a_crash() -> None:
    (decline,) = explained(judge=Refuses("conv", "relu", stage="crash")).declined
    assert "cuDNN crashed" in decline.ours


def test_an_op_split_off_by_a_cycle_is_not_a_refusal_of_cudnn() -> None:
    text = f"""
graph "g" (%x: f32[1,4,6,6]) {{{WEIGHTS}
  %c = conv(%x, %w) {WINDOW} loc("conv")
  %m = max_pool(%c) {{window=[1,1], strides=[1,1], pads=[0,0,0,0], dilations=[1,1]}} loc("pool")
  %y = add(%c, %m) loc("sum")
  return %y
}}"""
    (decline,) = explained(text).declined
    assert decline.stage == "fusec"
    assert "depends on the partition through a step outside it" in decline.message
    assert decline.cause is None


def test_a_program_that_fuses_whole_has_no_reasons() -> None:
    text = 'graph "g" (%x: f32[4,8]) {\n  %y = relu(%x)\n  return %y\n}'
    assert "Every op is in a cuDNN step" in str(explained(text, AcceptAll()))


class RuntimeOnly(AcceptAll):
    """Runtime engines only, no sign, and no relu after a convolution."""

    def verdict(self, body: Graph) -> Verdict:
        names = {n.op.name for n in body.nodes}
        if "sign" in names or {"conv", "relu"} <= names:
            return Refused("plan", "CUDNN_STATUS_NOT_SUPPORTED", "no sign, no relu")
        return Legal((Plan(7, (), False, 0, True),))


def test_compared_targets_show_their_differences() -> None:
    ours, theirs = explained(), explained(judge=RuntimeOnly())
    lines = compare([("h200", ours), ("t4", theirs), ("a100", ours)]).splitlines()
    assert lines[0].split() == ["h200", "t4", "a100"]
    (launches,) = [line for line in lines if line.startswith("launches")]
    assert launches.split() == ["launches", "3", "4", "3"]
    (row,) = [line for line in lines if line.startswith("stem, join, act")]
    assert row.count("conv+bias+add+relu (precompiled fused)") == 2
    assert "conv+bias+add (runtime generic) | relu (runtime generic)" in row
    assert lines[-1] == "2 of 3 groups of ops run the same way on all"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (512, "512 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (3 << 40, "3072.0 GiB")],
)
def test_bytes_text(count: int, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("names", "width", "text"),
    [
        ([], 10, ""),
        (["a", "b"], 10, "a, b"),
        (["alpha", "beta", "gamma"], 13, "alpha +2"),
        (["alpha", "beta", "gamma"], 14, "alpha, beta +1"),
        (["a very long name", "b"], 10, "a very… +1"),
        (["a very long name"], 10, "a very lo…"),
    ],
)
def test_listed_names_fit(names: Sequence[str], width: int, text: str) -> None:
    assert listed(names, width) == text
    assert len(text) <= width


def test_table_aligns_columns() -> None:
    assert table(("a", "bb"), [("1", "x"), ("22", "yyy")], right=(0,)) == [" a  bb", "──  ───", " 1  x", "22  yyy"]


def test_shortened_and_wrapped_texts() -> None:
    assert shortened("abcdef", 4) == "abc…"
    assert shortened("abc", 4) == "abc"
    assert wrapped("one two three", "  ", 9) == ["  one two", "    three"]


def test_explain_leaves_the_program_unchanged() -> None:
    judge = Refuses("conv", "relu")
    program = partition(parse(NET), judge, load("h200"))
    before = str(program)
    explain(program, load("h200"), judge)
    assert str(program) == before
    program.verify()
