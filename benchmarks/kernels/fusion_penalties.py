"""Measure the two penalties of the cost model: time cuDNN's best plans with and without a fused epilogue.

Usage, on a machine with an NVIDIA GPU: python -m benchmarks.kernels.fusion_penalties [--budget SECONDS]
The first penalty: MobileNetV2's depthwise convolutions at batch 32, with bias and relu and without. The second: a
convolution with bias, residual and relu. With the bias first it has no precompiled engines, with the bias last it has.
The L2 cache is cold. Writes benchmarks/results/penalties.json.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from typing import Any

from benchmarks.common.result_files import KEYS, gpu, parser, write_row
from benchmarks.compile_time.plan_builds import lowered
from fusec.ir import DType, Graph, TensorType, Value, channels_last
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.ops import Conv, pw

# Channels, height of the image and stride of MobileNetV2's 17 depthwise convolutions.
DEPTHWISE = [(32, 112, 1), (96, 112, 2), (144, 56, 1), (144, 56, 2), (192, 28, 1), (192, 28, 1), (192, 28, 2)]
DEPTHWISE += [(384, 14, 1)] * 4 + [(576, 14, 1)] * 2 + [(576, 14, 2)] + [(960, 7, 1)] * 3
F16 = DType.F16
FOOTPRINT_BYTES = 1 << 30  # memory of the whole model: more than any L2 cache holds


def nhwc(*shape: int) -> TensorType:
    return TensorType(shape, F16, channels_last(4))


def depthwise(channels: int, high: int, stride: int, fused: bool, batch: int = 32) -> CudnnGraph:
    def make(g: Graph, x: Value, w: Value, *bias: Value) -> Value:
        y = g.add(Conv((stride, stride), (1, 1, 1, 1), (1, 1), channels), x, w)
        return g.add(pw("relu"), g.add(pw("add"), y, *bias)) if bias else y

    types = [nhwc(batch, channels, high, high), nhwc(channels, 1, 3, 3)]
    return lowered([*types, TensorType((1, channels, 1, 1), F16)] if fused else types, make)


def residual(bias_first: bool) -> CudnnGraph:
    def make(g: Graph, x: Value, w: Value, b: Value, z: Value) -> Value:
        y = g.add(Conv((1, 1), (0, 0, 0, 0), (1, 1), 1), x, w)
        for addend in (b, z) if bias_first else (z, b):
            y = g.add(pw("add"), y, addend)
        return g.add(pw("relu"), y)

    types = [nhwc(32, 64, 56, 56), nhwc(256, 64, 1, 1), TensorType((1, 256, 1, 1), F16), nhwc(32, 256, 56, 56)]
    return lowered(types, make)


def total_us(graphs: list[CudnnGraph], times_us: Callable[[dict[str, CudnnGraph], int], dict[str, float]]) -> float:
    """Return the time of all graphs together; equal graphs are timed once."""
    count, by_key = Counter(graph.key for graph in graphs), {graph.key: graph for graph in graphs}
    times = times_us(by_key, FOOTPRINT_BYTES)
    return sum(times[key] * n for key, n in count.items())


def rows(times_us: Callable[[dict[str, CudnnGraph], int], dict[str, float]]) -> list[dict[str, Any]]:
    plain = total_us([depthwise(*layer, fused=False) for layer in DEPTHWISE], times_us)
    fused = total_us([depthwise(*layer, fused=True) for layer in DEPTHWISE], times_us)
    fast, slow = (total_us([residual(bias_first)], times_us) for bias_first in (False, True))
    return [
        {
            "penalty": "depthwise convolution, something fused",
            "layers": len(DEPTHWISE),
            "us": fused,
            "without_us": plain,
        },
        {"penalty": "no fast precompiled engine", "layers": 1, "us": slow, "without_us": fast},
    ]


def main() -> int:
    given = parser(__doc__, "penalties.json", budget=True).parse_args()
    from fusec.gpu.autotune.plans.plan_search import TuningOptions
    from fusec.gpu.backend import CudnnBackend

    machine = gpu()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FUSEC_CACHE"] = folder  # an empty cache
        backend = CudnnBackend(TuningOptions("quick", given.budget))
        for row in rows(backend.plans.times_us):
            print(f"{row['penalty']}: {row['us']:.1f} us against {row['without_us']:.1f}", flush=True)
            write_row(given.output, machine, given.commit, row, KEYS["penalties.json"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
