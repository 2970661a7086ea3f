"""Find the functions of ops outside ONNX's default domain.

Their modules are imported when a model has such an op, because most models have none.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from onnx import defs

from fusec.frontends.onnx.emission.emit import OpFunction

MICROSOFT, CLASSICAL, TRAINING = "com.microsoft", "ai.onnx.ml", "ai.onnx.preview.training"
_SIMPLIFIED = ("", "SimplifiedLayerNormalization")  # onnxruntime's, though it is in the default domain


@cache
def contrib_functions() -> Mapping[tuple[str, str], OpFunction]:
    """Return the functions of ops that the installed onnx does not know, by domain and op."""
    from fusec.frontends.onnx import contrib

    return {
        **{(MICROSOFT, op): function for table in contrib.TABLES for op, function in table.items()},
        _SIMPLIFIED: contrib.normalization.simplified_layer_norm,
    }


def contrib_function(op: str, domain: str) -> tuple[OpFunction, defs.OpSchema] | None:
    """Return the function of an op that the installed onnx does not know, and its schema; None for other ops."""
    if domain != MICROSOFT and (domain, op) != _SIMPLIFIED:
        return None
    from fusec.frontends.onnx.contrib.schemas import schema_from

    function = contrib_functions().get((domain, op))
    return None if function is None else (function, schema_from(function, op, domain))


def functions_of(domain: str) -> Mapping[str, OpFunction] | None:
    """Return the functions of one of ONNX's other domains, which serve all versions, by op; None for other domains."""
    if domain == CLASSICAL:
        from fusec.frontends.onnx import classical

        return classical.TABLE
    if domain == TRAINING:
        from fusec.frontends.onnx import training_steps

        return training_steps.TABLE
    return None
