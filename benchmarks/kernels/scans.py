"""Compare loops as one op, and as the nodes of all their steps, with a loop of torch in a CUDA graph.

Usage: python -m benchmarks.kernels.scans, on a machine with a GPU. Writes the time of a call of each, the launches, and
the time to compile into benchmarks/results/scans.json. Loops with more work than `scan_plan` allows run as one op here
too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import fusec
from benchmarks.common.result_files import KEYS, gpu, parser, write_row
from benchmarks.kernels.deformable import call_us, feeds
from fusec.builder import Builder
from fusec.lowering import scan_plan
from fusec.ops import Scan
from fusec.passes.folding import expand_scan
from fusec.runtime import Executable

SMALL = 0.5  # of the sum of a column of weights
NEVER = -1e4  # the logarithm of a probability of zero
CALLS = 50


def alignments(b: Builder, steps: int, batch: int, size: int) -> None:
    """Add the forward variables of connectionist temporal classification: three paths, in logarithms."""
    first, scores = b.input("first", (batch, size)), b.input("scores", (steps, batch, size))

    def step(states: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
        (alpha,), (x,) = states, rows
        one, two = (b.pad(alpha, (0, n, 0, 0), value=NEVER)[:, :size] for n in (1, 2))
        paths = b.concat([v.reshape(1, batch, size) for v in (alpha, one, two)])
        total = paths.reduce("log_sum_exp", 0) + x
        return [total], [total]

    (last,), (rows,) = b.scan([first], [scores], step)
    b.output(last=last, rows=rows)


def tags(b: Builder, steps: int, batch: int, size: int) -> None:
    """Add the scores of the best sequences of tags, as the algorithm of Viterbi computes them."""
    first, scores = b.input("first", (batch, size)), b.input("scores", (steps, batch, size))
    moves = b.input("moves", (size, size))

    def step(states: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
        best = (states[0].reshape(batch, size, 1) + moves).reduce("max", 1) + rows[0]
        return [best], [best]

    (last,), (rows,) = b.scan([first], [scores], step)
    b.output(last=last, rows=rows)


def cells(b: Builder, steps: int, batch: int, size: int) -> None:
    """Add a recurrent net and its product, whose weights are small, so that rounding errors do not grow."""
    first, x = b.input("first", (batch, size)), b.input("scores", (steps, batch, size))
    w = b.input("moves", (size, size)) * (SMALL / size)

    def step(states: list[Any], rows: list[Any]) -> tuple[list[Any], list[Any]]:
        h = (rows[0] + states[0] @ w).tanh()
        return [h], [h]

    (last,), (rows,) = b.scan([first], [x], step)
    b.output(last=last, rows=rows)


MODELS: dict[str, Callable[[Builder, int, int, int], None]] = {"alignments": alignments, "tags": tags, "cells": cells}
CASES = (  # the loop, its steps, batch and size
    ("alignments", 50, 4, 21),
    ("alignments", 100, 16, 101),
    ("alignments", 100, 1, 401),
    ("tags", 100, 32, 24),
    ("cells", 100, 16, 64),
    ("tags", 50, 32, 128),
    ("tags", 50, 32, 256),
    ("cells", 50, 1, 512),
    ("cells", 50, 16, 128),
    ("cells", 50, 16, 256),
    ("cells", 50, 16, 384),
    ("cells", 50, 256, 128),
    ("cells", 50, 256, 256),
    ("alignments", 50, 256, 401),
    ("alignments", 50, 1024, 101),
)


def by_torch(name: str, steps: int, given: dict[str, Any]) -> tuple[float, np.ndarray[Any, Any]]:
    """Return the time of a call of the same loop by torch, recorded as a CUDA graph, and the results of all steps."""
    import torch
    from torch.nn.functional import pad

    held = {key: torch.as_tensor(array, device="cuda") for key, array in given.items()}

    def one(state: Any, row: Any, moves: Any) -> Any:
        if name == "alignments":
            paths = [state, *(pad(state, (n, 0), value=NEVER)[:, : state.shape[1]] for n in (1, 2))]
            return torch.logsumexp(torch.stack(paths), 0) + row
        if name == "tags":
            return (state[:, :, None] + moves).amax(1) + row
        return torch.tanh(row + state @ moves)

    def whole() -> Any:
        state, rows, moves = held["first"], list[Any](), held.get("moves")
        if name == "cells":
            moves = moves * (SMALL / state.shape[1])
        for index in range(steps):
            state = one(state, held["scores"][index], moves)
            rows.append(state)
        return torch.stack(rows)

    with torch.inference_mode():
        for _ in range(3):
            whole()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = whole()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            graph.replay()
        torch.cuda.synchronize()
        spent_us = 1e6 * (time.perf_counter() - start) / CALLS
    return spent_us, result.double().cpu().numpy()


def relative(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def measure(name: str, steps: int, batch: int, size: int) -> dict[str, Any]:
    """Return the row of a loop."""
    row: dict[str, Any] = {"case": f"{name} {steps}x{batch}x{size}"}
    results: dict[str, np.ndarray[Any, Any]] = {}
    scan_plan.MOST_WORK = sys.maxsize
    for form, plan in (("scan", scan_plan.scan_plan), ("steps", lambda op: None)):
        expand_scan.scan_plan = plan
        b, start = Builder(), time.perf_counter()
        MODELS[name](b, steps, batch, size)
        executable = fusec.compile(b)
        assert isinstance(executable, Executable)
        row[f"{form}_compile_s"] = round(time.perf_counter() - start, 2)
        row[f"{form}_us"], row[f"{form}_launches"] = round(call_us(executable), 1), executable.compiled.program.launches
        results[form] = executable.run(None, feeds(executable))[1].astype(np.float64)
    torch_us, given = by_torch(name, steps, feeds(executable))
    row["torch_us"] = round(torch_us, 1)
    row["difference"], row["torch_difference"] = (relative(results["scan"], y) for y in (results["steps"], given))
    return row


def is_one_op(case: str) -> bool:
    """Tell if `compile` takes a loop of the table as one op."""
    name, _, sizes = case.partition(" ")
    b = Builder()
    MODELS[name](b, *map(int, sizes.split("x")))
    return any(isinstance(node.op, Scan) and scan_plan.scan_plan(node.op) is not None for node in b.graph().nodes)


def main() -> int:
    options = parser(__doc__, "scans.json").parse_args()
    for case in CASES:
        row = measure(*case)
        print(row, flush=True)
        write_row(options.output, gpu(), options.commit, row, KEYS["scans.json"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
