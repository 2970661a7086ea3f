"""A depthwise convolution with the squeeze-and-excitation after it, as text."""

from __future__ import annotations

import re

import numpy as np

EXCITATION = """graph "g" (%x: f32[2,8,6,6]{0,2,3,1}) {
  %w = constant weight("w") : f32[8,1,3,3]{0,2,3,1}
  %b = constant weight("b") : f32[1,8,1,1]
  %down = constant weight("down") : f32[4,8,1,1]{0,2,3,1}
  %up = constant weight("up") : f32[8,4,1,1]{0,2,3,1}
  %c = conv(%x, %w) {strides=[1, 1], pads=[1, 1, 1, 1], dilations=[1, 1], groups=8} : f32[2,8,6,6]{0,2,3,1}
  %d = add(%c, %b) : f32[2,8,6,6]{0,2,3,1}
  %y = swish(%d) : f32[2,8,6,6]{0,2,3,1}
  %m = reduce(%y) {kind="mean", axes=[2, 3]} : f32[2,8,1,1]{0,2,3,1}
  %h = conv(%m, %down) {strides=[1, 1], pads=[0, 0, 0, 0], dilations=[1, 1]} : f32[2,4,1,1]{0,2,3,1}
  %a = relu(%h) : f32[2,4,1,1]{0,2,3,1}
  %u = conv(%a, %up) {strides=[1, 1], pads=[0, 0, 0, 0], dilations=[1, 1]} : f32[2,8,1,1]{0,2,3,1}
  %s = sigmoid(%u) : f32[2,8,1,1]{0,2,3,1}
  %r = mul(%y, %s) : f32[2,8,6,6]{0,2,3,1}
  return %r
}"""


def drawn(text: str) -> dict[str, np.ndarray]:
    """Normal numbers for the weights that a text names, or bytes."""
    rng = np.random.default_rng(4)
    found = re.findall(r'weight\("(\w+)"\) : (f32|i8)\[([\d,]+)\]', text)
    shapes = {name: (dtype, [int(d) for d in dims.split(",")]) for name, dtype, dims in found}
    return {
        name: rng.standard_normal(shape).astype(np.float32) if dtype == "f32" else rng.integers(-128, 128, shape, "i1")
        for name, (dtype, shape) in shapes.items()
    }
