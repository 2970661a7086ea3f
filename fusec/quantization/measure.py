"""Measure the noise that quantisation adds, and find which layers to leave in float.

One program holds all layers both ways: a bool input for each layer says if it reads quantised operands. So every set of
layers is measured without another compilation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
from onnx import ModelProto

from fusec.driver import compile_dynamic
from fusec.errors import FusecError
from fusec.ir import HostArray
from fusec.quantization.calibration_data import Batch
from fusec.quantization.insert_qdq import QuantizedOperands, insert_qdq
from fusec.quantization.placement import QuantizedLayer

Run: TypeAlias = Callable[[Mapping[str, HostArray]], list[HostArray]]
Score: TypeAlias = Callable[[Run], float]


def sqnr(pairs: Iterable[tuple[HostArray, HostArray]]) -> float:
    """Return the signal-to-quantisation-noise ratio in dB: 10 log10(sum of x^2 / sum of (x - y)^2).

    pairs: exact and quantised values. Elements that are not finite in the exact one, such as masks, do not count.
    """
    signal = noise = 0.0
    for exact, quantised in pairs:
        x, y = exact.astype(np.float64), quantised.astype(np.float64)
        finite = np.isfinite(x)
        signal += float(np.square(x[finite]).sum())
        noise += float(np.square(x[finite] - y[finite]).sum())
    if math.isnan(noise) or noise == 0:
        return -math.inf if noise else math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


class Measurement:
    """Runs a model with any set of its layers quantised."""

    def __init__(
        self,
        model: ModelProto,
        layers: Sequence[QuantizedLayer],
        operands: QuantizedOperands,
        batches: Sequence[Batch],
        target: str,
    ):
        taken = {value.name for value in model.graph.input}
        self.layers = layers
        self._switches = {layer.name: f"quantize {layer.name}" for layer in layers}
        if clash := taken.intersection(self._switches.values()):
            raise FusecError(f"the model has an input named {min(clash)!r}, which measurements need")
        switchable = insert_qdq(model, layers, operands, self._switches)
        self._executable = compile_dynamic(switchable, target=target, tune="none")
        self._batches = batches
        self.outputs = [value.name for value in model.graph.output]
        self._exact = [self.run((), batch) for batch in batches]
        self._floats = [i for i, array in enumerate(self._exact[0]) if array.dtype.kind not in "biu"]

    def run(self, quantised: Collection[str], batch: Mapping[str, HostArray]) -> list[HostArray]:
        """Return the outputs if these layers, by name, read quantised operands."""
        switches = {switch: np.array(name in quantised) for name, switch in self._switches.items()}
        return self._executable.run(self.outputs, {**batch, **switches})

    def output_sqnr(self, quantised: Collection[str]) -> dict[str, float]:
        """Return the ratio of each floating-point output, in dB, over the measured batches."""
        got = [self.run(quantised, batch) for batch in self._batches]
        return {
            self.outputs[i]: sqnr((exact[i], found[i]) for exact, found in zip(self._exact, got, strict=True))
            for i in self._floats
        }

    def lowest_sqnr(self, quantised: Collection[str]) -> float:
        """Return the ratio of the worst output. Raises FusecError if no output is floating point."""
        if not self._floats:
            raise FusecError("no output of the model is floating point, so it has no signal-to-noise ratio: give score")
        return min(self.output_sqnr(quantised).values())

    def sensitivities(self, progress: Callable[[int], None]) -> dict[str, float]:
        """Return the ratio, by layer name, if only this layer is quantised. The lowest first."""
        found: dict[str, float] = {}
        for index, layer in enumerate(self.layers):
            found[layer.name] = self.lowest_sqnr((layer.name,))
            progress(index + 1)
        return dict(sorted(found.items(), key=lambda item: item[1]))


def fewest_in_float(order: Sequence[str], least: int, holds: Callable[[set[str]], bool]) -> int | None:
    """Return how many layers must stay in float, the most sensitive first, so that a bound holds.

    order: names of layers, the most sensitive first.
    least: number of layers that stay in float anyway.
    holds: tells if the bound holds with these layers quantised. More float layers are taken to lose less.

    Returns None when the bound holds only with no layer quantised.
    """
    low, high = least, len(order)  # the bound holds at `high`, because nothing is quantised there
    while low < high:
        middle = (low + high) // 2
        if holds(set(order[middle:])):
            high = middle
        else:
            low = middle + 1
    return None if high == len(order) else high
