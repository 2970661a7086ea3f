"""Report a quantisation: each layer and each edge with its signal-to-noise ratio, and each node that stays in float."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from fusec.quantization.placement import FloatNode
from fusec.system.dataclass import dataclass
from fusec.system.printable import printable


@dataclass(frozen=True)
class LayerNoise:
    """One quantised layer.

    weight: signal-to-noise ratio of its weight in dB; None without a weight.
    output: the ratio of the model's worst output if only this layer is quantised; None if not measured.
    """

    name: str
    op: str
    weight: float | None
    output: float | None


@dataclass(frozen=True)
class EdgeNoise:
    """One quantised activation: largest magnitude, the threshold from which it saturates, scale, ratio in dB."""

    tensor: str
    largest: float
    threshold: float
    scale: float
    sqnr: float | None


@dataclass(frozen=True)
class QuantizationReport:
    """All layers that were quantised with their noise, and all nodes that were not with the reason.

    outputs: signal-to-noise ratio of each output in dB; empty if not measured.
    loss: how much lower the score is than in float, if a score was given.
    """

    model: str
    format: str
    calibration: str
    samples: int
    layers: Sequence[LayerNoise]
    edges: Sequence[EdgeNoise]
    floats: Sequence[FloatNode]
    outputs: Mapping[str, float]
    loss: float | None
    weight_bytes: tuple[int, int]

    def to_json(self) -> dict[str, Any]:
        """Return plain data. Ratios are in dB; those without noise are infinite."""
        return {**asdict(self), "outputs": dict(self.outputs), "weight_bytes": list(self.weight_bytes)}

    @property
    def summary(self) -> str:
        """Return the totals in a few lines."""
        how = f", {self.calibration} calibration on {self.samples} samples" if self.calibration else ""
        before, after = (size / 2**20 for size in self.weight_bytes)
        lines = [
            f"{self.model}: {len(self.layers)} layers in {self.format}{how}; nodes left in float: {len(self.floats)}; "
            f"weights {before:.2f} MiB -> {after:.2f} MiB"
        ]
        lines += [f"output {printable(name)}: {_db(ratio)}" for name, ratio in self.outputs.items()]
        if self.loss is not None:
            lines.append(f"score: {self.loss:.4g} lower than in float")
        return "\n".join(lines)

    def __str__(self) -> str:
        parts = [self.summary]
        if self.layers:
            parts.append("Layers, those that lose most first (output: if only this layer is quantised):")
            rows = [(printable(r.name), r.op, _db(r.output), _db(r.weight)) for r in self._sorted_layers()]
            parts.append(_table(("layer", "op", "output", "weight"), rows))
        if self.edges:
            parts.append("Edges, the noisiest first:")
            edges = sorted(self.edges, key=lambda edge: math.inf if edge.sqnr is None else edge.sqnr)
            cells = [
                (printable(e.tensor), f"{e.largest:.4g}", f"{e.threshold:.4g}", f"{e.scale:.4g}", _db(e.sqnr))
                for e in edges
            ]
            parts.append(_table(("tensor", "largest", "saturates at", "scale", "SQNR"), cells))
        if self.floats:
            parts.append("Left in float:")
            parts.append("\n".join(f"  {printable(f.name)} ({f.op}): {f.reason}" for f in self.floats))
        return "\n\n".join(parts)

    def _sorted_layers(self) -> list[LayerNoise]:
        def ratios(row: LayerNoise) -> tuple[float, ...]:
            return tuple(math.inf if ratio is None else ratio for ratio in (row.output, row.weight))

        return sorted(self.layers, key=ratios)


def _db(ratio: float | None) -> str:
    if ratio is None:
        return "-"
    return "exact" if ratio == math.inf else f"{ratio:.1f} dB"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, *rows]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)
