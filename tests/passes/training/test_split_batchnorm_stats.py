"""Which batch norms have their sums in front, were images large enough."""

from __future__ import annotations

import pytest

from fusec.passes.base import Options
from fusec.passes.training import split_batchnorm_stats
from fusec.passes.training.split_batchnorm_stats import SplitBatchNormStats
from fusec.text import parse

LAST = "{0,2,3,1}"
CONV = "conv(%x, %w) {{strides=[1, 1], pads=[0, 0, 0, 0], dilations=[1, 1], groups={groups}}}"


def ops(dtype: str = "f16", order: str = LAST, groups: int = 1, made: str = CONV, parameter: str = "f32") -> list[str]:
    """Of such a graph, behind the pass."""
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


def test_what_a_convolution_makes_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ops()[1:] == ["batch_norm_train"]  # small
    monkeypatch.setattr(split_batchnorm_stats, "KEPT_BYTES", 255)
    split = ["conv", "channel_sums", "batch_norm_by_sums"]
    assert ops() == ops("bf16") == ops(parameter="f16") == split
    monkeypatch.setattr(split_batchnorm_stats, "KEPT_BYTES", 512)
    assert ops() == ["conv", "batch_norm_train"]  # as large as what is kept


def test_all_others_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of squares cost digits that fp32 has; cuDNN wants channels side by side, and all of them in one group."""
    monkeypatch.setattr(split_batchnorm_stats, "KEPT_BYTES", 0)
    for name in (*ops("f32"), *ops(order=""), *ops(groups=8), *ops(made="mul(%x, %w)")):
        assert "sums" not in name
