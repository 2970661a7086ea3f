"""Test batch norms whose statistics are split off, if images count as large enough."""

from __future__ import annotations

import pytest

from fusec.passes.base import Options
from fusec.passes.training import split_batchnorm_stats
from fusec.passes.training.split_batchnorm_stats import SplitBatchNormStats
from fusec.targets.target import load
from fusec.text import parse

LAST = "{0,2,3,1}"
CONV = "conv(%x, %w) {{strides=[1, 1], pads=[0, 0, 0, 0], dilations=[1, 1], groups={groups}}}"


def ops(dtype: str = "f16", order: str = LAST, groups: int = 1, made: str = CONV, parameter: str = "f32") -> list[str]:
    """List the ops of the graph after the pass."""
    image, filters = f"{dtype}[2,8,4,4]{order}", f"{dtype}[8,{8 // groups},1,1]" if made is CONV else f"{dtype}[8,1,1]"
    graph = parse(f"""graph "g" (%x: {image}, %w: {filters}, %s: {parameter}[8], %b: {parameter}[8]) {{
  %c = {made.format(groups=groups)} : {image}
  %y, %m, %i = batch_norm_train(%c, %s, %b) : {image}, {parameter}[8], {parameter}[8]
  return %y, %m, %i
}}""")
    before = [v.type for v in graph.outputs]
    SplitBatchNormStats().run(graph, Options())
    graph.verify()
    assert [v.type for v in graph.outputs] == before
    return [node.op.name for node in graph.nodes]


def test_large_16_bit_results_of_convolutions_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ops()[1:] == ["batch_norm_train"]  # small
    monkeypatch.setattr(split_batchnorm_stats, "resident_bytes", lambda target: 255)
    split = ["conv", "channel_sums", "batch_norm_by_sums"]
    assert ops() == ops("bf16") == ops(parameter="f16") == split
    monkeypatch.setattr(split_batchnorm_stats, "resident_bytes", lambda target: 512)
    assert ops() == ["conv", "batch_norm_train"]  # no smaller than the values that stay


def test_the_figures_are_those_of_the_target() -> None:
    """A T4 has less shared memory and a smaller second-level cache than an H200, so it gains from smaller images."""
    image = "f16[16,64,112,112]{0,2,3,1}"
    text = f"""graph "g" (%x: {image}, %w: f16[64,64,1,1]{LAST}, %s: f32[64], %b: f32[64]) {{
  %c = {CONV.format(groups=1)} : {image}
  %y, %m, %i = batch_norm_train(%c, %s, %b) : {image}, f32[64], f32[64]
  return %y, %m, %i
}}"""
    for target, norm in (("h200", "batch_norm_train"), ("t4", "batch_norm_by_sums")):
        graph = parse(text)
        SplitBatchNormStats().run(graph, Options(target=load(target)))
        assert [node.op.name for node in graph.nodes][-1] == norm


def test_other_norms_are_not_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of squares cost digits that fp32 has; cuDNN wants channels side by side, and all of them in one group."""
    monkeypatch.setattr(split_batchnorm_stats, "resident_bytes", lambda target: 0)
    for name in (*ops("f32"), *ops(order=""), *ops(groups=8), *ops(made="mul(%x, %w)")):
        assert "sums" not in name
