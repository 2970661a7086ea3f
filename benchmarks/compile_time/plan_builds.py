"""Measure how long cuDNN takes to build its first plan for a graph, by the graph's length and by batch size.

Usage, on any machine, without a GPU: python -m benchmarks.compile_time.plan_builds
With --pointwise, only graphs of pointwise ops alone are built, and the other figures of the file stay.
Seconds are the processor time of this process, so other processes do not count. Writes
benchmarks/results/builds.json.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from typing import Any

from benchmarks.common.result_files import date_and_commit, parser, write
from fusec.gpu.cudnn.without_driver.deviceless import bring_up
from fusec.ir import DType, Graph, TensorType, Value, channels_last
from fusec.lower_cudnn import lower
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.ops import Conv, LayerNorm, MatMul, pw
from fusec.targets.target import Target, load

TARGET = "h200"
LENGTHS = (8, 16, 24, 48, 64)
POINTWISE = (1, 4, 8, 12, 16, 24, 32, 48, 64)  # ops of a graph without an anchor
EPILOGUE = ("sigmoid", "neg", "relu", "abs")
BATCHES = (8, 9, 16)
F16 = DType.F16


@dataclass(frozen=True)
class Built:
    """The first plan that builds.

    plans: how many plans cuDNN offers.
    precompiled: how many of these are not compiled at run time.
    engine: the engine of the plan; None if no plan builds.
    """

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


def with_epilogue(length: int) -> CudnnGraph:
    """Make a convolution with `length` pointwise ops after it."""

    def make(g: Graph, x: Value, w: Value) -> Value:
        y = conv(g, x, w)
        for name in islice(cycle(EPILOGUE), length):
            y = g.add(pw(name), y)
        return y

    return lowered([image(8), TensorType((64, 64, 3, 3), F16, channels_last(4))], make)


def pointwise(length: int) -> CudnnGraph:
    """Make a graph of `length` pointwise ops, of which many read a further input and store their result.

    So are the steps of a large graph of pointwise ops: about one tensor in memory for each op.
    """
    rng, graph, type = random.Random(length), Graph("case"), TensorType((8, 64, 32), DType.F32)
    values = [graph.add_input("x", type)]
    stored: list[Value] = []
    for place in range(length):
        value = rng.choice(values[-4:])
        if rng.random() < 0.4:
            value = graph.add(pw(rng.choice(EPILOGUE)), value)
        else:
            other = graph.add_input(f"x{place}", type) if rng.random() < 0.4 else rng.choice(values)
            value = graph.add(pw(rng.choice(("add", "mul", "sub", "max"))), value, other)
        values.append(value)
        if rng.random() < 0.5:
            stored.append(value)
    graph.set_outputs(list(dict.fromkeys([*stored, *(v for v in values if v.node is not None and not v.uses)])))
    return lower(graph, True).graph


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
    """Build the first plan that cuDNN can build.

    kernels: cuDNN's cache of kernels that serve all sizes; None builds for one size.
    """
    import cudnn  # only after the driver and NVRTC are loaded

    from fusec.gpu.cudnn.plans.emit import emit

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
    options = parser(__doc__, "builds.json")
    options.add_argument("--longest", type=int, default=max(LENGTHS), help="most pointwise ops after the convolution")
    options.add_argument("--pointwise", action="store_true", help="only graphs of pointwise ops alone")
    given = options.parse_args()
    target = load(TARGET)
    bring_up(target.sm)
    import cudnn

    from fusec.gpu.cudnn.plans.emit import kernel_cache

    lengths: list[dict[str, Any]] = []
    sizes: list[dict[str, Any]] = []
    result = {**date_and_commit(given.commit), "target": TARGET, "cudnn": cudnn.backend_version()}
    result |= {"lengths": lengths, "sizes": sizes}
    build(residual("relu", 4), target)  # not counted, because the first build loads libraries
    if given.pointwise:
        write(given.output, {**json.loads(given.output.read_text()), "alone": pointwise_alone(given.commit, target)})
        return 0
    for name, make in GRAPHS.items():
        kernels = kernel_cache()
        each = [asdict(build(make(batch), target, kernels)) for batch in BATCHES]
        row = {
            "graph": name,
            "batches": list(BATCHES),
            "one size": asdict(build(make(BATCHES[0]), target)),
            "all sizes": each,
        }
        sizes.append(row)
        print(row, flush=True)
    for length in (n for n in LENGTHS if n <= given.longest):
        lengths.append({"pointwise": length, **asdict(build(with_epilogue(length), target))})
        print(lengths[-1], flush=True)
    write(given.output, {**result, "alone": pointwise_alone(given.commit, target)})
    return 0


def pointwise_alone(commit: str, target: Target) -> dict[str, Any]:
    """Measure graphs of pointwise ops alone, by their number and that of their tensors in memory."""
    rows: list[dict[str, Any]] = []
    for length in POINTWISE:
        graph = pointwise(length)
        tensors = len(graph.inputs) + len(graph.outputs)
        rows.append({"pointwise": length, "tensors": tensors, **asdict(build(graph, target))})
        print(rows[-1], flush=True)
    return {**date_and_commit(commit), "load": round(os.getloadavg()[0], 1), "rows": rows}


if __name__ == "__main__":
    sys.exit(main())
