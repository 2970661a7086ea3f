"""Test that the canonical key is equal for bodies that compute the same."""

from __future__ import annotations

import pytest
from passes.partition.test_cases import read_graph

from fusec.passes.partition import canonical_key

BASE = """graph "g" (%x: f16[2,8,4,4], %z: f16[2,8,4,4]) {
  %w = constant weight("w") : f16[8,8,3,3]
  %k = constant [0.5] : f16[]
  %c = conv(%x, %w) {strides=[1,1], pads=[1,1,1,1], dilations=[1,1], groups=1} : f16[2,8,4,4]
  %m = mul(%c, %k) : f16[2,8,4,4]
  %a = add(%m, %z) : f16[2,8,4,4]
  %r = leaky_relu(%a) {alpha=0.1} : f16[2,8,4,4]
  return %r
}"""


@pytest.mark.parametrize(
    ("old", "new"),
    [("%c", "%conv"), ("%x", "%input"), ('"w"', '"other"'), ('graph "g"', 'graph "h"')],
)
def test_names_do_not_matter(old: str, new: str) -> None:
    assert canonical_key(read_graph(BASE.replace(old, new))) == canonical_key(read_graph(BASE))


def test_the_content_of_tensors_does_not_matter() -> None:
    text = BASE.replace("%k = constant [0.5] : f16[]", "%k = constant [0.5, 1.0, 1.5, 2.0] : f16[4]")
    assert canonical_key(read_graph(text)) == canonical_key(read_graph(text.replace("1.5", "3.0")))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[0.5]", "[0.25]"),
        ("alpha=0.1", "alpha=0.2"),
        ("leaky_relu(%a) {alpha=0.1}", "relu(%a)"),
        ("pads=[1,1,1,1]", "pads=[0,0,2,2]"),
        ("add(%m, %z)", "add(%z, %m)"),
        ("add(%m, %z)", "add(%m, %m)"),
        ("add(%m, %z)", "add(%m, %c)"),
        ("return %r", "return %r, %a"),
        ("f16", "f32"),
        ("%x: f16[2,8,4,4]", "%x: f16[2,8,4,4]{0,2,3,1}"),
    ],
)
def test_ops_attributes_types_and_wiring_matter(old: str, new: str) -> None:
    assert canonical_key(read_graph(BASE.replace(old, new))) != canonical_key(read_graph(BASE))
