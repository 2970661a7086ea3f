"""Import one node of a model into a Graph, in the scope of the names that it can see.

Bodies of If, Loop and Scan have their own scopes, as have ops that the standard defines as functions of other ops.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from functools import cache

from onnx import GraphProto, NodeProto, TensorProto, TypeProto, defs, helper

from fusec.errors import SizeError, VerifyError
from fusec.frontends.custom_ops import DEFAULT_DOMAINS, CustomOp, CustomOps, qualified
from fusec.frontends.onnx.emission.annotations import check
from fusec.frontends.onnx.emission.attributes import attributes
from fusec.frontends.onnx.emission.emit import Emitter, ModelValue, OpFunction, TensorList
from fusec.frontends.onnx.emission.host_values import HostValueError
from fusec.frontends.onnx.emission.loop_body import Surroundings
from fusec.frontends.onnx.emission.scope import Scope, live_nodes, reads, scope_of, without
from fusec.frontends.onnx.model_file.split_model import TensorFiles
from fusec.frontends.onnx.model_file.structure import captured, constants, node_names
from fusec.frontends.onnx.model_file.tensors import ELEMENT_TYPES, Tensors
from fusec.frontends.onnx.standard import body_of
from fusec.frontends.onnx.tables import SEQUENCES, domain_of, function_of, schema_of, unsupported
from fusec.ir import Array, DType, Graph, Literal, Value
from fusec.ops.spec import require
from fusec.system.printable import printable

MAX_DEPTH = 24


class NodeImporter:
    """The graph so far, and what the import of each node needs.

    source: graph of the model, without functions.
    opsets: version of each domain.
    files: where the data is that tensors lack.
    weights: initializers that an earlier import read; this import adds those that it reads.
    problems: what is wrong with nodes and initializers.
    depth: number of bodies around the current node.
    custom_ops: functions that the user gave for ops.
    """

    def __init__(
        self,
        source: GraphProto,
        opsets: Mapping[str, int],
        files: TensorFiles | None,
        weights: MutableMapping[str, Literal],
    ):
        self.source = source
        self.weights = weights
        self.graph = Graph(source.name or "main")
        self.tensors = Tensors(files)
        names = {v.name for v in source.input} | {*constants(source)} | {n for node in source.node for n in node.output}
        self.emit = Emitter(self.graph, opsets.get("", 0), frozenset(names))
        self.emit.subgraph = self._subgraph
        self.emit.around = self._around
        self.files = files
        self.scope = scope_of(source, opsets, frozenset(v.name for v in source.output))
        self.problems: list[str] = []
        self.depth = 0
        self.custom_ops: CustomOps = {}

    def import_node(self, scope: Scope, node: NodeProto, name: str) -> None:
        """Add the ops of a node to the graph, and bind its results to their names.

        Raises VerifyError if it cannot be imported, HostValueError if it needs a value that only the host can compute.
        """
        self.emit.require_room()
        operands = [self.value_of(scope, n) if n else None for n in node.input]
        for given, value in zip(node.input, operands, strict=True):
            require(not given or value is not None, f"its input {given!r} is not defined anywhere")
        results = self._results(scope, node, name, operands)
        for output, value in zip(node.output, results, strict=False):
            if output:
                if isinstance(value, Value):
                    self.emit.bind(value, f"{scope.prefix}{output}")
                check(scope, output, value, self.emit)
                scope.values[output] = value

    def _results(
        self, scope: Scope, node: NodeProto, name: str, operands: list[ModelValue | None]
    ) -> tuple[ModelValue, ...]:
        """Import a node by the user's function, by that of its op, or by the body that ONNX defines for it."""
        domain = domain_of(node)
        custom = self.custom_ops.get(qualified(domain, node.op_type))
        if custom is not None:
            return self._custom(custom, scope, node, name, operands)
        opset = scope.opsets.get(domain, 0)
        found = function_of(node.op_type, opset, domain)
        schema = found[1] if found else schema_of(node.op_type, opset, domain)
        require(schema is not None, f"op {'.'.join(filter(None, (domain, node.op_type)))} is not supported")
        assert schema is not None
        low, high = schema.min_input, schema.max_input
        require(
            low <= len(operands) <= high,
            f"takes {low if low == high else f'{low} to {high}'} inputs, not {len(operands)}",
        )
        if found is None:
            return self._by_definition(scope, node, name, operands, schema, opset)
        function = found[0]
        require(
            (domain, node.op_type) in SEQUENCES or not any(isinstance(v, TensorList) for v in operands),
            "takes tensors, not a sequence of them",
        )
        _check_present(function, operands)
        given = attributes(node, schema, self.tensors)
        with self._within(scope, name, node.output):
            results = function(self.emit, *operands, **given)
        results = results if isinstance(results, tuple) else (results,)
        for index, output in enumerate(node.output[len(results) :], len(results)):
            require(
                not output or (output not in scope.read and scope.outer is None),
                f"its output {output!r} (number {index}) is read, but fusec does not compute it",
            )
        return results

    def _custom(
        self, custom: CustomOp, scope: Scope, node: NodeProto, name: str, operands: Sequence[ModelValue | None]
    ) -> tuple[ModelValue, ...]:
        """Let the user's function compute a node."""
        require(not any(isinstance(v, TensorList) for v in operands), "takes tensors, not a sequence of them")
        given = {
            key: value.array if isinstance(value, Literal) else value
            for key, value in attributes(node, None, self.tensors).items()
        }
        require(not any(isinstance(v, GraphProto) for v in given.values()), "has a body, which a function cannot run")
        wanted = [index for index, output in enumerate(node.output) if output]

        def compute(arrays: Sequence[Array]) -> Sequence[Array]:
            left = iter(arrays)
            return custom.results([None if v is None else next(left) for v in operands], given, wanted)

        present = [v for v in operands if isinstance(v, Value)]
        strings = any(v.type.dtype is DType.STRING for v in present)
        require(not (custom.on_device and strings), "takes strings, which the device has not: leave out on_device")
        with self._within(scope, name, node.output):
            what = f"the operands of {qualified(domain_of(node), node.op_type)}"
            made = self.emit.on_host(what, compute, *present, custom=custom)
        named = dict(zip(wanted, made, strict=True))
        return tuple(named.get(index, made[0]) for index in range(len(node.output)))

    @contextmanager
    def _within(self, scope: Scope, name: str, outputs: Sequence[str]) -> Generator[None]:
        """Make the emitter build for a node, and restore the outer node afterwards."""
        emit = self.emit
        outer = emit.state()
        before, self.scope = self.scope, scope
        emit.opset = scope.opset
        emit.begin(f"{scope.prefix}{name}", [f"{scope.prefix}{o}" if o else "" for o in outputs], self.depth > 0)
        try:
            yield
        except SizeError as error:
            raise VerifyError(f"for its result {next(filter(None, outputs), '')!r}, {error}") from error
        finally:
            self.scope = before
            if self.depth > 0:
                emit.restore(outer)

    def _subgraph(self, body: GraphProto, given: Sequence[ModelValue]) -> list[ModelValue]:
        """Import a body of the current node and return its results. `given`: values of its inputs, by position."""
        outer = self.scope
        require(len(body.input) == len(given), f"its body takes {len(body.input)} inputs, not {len(given)}")
        scope = scope_of(body, outer.opsets, frozenset(v.name for v in body.output))
        scope.outer = outer
        scope.prefix = f"{self.emit.name}/"
        for declared, value in zip(body.input, given, strict=True):
            scope.values[declared.name] = value
        return self._inner(scope, body.node, [v.name for v in body.output])

    def _around(self, body: GraphProto) -> Surroundings:
        """Return what a body of the current node sees. Raises VerifyError if it reads a sequence."""
        own = {v.name for v in body.input} | {*constants(body)} | {o for node in body.node for o in node.output}
        values: dict[str, Value] = {}
        wrapped = NodeProto(attribute=[helper.make_attribute("body", body)])
        for name in sorted(captured(wrapped) - own - {""}):
            value = self.value_of(self.scope, name)
            require(not isinstance(value, TensorList), f"its body reads the sequence {name!r}")
            if isinstance(value, Value):  # other names are those of inner bodies
                values[name] = value
        return Surroundings(values, self.scope.opsets, self.files, self.custom_ops)

    def _by_definition(
        self,
        scope: Scope,
        node: NodeProto,
        name: str,
        operands: list[ModelValue | None],
        schema: defs.OpSchema,
        opset: int,
    ) -> tuple[ModelValue, ...]:
        """Import an op by the function of other ops that the standard defines for it."""
        attributes(node, schema, self.tensors)
        body = body_of(node, schema, opset, [_type_proto(v) for v in operands])
        if body is None:
            where = f"opset {opset}" if schema.domain in DEFAULT_DOMAINS else f"domain {schema.domain!r}"
            raise VerifyError(f"op {printable(node.op_type)} ({where}) is not supported")
        opsets = {**scope.opsets, **{entry.domain: entry.version for entry in body.opset_import}}
        inner = Scope(opsets, f"{scope.prefix}{name}/", read=reads(body, frozenset(body.output)))
        for given, value in zip(body.input, operands, strict=False):
            if value is not None:
                inner.values[given] = value
        absent = {n for n in body.input if n not in inner.values}
        nodes = [without(absent, n) for n in body.node]
        wanted = [n for n, given in zip(body.output, node.output, strict=False) if given]
        require(bool(wanted), "has no output")
        with self._within(scope, name, node.output):
            made = dict(zip(wanted, self._inner(inner, nodes, wanted), strict=True))
        count = len(node.output)
        require(count <= len(body.output), f"has {count} outputs, the op gives {len(body.output)}")
        # nothing reads an output without a name, so any value can stand for it
        return tuple(made.get(n) or next(iter(made.values())) for n in body.output[:count])

    def _inner(self, scope: Scope, nodes: Sequence[NodeProto], outputs: Sequence[str]) -> list[ModelValue]:
        """Import the nodes of a body and return its outputs. Errors name the inner node."""
        members = list(zip(node_names(nodes), nodes, strict=True))
        require(self.depth < MAX_DEPTH, f"bodies within bodies, {MAX_DEPTH} deep")
        refused = unsupported(members, scope.opsets, self.custom_ops)
        require(not refused, "in its body: " + "; ".join(refused))
        live = live_nodes(members, outputs)
        self.depth += 1
        try:
            for index, (name, node) in enumerate(members):
                if index in live:
                    self._inner_node(scope, node, name)
        finally:
            self.depth -= 1
        results: list[ModelValue] = []
        for name in outputs:
            value = self.value_of(scope, name)
            require(value is not None, f"the output {name!r} of its body is not defined anywhere")
            assert value is not None
            results.append(value)
        return results

    def _inner_node(self, scope: Scope, node: NodeProto, name: str) -> None:
        try:
            self.import_node(scope, node, name)
        except HostValueError as error:
            what = f"in its body, node {name!r} ({printable(node.op_type)}): {error.what}"
            raise HostValueError(
                what, error.values, error.compute, error.body, error.custom, rows=error.rows
            ) from error
        except VerifyError as error:
            raise VerifyError(f"in its body, node {name!r} ({printable(node.op_type)}): {error}") from error

    def value_of(self, scope: Scope, name: str) -> ModelValue | None:
        """Return the value of a name, None if it has none. Initializers enter the graph at their first read."""
        if name in scope.values or name in scope.failed:
            return scope.values.get(name)
        if name not in scope.dense and name not in scope.sparse:
            return self.value_of(scope.outer, name) if scope.outer is not None else None
        try:
            literal = self._literal(scope, name)
            value = self.emit.literal(literal, f"{scope.prefix}{name}")
            check(scope, name, value, self.emit)
        except VerifyError as error:
            if scope.outer is not None or self.depth:
                raise
            scope.failed.add(name)
            self.problems.append(f"initializer {name!r}: {error}")
            return None
        scope.values[name] = value
        return value

    def _literal(self, scope: Scope, name: str) -> Literal:
        """Read an initializer. All imports of the model share one literal for each of its own initializers."""
        known = self.weights.get(name) if scope.outer is None else None
        if known is not None:
            return known
        dense = scope.dense.get(name)
        literal = self.tensors.literal(dense) if dense is not None else self.tensors.sparse(scope.sparse[name])
        if scope.outer is None:
            self.weights[name] = literal
        return literal


