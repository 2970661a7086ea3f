"""Run a model on calibration data, and collect the magnitudes of the tensors to quantise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np
from onnx import ModelProto

from fusec.driver import compile_dynamic
from fusec.errors import FusecError
from fusec.ir import HostArray
from fusec.quantization.calibration_data import Batch
from fusec.quantization.histogram import Histogram
from fusec.runtime import Executable
from fusec.system.dataclass import dataclass

SAMPLES = 8  # samples that measurements repeat for each layer; more tell little about which layers lose most

# Ops whose results hold only values of their operand. A scale that is the operand's lets `QuantizeLinear` move before
# them, so that one tensor of codes serves all readers.
_SELECTS = ("Dropout", "Flatten", "Identity", "MaxPool", "Reshape", "Squeeze", "Transpose", "Unsqueeze")


@dataclass
class CalibrationResult:
    """Magnitudes, shapes and first batches of the calibration data.

    histograms: by tensor name; tensors that share a scale share one.
    shapes, dtypes: shape and type of each tensor in the first batch.
    first_batches: the first batches, for measurements.
    """

    histograms: dict[str, Histogram] = field(default_factory=dict[str, Histogram])
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict[str, tuple[int, ...]])
    dtypes: dict[str, np.dtype[Any]] = field(default_factory=dict[str, "np.dtype[Any]"])
    first_batches: list[Batch] = field(default_factory=list[Batch])
    samples: int = 0


class Probe:
    """A model that also returns some of its tensors."""

    def __init__(self, model: ModelProto, tensors: Sequence[str], target: str):
        inputs = {value.name for value in model.graph.input}
        self.tensors = list(dict.fromkeys(tensors))
        self._computed = [name for name in self.tensors if name not in inputs]
        probed = ModelProto()
        probed.CopyFrom(model)
        if self._computed:
            del probed.graph.output[:]
        for name in self._computed:
            probed.graph.output.add(name=name)
        self._executable = compile_dynamic(probed, target=target, tune="none")

    def __call__(self, batch: Batch) -> dict[str, HostArray]:
        """Return the tensors by name, those that a GPU computes as arrays of CuPy."""
        computed = self._executable.run(self._computed, self._on_device(batch)) if self._computed else []
        found = dict(zip(self._computed, computed, strict=True))
        return {name: found[name] if name in found else batch[name] for name in self.tensors}

    def _on_device(self, batch: Batch) -> Batch:
        """Copy a batch to where the model runs, because results then stay there. Host steps need it on the host."""
        program = self._executable.at({name: array.shape for name, array in batch.items()})
        return {n: program.backend.from_any(a) for n, a in batch.items()} if isinstance(program, Executable) else batch


def calibrate(
    model: ModelProto,
    probe: Probe | None,
    data: Iterable[Batch],
    progress: Callable[[int], None],
    counted: bool,
) -> CalibrationResult:
    """Run all batches once.

    probe: returns the tensors to quantise; None to keep batches only.
    counted: count magnitudes; else only the largest of each tensor is known.
    progress: called with the number of samples after each batch.

    Raises FusecError if there is no batch. Raises ModelError if a tensor has an infinity or NaN.
    """
    result = CalibrationResult()
    sources = range_sources(model) if probe else {}
    shared: dict[str, Histogram] = {}
    rows_stored = 0
    for batch in data:
        rows = max((array.shape[0] for array in batch.values() if array.ndim), default=1)
        if rows_stored < SAMPLES:
            result.first_batches.append(batch)
            rows_stored += rows
        elif probe is None:
            break
        for name, array in (probe(batch) if probe else {}).items():
            histogram = shared.setdefault(sources.get(name, name), Histogram(name, counted))
            result.histograms[name] = histogram
            result.shapes.setdefault(name, array.shape)
            result.dtypes.setdefault(name, array.dtype)
            histogram.add(array)
        result.samples += rows
        progress(result.samples)
    if not result.first_batches:
        raise FusecError("calibration data: holds no batches")
    return result


def range_sources(model: ModelProto) -> Mapping[str, str]:
    """Return the tensor from which each tensor's values are selected, where that is another one."""
    sources: dict[str, str] = {}
    for node in model.graph.node:  # sorted
        if node.op_type in _SELECTS and node.domain == "":
            sources[node.output[0]] = sources.get(node.input[0], node.input[0])
    return sources
