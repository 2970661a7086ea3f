"""Export a graph as an ONNX model. Each op becomes an ONNX operator, or several that compute the same.

Layouts are left out, because ONNX has none. Float attributes are rounded to 32 bits, because ONNX stores them so.
"""

from __future__ import annotations

from collections.abc import Mapping

from onnx import ModelProto

from fusec.exporters.onnx_emit import Export, Exporter, Notes
from fusec.exporters.onnx_layers import LAYERS
from fusec.exporters.onnx_loops import LOOPS
from fusec.exporters.onnx_pointwise import POINTWISE
from fusec.exporters.onnx_recurrent import RECURRENT
from fusec.exporters.onnx_shapes import SHAPES
from fusec.exporters.onnx_training import TRAINING
from fusec.ir import Graph


def to_onnx(graph: Graph, notes: Notes | None = None, properties: Mapping[str, str] | None = None) -> ModelProto:
    """Export a graph as an ONNX model of opset 21 with the same inputs and outputs. `frontends.load` can read it.

    Constants become initializers. Values keep their names, unless an output has the same name.

    notes: metadata for the operators that a node becomes. With notes, operators get names and values get types.
    properties: metadata of the model.

    Raises LoweringError if ONNX cannot express an op: random bits, signed shifts, or a linear resize whose sizes
    do not follow from its scales.
    """
    return Exporter(graph, EXPORT, notes or {}).model(properties or {})


EXPORT: Mapping[str, Export] = {**POINTWISE, **LAYERS, **RECURRENT, **LOOPS, **SHAPES, **TRAINING}