def _type_proto(value: ModelValue | None) -> TypeProto:
    proto = TypeProto()
    if isinstance(value, TensorList):
        proto.sequence_type.elem_type.tensor_type.elem_type = (
            ELEMENT_TYPES[value.items[0].type.dtype] if value.items else TensorProto.FLOAT
        )
    elif value is not None:
        proto.tensor_type.elem_type = ELEMENT_TYPES[value.type.dtype]
        proto.tensor_type.shape.SetInParent()
        for size in value.type.shape:
            proto.tensor_type.shape.dim.add().dim_value = size
    return proto


def _check_present(function: OpFunction, operands: Sequence[ModelValue | None]) -> None:
    """Check that all required operands are given. Raises VerifyError if one is missing."""
    required = _required(function)
    for index, operand in enumerate(operands):
        present = operand is not None or not required[min(index, len(required) - 1)]
        require(present, f"input number {index} is missing")


@cache
def _required(function: OpFunction) -> tuple[bool, ...]:
    """Return for each parameter after the emitter if it is required. The last entry holds for all further operands.

    One whose annotation allows None may be left out also where a required one follows.
    """
    parameters = list(inspect.signature(function).parameters.values())[1:]
    return tuple(
        p.kind is p.VAR_POSITIONAL or (p.default is p.empty and "None" not in str(p.annotation)) for p in parameters
    )
