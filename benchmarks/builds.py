"""How long cuDNN takes to build the first plan it offers for a graph, without a GPU: by length, and size by size.

Usage, on any machine: python -m benchmarks.builds. Seconds are those of a core (what the process computes), so other
work on the machine does not count. Writes benchmarks/results/builds.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from benchmarks.machine import RESULTS, made
from fusec.gpu.cudnn.deviceless import bring_up
from fusec.ir import DType, Graph, TensorType, Value, channels_last
from fusec.lower_cudnn import lower
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.ops import Conv, LayerNorm, MatMul, pw
from fusec.targets.target import Target, load

TARGET = "h200"
LENGTHS = (8, 16, 24, 48, 64)
CHAIN = ("sigmoid", "neg", "relu", "abs")
SIZES = (8, 9, 16)  # of a batch
F16 = DType.F16


@dataclass(frozen=True)
class Built:
    """plans: how many are offered; precompiled: how many of these ship compiled; engine: of the one that is built."""

    plans: int
    precompiled: int
    engine: int | None = None
    build_s: float | None = None


def lowered(types: list[TensorType], make: Callable[..., Value]) -> CudnnGraph:
    graph = Graph("case")
    graph.set_outputs([make(graph, *(graph.add_input(f"x{i}", type) for i, type in enumerate(types)))])
    return lower(graph, True).graph


def image(batch: int, channels: int = 64) -> TensorType:
    return TensorType((batch, channels, 28, 28), F16, channels_last(4))


def vector(*shape: int) -> TensorType:
    return TensorType(shape, F16)


def conv(g: Graph, x: Value, w: Value) -> Value:
    return g.add(Conv((1, 1), (1, 1, 1, 1), (1, 1), 1), x, w)


def chain(length: int) -> CudnnGraph:
    """A convolution and so many pointwise ops behind it."""

    def make(g: Graph, x: Value, w: Value) -> Value:
        y = conv(g, x, w)
        for name in islice(cycle(CHAIN), length):
            y = g.add(pw(name), y)
        return y

    return lowered([image(8), TensorType((64, 64, 3, 3), F16, channels_last(4))], make)


def residual(activation: str, batch: int) -> CudnnGraph:
    def make(g: Graph, x: Value, w: Value, b: Value, z: Value) -> Value:
        return g.add(pw("add"), g.add(pw(activation), g.add(pw("add"), conv(g, x, w), b)), z)

    filters = TensorType((64, 64, 3, 3), F16, channels_last(4))
    return lowered([image(batch), filters, vector(1, 64, 1, 1), image(batch)], make)


def product(batch: int) -> CudnnGraph:
    def make(g: Graph, x: Value, w: Value, b: Value) -> Value:
        return g.add(pw("gelu"), g.add(pw("add"), g.add(MatMul(), x, w), b))

    return lowered([vector(batch * 64, 256), vector(256, 512), vector(1, 512)], make)


GRAPHS: dict[str, Callable[[int], CudnnGraph]] = {
    "convolution + bias + sigmoid + add": lambda batch: residual("sigmoid", batch),
    "convolution + bias + relu + add": lambda batch: residual("relu", batch),
    "matmul + bias + gelu": product,
    "layer norm": lambda batch: lowered(
        [vector(batch * 64, 256), vector(256), vector(256)], lambda g, *v: g.add(LayerNorm(), *v)
    ),
    "convolution alone": lambda batch: lowered([image(batch), TensorType((64, 64, 3, 3), F16, channels_last(4))], conv),
    "pointwise": lambda batch: lowered(
        [image(batch), image(batch)], lambda g, x, z: g.add(pw("sigmoid"), g.add(pw("add"), x, z))
    ),
}


def build(graph: CudnnGraph, target: Target, kernels: Any = None) -> Built:
    """The first plan that builds; kernels: cuDNN's cache of kernels for all sizes."""
    import cudnn  # only after the driver and NVRTC are loaded

    from fusec.gpu.cudnn.emit import emit

    declined = (cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError)
    g = emit(graph, target=target, kernels=kernels)
    try:
        g.validate()
        g.build_operation_graph()
        g.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    except declined:
        return Built(0, 0)
    compiles = cudnn.behavior_note.RUNTIME_COMPILATION
    places = range(g.get_execution_plan_count())
    ready = sum(compiles not in g.get_behavior_notes_for_plan_at_index(place) for place in places)
    for place in places:
        start = time.process_time()
        try:
            g.build_plan_at_index(place)
        except declined:
            continue
        seconds = time.process_time() - start
        return Built(len(places), ready, int(g.get_engine_and_knobs_at_index(place)[0]), seconds)
    return Built(len(places), ready)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--longest", type=int, default=max(LENGTHS))
    parser.add_argument("--output", type=Path, default=RESULTS / "builds.json")
    given = parser.parse_args()
    target = load(TARGET)
    bring_up(target.sm)
    import cudnn

    from fusec.gpu.cudnn.emit import kernel_cache

    lengths: list[dict[str, Any]] = []
    sizes: list[dict[str, Any]] = []
    result = {**made(), "target": TARGET, "cudnn": cudnn.backend_version(), "lengths": lengths, "sizes": sizes}
    build(residual("relu", 4), target)  # what the first one loads is not of interest
    for name, make in GRAPHS.items():
        kernels = kernel_cache()
        each = [asdict(build(make(batch), target, kernels)) for batch in SIZES]
        row = {
            "graph": name,
            "batches": list(SIZES),
            "one size": asdict(build(make(SIZES[0]), target)),
            "all sizes": each,
        }
        sizes.append(row)
        print(row, flush=True)
    for length in (n for n in LENGTHS if n <= given.longest):
        lengths.append({"pointwise": length, **asdict(build(chain(length), target))})
        print(lengths[-1], flush=True)
    given.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
