"""Test core search: what is taken from a refused body, what may not be, the variants, the bound on questions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from passes.partition.judges import FAST, AcceptAll

from fusec.diagnostics.refusal_core import Core, CoreSearch
from fusec.diagnostics.refusal_core.rebuild import bypassed, with_dtype, with_outputs, with_sizes
from fusec.diagnostics.refusal_core.reduce import smaller_bodies
from fusec.diagnostics.refusal_core.variants import variants
from fusec.ir import Constant, DType, Graph
from fusec.plans.verdict import Refused, Verdict
from fusec.text import parse as parse_text

Refuse = Callable[[Graph], str]  # the stage at which a body is refused; empty: accepted
CONV = "{strides=[1,1], pads=[1,1,1,1], dilations=[1,1]}"
# a sigmoid gate: conv, bias, x * sigmoid(x), and a residual
GATE = f"""
graph "gate" (%x: f16[4,32,14,14], %z: f16[4,32,14,14]) {{
  %w = constant weight("w") : f16[32,32,3,3]
  %b = constant weight("b") : f16[1,32,1,1]
  %c = conv(%x, %w) {CONV}
  %d = add(%c, %b)
  %s = sigmoid(%d)
  %m = mul(%d, %s)
  %y = add(%m, %z)
  return %y
}}"""
CHAIN = """
graph "chain" (%x: f32[6,5,7]) {
  %a = relu(%x)
  %b = exp(%a)
  %c = tanh(%b)
  return %b, %c
}"""


WEIGHTS = {
    "w": np.random.default_rng(1).standard_normal((32, 32, 3, 3)).astype(np.float16),
    "b": np.random.default_rng(2).standard_normal((1, 32, 1, 1)).astype(np.float16),
}


def parse(text: str) -> Graph:
    return parse_text(text, WEIGHTS)


def ops(body: Graph) -> list[str]:
    return [n.op.name for n in body.nodes if not isinstance(n.op, Constant)]


def floats(body: Graph) -> set[DType]:
    return {v.type.dtype for v in body.values() if v.type.dtype.is_float}


class Rule(AcceptAll):
    """Refuses what `refuse` names, at the stage it gives; counts what it is asked."""

    def __init__(self, refuse: Refuse):
        super().__init__()
        self.refuse = refuse

    def verdict(self, body: Graph) -> Verdict:
        stage = self.refuse(body)
        return Refused(stage, "CUDNN_STATUS_NOT_SUPPORTED", f"no {stage}") if stage else FAST


def find(text: str, refuse: Refuse, questions: int = 60) -> tuple[Rule, Core]:
    judge = Rule(refuse)
    body = parse(text)
    (refusal,) = judge.judge([body])
    assert isinstance(refusal, Refused)
    judge.asked.clear()
    return judge, CoreSearch(judge, questions=questions).find(body, refusal)


def test_the_core_is_one_op() -> None:
    _, core = find(GATE, lambda b: "plan" if "sigmoid" in ops(b) else "")
    assert ops(core.body) == ["sigmoid"]
    assert core.body.inputs[0].type.size == 1
    assert core.verdict.stage == "plan"


def test_the_core_is_two_ops() -> None:
    _, core = find(GATE, lambda b: "plan" if {"conv", "sigmoid"} <= set(ops(b)) else "")
    assert {"conv", "sigmoid"} <= set(ops(core.body))
    assert len(ops(core.body)) < len(ops(parse(GATE)))


def test_an_op_that_reads_one_value_twice() -> None:
    square = CHAIN.replace("exp(%a)", "mul(%a, %a)")
    _, core = find(square, lambda b: "plan" if {"mul", "tanh"} <= set(ops(b)) else "")
    assert ops(core.body) == ["mul", "tanh"]


def test_a_dim_that_matters_stays() -> None:
    def refuse(body: Graph) -> str:
        return "plan" if any(v.type.shape[:1] == (4,) and "conv" in ops(body) for v in body.inputs) else ""

    _, core = find(GATE, refuse)
    assert ops(core.body) == ["conv"]
    assert core.body.inputs[0].type.shape[0] == 4
    assert core.body.inputs[0].type.shape[2:] == (1, 1)


def test_another_refusal_is_not_followed() -> None:
    """Without its epilogue the body fails elsewhere: that is another defect, so the epilogue stays."""
    _, core = find(GATE, lambda b: "plan" if {"conv", "sigmoid"} <= set(ops(b)) else "build")
    assert {"conv", "sigmoid"} <= set(ops(core.body))
    assert core.verdict.stage == "plan"


def test_refusals_of_lowering_differ_by_their_messages() -> None:
    class Lowering(AcceptAll):
        def verdict(self, body: Graph) -> Verdict:
            if "tanh" in ops(body):
                return Refused("lower", "FUSEC", f"%{body.outputs[-1].name} of {body.outputs[-1].type} is a tanh")
            return Refused("lower", "FUSEC", "something else")

    body = parse(CHAIN)
    judge = Lowering()
    (refusal,) = judge.judge([body])
    assert isinstance(refusal, Refused)
    core = CoreSearch(judge).find(body, refusal)
    assert ops(core.body) == ["tanh"]


def test_an_escaping_output_is_named() -> None:
    _, core = find(CHAIN, lambda b: "plan" if len(b.outputs) > 1 else "")
    assert len(core.body.outputs) == 2
    assert core.variant is not None
    assert core.variant.change == "without the other outputs"
    assert core.variant.whole is True


@pytest.mark.parametrize(
    ("refuse", "change"),
    [
        (lambda b: "plan" if DType.F32 in floats(b) else "", "in fp16"),
        (lambda b: "plan" if floats(b) & {DType.F32, DType.F16} else "", "in bf16"),
        (lambda b: "plan" if any(d > 1 and d % 8 for v in b.values() for d in v.type.shape) else "", "multiple of 8"),
    ],
)
def test_variant_of_dtype_and_size(refuse: Refuse, change: str) -> None:
    _, core = find(CHAIN, refuse)
    assert core.variant is not None
    assert change in core.variant.change
    assert core.variant.whole is True


def test_variant_of_memory_order() -> None:
    def refuse(body: Graph) -> str:
        return "plan" if any(v.type.rank == 4 and not v.type.order for v in body.inputs) else ""

    _, core = find(GATE, refuse)
    assert core.variant is not None
    assert core.variant.change == "with channels last in memory"


def test_variant_only_for_part_of_the_body_says_so() -> None:
    """fp16 serves the core, but the whole has another defect as well."""

    def refuse(body: Graph) -> str:
        return "plan" if DType.F32 in floats(body) or len(body.outputs) > 1 else ""

    _, core = find(CHAIN, refuse)
    assert core.variant is not None
    assert core.variant.change == "in fp16"
    assert core.variant.whole is False


def test_without_an_accepted_variant_there_is_none() -> None:
    _, core = find(CHAIN, lambda b: "plan")
    assert core.variant is None
    assert len(ops(core.body)) == 1


@pytest.mark.parametrize("bound", [1, 5, 12, 60])
def test_questions_are_bounded_and_counted(bound: int) -> None:
    judge, core = find(GATE, lambda b: "plan" if "conv" in ops(b) else "", questions=bound)
    assert core.questions <= bound
    assert "conv" in ops(core.body)
    assert judge.waves <= 1 + bound


def test_questions_are_asked_in_batches() -> None:
    judge, core = find(GATE, lambda b: "plan" if len(b.outputs) and "conv" in ops(b) else "")
    assert judge.waves < core.questions


def test_equal_bodies_are_searched_once() -> None:
    judge = Rule(lambda b: "plan" if "tanh" in ops(b) else "")
    search = CoreSearch(judge)
    refusal = Refused("plan", "CUDNN_STATUS_NOT_SUPPORTED", "no plan")
    first = search.find(parse(CHAIN), refusal)
    asked = len(judge.asked)
    assert search.find(parse(CHAIN.replace("%a", "%q")), refusal) is first
    assert len(judge.asked) == asked


def test_the_judge_with_tensor_cores_is_asked_where_operands_may_be_rounded() -> None:
    strict, loose = Rule(lambda b: "plan" if DType.F32 in floats(b) else ""), AcceptAll()
    body = parse(CHAIN)
    core = CoreSearch(strict, loose).find(body, Refused("plan", "CUDNN_STATUS_NOT_SUPPORTED", "no plan"))
    assert core.variant is not None
    assert core.variant.change == "with operands rounded to tf32"
    assert loose.asked


def test_every_smaller_body_is_sound_and_differs() -> None:
    body = parse(GATE)
    found = list(smaller_bodies(body))
    assert len(found) > 10
    for smaller in found:
        smaller.body.verify()
        assert str(smaller.body) != str(body)
    assert str(body) == str(parse(GATE)), "the search changed the body it was given"


def test_every_variant_is_sound_and_differs() -> None:
    body = parse(GATE)
    found = list(variants(body))
    assert len({c.words for c in found}) == len(found)
    for change in found:
        change.body.verify()
        assert change.body.output_names == body.output_names


def test_rebuild() -> None:
    body = parse(GATE)
    mul = next(n for n in body.nodes if n.op.name == "mul")
    conv = next(n for n in body.nodes if n.op.name == "conv")
    gated = bypassed(body, mul, 0)
    assert gated is not None
    assert ops(gated) == ["conv", "add", "add"]
    half = with_dtype(body, DType.BF16)
    assert half is not None
    assert floats(half) == {DType.BF16}
    small = with_sizes(body, {14: 2, 32: 8})
    assert small is not None
    assert small.outputs[0].type.shape == (4, 8, 2, 2)
    rest = with_outputs(body, body.outputs, conv.results)
    assert rest is not None
    assert "conv" not in ops(rest)
    assert with_outputs(body, []) is None


def test_a_number_beyond_the_other_type_becomes_infinite() -> None:
    """As the least number of a mask; NumPy warns of the overflow."""
    text = 'graph "g" (%x: f32[]) {\n  %c = constant [-3.0e38] : f32[]\n  %y = add(%x, %c)\n  return %y\n}'
    half = with_dtype(parse_text(text), DType.F16)
    assert half is not None
    (constant,) = [n.op.literal for n in half.nodes if isinstance(n.op, Constant)]
    assert np.isneginf(constant.array)


def test_sizes_that_an_op_refuses_give_no_body() -> None:
    body = parse('graph "g" (%x: f32[4,6]) {\n  %y = reshape(%x) {shape=[24]}\n  return %y\n}')
    assert with_sizes(body, {4: 2}) is None
    halved = with_sizes(body, {4: 2, 24: 12})
    assert halved is not None
    assert halved.outputs[0].type.shape == (12,)


def test_an_operand_of_an_op_with_several_results_has_variants() -> None:
    body = parse(
        'graph "g" (%q: f16[2,4,6,16], %k: f16[2,4,9,16], %v: f16[2,4,9,16], %m: f16[1,1,6,9]) {'
        " %y, %s = attention_train(%q, %k, %v, %m) : f16[2,4,6,16], f32[2,4,6,1] return %y, %s }"
    )
    words = [change.words for change in variants(body)]
    assert words[0] == "without the other outputs"
    assert "in bf16" in words
