"""Test attention by cuDNN: which shapes it takes on which GPU, and on a GPU that the numbers are right."""

from __future__ import annotations

import numpy as np
import pytest
from helpers import assert_close, one_program, quick

import fusec
from fusec.gpu.cudnn.legality.judges import CudnnJudge
from fusec.gpu.cudnn.legality.oracle import Oracle
from fusec.ir import DType, Graph
from fusec.plans.verdict import Legal, Refused
from fusec.reference import evaluate
from fusec.targets.target import load
from fusec.text import parse


def packed(batch: int, rows: int, heads: int, features: int, attributes: str = "", dtype: str = "f16") -> Graph:
    """Queries, keys and values as parts of one projection."""
    width = heads * features
    lines = [f"  %q, %k, %v = split(%x) {{axis=2, sizes=[{width},{width},{width}]}}"]
    for name in "qkv":
        lines.append(f"  %{name}h = reshape(%{name}) {{shape=[{batch},{rows},{heads},{features}]}}")
        lines.append(f"  %{name}t = transpose(%{name}h) {{perm=[0,2,1,3]}}")
    shape = f"{dtype}[{batch},{heads},{rows},{features}]{{0,2,1,3}}"
    lines.append(f"  %y = attention(%qt, %kt, %vt) {{scale=0.125{attributes}}} : {shape}")
    return parse("\n".join([f'graph "b" (%x: {dtype}[{batch},{rows},{3 * width}]) {{', *lines, "  return %y\n}"]))


def shared(rows: int, columns: int, groups: int, bias: str, attributes: str = "") -> Graph:
    """Eight heads of 64 that share keys and values; a bias of any shape."""
    keys = f"f16[2,{groups},{columns},64]"
    operands = f"%q: f16[2,8,{rows},64], %k: {keys}, %v: {keys}" + (f", %m: f16{bias}" if bias else "")
    added = ", %m" if bias else ""
    line = f"%y = attention(%q, %k, %v{added}) {{scale=0.125{attributes}}}"
    return parse(f'graph "b" ({operands}) {{\n  {line}\n  return %y\n}}')


BODIES = {
    "odd rows": packed(4, 197, 12, 64),
    "causal": packed(2, 128, 4, 64, ", causal=true"),
    "guarded": packed(2, 64, 4, 64, ", guarded=true"),
    "bf16": packed(2, 64, 4, 64, dtype="bf16"),
    "narrow heads": packed(2, 16, 4, 8),
    "shared heads, causal": shared(64, 64, 2, "", ", causal=true"),
    "other lengths": shared(64, 77, 8, ""),
    "one query": shared(1, 128, 4, ""),
    "a bias by key": shared(64, 64, 8, "[2,1,1,64]"),
    "a bias for all": shared(32, 48, 8, "[1,8,32,48]"),
}


@pytest.mark.cudnn
@pytest.mark.parametrize("target", quick(["h200", "a100"], ["h200"]))
def test_cudnn_takes_it_with_its_strides(target: str) -> None:
    with Oracle(load(target)) as oracle:
        verdicts = CudnnJudge(oracle, True).judge(list(BODIES.values()))
    refused = {n: v for n, v in zip(BODIES, verdicts, strict=True) if not isinstance(v, Legal)}
    assert not refused


@pytest.mark.cudnn
@pytest.mark.parametrize(("target", "features", "words"), [("t4", 64, "SM80"), ("h200", 12, "multiple of 8")])
def test_cudnn_says_why_not(target: str, features: int, words: str) -> None:
    with Oracle(load(target)) as oracle:
        (verdict,) = CudnnJudge(oracle, True).judge([packed(1, 16, 2, features)])
    assert isinstance(verdict, Refused) and words in verdict.message


MASKED = shared(16, 24, 4, "[2,1,16,24]", ", hides=true, guarded=true")


