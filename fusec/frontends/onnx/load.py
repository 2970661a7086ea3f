"""Load an ONNX model as a Graph: check the header, inline functions, sort the nodes, import them one by one."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from dataclasses import field
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    ValueInfoProto,
    helper,
    shape_inference,
    version_converter,
)

from fusec.errors import ModelError, VerifyError
from fusec.frontends.custom_ops import DEFAULT_DOMAINS, CustomOp, CustomOps, qualified
from fusec.frontends.onnx.advice import require_tensors
from fusec.frontends.onnx.importer import Bound, Importer
from fusec.frontends.onnx.model_file.functions import all_nodes, inlined
from fusec.frontends.onnx.model_file.inputs import element_type, tensor_type
from fusec.frontends.onnx.model_file.split_model import TensorFiles, split
from fusec.frontends.onnx.model_file.structure import GRAPHS, constants, draws, node_names, ordered, report
from fusec.frontends.onnx.other_domains import CLASSICAL
from fusec.frontends.onnx.tables import OLDEST_OPSET, newest_versions, unsupported
from fusec.ir import DType, Graph, Literal
from fusec.system.byte_ranges import ByteRanges
from fusec.system.dataclass import dataclass

# Of onnx's converter, whose errors have no common base class.
_CONVERSION_ERRORS = (
    *(RuntimeError, ValueError, TypeError, IndexError, AttributeError),
    *(shape_inference.InferenceError, version_converter.ConvertError),
)


def load_onnx(
    model: ModelProto | CheckedModel,
    shapes: Mapping[str, Sequence[int]],
    file: str,
    files: TensorFiles | None,
    bound: Mapping[str, Bound],
    weights: MutableMapping[str, Literal],
) -> Graph:
    """Load the graph of a model whose outputs are tensors.

    shapes: shapes by input name.
    file: name of the model in messages.
    files: where the data is that its tensors lack.
    bound: values of some inputs, which become constants.
    weights: initializers that an earlier load read; this load adds those that it reads.
    """
    graph, lengths = load_bound(model, shapes, bound, file, files, weights)
    require_tensors(file, lengths)
    return graph


def load_bound(
    model: ModelProto | CheckedModel,
    shapes: Mapping[str, Sequence[int]],
    bound: Mapping[str, Bound],
    file: str,
    files: TensorFiles | None = None,
    weights: MutableMapping[str, Literal] | None = None,
) -> tuple[Graph, dict[str, int]]:
    """Load the graph of a model, and the length of each output that is a sequence.

    The tensors of a sequence are outputs of the graph named `name[0]`, `name[1]`, … Parameters as in `load_onnx`.
    """
    known = model if isinstance(model, CheckedModel) else check_model(model, file)
    importer = known.importer(files, file, {} if weights is None else weights)
    return importer.run(known.order, known.names, shapes, bound)


@dataclass(frozen=True)
class CheckedModel:
    """A model's graph that is well-formed, has known ops and no functions. It is valid for all input shapes.

    names: name of each node of the graph.
    order: indices of the nodes to import, in order.
    custom_ops: functions that the user gave for ops.
    noted: notes that the user has seen, because each is shown once for all shapes.
    """

    graph: GraphProto
    opsets: Mapping[str, int]
    names: Sequence[str]
    order: Sequence[int]
    custom_ops: CustomOps = field(default_factory=dict[str, CustomOp])
    noted: set[str] = field(default_factory=set[str])

    @property
    def draws(self) -> bool:
        """Tell if nodes may draw random numbers from the state that a call gives."""
        return any(draws(node) for node in all_nodes(self.graph.node))

    def importer(self, files: TensorFiles | None, file: str, weights: MutableMapping[str, Literal]) -> Importer:
        """Return a new importer of the model; see `load_onnx` for the parameters."""
        importer = Importer(self.graph, self.opsets, files, file, weights, self.noted)
        importer.custom_ops = self.custom_ops
        return importer


def check_model(model: ModelProto, file: str, custom_ops: CustomOps | None = None) -> CheckedModel:
    """Check a model and prepare it for import. Raises ModelError if anything is wrong with it.

    custom_ops: functions that the user gave for ops.
    """
    custom_ops = custom_ops or {}
    _check_type(model)
    if bad := next((text for text in _texts(model) if not isinstance(text, str)), None):
        raise ModelError(f"{file}: is not a valid ONNX model: the name {bad!r} in it is not UTF-8")
    model = _modern(model, file)
    opsets = _opsets(model, file)
    for function in model.functions:
        name = qualified("" if function.domain in DEFAULT_DOMAINS else function.domain, function.name)
        if name in custom_ops:
            raise ModelError(f"{file}: defines {name} as a function of its own, so custom_ops cannot give it another")
    source = inlined(model, file).graph
    if any(node.domain == CLASSICAL for node in source.node):
        from fusec.frontends.onnx.classical.string_labels import with_numbered_classes  # few models need it

        source = with_numbered_classes(source)
    names = node_names(source.node)
    order = ordered(source, file)
    members = [(names[i], source.node[i]) for i in order]
    added = {domain: newest_versions()[domain] for domain in _unimported((node for _, node in members), opsets)}
    opsets = {**opsets, **added}
    if refused := unsupported(members, opsets, custom_ops):
        raise report(file, refused)
    notes = {
        f"does not import domain {domain!r}: fusec uses version {number} of it" for domain, number in added.items()
    }
    for note in sorted(notes):
        warnings.warn(f"{file}: {note}", stacklevel=2)
    return CheckedModel(source, opsets, names, order, custom_ops, notes)


def _check_type(model: ModelProto) -> None:
    if not isinstance(model, ModelProto):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
        raise ModelError(f"a model is a path, bytes, a ModelProto or a Graph, not {type(model).__name__}")


def _unimported(nodes: Iterable[NodeProto], opsets: Mapping[str, int]) -> list[str]:
    """List domains of known ops that nodes or their bodies use but the model does not import."""
    missing = {node.domain for node in all_nodes(nodes)}.difference(opsets, DEFAULT_DOMAINS)
    return sorted(missing.intersection(newest_versions())) if missing else []


Port = tuple[str, DType | None, tuple[int | str, ...] | None]  # name, dtype and dims; None if not declared


def declared(model: ModelProto, file: str) -> tuple[list[Port], list[Port]]:
    """Return the declared inputs (without initializers) and outputs. Raises ModelError if an input is not a tensor.

    An output that is a sequence, or has no type, has neither dtype nor dims: the import computes them.
    """
    _check_type(model)
    problems: list[str] = []

    def port(kind: str, value: ValueInfoProto) -> Port:
        if kind == "output" and element_type(value.type).WhichOneof("value") != "tensor_type":
            return value.name, None, None
        try:
            dtype, dims = tensor_type(value)
        except VerifyError as error:
            problems.append(f"{kind} {value.name!r}: {error}")
            return value.name, None, None
        return value.name, dtype, None if dims is None else tuple(dims)

    initializers = constants(model.graph)
    inputs = [port("input", value) for value in model.graph.input if value.name not in initializers]
    outputs = [port("output", value) for value in model.graph.output]
    if problems:
        raise report(file, problems)
    return inputs, outputs


def decoded(data: ByteRanges, file: str, folder: Path | None) -> tuple[ModelProto, TensorFiles]:
    """Decode a model, whose large weights are read later. Raises ModelError if the bytes are not an ONNX model.

    folder: folder of external data, or None.
    """
    if not data.size:
        raise ModelError(f"{file}: is empty")
    message, places = split(data)
    model = _decoded(message, file)
    if places and _needs_conversion(model):  # onnx's converter drops external data
        return _decoded(data.read(0, data.size), file), TensorFiles(folder)
    return model, TensorFiles(folder, data, places) if places else TensorFiles(folder)


def _decoded(message: bytes, file: str) -> ModelProto:
    try:
        return ModelProto.FromString(message)
    except DecodeError as error:
        raise ModelError(f"{file}: is no ONNX model, or a truncated one (protobuf cannot decode it)") from error


def _texts(model: ModelProto) -> Iterable[str | bytes]:
    """Iterate over all names in the model. A name that is not UTF-8 is bytes, since protobuf cannot decode it."""
    yield from _graph_texts(model.graph)
    for function in model.functions:
        yield from (function.name, function.domain, *function.input, *function.output)
        yield from _node_texts(function.node)


def _graph_texts(graph: GraphProto) -> Iterable[str | bytes]:
    yield graph.name
    for value in (*graph.input, *graph.output, *graph.value_info):
        yield value.name
        yield from (dim.dim_param for dim in value.type.tensor_type.shape.dim)
    for tensor in (*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer)):
        yield tensor.name
        for entry in tensor.external_data:
            yield from (entry.key, entry.value)
    yield from _node_texts(graph.node)


def _node_texts(nodes: Iterable[NodeProto]) -> Iterable[str | bytes]:
    for node in nodes:
        yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
        for attribute in node.attribute:
            yield from (attribute.name, attribute.ref_attr_name, attribute.t.name)
            for graph in (attribute.g, *attribute.graphs) if attribute.type in GRAPHS else ():
                yield from _graph_texts(graph)


def _opsets(model: ModelProto, file: str) -> dict[str, int]:
    """Check the header and return the opset version of each domain."""
    if not model.HasField("graph") or not model.ir_version:
        raise ModelError(f"{file}: is no ONNX model: it has no {'IR version' if model.HasField('graph') else 'graph'}")
    if model.ir_version > onnx.IR_VERSION:
        raise ModelError(
            f"{file}: has IR version {model.ir_version}, the installed onnx {onnx.__version__} knows "
            f"{onnx.IR_VERSION}: install a newer onnx"
        )
    opsets: dict[str, int] = {}
    for entry in model.opset_import:
        domain = "" if entry.domain in DEFAULT_DOMAINS else entry.domain
        if opsets.setdefault(domain, entry.version) != entry.version:
            raise ModelError(f"{file}: imports domain {domain!r} in versions {opsets[domain]} and {entry.version}")
    newest = onnx.defs.onnx_opset_version()
    if "" not in opsets:
        if not opsets or any(node.domain in DEFAULT_DOMAINS for node in model.graph.node):
            raise ModelError(f"{file}: does not say which opset of the default domain it uses")
        return opsets
    if opsets[""] > newest:
        raise ModelError(
            f"{file}: has opset {opsets['']}, the installed onnx {onnx.__version__} knows {newest}: "
            "install a newer onnx"
        )
    return opsets


def _modern(model: ModelProto, file: str) -> ModelProto:
    """Convert a model older than OLDEST_OPSET with onnx's converter. Raises ModelError if onnx cannot."""
    if not _needs_conversion(model):
        return model
    versions = [e.version for e in model.opset_import if e.domain in DEFAULT_DOMAINS]
    try:
        return version_converter.convert_version(_prepared(model, file), OLDEST_OPSET)
    except _CONVERSION_ERRORS as error:
        raise ModelError(
            f"{file}: has opset {max(versions)}, older than {OLDEST_OPSET}, and onnx cannot convert it: {error}"
        ) from error


