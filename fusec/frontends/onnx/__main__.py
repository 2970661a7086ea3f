"""Print tables of all ONNX ops and of onnxruntime's, for docs/onnx.md (`python -m fusec.frontends.onnx`)."""

from __future__ import annotations

from collections.abc import Mapping

from onnx import defs

from fusec.frontends.onnx.movement import data_dependent
from fusec.frontends.onnx.other_domains import contrib_functions
from fusec.frontends.onnx.standard import has_body
from fusec.frontends.onnx.tables import EQUAL_TO_ONNX, REVIEWED_OPSET, SEQUENCES, TABLE

# Uses of onnxruntime's own ops that fusec refuses; all others are imported.
REFUSED: Mapping[str, str] = {
    "Attention": "do_rotary, past_present_share_buffer, past_sequence_length",
    "EmbedLayerNormalization": "mask_index_type other than 0 and 1",
    "GatherBlockQuantized": "axes other than rows gathered and last dim quantised",
    "GroupQueryAttention": "causal=0, a quantised or wrapping cache, scores as a result, keys of another call",
    "MatMulNBits": "g_idx, weight_prepacked, bits other than 2, 4 and 8",
    "MultiHeadAttention": "cache_indirection, past_sequence_length, scores as a result",
    "QAttention": "do_rotary, past_present_share_buffer",
    "RotaryEmbedding": "is_packed_batching, scale",
    "SimplifiedLayerNormalization": "stash_type other than 1",
}


def schemas() -> dict[str, defs.OpSchema]:
    """Return the newest version of every op of the default domain that is not deprecated, by name."""
    newest: dict[str, defs.OpSchema] = {}
    for schema in defs.get_all_schemas():
        if schema.domain == "" and not schema.deprecated and schema.since_version <= REVIEWED_OPSET:
            newest[schema.name] = schema
    return dict(sorted(newest.items()))


def imports() -> dict[str, str]:
    """Describe the import of each op in a few words; empty for an op that is not imported."""
    folded = {name for name, _ in data_dependent.TABLE} - {"Compress"}
    found: dict[str, str] = {}
    for name, schema in schemas().items():
        if not any(op == name for op, _ in TABLE):
            found[name] = "by its definition" if has_body(schema) else ""
        elif name in folded:
            found[name] = "where its operands are known"
        elif ("", name) in SEQUENCES and name != "Identity":
            found[name] = "resolved on import"
        else:
            found[name] = "yes"
    return found


def markdown() -> str:
    """Return the table, one row for each op."""
    lines = ["| Op | Versions from | Imported |", "|---|---|---|"]
    for name, imported in imports().items():
        since = ", ".join(str(v) for op, v in TABLE if op == name)
        lines.append(f"| {name} | {since} | {imported or 'no'} |")
    return "\n".join(lines)


def contrib_markdown() -> str:
    """Return the table of the ops that onnxruntime adds, one row for each."""
    lines = ["| Op | Imported | Refused |", "|---|---|---|"]
    for domain, name in sorted({*contrib_functions(), *EQUAL_TO_ONNX}, key=lambda key: key[1]):
        same = f"as ONNX's of version {EQUAL_TO_ONNX[domain, name]}" if (domain, name) in EQUAL_TO_ONNX else "yes"
        lines.append(f"| {name} | {same} | {REFUSED.get(name, '')} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown())
    print()
    print(contrib_markdown())
