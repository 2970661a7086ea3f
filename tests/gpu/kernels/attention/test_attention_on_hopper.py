"""Test every way that a kernel of attention has, those by products of four warps, too, at sizes of models, on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu.kernels.attention.test_attention_forward import BF16, F16, attended
from gpu.kernels.cases import each_way

from fusec.ir import DType, TensorType, Value
from fusec.ops import Attention

SIZES = ((77, 77), (128, 128), (197, 197), (4096, 77), (500, 1000), (1024, 1024), (4096, 4096))
CLOSE = {F16: 1e-3, BF16: 6e-3}


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", SIZES, ids=str)
@pytest.mark.parametrize("features", [40, 64])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_every_way(dtype: DType, features: int, lengths: tuple[int, int], causal: bool) -> None:
    cupy: Any = pytest.importorskip("cupy")
    from fusec.gpu.launch.kernel_launcher import Launcher

    case = attended(dtype, (2, 4, 2), lengths, (features, features), Attention(0.2, causal=causal))
    kernel = case.kernel
    assert kernel is not None
    launcher, rng = Launcher(), np.random.default_rng(3)
    launcher.compile(each_way(kernel))
    drawn = {v: rng.standard_normal(v.type.shape, np.float32).astype(dtype.numpy) for v in case.graph.inputs}
    q, k, v = (cupy.asarray(array.astype(np.float32)) for array in drawn.values())
    scores = cupy.matmul(q, cupy.repeat(k, 2, 1).transpose(0, 1, 3, 2)) * cupy.float32(0.2)
    if causal:
        scores[..., cupy.arange(lengths[0])[:, None] < cupy.arange(lengths[1])] = -cupy.inf
    weights = cupy.exp(scores - scores.max(-1, keepdims=True))
    want = cupy.matmul(weights, cupy.repeat(v, 2, 1)).get() / weights.sum(-1, keepdims=True).get()
    for way in each_way(kernel):
        if not launcher.runs(way):
            continue
        held: dict[Value, Any] = {value: cupy.asarray(array.view(np.uint16)) for value, array in drawn.items()}
        held[case.outputs[0]] = cupy.full(want.shape, 0xFFFF, np.uint16)

        def memory(value: Value, type: TensorType, held: dict[Value, Any] = held) -> Any:
            return held[value]

        launcher.bind(way, memory)()
        got = held[case.outputs[0]].get().view(dtype.numpy).astype(np.float64)
        assert np.linalg.norm(got - want) <= CLOSE[dtype] * np.linalg.norm(want), way.launches[0].entry
        assert np.abs(got - want).max() <= 20 * CLOSE[dtype] * np.abs(want).max(), way.launches[0].entry
