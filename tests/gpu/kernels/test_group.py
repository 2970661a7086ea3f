"""Steps joined into kernels: which are, which are not, and that the program means the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gpu.test_forms import outputs, signatures
from lowers_judge import LowersJudge

from fusec.compiled import Compiled
from fusec.gpu.kernels import group
from fusec.gpu.kernels.group import grouped
from fusec.passes.base import Options
from fusec.passes.partition import partition
from fusec.program import Kind
from fusec.target import load
from fusec.text import parse

POOL = "{window=[2, 2], strides=[2, 2], pads=[0, 0, 0, 0], dilations=[1, 1]}"


def compiled(text: str) -> Compiled:
    graph, target, judge = parse(text), load("h200"), LowersJudge()
    return Compiled(graph, partition(graph, judge, target), target, Options(), judge)


def check(text: str, want: list[str]) -> Compiled:
    of = compiled(text)
    joined = replace(of, program=grouped(of.program))
    assert signatures(joined.program) == want
    for got, right in zip(outputs(joined), outputs(of), strict=True):
        np.testing.assert_allclose(got, right, rtol=1e-5, atol=1e-6)
    return joined


def test_an_image_is_cast_and_laid_out_in_one() -> None:
    of = check(
        """graph "g" (%x: f32[2,3,8,8]) {
  %s = constant [0.5] : f32[]
  %m = mul(%x, %s)
  %h = cast(%m) {to=f16}
  %r = relayout(%h) {order=[0, 2, 3, 1]} : f16[2,3,8,8]{0,2,3,1}
  return %r
}""",
        ["mul+cast+relayout"],
    )
    (step,) = of.program.steps
    assert step.kind is Kind.KERNEL and len(step.nodes) == 3


def test_what_is_behind_a_pool_is_done_by_it() -> None:
    check(
        f"""graph "g" (%x: f32[2,8,6,6]{{0,2,3,1}}, %z: f32[2,8,3,3]{{0,2,3,1}}) {{
  %p = max_pool(%x) {POOL} : f32[2,8,3,3]{{0,2,3,1}}
  %a = add(%p, %z)
  %r = relu(%a)
  %e = exp(%r)
  return %e, %r
}}""",
        ["max_pool+add+relu+exp"],
    )


def test_what_cudnn_does_alone_is_left_to_it() -> None:
    text = """graph "g" (%x: f32[2,8,6,6]{0,2,3,1}) {
  %e = exp(%x)
  %r = relu(%e)
  return %r
}"""
    of = compiled(text)
    assert grouped(of.program) is of.program


def test_no_cycle_is_closed() -> None:
    """The add reads the softmax through a sum that is no kernel's, too: they stay apart."""
    check(
        """graph "g" (%x: f32[4,4]) {
  %p = softmax(%x)
  %m = cumulate(%p) {kind="sum", axis=1}
  %a = add(%p, %m)
  %s = softmax(%a)
  return %s
}""",
        ["softmax", "cumulate", "add+softmax"],
    )


def test_a_gate_is_not_computed_for_every_element_of_a_large_image(monkeypatch: pytest.MonkeyPatch) -> None:
    text = """graph "g" (%x: f32[2,8,6,6]{0,2,3,1}) {
  %m = reduce(%x) {kind="mean", axes=[2, 3]} : f32[2,8,1,1]{0,2,3,1}
  %s = softmax(%m) {axis=1} : f32[2,8,1,1]{0,2,3,1}
  %g = sigmoid(%s) : f32[2,8,1,1]{0,2,3,1}
  %y = mul(%x, %g) : f32[2,8,6,6]{0,2,3,1}
  return %y
}"""
    of = compiled(text)
    small = signatures(grouped(of.program))
    monkeypatch.setattr(group, "AGAIN_ELEMENTS", 1)
    large = signatures(grouped(of.program))
    assert "softmax+sigmoid" in small and "softmax+sigmoid" in large
    assert small[-1] == large[-1] == "mul"
