"""Make the schema of an op that the installed onnx does not know from the signature of the function that imports it.

Positional parameters are the operands, optional ones have a default. Keyword parameters are the attributes.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from onnx import defs

from fusec.frontends.onnx.emission.emit import OpFunction

_Parameter = defs.OpSchema.FormalParameter
_Option = defs.OpSchema.FormalParameterOption
_KINDS: Mapping[str, defs.OpSchema.AttrType] = {
    "int": defs.OpSchema.AttrType.INT,
    "float": defs.OpSchema.AttrType.FLOAT,
    "str": defs.OpSchema.AttrType.STRING,
    "Sequence[int]": defs.OpSchema.AttrType.INTS,
    "Sequence[float]": defs.OpSchema.AttrType.FLOATS,
    "Sequence[str]": defs.OpSchema.AttrType.STRINGS,
}
_MOST_RESULTS = 4  # of an op in these tables


def schema_from(function: OpFunction, name: str, domain: str) -> defs.OpSchema:
    """Return a schema with the operands and attributes that `function` takes. The op has up to four results."""
    operands: list[_Parameter] = []
    attributes: list[defs.OpSchema.Attribute] = []
    for parameter in list(inspect.signature(function).parameters.values())[1:]:
        if parameter.kind is parameter.KEYWORD_ONLY:
            kind = _KINDS[str(parameter.annotation).removesuffix(" | None")]
            required = parameter.default is parameter.empty
            attributes.append(defs.OpSchema.Attribute(parameter.name, kind, required=required))
            continue
        option = _Option.Single if parameter.default is parameter.empty else _Option.Optional
        if parameter.kind is parameter.VAR_POSITIONAL:
            option = _Option.Variadic
        operands.append(_Parameter(parameter.name, "T", param_option=option))
    results = [_Parameter(f"y{i}", "T", param_option=_Option.Optional) for i in range(_MOST_RESULTS)]
    kinds = [("T", ["tensor(float)"], "any; the op's function checks it")]
    return defs.OpSchema(
        name, domain, 1, inputs=operands, outputs=results, type_constraints=kinds, attributes=attributes
    )
