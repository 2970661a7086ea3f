"""`python -m fusec.frontends.onnx`: the ops of ONNX and what becomes of each, as Markdown (docs/onnx.md holds it)."""

from __future__ import annotations

from collections.abc import Mapping

from onnx import defs

from fusec.frontends.onnx.movement import data_dependent
from fusec.frontends.onnx.standard import has_body
from fusec.frontends.onnx.tables import REVIEWED_OPSET, SEQUENCES, TABLE

# Why an op is not imported.
WHY_NOT: Mapping[str, str] = {
    **dict.fromkeys(("RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit"), "strings"),
    **dict.fromkeys(("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike"), "random numbers"),
    **dict.fromkeys(("RandomUniform", "RandomUniformLike"), "random numbers"),
    **dict.fromkeys(("Optional", "OptionalGetElement", "OptionalHasElement"), "optional values"),
    "ImageDecoder": "compressed images",
    "MaxRoiPool": "windows whose size depends on values",
}


def schemas() -> dict[str, defs.OpSchema]:
    """The newest version of every op of the default domain that is still in use."""
    newest: dict[str, defs.OpSchema] = {}
    for schema in defs.get_all_schemas():
        if schema.domain == "" and not schema.deprecated and schema.since_version <= REVIEWED_OPSET:
            newest[schema.name] = schema
    return dict(sorted(newest.items()))


def ways() -> dict[str, str]:
    """How each op is imported; empty if it is not."""
    folded = {name for name, _ in data_dependent.TABLE} - {"Compress"}
    found: dict[str, str] = {}
    for name, schema in schemas().items():
        if name in WHY_NOT:
            found[name] = ""
        elif not any(op == name for op, _ in TABLE):
            found[name] = "by its definition" if has_body(schema) else ""
        elif name in folded:
            found[name] = "where its operands are known"
        elif ("", name) in SEQUENCES and name != "Identity":
            found[name] = "resolved on import"
        else:
            found[name] = "yes"
    return found


def markdown() -> str:
    """One row an op."""
    lines = ["| Op | Versions from | Imported |", "|---|---|---|"]
    for name, way in ways().items():
        since = ", ".join(str(v) for op, v in TABLE if op == name)
        lines.append(f"| {name} | {since} | {way or f'no: {WHY_NOT[name]}'} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())
