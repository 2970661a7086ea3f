"""Write a compiled model as ONNX: the graph after the passes, with the step of each operator in its metadata.

Netron shows the metadata of a node next to its attributes, such as the fusion to which it belongs.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fusec.errors import FusecError
from fusec.execution.compilation import Compiled
from fusec.ir import Node, print_node
from fusec.plans.verdict import Legal
from fusec.schedule.program import Kind, Partition

if TYPE_CHECKING:
    from onnx import ModelProto

LIMIT = (1 << 31) - 1  # bytes of a protobuf message


def to_onnx(compiled: Compiled) -> ModelProto:
    """Return the graph after the passes as an ONNX model. Raises LoweringError for an op that ONNX cannot express."""
    from fusec.exporters.onnx import to_onnx as export  # here, because importing onnx takes long

    return export(compiled.graph, notes(compiled), properties(compiled))


def to_bytes(compiled: Compiled) -> bytes:
    """Return that model as the contents of a file. Raises FusecError if it is too large for one file."""
    return file_of(to_onnx(compiled), "the model")


def file_of(model: ModelProto, what: str) -> bytes:
    """Return an ONNX model as the contents of a file. Raises FusecError if it is too large for one file."""
    size = model.ByteSize()
    if size > LIMIT:
        raise FusecError(f"{what} takes {size} bytes as ONNX, and a file of protobuf holds {LIMIT}")
    return model.SerializeToString()


def properties(compiled: Compiled) -> dict[str, str]:
    """Return the model's metadata."""
    return {
        **({"fusec.note": compiled.note} if compiled.note else {}),
        "fusec.version": importlib.import_module("fusec").__version__,
        "fusec.target": compiled.target.name,
        "fusec.precision": compiled.options.precision,
        "fusec.disabled": ",".join(compiled.options.disabled_names),
        "fusec.steps": str(len(compiled.program.steps)),
        "fusec.launches": str(compiled.program.launches),
    }


def notes(compiled: Compiled) -> Mapping[Node, Mapping[str, str]]:
    """Return the metadata of the operators of each node."""
    found: dict[Node, Mapping[str, str]] = {}
    for index, (step, lowered) in enumerate(zip(compiled.program.steps, compiled.lowered, strict=True)):
        shared = {"fusec.step": str(index), "fusec.kind": step.kind.value, "fusec.partition": step.signature}
        if step.spelling:
            shared["fusec.spelling"] = ", ".join(step.spelling)
        if lowered is not None:
            shared["fusec.cudnn"] = str(lowered.graph)
        if isinstance(step.verdict, Legal):
            shared["fusec.plans"] = _plans(step.verdict)
        for node in step.nodes:
            found[node] = {**shared, **_own(step, node)}
    return found


def _plans(verdict: Legal) -> str:
    if not verdict.plans:
        return "none: cuDNN was not asked"
    first = verdict.plans[0]
    how = "precompiled" if first.precompiled else "compiled at run time"
    return f"{len(verdict.plans)}, first: engine {first.engine}, {how}, {first.workspace_bytes} bytes of workspace"


def _own(step: Partition, node: Node) -> dict[str, str]:
    """Return the metadata about layout and storage, which ONNX has no other place for."""
    own = {"fusec.node": print_node(node)}
    if step.kind is Kind.CUDNN:
        virtual = [v.name for v in node.results if v in step.virtual]
        own["fusec.result"] = "virtual: never in memory" if virtual else "stored"
    if node.origin:
        own["fusec.origin"] = ", ".join(node.origin)
    return own
