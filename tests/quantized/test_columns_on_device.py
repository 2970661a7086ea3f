"""Test products of 8-bit integers by weights that are stored by columns, on a GPU: every plan of cuDNN."""

from __future__ import annotations

import numpy as np
import pytest
from gpu.plan_check import random_buffers

from fusec.diagnostics.verify import TIES
from fusec.ir import DType
from fusec.lower_cudnn import lower
from fusec.lowering.simulator import simulate
from fusec.text import parse

pytestmark = pytest.mark.gpu

BY_COLUMNS = """graph "g" (%x: i8[197,DEPTH]) {
  %w = constant weight("w") : i8[DEPTH,COLUMNS]{1,0}
  %s = constant weight("s") : f32[COLUMNS]
  %b = constant weight("b") : f32[COLUMNS]
  %m = matmul(%x, %w)
  %f = cast(%m) {to=f32}
  %d = mul(%f, %s)
  %a = add(%d, %b)
  END
}"""
BY_COLUMNS_ENDS = {
    "in fp16": "%y = cast(%a) {to=f16}\n  return %y",
    "rounded": "%r = round(%a)\n  %c = clip(%r) {min=-128.0, max=127.0}\n  %y = cast(%c) {to=i8}\n  return %y",
}


@pytest.mark.parametrize("sizes", [(16, 16), (48, 80), (768, 2304), (3072, 768)])
@pytest.mark.parametrize("end", BY_COLUMNS_ENDS.values(), ids=BY_COLUMNS_ENDS)
def test_every_plan_of_weights_by_columns_is_right(end: str, sizes: tuple[int, int], rng: np.random.Generator) -> None:
    """fusec stores weights so. By rows, an engine that reads columns has to transpose them."""
    from fusec.gpu.backend import CudnnBackend

    depth, columns = sizes
    text = BY_COLUMNS.replace("END", end).replace("DEPTH", str(depth)).replace("COLUMNS", str(columns))
    weights = {
        "w": rng.integers(-128, 128, sizes, np.int8),
        "s": rng.uniform(0.5, 2, columns).astype(np.float32) / (100 * np.sqrt(depth)).astype(np.float32),
        "b": rng.standard_normal(columns).astype(np.float32),
    }
    graph, wrong = lower(parse(text, weights)).graph, list[str]()
    host = random_buffers(graph, rng)
    poisoned = {uid: buffer.copy() for uid, buffer in host.items()}
    simulate(graph, host)
    (result,) = graph.outputs
    runners = list(CudnnBackend("none").plan_runners(graph, 4))
    assert runners
    for choice, run in runners:
        device = {uid: buffer.copy() for uid, buffer in poisoned.items()}
        run(device)
        off = np.abs(device[result.uid].astype(np.float64) - host[result.uid].astype(np.float64))
        if result.dtype is DType.F16:
            fits = np.linalg.norm(off) <= 1e-3 * np.linalg.norm(host[result.uid].astype(np.float64))
        else:
            fits = off.max() <= 1 and np.count_nonzero(off) <= 1 + off.size * TIES
        wrong += [] if fits else [f"{choice.name} {choice.knobs}: {np.count_nonzero(off)} of {off.size}, {off.max()}"]
    assert not wrong, "\n".join(wrong)
