"""Test that attention in windows is recognised where copies of its mask for each image would be large."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import assert_close

from fusec.passes.rules import attention_mask
from fusec.passes.rules.attention import attention
from fusec.reference import evaluate
from fusec.text import parse

# three images of four windows, with two heads, as Swin transformers export them
WINDOWS = """graph "g" (%q: f32[12,2,2,8], %k: f32[12,2,2,8], %v: f32[12,2,2,8]) {
  %t = transpose(%k) {perm=[0,1,3,2]}
  %a = matmul(%q, %t)
  %b = constant [1, 2, 3, 4, 5, 6, 7, 8] : f32[1,2,2,2]
  %s = add(%a, %b)
  %i = reshape(%s) {shape=[3,4,2,2,2]}
  %m = constant [0, -9, -9, 0, 0, 0, 0, 0, -3, 0, 0, 0, 0, 0, 0, -1] : f32[1,4,1,2,2]
  %h = add(%i, %m)
  %j = reshape(%h) {shape=[12,2,2,2]}
  %w = softmax(%j)
  %o = matmul(%w, %v)
  return %o
}
"""


@pytest.mark.parametrize(("limit", "expanded"), [(1 << 20, False), (64, True)])
def test_masks_that_are_large_are_repeated_in_each_call(
    limit: int, expanded: bool, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setattr(attention_mask, "MASK_BYTES", limit)
    graph = parse(WINDOWS)
    feeds = {v.name: rng.standard_normal(v.type.shape).astype(np.float32) for v in graph.inputs}
    (want,) = evaluate(graph, feeds).values()
    (last,) = (node for node in graph.nodes if node.results[0].name == "o")
    made = attention.apply(graph, last)
    assert made is not None
    graph.replace(last.result, made)
    graph.prune()
    graph.verify()
    (got,) = evaluate(graph, feeds).values()
    assert_close(got, want, 1e-6)
    names = [node.op.name for node in graph.nodes]
    assert "attention" in names
    assert ("expand" in names) == expanded
