"""Measure how compile time grows with the size of the graph, with cuDNN's verdicts cached.

Usage: python -m benchmarks.compile_time.graph_size. Writes benchmarks/results/scaling.json.
"""

from __future__ import annotations

import os
import time

import numpy as np

from benchmarks.common.result_files import date_and_commit, parser, write
from fusec import driver
from fusec.ir import DType, Graph, TensorType
from fusec.ops import Conv, pw
from fusec.passes import PIPELINE
from fusec.passes.base import Options, run

SIZES = (2500, 5000, 10_000, 20_000)


def network(nodes: int) -> Graph:
    """Make a sequence of convolution, bias and activation, with a residual add in every second block."""
    graph, rng = Graph("sequence"), np.random.default_rng(0)
    x = skip = graph.add_input("x", TensorType((1, 16, 8, 8), DType.F32))
    block = 0
    while len(graph) < nodes:
        weight = graph.constant(0.05 * rng.standard_normal((16, 16, 3, 3)).astype(np.float32))
        bias = graph.constant(rng.standard_normal((1, 16, 1, 1)).astype(np.float32))
        y = graph.add(pw("add"), graph.add(Conv((1, 1), (1, 1, 1, 1), (1, 1)), x, weight), bias)
        if block % 2:
            y = skip = graph.add(pw("add"), y, skip)
        x = graph.add(pw("relu" if block % 3 else "gelu"), y)
        block += 1
    graph.set_outputs([x])
    return graph


def main() -> None:
    given = parser(__doc__, "scaling.json").parse_args()
    driver.build(network(SIZES[0]), target="h200")  # caches the verdicts
    rows: list[dict[str, float]] = []
    for size in SIZES:
        graph = network(size)
        start = time.perf_counter()
        run(PIPELINE, graph.clone(), Options())
        passes_s = time.perf_counter() - start
        start = time.perf_counter()
        compiled = driver.build(graph, target="h200")
        all_s = time.perf_counter() - start
        rows.append(
            {
                "nodes": len(graph),
                "passes_s": round(passes_s, 2),
                "all_s": round(all_s, 2),
                "launches": compiled.program.launches,
            }
        )
        print(rows[-1], flush=True)
    write(given.output, {**date_and_commit(given.commit), "cores": os.cpu_count(), "graphs": rows})


if __name__ == "__main__":
    main()