def _needs_conversion(model: ModelProto) -> bool:
    """Tell if a model is older than OLDEST_OPSET."""
    versions = [e.version for e in model.opset_import if e.domain in DEFAULT_DOMAINS]
    return bool(versions) and model.HasField("graph") and max(versions) < OLDEST_OPSET


def _prepared(model: ModelProto, file: str) -> ModelProto:
    """Rewrite what onnx's converter gets wrong or refuses: slopes of PRelu, operands that broadcast along an axis."""
    if not any(node.op_type == "PRelu" or _attribute(node, "axis") is not None for node in model.graph.node):
        return model
    changed = shape_inference.infer_shapes(model)
    values = (*changed.graph.input, *changed.graph.value_info, *changed.graph.output)
    ranks = {v.name: len(v.type.tensor_type.shape.dim) for v in values if v.type.tensor_type.HasField("shape")}
    ranks |= {tensor.name: len(tensor.dims) for tensor in changed.graph.initializer}
    _reshape_slopes(changed.graph, ranks, file)
    _unsqueeze_operands(changed.graph, ranks)
    return changed


def _reshape_slopes(graph: GraphProto, ranks: Mapping[str, int], file: str) -> None:
    """Reshape the slopes of PRelu for opset 7, because a list of slopes was one per channel before."""
    slopes = {t.name: t for t in graph.initializer}
    for node in graph.node:
        if node.op_type != "PRelu" or (node.input[1] in slopes and list(slopes[node.input[1]].dims) == [1]):
            continue
        slope = slopes.get(node.input[1])
        if slope is None or node.input[0] not in ranks or len(slope.dims) != 1:
            raise ModelError(f"{file}: node {node.name!r} (PRelu): its slopes cannot be converted to opset 7")
        listed = [v for v in graph.input if v.name == slope.name]
        for _ in range(ranks[node.input[0]] - 2):
            slope.dims.append(1)
            for value in listed:
                value.type.tensor_type.shape.dim.add().dim_value = 1


