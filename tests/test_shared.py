"""Weights that programs have in common: equal ones once, in each memory order that is read."""

from __future__ import annotations

import gc
import weakref

import numpy as np

from fusec.ir import Literal
from fusec.shared import SharedWeights


def test_an_array_is_prepared_once_for_each_memory_order() -> None:
    weights, array = SharedWeights(), np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    same, other = Literal.of(array), Literal.of(array + 1)
    first = weights.prepared(Literal.of(array), (), lambda: array.copy())
    turned = weights.prepared(same, (0, 2, 1), lambda: array.transpose(0, 2, 1).copy())
    assert turned is not first and turned.shape == (2, 4, 3)
    assert weights.prepared(same, (), lambda: array.copy()) is first
    assert weights.prepared(same, (0, 2, 1), lambda: array.copy()) is turned
    assert weights.prepared(other, (), lambda: array + 1) is not first
    gone = weakref.ref(first)
    del first
    gc.collect()
    assert gone() is None, "what no program holds is let go of"
