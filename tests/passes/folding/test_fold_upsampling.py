"""Test resizes that copy pixels, and resizes that do not."""

from __future__ import annotations

import pytest

from fusec.passes.folding.fold_upsampling import copies
from fusec.text import parse


@pytest.mark.parametrize(
    ("line", "times"),
    [
        ('resize(%x) {sizes=[1,4,8,12], scales=[1.0,1.0,2.0,3.0], coordinates="asymmetric", rounding="floor"}', (2, 3)),
        ('resize(%x) {sizes=[1,4,8,6], scales=[1.0,1.0,2.0,1.5], coordinates="asymmetric", rounding="floor"}', None),
        ("split(%x) {axis=1, sizes=[3,1]}", None),
        ("constant [1.0] : f32[1,1,1,1]", None),
        ("relu(%x)", None),
    ],
)
def test_pixels_that_are_copied_side_by_side(line: str, times: tuple[int, ...] | None) -> None:
    left = "%y, %z" if line.startswith("split") else "%y"
    graph = parse(f'graph "g" (%x: f32[1,4,4,4]) {{\n  {left} = {line}\n  return %y\n}}')
    (node,) = graph.nodes
    assert copies(node) == times
