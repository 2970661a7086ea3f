"""A graph as an ONNX model: every op is an ONNX operator, or a few of them of the same meaning.

Memory orders are left out, since ONNX has none; float attributes are rounded to 32 bits, as ONNX keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping

from onnx import ModelProto

from fusec.exporters.onnx_emit import Export, Exporter, Notes
from fusec.exporters.onnx_layers import LAYERS
from fusec.exporters.onnx_pointwise import POINTWISE
from fusec.exporters.onnx_shapes import SHAPES
from fusec.exporters.onnx_training import TRAINING
from fusec.ir import Graph


def to_onnx(graph: Graph, notes: Notes | None = None, properties: Mapping[str, str] | None = None) -> ModelProto:
    """The graph as a model of opset 21, with the same inputs and outputs; `frontends.load` reads it back.

    notes: what is written into the metadata of the operators that a node becomes; with it these get names, and values
    their types. properties: metadata of the model.

    Constants become initializers, values keep their names where no output has them. LoweringError where ONNX has
    nothing of the meaning: a linear resize whose sizes do not follow from its scales, random bits.
    """
    return Exporter(graph, EXPORT, notes or {}).model(properties or {})


EXPORT: Mapping[str, Export] = {**POINTWISE, **LAYERS, **SHAPES, **TRAINING}
