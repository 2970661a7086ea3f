"""Compile an exported ResNet-50 for this machine's GPU (or for an H200), show what fused, run it, and check the result.

The weights are seeded random numbers, because each weight tensor in the file repeats one number, which would hide a
wrong layout. The result is compared with onnxruntime's on the CPU. With --save it only writes the model.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from models import light, random_inputs, randomised

import fusec

ALLOWED = 1e-4  # relative L2 error in fp32


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--save", type=Path, metavar="FILE.onnx", help="write the model, and do nothing else")
    file: Path | None = parser.parse_args().save
    model = randomised(onnx.load(light("resnet50")), seed=2024)
    if file is not None:
        onnx.save(model, file)
        print(f"wrote {file}, {file.stat().st_size / 2**20:.1f} MiB")
        return 0
    inputs = random_inputs(model, seed=7)

    start = time.perf_counter()
    executable = fusec.compile(model.SerializeToString(), target="auto", precision="fp32")
    compile_s = time.perf_counter() - start
    print(executable.explain())

    start = time.perf_counter()
    (got,) = executable.run(None, inputs)
    run_s = time.perf_counter() - start

    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (want,) = session.run(None, inputs)
    error = float(np.linalg.norm(got.astype(np.float64) - want) / np.linalg.norm(want))
    program = executable.compiled.program
    where = "in simulation" if executable.device == "simulated" else f"on {executable.device}"
    print(
        f"\nResNet-50 for {executable.compiled.target.name}: {program.counts}, compiled in {compile_s:.1f} s, "
        f"run {where} in {run_s:.2f} s"
    )
    print(f"relative L2 distance from onnxruntime: {error:.1e} (allowed {ALLOWED:.0e})")
    return 0 if error <= ALLOWED else 1  # NaN is never <= a number


if __name__ == "__main__":
    sys.exit(main())
