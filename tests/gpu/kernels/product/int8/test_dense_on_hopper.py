"""Test all tiles of dense products of 8-bit integers, at sizes of models, on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gpu.kernels.cases import FIGURES, each_way
from gpu.kernels.product.int8.test_dense_bytes import matrix

from fusec.gpu.kernels.product.int8 import dense_tiles
from fusec.ir import TensorType, Value
from fusec.lowering.packing import pack

SIZES = ((2048, 768, 768), (3152, 768, 2304), (3152, 3072, 768), (9000, 384, 576), (16, 3072, 768), (500, 256, 768))
RUNS = 20  # because warps that wait for each other may go wrong now and then


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_all_tiles_give_the_sums(sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    cupy: Any = pytest.importorskip("cupy")
    from fusec.gpu.launch.kernel_launcher import Launcher

    monkeypatch.setattr(dense_tiles, "MORE_WORK", float("inf"))
    case = replace(matrix(*sizes, "sums"), figures=FIGURES)
    kernel = case.kernel
    assert kernel is not None
    launcher = Launcher()
    launcher.compile(each_way(kernel))
    arrays = case.arrays(np.random.default_rng(7))
    x, weights = (cupy.asarray(array).astype(np.float64) for array in arrays.values())
    want = (x @ weights).astype(np.int32)
    for way in each_way(kernel):
        if not launcher.runs(way):
            continue
        result = cupy.empty(want.size, np.int32)
        held: dict[tuple[Value, TensorType], Any] = {}

        def memory(value: Value, type: TensorType, held: dict[Any, Any] = held, result: Any = result) -> Any:
            if value is case.outputs[0]:
                return result
            if (value, type) not in held:
                held[value, type] = cupy.asarray(np.ascontiguousarray(pack(np, arrays[value], type)))
            return held[value, type]

        run = launcher.bind(way, memory)
        for _ in range(RUNS):
            result.fill(-1)
            run()
            assert bool((result.reshape(want.shape) == want).all()), way.launches[0].entry
