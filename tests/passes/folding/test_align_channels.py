"""Test that padded channels keep the meaning of random graphs, in which four channels become six."""

from __future__ import annotations

import numpy as np
import pytest
from passes.cases import assert_same_meaning
from passes.test_random import random_graph

from fusec.ir import DType
from fusec.passes.base import run
from fusec.passes.folding.align_channels import AlignChannels

MODULE = "fusec.passes.folding.align_channels"


def test_random_graphs_keep_their_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{MODULE}.HALVES", frozenset({DType.F64}))
    monkeypatch.setattr(f"{MODULE}._TOGETHER", 3)
    monkeypatch.setattr(f"{MODULE}._ENOUGH_CHANNELS", 1)
    monkeypatch.setattr(f"{MODULE}._pays", lambda *_: True)
    padded = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        before = random_graph(rng, 14)
        after = run((AlignChannels(),), before.clone())
        padded += str(after) != str(before)
        assert_same_meaning(before, after, rng, 1e-9)
    assert padded > 20
