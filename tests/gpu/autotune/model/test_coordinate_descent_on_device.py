"""Test on a GPU that choices made within the model are stored, revived, and compute the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from helpers import assert_close, one_program

import fusec
from fusec.ir import DType, Graph
from fusec.reference import evaluate
from fusec.text import parse

pytestmark = pytest.mark.gpu

LAYERS = """graph "layers" (%x: f16[512,768]) {
  %w = constant weight("w") : f16[768,3072]
  %u = constant weight("u") : f16[3072,768]
  %b = constant weight("b") : f16[3072]
  %s = constant weight("s") : f16[768]
  %n = layer_norm(%x, %s)
  %h = matmul(%n, %w)
  %a = add(%h, %b)
  %g = gelu(%a)
  %d = matmul(%g, %u)
  %y = add(%d, %x)
  %m = layer_norm(%y, %s)
  %k = matmul(%m, %w)
  %e = add(%k, %b)
  %f = gelu(%e)
  return %f
}"""

ROTATED = """graph "rotated" (%x: f16[2,128,512], %cos: f16[128,64], %sin: f16[128,64]) {
  %wq = constant weight("wq") : f16[512,512]
  %wk = constant weight("wk") : f16[512,128]
  %wv = constant weight("wv") : f16[512,128]
  %q = matmul(%x, %wq)
  %qh = reshape(%q) {shape=[2,128,8,64]}
  %qt = transpose(%qh) {perm=[0,2,1,3]}
  %qr = rotary(%qt, %cos, %sin)
  %k = matmul(%x, %wk)
  %kh = reshape(%k) {shape=[2,128,2,64]}
  %kt = transpose(%kh) {perm=[0,2,1,3]}
  %kr = rotary(%kt, %cos, %sin)
  %v = matmul(%x, %wv)
  %vh = reshape(%v) {shape=[2,128,2,64]}
  %vt = transpose(%vh) {perm=[0,2,1,3]}
  %y = attention(%qr, %kr, %vt) {scale=0.125, causal=true}
  return %y
}"""

GROUPS = """graph "groups" (%x: f16[2,320,32,32]) {
  %w = constant weight("w") : f16[320,320,3,3]
  %s = constant weight("s") : f16[320]
  %b = constant weight("b") : f16[320]
  %n = group_norm(%x, %s, %b) {groups=32}
  %c = conv(%n, %w) {strides=[1,1], pads=[1,1,1,1], dilations=[1,1], groups=1}
  %y = add(%c, %x)
  %m = group_norm(%y, %s, %b) {groups=32}
  return %m
}"""

SWIGLU = """graph "swiglu" (%x: f16[256,512]) {
  %a = constant weight("a") : f16[512,1536]
  %b = constant weight("b") : f16[512,1536]
  %g = matmul(%x, %a)
  %s = swish(%g)
  %u = matmul(%x, %b)
  %y = mul(%s, %u)
  return %y
}"""


def graph_of(text: str, rng: np.random.Generator) -> Graph:
    """With weights that keep numbers as large as they are."""
    shapes = {line.split('"')[1]: line.split("[")[1].split("]")[0] for line in text.splitlines() if "weight(" in line}
    weights: dict[str, np.ndarray] = {}
    for name, dims in shapes.items():
        shape = tuple(map(int, dims.split(",")))
        fan = shape[0] if len(shape) == 2 else int(np.prod(shape[1:])) if len(shape) == 4 else 1
        weights[name] = (rng.standard_normal(shape) / np.sqrt(fan)).astype(np.float16)
    return parse(text, weights)


@pytest.mark.parametrize("tune", ["quick", "full"])
@pytest.mark.parametrize("text", [LAYERS, ROTATED, GROUPS, SWIGLU], ids=["layers", "rotated", "groups", "swiglu"])
def test_options_chosen_within_the_model_compute_the_same(
    text: str, tune: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator
) -> None:
    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path))
    graph = graph_of(text, rng)
    feeds = {v.name: rng.standard_normal(v.type.shape).astype(np.float16) for v in graph.inputs}
    (want,) = evaluate(graph, feeds, precision=DType.F64).values()
    found: list[dict[str, tuple[object, ...]]] = []
    for _ in range(2):  # what was found is known the second time
        exe = one_program(fusec.compile(graph, precision="fp16", tune=tune))
        for _ in range(3):  # step by step, recorded, replayed
            assert_close(np.asarray(exe(**feeds)).astype(np.float64), want, 5e-3)
        backend = exe.backend
        found.append({key: choice.identity for key, choice in backend.choices().items()})  # type: ignore[attr-defined]
    ran = {key for key in found[1] if key in found[0]}
    assert ran and all(found[0][key] == found[1][key] for key in ran)
