"""Serve a model on a device that only waits, so that the server itself is measured, also without a GPU.

Usage: python -m benchmarks.serving.stub_device FILE.fusec SECONDS_OF_A_ROW SECONDS_OF_A_BATCH [options of fusec serve].
A batch takes a fixed time and a time for each of its rows. Its results are the first numbers of each row.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import fusec
from fusec.cli import main as command
from fusec.serving.server import supervisor
from fusec.serving.server.worker import loaded_model

ROW_S, BATCH_S = "FUSEC_STUB_ROW_S", "FUSEC_STUB_BATCH_S"
RESULTS = 1000  # numbers of a row, as a classifier of ImageNet has


def model(side: int) -> onnx.ModelProto:
    """Return a network that copies a part of each image, which takes no time."""
    count = RESULTS
    nodes = [
        helper.make_node("Reshape", ["image", "flat"], ["row"]),
        helper.make_node("Slice", ["row", "start", "end", "axis"], ["part"]),
        helper.make_node("Cast", ["part"], ["y"], to=TensorProto.FLOAT),
    ]
    held = {"flat": [0, -1], "start": [0], "end": [count], "axis": [1]}
    graph = helper.make_graph(
        nodes,
        "stub",
        [helper.make_tensor_value_info("image", TensorProto.UINT8, ["N", 3, side, side])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["N", count])],
        [numpy_helper.from_array(np.array(value, np.int64), name) for name, value in held.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def compiled(side: int, batches: Sequence[int], path: Path) -> Path:
    """Compile the network for some batches."""
    made = fusec.compile(
        model(side),
        target="h200",
        shapes={"N": (batches[0], batches[-1])},
        buckets={"N": list(batches)},
        simulate=True,
    )
    made.save(path)
    return path


@dataclass(frozen=True)
class Ending:
    """The time at which a batch ends, as an event of a GPU."""

    at: float

    def synchronize(self) -> None:
        """Wait for the end of the batch."""
        time.sleep(max(0.0, self.at - time.monotonic()))


class StubModel(loaded_model.LoadedModel):
    """A model whose batches take the time that the environment says, one after the other."""

    busy_until = 0.0

    def run(self, batch: loaded_model.PreparedBatch, outputs: Sequence[str]) -> Any:
        """Hold the device for the time of a batch."""
        (image,) = batch.feeds.arrays.values()
        seconds = float(os.environ[BATCH_S]) + len(image) * float(os.environ[ROW_S])
        StubModel.busy_until = max(StubModel.busy_until, time.monotonic()) + seconds
        results = image.reshape(len(image), -1)[:, :RESULTS].astype(np.float32)
        return loaded_model.PendingResults(dict.fromkeys(outputs, results), Ending(StubModel.busy_until))


def run(module: str) -> None:
    """Run a process of the server; give this device to a worker."""
    part = importlib.import_module(f"fusec.serving.server.{module}")
    if module == "worker.model_worker":
        vars(part)["LoadedModel"] = StubModel
    part.main()


def main() -> None:
    """Compile the network, and serve it on the stub."""
    file, os.environ[ROW_S], os.environ[BATCH_S], *options = sys.argv[1:]
    start: str = vars(supervisor)["_START"]
    own = "from benchmarks.serving.stub_device import run; run({module!r})"
    vars(supervisor)["_START"] = start[: start.index("from fusec.serving.server.{module}")] + own
    sys.argv[1:] = ["serve", file, *options]
    sys.exit(command())


if __name__ == "__main__":
    main()
