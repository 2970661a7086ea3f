"""Bodies of partitions that lower, by name: text with weights drawn by label. Shared by the lowering tests."""

from __future__ import annotations

import re
import zlib

import numpy as np

from fusec.ir import DType, Graph
from fusec.text import parse

_WEIGHT = re.compile(r'weight\("([^"]+)"\) : (\w+)\[([\d,]*)\]')
NHWC = "{0,2,3,1}"
CONV = "strides=[1,1], pads=[1,1,1,1], dilations=[1,1]"

BODIES: dict[str, str] = {
    "conv with residual first, bias, relu6, image in NCHW": f"""
graph "b" (%x: f16[2,8,9,7], %z: f16[2,16,9,7]{NHWC}) {{
  %w = constant weight("w") : f16[16,8,3,3]{NHWC}
  %b = constant weight("b") : f16[1,16,1,1]
  %c = conv(%x, %w) {{{CONV}}} : f16[2,16,9,7]{NHWC}
  %d = add(%c, %z) : f16[2,16,9,7]{NHWC}
  %e = add(%d, %b) : f16[2,16,9,7]{NHWC}
  %f = clip(%e) {{min=0.0, max=6.0}} : f16[2,16,9,7]{NHWC}
  return %f
}}""",
    "grouped, dilated, strided conv with asymmetric pads": f"""
graph "b" (%x: f32[1,6,12,11]{NHWC}) {{
  %w = constant weight("w") : f32[4,3,3,2]{NHWC}
  %c = conv(%x, %w) {{strides=[2,1], pads=[1,0,2,1], dilations=[1,2], groups=2}} : f32[1,4,7,10]{NHWC}
  %r = relu(%c) : f32[1,4,7,10]{NHWC}
  return %r
}}""",
    "conv1d is lifted to two dims": """
graph "b" (%x: f32[2,6,50]{0,2,1}) {
  %w = constant weight("w") : f32[9,6,3]{0,2,1}
  %c = conv(%x, %w) {strides=[2], pads=[1,2], dilations=[1]} : f32[2,9,26]{0,2,1}
  %d = mish(%c) : f32[2,9,26]{0,2,1}
  return %d
}""",
    "conv3d": """
graph "b" (%x: f32[1,4,5,6,7]{0,2,3,4,1}) {
  %w = constant weight("w") : f32[5,4,3,3,3]{0,2,3,4,1}
  %c = conv(%x, %w) {strides=[1,1,1], pads=[1,1,1,1,1,1], dilations=[1,1,1]} : f32[1,5,5,6,7]{0,2,3,4,1}
  return %c
}""",
    "conv of reversed filters in groups, with bias and relu": f"""
graph "b" (%x: f32[1,6,12,11]{NHWC}, %w: f32[4,3,3,2]{NHWC}, %b: f32[1,4,1,1]) {{
  %c = conv_flipped(%x, %w) {{strides=[2,1], pads=[1,0,2,1], dilations=[1,2], groups=2}} : f32[1,4,7,10]{NHWC}
  %d = add(%c, %b) : f32[1,4,7,10]{NHWC}
  %r = relu(%d) : f32[1,4,7,10]{NHWC}
  return %r
}}""",
    "conv of reversed filters in 16 bits, with residual, bias and relu": f"""
graph "b" (%x: f16[2,16,9,8]{NHWC}, %w: f16[8,16,3,3]{NHWC}, %z: f16[2,8,9,8]{NHWC}) {{
  %b = constant weight("b") : f16[1,8,1,1]
  %c = conv_flipped(%x, %w) {{{CONV}}} : f16[2,8,9,8]{NHWC}
  %s = add(%c, %z) : f16[2,8,9,8]{NHWC}
  %t = add(%s, %b) : f16[2,8,9,8]{NHWC}
  %d = relu(%t) : f16[2,8,9,8]{NHWC}
  return %d
}}""",
    "conv1d of reversed filters": """
graph "b" (%x: f16[2,8,50]{0,2,1}, %w: f16[8,8,3]{0,2,1}) {
  %c = conv_flipped(%x, %w) {strides=[1], pads=[1,2], dilations=[1]} : f16[2,8,51]{0,2,1}
  return %c
}""",
    "conv3d of reversed filters": """
graph "b" (%x: f32[1,4,5,6,7]{0,2,3,4,1}, %w: f32[5,4,3,2,3]{0,2,3,4,1}) {
  %c = conv_flipped(%x, %w) {strides=[1,1,1], pads=[1,1,1,1,1,1], dilations=[1,1,1]} : f32[1,5,5,7,7]{0,2,3,4,1}
  return %c
}""",
    "transposed conv with output padding and groups": f"""
graph "b" (%x: f32[2,6,5,5]{NHWC}) {{
  %w = constant weight("w") : f32[6,4,3,3]{NHWC}
  %c = conv_transpose(%x, %w) {{strides=[2,2], pads=[1,1,0,1], dilations=[1,1],
                                output_padding=[1,0], groups=2}} : f32[2,8,11,9]{NHWC}
  %d = relu(%c) : f32[2,8,11,9]{NHWC}
  return %d
}}""",
    "gradient of grouped, strided filters": f"""
graph "b" (%x: f32[2,6,9,8]{NHWC}, %dy: f32[2,4,5,8]{NHWC}) {{
  %d = conv_wgrad(%x, %dy) {{window=[3,2], strides=[2,1], pads=[1,0,1,1], dilations=[1,1],
                             groups=2}} : f32[4,3,3,2]{NHWC}
  return %d
}}""",
    "gradient of the filters of a conv1d": """
graph "b" (%x: f16[2,6,50]{0,2,1}, %dy: f16[2,8,50]{0,2,1}) {
  %d = conv_wgrad(%x, %dy) {window=[3], strides=[1], pads=[1,1], dilations=[1]} : f16[8,6,3]{0,2,1}
  return %d
}""",
    "a value needed outside is a second output": f"""
graph "b" (%x: f32[1,4,6,6]{NHWC}) {{
  %w = constant weight("w") : f32[4,4,3,3]{NHWC}
  %c = conv(%x, %w) {{{CONV}}} : f32[1,4,6,6]{NHWC}
  %s = sigmoid(%c) : f32[1,4,6,6]{NHWC}
  %d = mul(%c, %s) : f32[1,4,6,6]{NHWC}
  return %d, %s
}}""",
    "the residual is the conv's own input": f"""
graph "b" (%x: f32[1,4,6,6]{NHWC}) {{
  %w = constant weight("w") : f32[4,4,3,3]{NHWC}
  %c = conv(%x, %w) {{{CONV}}} : f32[1,4,6,6]{NHWC}
  %d = add(%c, %x) : f32[1,4,6,6]{NHWC}
  return %d
}}""",
    "linear over rank 3 folds the batch into the rows": """
graph "b" (%x: f32[2,5,32], %z: f32[2,5,24]) {
  %w = constant weight("w") : f32[32,24]
  %b = constant weight("b") : f32[24]
  %c = matmul(%x, %w)
  %d = add(%c, %b)
  %e = add(%d, %z)
  %f = gelu(%e)
  return %f
}""",
    "batched matmul with a transposed operand and a scale": """
graph "b" (%x: f32[2,3,5,8], %y: f32[2,3,9,8]) {
  %t = transpose(%y) {perm=[0,1,3,2]}
  %c = matmul(%x, %t)
  %k = constant [0.125] : f32[]
  %d = mul(%c, %k)
  return %d
}""",
    "prologue cast into a matmul": """
graph "b" (%x: i8[4,32]) {
  %w = constant weight("w") : f16[32,24]
  %h = cast(%x) {to=f16}
  %c = matmul(%h, %w)
  return %c
}""",
    "linear spelled as a 1x1 convolution": """
graph "b" (%x: f32[7,32]) {
  %w = constant weight("w") : f32[24,32,1,1]
  %x4 = reshape(%x) {shape=[7,32,1,1]}
  %c = conv(%x4, %w) {strides=[1,1], pads=[0,0,0,0], dilations=[1,1]}
  %r = relu(%c)
  %o = reshape(%r) {shape=[7,24]}
  return %o
}""",
    "channel gate over a channels-last map": f"""
graph "b" (%x: f32[2,32,5,4]{NHWC}, %g: f32[2,32,1,1]) {{
  %c = mul(%x, %g) : f32[2,32,5,4]{NHWC}
  return %c
}}""",
    "row-major per-channel pointwise": """
graph "b" (%x: f16[2,32,5,4]) {
  %s = constant weight("s") : f16[1,32,1,1]
  %c = mul(%x, %s)
  %d = sigmoid(%c)
  return %d
}""",
    "compare and select": """
graph "b" (%x: f32[3,40], %y: f32[3,40]) {
  %c = cmp_gt(%x, %y)
  %d = cmp_lt(%x, %x)
  %l = logical_or(%c, %d)
  %e = where(%l, %x, %y)
  return %e
}""",
    "a constant per channel next to a gate is repeated per image": f"""
graph "b" (%x: f32[2,32,5,4]{NHWC}, %g: f32[2,32,1,1]) {{
  %b = constant weight("b") : f32[1,32,1,1]
  %c = mul(%x, %g) : f32[2,32,5,4]{NHWC}
  %d = add(%c, %b) : f32[2,32,5,4]{NHWC}
  return %d
}}""",
    "layer norm without a bias": """
graph "b" (%x: f32[2,7,48]) {
  %s = constant weight("s") : f32[48]
  %c = layer_norm(%x, %s)
  return %c
}""",
    "rms norm": """
graph "b" (%x: f16[2,7,48]) {
  %s = constant weight("s") : f16[48]
  %c = rms_norm(%x, %s) {epsilon=0.001}
  return %c
}""",
    "instance norm": f"""
graph "b" (%x: f32[2,7,9,10]{NHWC}, %s: f32[7], %b: f32[7]) {{
  %c = instance_norm(%x, %s, %b) : f32[2,7,9,10]{NHWC}
  return %c
}}""",
    "batch norm in training, residual, relu": f"""
graph "b" (%x: f16[2,8,9,10]{NHWC}, %z: f16[2,8,9,10]{NHWC}, %s: f32[8]) {{
  %b = constant weight("b") : f32[8]
  %y, %m, %i = batch_norm_train(%x, %s, %b) {{epsilon=0.001}} : f16[2,8,9,10]{NHWC}, f32[8], f32[8]
  %d = add(%y, %z) : f16[2,8,9,10]{NHWC}
  %r = relu(%d) : f16[2,8,9,10]{NHWC}
  return %r, %m, %i
}}""",
    "batch norm of rows in training, without its statistics": """
graph "b" (%x: f32[40,8], %s: f32[8]) {
  %y, %m, %i = batch_norm_train(%x, %s, %s)
  return %y
}""",
    "gradients of batch norm": f"""
graph "b" (%dy: f16[2,8,9,10]{NHWC}, %x: f16[2,8,9,10]{NHWC}, %s: f32[8], %m: f32[8], %i: f32[8]) {{
  %dx, %ds, %db = batch_norm_backward(%dy, %x, %s, %m, %i) : f16[2,8,9,10]{NHWC}, f32[8], f32[8]
  return %db, %dx, %ds
}}""",
    "gradients of batch norm of its own gradient, without that of the bias": """
graph "b" (%x: f32[2,8,5], %s: f32[8], %m: f32[8], %i: f32[8]) {
  %dx, %ds, %db = batch_norm_backward(%x, %x, %s, %m, %i)
  return %dx, %ds
}""",
    "sum over channels": f"""
graph "b" (%x: f16[2,7,9,10]{NHWC}) {{
  %f = cast(%x) {{to=f32}} : f32[2,7,9,10]{NHWC}
  %c = reduce(%f) {{kind="sum", axes=[1], keepdims=false}}
  return %c
}}""",
    "sum over everything but channels": f"""
graph "b" (%x: f32[2,7,9,10]{NHWC}) {{
  %c = reduce(%x) {{kind="sum", axes=[0,2,3]}}
  return %c
}}""",
    "prologue cast into a convolution": f"""
graph "b" (%x: f32[2,8,6,5]{NHWC}) {{
  %w = constant weight("w") : f16[16,8,3,3]{NHWC}
  %h = cast(%x) {{to=f16}} : f16[2,8,6,5]{NHWC}
  %c = conv(%h, %w) {{{CONV}}} : f16[2,16,6,5]{NHWC}
  return %c
}}""",
    "attention with shared heads and a bias, written head by head of each position": """
graph "b" (%q: f16[2,4,6,16], %k: f16[2,2,9,16], %v: f16[2,2,9,8], %m: f16[1,6,9]) {
  %y = attention(%q, %k, %v, %m) {scale=0.25} : f16[2,4,6,8]{0,2,1,3}
  return %y
}""",
    "attention over parts of one projection": """
graph "b" (%x: f16[2,5,96]) {
  %q, %k, %v = split(%x) {axis=2, sizes=[32,32,32]}
  %qh = reshape(%q) {shape=[2,5,4,8]}
  %qt = transpose(%qh) {perm=[0,2,1,3]} : f16[2,4,5,8]{0,2,1,3}
  %kh = reshape(%k) {shape=[2,5,4,8]}
  %kt = transpose(%kh) {perm=[0,2,1,3]} : f16[2,4,5,8]{0,2,1,3}
  %vh = reshape(%v) {shape=[2,5,4,8]}
  %vt = transpose(%vh) {perm=[0,2,1,3]} : f16[2,4,5,8]{0,2,1,3}
  %y = attention(%qt, %kt, %vt) {scale=0.35, causal=true, guarded=true} : f16[2,4,5,8]{0,2,1,3}
  return %y
}""",
    "attention of one value with itself, one query, one key seen": """
graph "b" (%x: bf16[1,2,1,8], %k: bf16[1,2,3,8]) {
  %m = constant [0.0, -inf, -inf] : bf16[3]
  %y = attention(%x, %k, %k, %m) {guarded=true, seen=true} : bf16[1,2,1,8]
  return %y
}""",
    "attention with its sums, of shared heads and a bias": """
graph "b" (%q: f16[2,4,6,16], %k: f16[2,2,9,16], %v: f16[2,2,9,8], %m: f16[1,1,6,9]) {
  %y, %s = attention_train(%q, %k, %v, %m) {scale=0.25} : f16[2,4,6,8]{0,2,1,3}, f32[2,4,6,1]
  return %y, %s
}""",
    "the gradient of attention over parts of one projection": """
graph "b" (%x: f16[2,5,96], %dy: f16[2,4,5,8], %y: f16[2,4,5,8]{0,2,1,3}) {
  %s = constant weight("sums") : f32[2,4,5,1]
  %q, %k, %v = split(%x) {axis=2, sizes=[32,32,32]}
  %qh = reshape(%q) {shape=[2,5,4,8]}
  %qt = transpose(%qh) {perm=[0,2,1,3]} : f16[2,4,5,8]{0,2,1,3}
  %kh = reshape(%k) {shape=[2,5,4,8]}
  %kt = transpose(%kh) {perm=[0,2,1,3]} : f16[2,4,5,8]{0,2,1,3}
  %vh = reshape(%v) {shape=[2,5,4,8]}
  %vt = transpose(%vh) {perm=[0,2,1,3]} : f16[2,4,5,8]{0,2,1,3}
  %dq, %dk, %dv = attention_backward(%dy, %qt, %kt, %vt, %y, %s) {scale=0.35, causal=true} :
    f16[2,4,5,8]{0,2,1,3}, f16[2,4,5,8]{0,2,1,3}, f16[2,4,5,8]
  return %dq, %dk, %dv
}""",
    "integer conv, scale, bias, integer residual, relu, rounded": f"""
graph "b" (%x: i8[2,8,9,7]{NHWC}, %z: i8[2,16,9,7]{NHWC}) {{
  %w = constant weight("w") : i8[16,8,3,3]{NHWC}
  %s = constant weight("s") : f32[1,16,1,1]
  %b = constant weight("b") : f32[1,16,1,1]
  %t = constant [0.37] : f32[]
  %u = constant [0.011] : f32[]
  %c = conv(%x, %w) {{{CONV}}} : i32[2,16,9,7]{NHWC}
  %f = cast(%c) {{to=f32}} : f32[2,16,9,7]{NHWC}
  %d = mul(%f, %s) : f32[2,16,9,7]{NHWC}
  %e = add(%d, %b) : f32[2,16,9,7]{NHWC}
  %g = cast(%z) {{to=f32}} : f32[2,16,9,7]{NHWC}
  %h = mul(%g, %t) : f32[2,16,9,7]{NHWC}
  %i = add(%e, %h) : f32[2,16,9,7]{NHWC}
  %r = relu(%i) : f32[2,16,9,7]{NHWC}
  %q = mul(%r, %u) : f32[2,16,9,7]{NHWC}
  %n = round(%q) : f32[2,16,9,7]{NHWC}
  %l = clip(%n) {{min=-128.0, max=127.0}} : f32[2,16,9,7]{NHWC}
  %y = cast(%l) {{to=i8}} : i8[2,16,9,7]{NHWC}
  return %y
}}""",
    "integer matmul, rounded with a zero point and limits, and as it was before": """
graph "b" (%x: i8[2,5,40]) {
  %w = constant weight("w") : i8[40,24]
  %s = constant weight("s") : f32[24]
  %z = constant [4.0] : f32[]
  %u = constant [0.011] : f32[]
  %c = matmul(%x, %w)
  %f = cast(%c) {to=f32}
  %d = mul(%f, %s)
  %q = mul(%d, %u)
  %n = round(%q)
  %a = add(%n, %z)
  %l = clip(%a) {min=-100.0, max=90.0}
  %y = cast(%l) {to=i8}
  return %d, %y
}""",
    "integer products as they are": """
graph "b" (%x: i8[2,5,600]) {
  %w = constant weight("w") : i8[600,24]
  %c = matmul(%x, %w)
  return %c
}""",
    "integers to floats and back": """
graph "b" (%x: i8[3,50]) {
  %s = constant [0.37] : f32[]
  %f = cast(%x) {to=f32}
  %d = mul(%f, %s)
  %n = round(%d)
  %l = clip(%n) {min=0.0, max=127.0}
  %y = cast(%l) {to=i8}
  return %y
}""",
    "cast on the way out": """
graph "b" (%x: f16[3,50]) {
  %y = exp(%x)
  %c = cast(%y) {to=f32}
  return %c
}""",
}


def load(text: str) -> Graph:
    """Parse a body; every weight("label") is drawn from a generator seeded by its label."""
    weights = {
        label: _drawn(label, DType(dtype), [int(d) for d in dims.split(",") if d])
        for label, dtype, dims in _WEIGHT.findall(text)
    }
    return parse(text, weights)


def _drawn(label: str, dtype: DType, shape: list[int]) -> np.ndarray:
    rng = np.random.default_rng(zlib.crc32(label.encode()))
    return (
        rng.integers(-128, 128, shape, np.int8) if dtype is DType.I8 else rng.standard_normal(shape).astype(dtype.numpy)
    )
