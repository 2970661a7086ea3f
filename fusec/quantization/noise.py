"""Measure the noise of weights and of edges by themselves."""

from __future__ import annotations

from collections.abc import Mapping

from fusec.ir import HostArray
from fusec.quantization.calibrate import CalibrationResult, Probe
from fusec.quantization.histogram import on_host
from fusec.quantization.insert_qdq import QuantizedOperands
from fusec.quantization.measure import sqnr
from fusec.quantization.placement import Placement
from fusec.quantization.report import EdgeNoise, LayerNoise


def layer_noise(
    placement: Placement, operands: QuantizedOperands, ranking: Mapping[str, float]
) -> tuple[LayerNoise, ...]:
    """Describe each quantised layer. `ranking`: ratio of the worst output if only that layer is quantised, by name."""
    rows: list[LayerNoise] = []
    for layer in placement.layers:
        weight = None
        if layer.weight is not None:
            exact = placement.constants.array(layer.node.input[layer.weight])
            weight = sqnr([(exact, operands.weights[layer.name].restored)])
        rows.append(LayerNoise(layer.name, layer.node.op_type, weight, ranking.get(layer.name)))
    return tuple(rows)


def edge_noise(
    probe: Probe, placement: Placement, seen: CalibrationResult, operands: QuantizedOperands
) -> tuple[EdgeNoise, ...]:
    """Describe each quantised activation by itself, in the float model.

    probe: returns activations of the float model by name.
    seen: the batches of the calibration, with histograms.
    operands: scales and format.
    """
    scales, format = operands.scales, operands.format
    names = dict.fromkeys(name for layer in placement.layers for name in layer.tensors)
    pairs: dict[str, list[tuple[HostArray, HostArray]]] = {name: [] for name in names}
    for batch in seen.first_batches:
        arrays = {name: on_host(array) for name, array in probe(batch).items()}
        for name in names:
            pairs[name].append((arrays[name], format.rounded(arrays[name], scales[name])))
    return tuple(
        EdgeNoise(
            name, seen.histograms[name].largest, float(scales[name]) * format.largest, float(scales[name]), sqnr(found)
        )
        for name, found in pairs.items()
    )
