"""Quantise an ONNX model after training; read this file first.

The stages are: fold batch norms → choose layers → calibrate → quantise weights → measure → insert Q/DQ nodes.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from onnx import TensorProto

from fusec import frontends
from fusec.convert import file_of
from fusec.errors import FusecError
from fusec.ir import HostArray
from fusec.quantization.calibrate import CalibrationResult, Probe, calibrate
from fusec.quantization.calibration_data import CalibrationData, batches
from fusec.quantization.choose_float import choose_float
from fusec.quantization.fold_batchnorm import fold_batchnorm
from fusec.quantization.insert_qdq import QuantizedOperands, insert_qdq
from fusec.quantization.measure import Measurement, Score
from fusec.quantization.noise import edge_noise, layer_noise
from fusec.quantization.number_formats import OPSET_OF_HALVES
from fusec.quantization.placement import Placement, vector_products
from fusec.quantization.quantize_options import QuantizeOptions
from fusec.quantization.report import QuantizationReport
from fusec.quantization.thresholds import CALIBRATIONS
from fusec.quantization.weights import quantized_weight, shared_magnitudes
from fusec.system.atomic_write import written
from fusec.system.dataclass import dataclass

if TYPE_CHECKING:
    from onnx import ModelProto

    from fusec.execution.compile_options import Progress

QUANTISED = (
    *("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"),
    *("QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger", "MatMulNBits"),
)


@dataclass(frozen=True)
class QuantizedModel:
    """A quantised model, as an ONNX ModelProto, and the report about it."""

    model: ModelProto
    report: QuantizationReport

    def to_bytes(self) -> bytes:
        """Return the model as the contents of a file. Raises FusecError if it is too large for one file."""
        return file_of(self.model, "the quantised model")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model as an ONNX file, whole or not at all."""
        data = self.to_bytes()
        with written(Path(path).resolve(), durable=True) as file:
            file.write(data)


def quantize(
    model: str | os.PathLike[str] | bytes | ModelProto,
    data: CalibrationData | None = None,
    *,
    format: str = "int8",
    calibration: str = "",
    percentile: float = 99.99,
    block_size: int = 32,
    attention: bool = False,
    exclude: Collection[str] = (),
    keep_float: int = 0,
    min_sqnr: float | None = None,
    score: Score | None = None,
    max_loss: float | None = None,
    report: bool = False,
    target: str = "cpu",
    progress: Progress | None = None,
) -> QuantizedModel:
    """Quantise a trained ONNX model: insert QuantizeLinear and DequantizeLinear around what may run in few bits.

    model: an ONNX path, ONNX bytes, or a ModelProto, which is not changed.
    data: calibration data: a folder or file of `.npz` or `.npy`; arrays by input name, or one array, with many samples
        along the first dim; an iterable of batches, or a function that returns one. Formats of weights alone need none.
    format: `int8` and `fp8` (E4M3) quantise weights and activations. Weights have a scale per output channel; in fp8
        products have one scale for all weights. `weights-int8` and `weights-int4` quantise weights alone, per output
        channel and per block. All formats are symmetric.
    calibration: `max`, `entropy` or `percentile`; by default entropy for int8, max for fp8.
    percentile: percent of a tensor's elements that do not saturate, with calibration `percentile`.
    block_size: weights that share a scale in `weights-int4`.
    attention: also quantise the two products of attention.
    exclude: names of nodes to leave in float; `*` matches any text.
    keep_float: number of layers to leave in float, those that lose most.
    min_sqnr: lowest signal-to-quantisation-noise ratio of any output, in dB. As few layers as possible, those that lose
        most, stay in float.
    score, max_loss: the same for a score of your own, such as an accuracy. `score(run)` returns a number, higher for
        better; `run(feeds)` returns the outputs as a list. The score may fall by `max_loss`.
    report: measure the loss of each layer for the report, also without a bound.
    target: where calibration runs: `cpu` (NumPy), or `auto` or a name of `fusec targets` for this machine's GPU.
    progress: called with the stage, and with how many of how many parts of it are done.

    Raises FusecError if there is nothing to quantise, or data or options do not fit. Raises CheckError if a bound
    holds only with every layer in float. Raises ModelError if the model is malformed or fusec cannot import it.
    """
    options = QuantizeOptions(
        format=format,
        calibration=calibration,
        percentile=percentile,
        block_size=block_size,
        attention=attention,
        exclude=exclude,
        keep_float=keep_float,
        min_sqnr=min_sqnr,
        score=score,
        max_loss=max_loss,
        report=report,
        target=target,
        progress=progress,
    )
    return quantize_model(frontends.Source(model), data, options)


