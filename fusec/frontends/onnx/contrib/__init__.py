"""Import the ops that onnxruntime adds to ONNX: domain com.microsoft, and SimplifiedLayerNormalization.

onnxruntime's optimiser, its quantiser and its model builder write them. The installed onnx has no schemas for them, so
`schemas.py` makes each schema from the signature of the op's function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusec.frontends.onnx.contrib import (
    activations,
    attention,
    grouped_attention,
    normalization,
    products,
    quantized,
    quantized_products,
    quantized_recurrent,
    shapes,
)
from fusec.frontends.onnx.emission.emit import OpFunction

TABLES: Sequence[Mapping[str, OpFunction]] = (
    activations.TABLE,
    attention.TABLE,
    grouped_attention.TABLE,
    normalization.TABLE,
    products.TABLE,
    quantized.TABLE,
    quantized_products.TABLE,
    quantized_recurrent.TABLE,
    shapes.TABLE,
)
