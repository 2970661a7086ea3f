"""An ONNX model into a Graph: check the header, inline functions, order the nodes, import them one by one."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError
from onnx import GraphProto, ModelProto, NodeProto

from fusec.errors import ModelError, VerifyError
from fusec.frontends.onnx.attributes import attributes
from fusec.frontends.onnx.emit import Emitter, OpFunction
from fusec.frontends.onnx.functions import inlined
from fusec.frontends.onnx.inputs import input_types, tensor_type
from fusec.frontends.onnx.structure import constants, node_names, ordered, report
from fusec.frontends.onnx.tables import DEFAULT_DOMAINS, OLDEST_OPSET, function_of, unsupported
from fusec.frontends.onnx.tensors import Tensors
from fusec.ir import Graph, Literal, Value
from fusec.ops.spec import require


def load_onnx(model: ModelProto, shapes: Mapping[str, Sequence[int]], file: str, folder: Path | None) -> Graph:
    """The graph of a model; `file` names it in messages, `folder` is where its external data may lie."""
    if not isinstance(model, ModelProto):  # pyright: ignore[reportUnnecessaryIsInstance] - callers may be untyped
        raise ModelError(f"a model is a path, bytes, a ModelProto or a Graph, not {type(model).__name__}")
    if bad := next((text for text in _texts(model) if not isinstance(text, str)), None):
        raise ModelError(f"{file}: is no sound ONNX model: the name {bad!r} in it is not UTF-8")
    return _load(model, shapes, file, folder)


def decoded(data: bytes, file: str) -> ModelProto:
    """The message in the bytes; ModelError if there is none."""
    if not data:
        raise ModelError(f"{file}: is empty")
    try:
        return ModelProto.FromString(data)
    except DecodeError as error:
        raise ModelError(f"{file}: is no ONNX model, or a truncated one (protobuf cannot decode it)") from error


def _texts(model: ModelProto) -> Iterable[str | bytes]:
    """Every name fusec reads in the model; protobuf hands out bytes for those that are not UTF-8."""
    graph = model.graph
    yield graph.name
    for value in (*graph.input, *graph.output, *graph.value_info):
        yield value.name
        yield from (dim.dim_param for dim in value.type.tensor_type.shape.dim)
    for tensor in (*graph.initializer, *(sparse.values for sparse in graph.sparse_initializer)):
        yield tensor.name
        for entry in tensor.external_data:
            yield from (entry.key, entry.value)
    for function in model.functions:
        yield from (function.name, function.domain, *function.input, *function.output)
    for nodes in (graph.node, *(function.node for function in model.functions)):
        for node in nodes:
            yield from (node.name, node.op_type, node.domain, *node.input, *node.output)
            for attribute in node.attribute:
                yield from (attribute.name, attribute.ref_attr_name, attribute.t.name)


def _load(model: ModelProto, shapes: Mapping[str, Sequence[int]], file: str, folder: Path | None) -> Graph:
    opsets = _opsets(model, file)
    opset = opsets.get("", 0)
    source = inlined(model, file).graph
    names = node_names(source)
    order = ordered(source, file)
    refused = unsupported(((names[i], source.node[i]) for i in order), opset, opsets)
    if refused:
        raise report(file, [f"{line} - not supported" for line in refused])
    importer = _Importer(source, opset, folder, file)
    return importer.run(order, names, shapes)


def _opsets(model: ModelProto, file: str) -> dict[str, int]:
    """Domain to version, after a look at the header."""
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
    if opsets[""] < OLDEST_OPSET:
        raise ModelError(
            f"{file}: has opset {opsets['']}, older than {OLDEST_OPSET}: convert it with onnx.version_converter"
        )
    return opsets


class _Importer:
    """One import: the values made so far, by their names in the model, and the problems met."""

    def __init__(self, source: GraphProto, opset: int, folder: Path | None, file: str):
        self.source = source
        self.file = file
        self.opset = opset
        self.graph = Graph(source.name or "main")
        self.tensors = Tensors(folder)
        self.held = {t.name: t for t in source.initializer}
        self.sparse = {t.values.name: t for t in source.sparse_initializer}
        names = {v.name for v in source.input} | {*constants(source)} | {n for node in source.node for n in node.output}
        self.emit = Emitter(self.graph, opset, frozenset(names))
        self.read = {n for node in source.node for n in node.input} | {v.name for v in source.output}
        self.declared = {v.name: v for v in (*source.value_info, *source.output, *source.input)}
        self.values: dict[str, Value] = {}
        self.failed: set[str] = set()  # names of values that are missing because of a problem already noted
        self.problems: list[str] = []

    def run(self, order: Sequence[int], names: Sequence[str], shapes: Mapping[str, Sequence[int]]) -> Graph:
        for name, type in input_types(self.source, shapes, self.file).items():
            self.values[name] = self.graph.add_input(name, type)
        for index in order:
            self._node(self.source.node[index], names[index])
        outputs = [self._value(v.name) for v in self.source.output]
        if self.problems:
            raise report(self.file, self.problems)
        self.graph.set_outputs([v for v in outputs if v is not None], [v.name for v in self.source.output])
        self.graph.prune()
        try:
            self.graph.verify()
        except VerifyError as error:
            raise ModelError(f"{self.file}: {error}") from error
        return self.graph

    def _node(self, node: NodeProto, name: str) -> None:
        operands = [self._value(n) if n else None for n in node.input]
        if any(n in self.failed for n in node.input):
            self.failed.update(node.output)
            return
        try:
            results = self._results(node, name, operands)
            for output, value in zip(node.output, results, strict=False):
                if output:
                    self.emit.bind(value, output)
                    self._check(output, value)
                    self.values[output] = value
        except VerifyError as error:
            self.failed.update(node.output)
            self.problems.append(f"node {name!r} ({node.op_type}): {error}")

    def _results(self, node: NodeProto, name: str, operands: list[Value | None]) -> tuple[Value, ...]:
        found = function_of(node.op_type, self.opset)
        assert found is not None, "unsupported ops are refused before"
        function, schema = found
        low, high = schema.min_input, schema.max_input
        require(
            low <= len(operands) <= high,
            f"takes {low if low == high else f'{low} to {high}'} inputs, not {len(operands)}",
        )
        _check_present(function, operands)
        given = attributes(node, schema, self.tensors)
        self.emit.begin(name, node.output)
        results = function(self.emit, *operands, **given)
        results = (results,) if isinstance(results, Value) else results
        for index, output in enumerate(node.output[len(results) :], len(results)):
            require(
                output not in self.read,
                f"its output {output!r} (number {index}) is read, but fusec does not compute it",
            )
        return results

    def _value(self, name: str) -> Value | None:
        """The value of that name; initializers enter the graph when first read."""
        if name in self.values or name in self.failed:
            return self.values.get(name)
        if name not in self.held and name not in self.sparse:
            return None
        try:
            literal = self._literal(name)
            value = self.emit.literal(literal, name)
            self._check(name, value)
        except VerifyError as error:
            self.failed.add(name)
            self.problems.append(f"initializer {name!r}: {error}")
            return None
        self.values[name] = value
        return value

    def _literal(self, name: str) -> Literal:
        return self.tensors.literal(self.held[name]) if name in self.held else self.tensors.sparse(self.sparse[name])

    def _check(self, name: str, value: Value) -> None:
        """VerifyError if the model declares another type for this value; symbolic dims agree with all."""
        if name not in self.declared or not self.declared[name].type.WhichOneof("value"):
            return
        dtype, dims = tensor_type(self.declared[name])
        agrees = dims is None or (
            len(dims) == value.type.rank
            and all(isinstance(d, str) or d == size for d, size in zip(dims, value.type.shape, strict=True))
        )
        shape = "[" + ",".join(str(d) if d != "" else "?" for d in dims or ()) + "]"
        require(
            dtype is value.type.dtype and agrees,
            f"the model declares {name!r} as {dtype.value}{shape if dims is not None else ''}, but it is {value.type}",
        )


def _check_present(function: OpFunction, operands: Sequence[Value | None]) -> None:
    """VerifyError if an operand was left out that the op cannot do without."""
    parameters = list(inspect.signature(function).parameters.values())[1:]
    for index, operand in enumerate(operands):
        parameter = parameters[min(index, len(parameters) - 1)]
        variadic = parameter.kind is parameter.VAR_POSITIONAL
        required = variadic or parameter.default is parameter.empty
        require(operand is not None or not required, f"input number {index} is missing")
