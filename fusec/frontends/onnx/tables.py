"""List the ONNX ops that fusec imports, and describe those of a model that it cannot import.

An op is imported by the function in TABLE for its newest version that is not newer than the model's opset. To add an
op, write its function in `ops/` or `movement/` and enter it in the TABLE of that file. One function may serve several
versions, because the importer checks attributes and the number of operands against the schema of the model's opset.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache

from onnx import NodeProto, defs

from fusec.frontends.custom_ops import DEFAULT_DOMAINS, CustomOps, qualified
from fusec.frontends.onnx.advice import advice
from fusec.frontends.onnx.emission.emit import OpFunction, Table
from fusec.frontends.onnx.model_file.structure import abridged
from fusec.frontends.onnx.movement import affine_grid, data_dependent, gather_scatter, indexing, resize, sampling, shape
from fusec.frontends.onnx.ops import (
    constant,
    control,
    convolution,
    einsum,
    matmul,
    ngrams,
    normalization,
    pointwise,
    pooling,
    quantize,
    random,
    recurrent,
    reduction,
    sequence,
    spectral,
    strings,
)
from fusec.frontends.onnx.other_domains import MICROSOFT, contrib_function, functions_of
from fusec.frontends.onnx.standard import has_body
from fusec.system.printable import printable

OLDEST_OPSET = 7
REVIEWED_OPSET = 28  # newest opset whose op versions were compared with TABLE
# Ops that models use in older opsets than the one that defines them, because onnxruntime accepts them in any.
_IN_ANY_OPSET = {"LayerNormalization": 17}
# Ops of onnxruntime's own domain, by the version of ONNX's op of the same name that they are equal to.
EQUAL_TO_ONNX: Mapping[tuple[str, str], int] = {
    (MICROSOFT, "DequantizeLinear"): 21,
    (MICROSOFT, "GatherND"): 11,
    (MICROSOFT, "Gelu"): 20,
    (MICROSOFT, "GridSample"): 16,
    (MICROSOFT, "Pad"): 11,
    (MICROSOFT, "QuantizeLinear"): 21,
    (MICROSOFT, "Trilu"): 14,
}

TABLE: Table = {
    **pointwise.TABLE,
    **convolution.TABLE,
    **pooling.TABLE,
    **matmul.TABLE,
    **normalization.TABLE,
    **reduction.TABLE,
    **shape.TABLE,
    **indexing.TABLE,
    **resize.TABLE,
    **constant.TABLE,
    **control.TABLE,
    **einsum.TABLE,
    **gather_scatter.TABLE,
    **quantize.TABLE,
    **random.TABLE,
    **recurrent.TABLE,
    **sampling.TABLE,
    **affine_grid.TABLE,
    **spectral.TABLE,
    **data_dependent.TABLE,
    **ngrams.TABLE,
    **sequence.TABLE,
    **strings.TABLE,
}
# Ops with a sequence of tensors as an operand or result: (domain, op).
SEQUENCES = frozenset({("", op) for op in ("Identity", "If", "Loop", *(name for name, _ in sequence.TABLE))})


@cache
def schema_of(op: str, opset: int, domain: str = "") -> defs.OpSchema | None:
    """Return the schema of an op in the installed onnx, None if it has none."""
    try:
        return defs.get_schema(op, opset, domain)
    except defs.SchemaError:
        return None


@cache
def newest_versions() -> Mapping[str, int]:
    """Return the newest version of each domain of known ops, except the default one."""
    versions = {MICROSOFT: 1}
    for schema in defs.get_all_schemas():
        if schema.domain not in DEFAULT_DOMAINS:
            versions[schema.domain] = max(schema.since_version, versions.get(schema.domain, 0))
    return versions


@cache
def function_of(op: str, opset: int, domain: str = "") -> tuple[OpFunction, defs.OpSchema] | None:
    """Return the function of an op's newest version in TABLE up to `opset`, and its schema; None if it has none.

    Ops of other domains, and those that onnxruntime adds, have one version.
    """
    contrib = contrib_function(op, domain)
    if contrib is not None:
        return contrib
    functions = functions_of(domain)
    if functions is not None:
        own, known = functions.get(op), schema_of(op, opset, domain)
        return None if own is None or known is None else (own, known)
    opset = EQUAL_TO_ONNX.get((domain, op), 0) if domain else max(opset, _IN_ANY_OPSET.get(op, 0))
    schema = schema_of(op, opset)
    versions = [since for name, since in TABLE if name == op and since <= opset]
    if schema is None or not versions or schema.since_version > REVIEWED_OPSET:
        return None
    if schema.deprecated and schema.since_version not in versions:
        return None
    return TABLE[op, max(versions)], schema


def unsupported(nodes: Iterable[tuple[str, NodeProto]], opsets: Mapping[str, int], custom_ops: CustomOps) -> list[str]:
    """Describe each op that cannot be imported in one line, with the nodes that use it.

    nodes: pairs of a node's name and the node.
    opsets: version of each domain.
    custom_ops: functions that the user gave for ops.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for name, node in nodes:
        if qualified(domain_of(node), node.op_type) not in custom_ops and not _supported(node, opsets):
            found.setdefault((node.domain, node.op_type), []).append(name)
    lines: list[str] = []
    for (domain, op), names in sorted(found.items()):
        shown = abridged([repr(name) for name in names])
        why = advice("" if domain in DEFAULT_DOMAINS else domain, op)
        where = f"{_described(domain, op, opsets)}: node{'s' * (len(names) > 1)} {shown}"
        lines.append(f"{where} - not supported{why and ': '}{why}")
    return lines


def domain_of(node: NodeProto) -> str:
    """Return the domain of a node's op; "" for the default domain, however it is spelled."""
    return "" if node.domain in DEFAULT_DOMAINS else node.domain


def _supported(node: NodeProto, opsets: Mapping[str, int]) -> bool:
    """Tell if fusec has a function for the op, or the standard defines it by other ops."""
    op = node.op_type, opsets.get(domain_of(node), 0), domain_of(node)
    if function_of(*op) is not None:
        return True
    schema = schema_of(*op)
    if schema is None or schema.deprecated or schema.since_version > REVIEWED_OPSET:
        return False
    return has_body(schema)


def _described(domain: str, op: str, opsets: Mapping[str, int]) -> str:
    opset = opsets.get("", 0)
    if domain not in DEFAULT_DOMAINS:
        version = f"version {opsets[domain]}" if domain in opsets else "which the model does not import"
        return f"op {printable(domain)}.{printable(op)} (domain {domain!r}, {version})"
    schema = schema_of(op, opset)
    if schema is None:
        return f"op {printable(op)} (not in ONNX opset {opset})"
    if schema.deprecated:
        return f"op {printable(op)} (removed from ONNX in opset {schema.since_version}, the model is of opset {opset})"
    subgraphs = any(
        a.type in (defs.OpSchema.AttrType.GRAPH, defs.OpSchema.AttrType.GRAPHS) for a in schema.attributes.values()
    )
    return f"op {printable(op)} (opset {opset}{', control flow' if subgraphs else ''})"