def _unsqueeze_operands(graph: GraphProto, ranks: Mapping[str, int]) -> None:
    """Unsqueeze operands that broadcast along an axis: onnx's converter compares the last dims of most of them."""
    nodes = list[NodeProto]()
    for node in graph.node:
        axis = _attribute(node, "axis")
        if _attribute(node, "broadcast") == 1 and axis is not None and all(name in ranks for name in node.input):
            rank, own = (ranks[name] for name in node.input)
            start = axis + rank if axis < 0 else axis
            if added := list(range(own, rank - start)):
                name = f"{node.input[1]}/{node.output[0]}/unsqueezed"  # a result has one name in a model
                nodes.append(helper.make_node("Unsqueeze", [node.input[1]], [name], axes=added))
                node.input[1] = name
                others = [attribute for attribute in node.attribute if attribute.name != "axis"]
                del node.attribute[:]
                node.attribute.extend(others)
        nodes.append(node)
    copies = [NodeProto.FromString(node.SerializeToString()) for node in nodes]  # which survive the deletion
    del graph.node[:]
    graph.node.extend(copies)


def _attribute(node: NodeProto, name: str) -> int | None:
    """Return an integer attribute of a binary op of opset 6 or older; None for other ops and attributes."""
    if len(node.input) != 2:
        return None
    return next((a.i for a in node.attribute if a.name == name and a.type == AttributeProto.INT), None)
