"""Measure what quantisation costs in accuracy: the toy framework's CNN and ViT on handwritten digits.

Usage: python -m benchmarks.checks.quantized_accuracy [--target cpu|auto] [cnn vit]
Each model is trained, exported to ONNX and quantised in each format with the training images as calibration data. The
test images are classified by fusec (`--target`: NumPy, or this machine's GPU) and by onnxruntime on the CPU, which runs
the nodes as they are written. onnxruntime's own quantiser is measured on the same models. Writes
benchmarks/results/quantization.json. Status 1 if a format loses more than its goal.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from threadpoolctl import threadpool_limits

import fusec
from benchmarks.common.result_files import KEYS, gpu, parser, write_row
from examples.toy_framework import nn
from examples.toy_framework.data import DataLoader, digits
from examples.toy_framework.optim import AdamW
from examples.toy_framework.train_digits import RECIPES
from examples.toy_framework.trainer import Trainer, accuracy, in_batches

BATCH = 64
GOALS = {"int8": 0.003, "fp8": 0.003, "weights-int8": 0.003, "weights-int4": 0.01}  # accuracy that a format may lose
Images = np.ndarray[Any, Any]


def trained(name: str) -> bytes:
    """Train a model as `train_digits` does, and return it as ONNX."""
    make, epochs, rate, _ = RECIPES[name]
    threadpool_limits(1)
    nn.seed(0)
    images, labels, _, _ = digits()
    trainer = Trainer(make(), AdamW(0.05), images.shape[1:], BATCH)
    trainer.fit(DataLoader(images, labels, BATCH, np.random.default_rng(0)), epochs, rate, say=lambda text: None)
    return trainer.export()


def in_onnxruntime(model: bytes) -> float:
    """Return the accuracy in onnxruntime, which runs the nodes as they are written: optimised, it misplaces fp8."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    return correct(lambda x: session.run(None, {"x": x})[0])


def correct(run: Callable[[Images], Images]) -> float:
    _, _, images, labels = digits()
    return accuracy(in_batches(run, images, BATCH), labels)


def by_fusec(model: bytes, format: str, target: str) -> dict[str, Any]:
    """Quantise a model with fusec and measure it."""
    images, *_ = digits()
    start = time.perf_counter()
    quantised = fusec.quantize(model, images, format=format)
    seconds = time.perf_counter() - start
    report = fusec.quantize(model, images, format=format, report=True).report
    made = quantised.to_bytes()
    executable = fusec.compile(made, target=target)
    return {
        "calibration": report.calibration,
        "layers": len(report.layers),
        "left_in_float": len(report.floats),
        "weight_kib": [round(size / 1024, 1) for size in report.weight_bytes],
        "sqnr_db": round(min(report.outputs.values()), 1),
        "accuracy": correct(lambda x: executable.run(None, {"x": x})[0]),
        "onnxruntime": in_onnxruntime(made),
        "seconds": round(seconds, 2),
    }


def by_onnxruntime(model: bytes, format: str) -> dict[str, Any]:
    """Quantise a model with onnxruntime's quantiser: QDQ, scales per channel, symmetric, biases in float."""
    from onnxruntime import quantization as ort

    images, *_ = digits()
    batches = [{"x": images[i : i + BATCH]} for i in range(0, len(images) - BATCH + 1, BATCH)]

    class Reader(ort.CalibrationDataReader):
        def __init__(self):
            self.left = iter(batches)

        def get_next(self) -> dict[str, Images] | None:
            return next(self.left, None)

    int8 = format == "int8"
    type = ort.QuantType.QInt8 if int8 else ort.QuantType.QFLOAT8E4M3FN
    method = ort.CalibrationMethod.Entropy if int8 else ort.CalibrationMethod.Distribution
    with tempfile.TemporaryDirectory() as folder:
        source, goal = Path(folder) / "float.onnx", Path(folder) / "quantised.onnx"
        source.write_bytes(model)
        start = time.perf_counter()
        try:
            ort.quantize_static(
                source,
                goal,
                Reader(),
                quant_format=ort.QuantFormat.QDQ,
                per_channel=True,
                activation_type=type,
                weight_type=type,
                calibrate_method=method,
                extra_options={"ActivationSymmetric": True, "QuantizeBias": False},
            )
            seconds = round(time.perf_counter() - start, 2)
            made = goal.read_bytes()
            found = fusec.compile(made, target="cpu")
            own = correct(lambda x: found.run(None, {"x": x})[0])
            figures = {"accuracy": own, "onnxruntime": in_onnxruntime(made), "seconds": seconds}
        except Exception as error:  # noqa: BLE001  # its errors have no common base class; the table tells them
            figures = {"error": f"{error.__class__.__name__}: {str(error).splitlines()[0][:64]}"}
    return {"calibration": method.name.lower(), **figures}


def measured(name: str, target: str, where: str) -> Iterator[dict[str, Any]]:
    """Yield a row for each format and quantiser."""
    model = trained(name)
    exact = in_onnxruntime(model)
    for format in GOALS:
        case = {"model": name, "format": format, "tool": "fusec", "where": where, "float": exact}
        yield {**case, **by_fusec(model, format, target)}
    for format in ("int8", "fp8") if target == "cpu" else ():
        case = {"model": name, "format": format, "tool": "onnxruntime", "where": where, "float": exact}
        yield {**case, **by_onnxruntime(model, format)}


def tables(data: dict[str, Any]) -> str:
    """Return the table of docs/quantize-a-model.md."""
    lines = [
        "| model | format | quantised by | fusec runs on | in float | in fusec | in onnxruntime | SQNR dB | KiB | s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in data["rows"]:
        cells = [row["model"], f"{row['format']} {row['calibration']}".strip(), row["tool"], row["where"]]
        cells.append(f"{row['float']:.2%}")
        if "error" in row:
            cells += [row["error"].replace("|", "/"), "", "", "", ""]
        else:
            before, after = row.get("weight_kib", ("", ""))
            cells += [f"{row['accuracy']:.2%}", f"{row['onnxruntime']:.2%}", str(row.get("sqnr_db", ""))]
            cells += [f"{before} → {after}" if before else "", str(row["seconds"])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    options = parser(__doc__, "quantization.json")
    options.add_argument("models", nargs="*", default=list(RECIPES))
    options.add_argument("--target", default="cpu", choices=("cpu", "auto"))
    given = options.parse_args()
    where = f"NumPy, {os.cpu_count()} cores" if given.target == "cpu" else gpu()["gpu"]
    good = True
    for name in given.models:
        for row in measured(name, given.target, where):
            write_row(given.output, {}, given.commit, row, KEYS["quantization.json"])
            print(row, flush=True)
            if row["tool"] == "fusec":
                lost = row["float"] - min(row["accuracy"], row["onnxruntime"])
                good = good and lost <= GOALS[row["format"]]
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
