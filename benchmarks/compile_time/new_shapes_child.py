"""Run the sizes of one case of `new_shapes.py` in a process of its own, and print a line of JSON for each.

Arguments: the ONNX file and the .npz file with inputs and expected outputs; then, as JSON, `tune`, the kind of kernels,
the sizes, the padded size, and the seconds of the pause after the first size.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import cupy
import numpy as np

import fusec
import fusec.dynamic_shapes.executable
import fusec.gpu.backend  # imported here, so that the first size does not pay for it
from fusec.compiler import compile_model


class Stopwatch:
    """Sums up the seconds that functions of a module take."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, module: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(module, name)

        def timed(*args: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **named)
            finally:
                self.seconds += time.perf_counter() - start

        setattr(module, name, timed)


def run_size(net: Any, x: Any, want: Any, to_program: Stopwatch) -> dict[str, Any]:
    """Return the seconds to a size's first result, those up to its program, and how long the program runs."""
    to_program.seconds, start = 0.0, time.perf_counter()
    got = net(x)
    first_s = time.perf_counter() - start
    error = float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want))
    start = time.perf_counter()
    net(x)
    second_s = time.perf_counter() - start
    program = net.at(net.shapes[-1])
    net(x)
    whole = sorted(program.time_us(21)[0])
    return {
        "first_s": first_s,
        "program_s": to_program.seconds,
        "second_s": second_s,
        "error": error,
        "run_us": whole[10],
        "low_us": whole[2],
        "high_us": whole[18],
        "asked": program.compiled.judge.oracle.asked,
    }


def main(arguments: Sequence[str]) -> None:
    path, arrays = arguments[0], np.load(arguments[1])
    tune, kernels, sizes, padded, pause = map(json.loads, arguments[2:])
    to_program = Stopwatch()
    for name in ("read_model", "build_program"):
        to_program.watch(compile_model, name)
    cupy.zeros(1)
    warnings.simplefilter("ignore")
    buckets = {"N": sorted({size[0] for size in sizes if size != padded})}
    how = {"share_kernels": kernels == "shared", "tune_each": kernels == "each", "buckets": buckets}
    net = fusec.compile_dynamic(path, precision="fp16", tune=tune, **how)
    for size in sizes:
        key = "_".join(map(str, size))
        row = run_size(net, arrays["x" + key], arrays["y" + key], to_program)
        print(json.dumps({"size": size, **row, "pause_s": pause}), flush=True)
        if size == sizes[0]:
            time.sleep(pause)


if __name__ == "__main__":
    main(sys.argv[1:])