def quantize_model(source: frontends.Source, data: CalibrationData | None, options: QuantizeOptions) -> QuantizedModel:
    """Quantise a model with checked options. See `quantize`, whose keywords become the options."""
    options.report_progress("import", 0, 1)
    model = source.standalone(_least_opset(source, options))
    _require_float(model, source.file)
    fold_batchnorm(model)
    placement = _placement(model, source.file, options)
    if data is None and (options.activations is not None or (options.ranks_layers and not _only_report(options))):
        raise FusecError(f"{source.file}: calibration data is needed: give data")

    probe = None
    if options.activations is not None:
        probe = Probe(model, [name for layer in placement.layers for name in layer.tensors], options.target)
    seen = CalibrationResult()
    if data is not None and (probe is not None or options.ranks_layers):
        given = batches(data, source.interface[0])
        counted = options.method != "max"
        seen = calibrate(model, probe, given, lambda samples: options.report_progress("calibrate", samples), counted)
    if probe is not None:
        placement.leave_in_float(vector_products(placement.layers, seen.shapes))
        _require_layers(placement, source.file)

    thresholds = _thresholds(seen, options)
    operands = _operands(placement, seen, thresholds, options)
    ranking: dict[str, float] = {}
    outputs: dict[str, float] = {}
    loss = None
    if options.ranks_layers and seen.first_batches:
        measurement = Measurement(model, placement.layers, operands, seen.first_batches, options.target)
        ranking, loss = choose_float(placement, measurement, options)
        outputs = measurement.output_sqnr([layer.name for layer in placement.layers])
    quantised = insert_qdq(model, placement.layers, operands)
    edges = edge_noise(probe, placement, seen, operands) if ranking and probe is not None else ()
    report = QuantizationReport(
        model=source.file,
        format=options.format,
        calibration=options.method,
        samples=seen.samples,
        layers=layer_noise(placement, operands, ranking),
        edges=edges,
        floats=tuple(placement.floats),
        outputs=outputs,
        loss=loss,
        weight_bytes=(_weight_bytes(model), _weight_bytes(quantised)),
    )
    return QuantizedModel(quantised, report)


def _only_report(options: QuantizeOptions) -> bool:
    """Tell if no option but `report` ranks the layers. Of weights alone, such a report needs no data."""
    return not options.keep_float and options.min_sqnr is None and options.score is None


def _placement(model: ModelProto, file: str, options: QuantizeOptions) -> Placement:
    """Choose the layers to quantise, without those that the user excludes."""
    placement = Placement(
        model,
        activations=options.activations is not None,
        grouped=options.format == "int8",
        attention=options.attention,
    )
    excluded: set[str] = set()
    for pattern in options.exclude:
        named = {
            node.name for node in model.graph.node if node.name == pattern or fnmatch.fnmatchcase(node.name, pattern)
        }
        if not named:
            raise FusecError(f"{file}: exclude: no node is named {pattern!r}")
        excluded |= named
    _require_layers(placement, file)
    placement.leave_in_float(dict.fromkeys(sorted(excluded), "excluded by its name"))
    _require_layers(placement, file)
    return placement


def _least_opset(source: frontends.Source, options: QuantizeOptions) -> int:
    """Return the first opset that has the number formats, and scales in 16 bits if tensors of the model have them."""
    least = max(f.opset for f in (options.activations, options.weights) if f is not None)
    model = source.onnx
    if model is None:
        return least
    nodes = (attribute.t for node in model.graph.node for attribute in node.attribute)
    types = {tensor.data_type for tensor in (*model.graph.initializer, *nodes)}
    types |= {value.type.tensor_type.elem_type for value in model.graph.input}
    return max(least, OPSET_OF_HALVES) if types & {TensorProto.FLOAT16, TensorProto.BFLOAT16} else least


def _require_float(model: ModelProto, file: str) -> None:
    """Raise FusecError if the model is quantised already, because rounding twice loses twice."""
    for node in model.graph.node:
        if node.op_type in QUANTISED:
            raise FusecError(f"{file}: is quantised already: node {node.name!r} ({node.op_type})")


def _require_layers(placement: Placement, file: str) -> None:
    """Raise FusecError if no layer is left to quantise, with the reasons."""
    if not placement.layers:
        reasons = "; ".join(f"{each.name}: {each.reason}" for each in placement.floats[:4])
        raise FusecError(f"{file}: has no layer to quantise{f' ({reasons})' if reasons else ''}")


def _thresholds(seen: CalibrationResult, options: QuantizeOptions) -> dict[str, float]:
    """Return the magnitude from which each activation saturates. Tensors that share a histogram share it."""
    if options.activations is None:
        return {}
    choose = CALIBRATIONS[options.method]
    shared = {id(each): choose(each, options.activations, options.percentile) for each in seen.histograms.values()}
    return {name: shared[id(histogram)] for name, histogram in seen.histograms.items()}


def _operands(
    placement: Placement, seen: CalibrationResult, thresholds: dict[str, float], options: QuantizeOptions
) -> QuantizedOperands:
    """Quantise the operands of all layers."""
    format = options.activations
    scales: dict[str, HostArray] = {}
    if format is not None:
        scales = {name: format.scale(thresholds[name], seen.dtypes[name]) for name in thresholds}
    weighted = [layer for layer in placement.layers if layer.weight is not None]
    arrays = {layer.name: placement.constants.array(layer.node.input[layer.weight or 0]) for layer in weighted}
    shared = shared_magnitudes(weighted, arrays) if options.weights.wide_range else {}
    weights = {
        layer.name: quantized_weight(arrays[layer.name], layer, options.weights, options.block, shared.get(layer.name))
        for layer in weighted
    }
    return QuantizedOperands(format or options.weights, scales, weights)


def _weight_bytes(model: ModelProto) -> int:
    return sum(len(tensor.raw_data) or int(np.prod(tensor.dims)) * 4 for tensor in model.graph.initializer)