def masked_feeds(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Some keys hidden from every query, and all keys from two of them."""
    feeds = {v.name: rng.standard_normal(v.type.shape).astype(np.float16) for v in MASKED.inputs}
    feeds["m"] = np.where(rng.random((2, 1, 16, 24)) < 0.3, -np.inf, 0.0).astype(np.float16)
    feeds["m"][:, :, [0, 7]] = -np.inf
    return feeds


def check_masked(exe: fusec.Executable, rng: np.random.Generator) -> None:
    assert "attention" in [s.signature for s in exe.compiled.program.steps]
    feeds = masked_feeds(rng)
    got = np.asarray(exe(**feeds)).astype(np.float64)
    assert not got[:, :, [0, 7]].any(), "a query without keys gets zeros"
    assert_close(got, evaluate(MASKED, feeds, precision=DType.F64)["y"], 3e-3)


@pytest.mark.cudnn
def test_a_guarded_mask_runs_as_one_attention(rng: np.random.Generator) -> None:
    check_masked(one_program(fusec.compile(MASKED, target="h200", precision="fp16")), rng)


@pytest.mark.gpu
@pytest.mark.parametrize("tune", ["none", "quick", "full"])
def test_a_guarded_mask_on_a_gpu(tune: str, rng: np.random.Generator) -> None:
    check_masked(one_program(fusec.compile(MASKED, precision="fp16", tune=tune)), rng)


def compare(graph: Graph, exe: fusec.Executable, rng: np.random.Generator) -> None:
    feeds = {v.name: rng.standard_normal(v.type.shape).astype(v.type.dtype.numpy) for v in graph.inputs}
    (want,) = evaluate(graph, feeds, precision=DType.F64).values()
    assert_close(np.asarray(exe(**feeds)).astype(np.float64), want, 2e-2 if "bf16" in str(graph) else 3e-3)


@pytest.mark.cudnn
@pytest.mark.parametrize("name", BODIES)
def test_the_program_simulated_is_right(name: str, rng: np.random.Generator) -> None:
    exe = one_program(fusec.compile(BODIES[name], target="h200"))
    assert [s.signature for s in exe.compiled.program.steps if s.kind.value == "cudnn"][-1:] == ["attention"]
    compare(BODIES[name], exe, rng)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BODIES)
def test_the_program_on_a_gpu_is_right(name: str, rng: np.random.Generator) -> None:
    compare(BODIES[name], one_program(fusec.compile(BODIES[name], tune="quick")), rng)


def sequences_first(rng: np.random.Generator, batch: int, rows: int, heads: int, features: int) -> Graph:
    """`torch.nn.MultiheadAttention` with batch_first and a residual, as torch.onnx writes it."""
    width, merged = heads * features, batch * heads
    parts = ""
    for i, name in enumerate("qkv"):
        parts += f"""
  %{name}0 = slice(%s) {{starts=[{i},0,0,0], sizes=[1,{rows},{batch},{width}], steps=[1,1,1,1]}}
  %{name}1 = reshape(%{name}0) {{shape=[{rows},{merged},{features}]}}
  %{name}2 = transpose(%{name}1) {{perm=[1,0,2]}}
  %{name} = reshape(%{name}2) {{shape=[{batch},{heads},{rows},{features}]}}"""
    text = f"""graph "b" (%x: f16[{batch},{rows},{width}]) {{
  %w = constant weight("w") : f16[{width},{3 * width}]
  %b = constant weight("b") : f16[{3 * width}]
  %o = constant weight("o") : f16[{width},{width}]
  %c = constant weight("c") : f16[{width}]
  %f = transpose(%x) {{perm=[1,0,2]}}
  %m = matmul(%f, %w)
  %p = add(%m, %b)
  %r = reshape(%p) {{shape=[1,{rows},{batch},3,{width}]}}
  %t = transpose(%r) {{perm=[3,1,2,0,4]}}
  %s = reshape(%t) {{shape=[3,{rows},{batch},{width}]}}{parts}
  %a = attention(%q, %k, %v) {{scale=0.125}}
  %a0 = transpose(%a) {{perm=[2,0,1,3]}}
  %a1 = reshape(%a0) {{shape=[{batch * rows},{width}]}}
  %n = matmul(%a1, %o)
  %d = add(%n, %c)
  %d0 = reshape(%d) {{shape=[{rows},{batch},{width}]}}
  %d1 = transpose(%d0) {{perm=[1,0,2]}}
  %y = add(%x, %d1)
  return %y
}}"""
    shapes = {"w": (width, 3 * width), "b": (3 * width,), "o": (width, width), "c": (width,)}
    return parse(text, {n: (rng.standard_normal(s) / width**0.5).astype(np.float16) for n, s in shapes.items()})


@pytest.mark.cudnn
def test_sequences_first_take_no_copies(rng: np.random.Generator) -> None:
    graph = sequences_first(rng, 3, 9, 4, 8)
    exe = one_program(fusec.compile(graph, target="h200", precision="fp16"))
    launched = [(s.kind.value, s.signature) for s in exe.compiled.program.steps if s.kind.value != "view"]
    assert launched == [("cudnn", "matmul+bias"), ("cudnn", "attention"), ("cudnn", "matmul+bias+add")]
    compare(graph, exe, rng)


@pytest.mark.gpu
def test_sequences_first_on_a_gpu(rng: np.random.Generator) -> None:
    graph = sequences_first(rng, 4, 197, 12, 64)
    compare(graph, one_program(fusec.compile(graph, tune="quick", precision="fp16")), rng)
