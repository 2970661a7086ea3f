"""Compare the kernel of deformable convolutions with its parts: a grid_sample of all windows, and a product.

Usage: python -m benchmarks.kernels.deformable, on a machine with a GPU. Writes the time of a call of each, and how many
blocks the kernel has for a processor, into benchmarks/results/deformable.json. The pass expand_deform_conv chooses.
"""

from __future__ import annotations

import math
import sys
import time
from typing import Any

import numpy as np

import fusec
from benchmarks.common.result_files import KEYS, gpu, parser, write_row
from fusec.builder import Builder
from fusec.ops import DeformConv
from fusec.passes.folding import expand_deform_conv
from fusec.passes.folding.expand_deform_conv import FILTERS, WINDOWS
from fusec.runtime import Executable
from fusec.targets.target import load

# batch, channels, pixels of a side, filters
CASES = ((4, 256, 64, 256), (8, 64, 56, 64), (2, 512, 28, 512), (1, 256, 100, 256))
CALLS = 50


def model(batch: int, channels: int, side: int, filters: int) -> Builder:
    """Make a masked convolution of 3 x 3 with a relu."""
    b, rng = Builder(), np.random.default_rng(0)
    x, offset, mask = (b.input(n, (batch, c, side, side)) for n, c in (("x", channels), ("offset", 18), ("mask", 9)))
    w = b.constant((rng.standard_normal((filters, channels, 3, 3)) / 20).astype(np.float32))
    b.output(y=b.apply(DeformConv((1, 1), (1,) * 4, (1, 1)), x, w, offset, mask).pointwise("relu"))
    return b


def feeds(executable: Executable) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return {spec.name: 2 * rng.standard_normal(spec.shape).astype(spec.dtype) for spec in executable.inputs}


def call_us(executable: Executable) -> float:
    """Return the time of a call with inputs and results on the device."""
    import cupy

    given = {name: cupy.asarray(array) for name, array in feeds(executable).items()}
    for _ in range(5):
        executable.run(None, given)
    cupy.cuda.Device().synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        executable.run(None, given)
    cupy.cuda.Device().synchronize()
    return 1e6 * (time.perf_counter() - start) / CALLS


def measure(case: tuple[int, int, int, int], precision: str) -> dict[str, Any]:
    """Return the row of a case."""
    batch, channels, side, filters = case
    blocks = math.ceil(batch * side * side / WINDOWS) * math.ceil(filters / FILTERS)
    row: dict[str, Any] = {"case": "x".join(map(str, case)), "precision": precision, "products": 9 * channels}
    row["blocks_a_processor"] = round(blocks / load("h200").processors, 2)
    results: dict[str, np.ndarray[Any, Any]] = {}
    for form, least in (("kernel", 0), ("parts", math.inf)):
        expand_deform_conv.LEAST_BLOCKS, expand_deform_conv.MOST_PRODUCTS = least, 0
        executable = fusec.compile(model(*case), precision=precision)
        assert isinstance(executable, Executable)
        row[f"{form}_us"], row[f"{form}_launches"] = round(call_us(executable), 1), executable.compiled.program.launches
        results[form] = executable.run(None, feeds(executable))[0].astype(np.float64)
    row["difference"] = float(np.linalg.norm(results["parts"] - results["kernel"]) / np.linalg.norm(results["kernel"]))
    return row


def main() -> int:
    options = parser(__doc__, "deformable.json").parse_args()
    for case in CASES:
        for precision in ("fp16", "fp32"):
            row = measure(case, precision)
            print(row, flush=True)
            write_row(options.output, gpu(), options.commit, row, KEYS["deformable.json"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
