"""Build a graph from Python: inputs, parameters, constants, nodes and outputs. Errors name the line of the caller."""

from __future__ import annotations

import operator
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fusec.builder.op_methods import OpMethods
from fusec.builder.steps import Step, call_step, count_steps, erase_step, trace_body
from fusec.builder.tensor import Operand, Tensor
from fusec.errors import ModelError, VerifyError
from fusec.ir import NUMBERS, DType, Graph, Node, Op, TensorType, Value, copy_name
from fusec.ops import Scan
from fusec.ops.scan import dependents

_PACKAGE = str(Path(__file__).parent.parent)  # stack frames of fusec itself are not the caller's line


class Builder(OpMethods):
    """A graph under construction.

    The caller passes inputs with every call. Parameters are passed once (`Executable.bind`) and stay on the device.
    `update` names the tensor that replaces a parameter after a call. Every method raises ModelError with the caller's
    line when its arguments are wrong.

    dtype: dtype of inputs and parameters that name none.
    """

    def __init__(self, dtype: DType | str = "f32", name: str = "main"):
        self._origin: tuple[str, ...] | None = None
        self.dtype = self.dtype_of(dtype)
        self.parameters: dict[str, np.ndarray[Any, Any] | None] = {}
        self.updates: dict[str, str] = {}
        self.copies: dict[str, list[Tensor]] = {}
        self.gradients: dict[str, Tensor] = {}  # by parameter; `fusec.backward` adds them
        self._graph = Graph(name)
        self._outputs: dict[str, Tensor] = {}
        self._scalars: dict[tuple[str, DType], Tensor] = {}
        self._steps = 0  # functions of steps that are running, one within another
        self._erased = set[Value]()  # of steps

    @classmethod
    def on(cls, graph: Graph) -> Builder:
        """Return a builder that adds to an existing graph in place. The outputs of the graph stay outputs."""
        builder = cls(name=graph.name)
        builder._graph = graph
        builder._outputs = {n: Tensor(builder, v) for n, v in zip(graph.output_names, graph.outputs, strict=True)}
        return builder

    # the interface of the graph --------------------------------------------------------------------------

    def input(self, name: str, shape: Sequence[int], dtype: DType | str | None = None) -> Tensor:
        """Add an input, which the caller passes with every call."""
        return self._input(name, shape, self.dtype_of(dtype) if dtype else self.dtype)

    def parameter(self, name: str, array: Any = None, shape: Sequence[int] | None = None, dtype: Any = None) -> Tensor:
        """Add a parameter: a tensor that stays on the device from call to call.

        array: the first value. Without it, `shape` and `dtype` declare the parameter.
        """
        first = None
        if array is not None:
            first = np.asarray(array)
            shape, dtype = first.shape, DType.of(first.dtype)
        if shape is None:
            raise self.error(f"parameter {name!r} needs an array or a shape")
        tensor = self._input(name, shape, self.dtype_of(dtype) if dtype else self.dtype)
        self.parameters[name] = first
        return tensor

    def copy(self, parameter: Tensor, dtype: DType | str) -> Tensor:
        """Add a copy of a parameter in another floating-point type, as a parameter named `<name> as <dtype>`.

        The network reads the copy and optimisers update the original, so no call has to cast it.
        `Executable.bind`, `update` and `backward` handle both together.
        """
        dtype, name = self.dtype_of(dtype), self._parameter(parameter)
        if dtype is parameter.dtype:
            return parameter
        if not dtype.is_float or not parameter.dtype.is_float:
            raise self.error(f"a copy of {parameter!r} in {dtype.value}")
        if name in self.updates:
            raise self.error(f"{parameter!r} is already updated: call copy() before update()")
        for made in self.copies.get(name, ()):
            if made.dtype is dtype:
                return made
        first, own_name = self.parameters[name], copy_name(name, dtype)
        made = self._input(own_name, parameter.shape, dtype)
        self.parameters[own_name] = None if first is None else first.astype(dtype.numpy)
        self.copies.setdefault(name, []).append(made)
        return made

    def _parameter(self, tensor: Tensor) -> str:
        if tensor.name not in self.parameters or tensor.value not in self._graph.inputs:
            raise self.error(f"{tensor!r} is no parameter of this graph")
        return tensor.name

    def _input(self, name: str, shape: Sequence[int], dtype: DType) -> Tensor:
        try:
            sizes = tuple(operator.index(d) for d in shape)
        except TypeError:
            message = f"input {name!r} has the shape {shape!r}: a graph has sizes, no symbolic dims"
            raise self.error(message) from None
        try:
            return Tensor(self, self._graph.add_input(name, TensorType(sizes, dtype)))
        except VerifyError as error:
            raise self.error(str(error)) from None

    def output(self, tensors: Mapping[str, Tensor] | None = None, **named: Tensor) -> None:
        """Make tensors outputs of the graph, under these names."""
        for name, tensor in {**(tensors or {}), **named}.items():
            if name in self._outputs:
                raise self.error(f"two outputs are named {name!r}")
            self._outputs[name] = self._own(tensor)

    def update(self, parameter: Tensor, new: Tensor) -> None:
        """Replace a parameter by `new` after each call.

        The new value is written to the parameter's own memory if nothing reads the old value later.
        """
        name = self._parameter(parameter)
        if name in self.updates:
            raise self.error(f"parameter {name!r} is updated twice")
        if not new.value.type.same_value_type(parameter.value.type):
            raise self.error(f"parameter {parameter!r} cannot become {new!r}")
        self.updates[name] = f"{name}.next"
        self.output({f"{name}.next": new})
        for copy in self.copies.get(name, ()):
            self.update(copy, new.astype(copy.dtype))

    def graph(self, prune: bool = True, also: Mapping[str, Tensor] | None = None) -> Graph:
        """Return a copy of the graph so far. Later calls of the builder do not change it.

        prune: remove nodes that no output depends on.
        also: more outputs, of this copy alone.
        """
        if not self._outputs:
            raise self.error("the graph has no outputs")
        outputs = {**self._outputs, **(also or {})}
        self._graph.set_outputs([self._own(t).value for t in outputs.values()], list(outputs))
        copy = self._graph.clone()
        if prune:
            copy.prune()
        return copy

    def snapshot(self, *tensors: Tensor) -> Graph:
        """Return a graph with only these outputs, named `y0`, `y1`…, and the inputs they depend on."""
        wanted = [self._own(t).value for t in tensors]
        needed, stack = set[Value](), list(wanted)
        while stack:
            value = stack.pop()
            if value not in needed:
                needed.add(value)
                stack += value.node.operands if value.node is not None else ()
        nodes = [n for n in self._graph.nodes if any(v in needed for v in n.results)]
        inputs = [v for v in self._graph.inputs if v in needed]
        return self._graph.extract(inputs, nodes, wanted, [f"y{i}" for i in range(len(wanted))])

    # nodes -----------------------------------------------------------------------------------------------

    def results(self, op: Op, *operands: Tensor) -> tuple[Tensor, ...]:
        """Add an op of the IR and return all its results."""
        if not isinstance(op, Op):  # pyright: ignore[reportUnnecessaryIsInstance]  # users need not check types
            raise self.error(f"{op!r} is no op of fusec.ops: `pointwise` takes names, such as 'relu'")
        values = [self._own(t).value for t in operands]
        origin = self._origin or (_where(),)
        try:
            node = self._graph.insert(op, values, origin=origin)
        except VerifyError as error:
            raise ModelError(f"{origin[0]}: {error}") from None
        return tuple(Tensor(self, v) for v in node.results)

    def apply(self, op: Op, *operands: Tensor) -> Tensor:
        """Add an op that has one result and return it."""
        (result,) = self.results(op, *operands)
        return result

    def scan(
        self, states: Sequence[Tensor], sequences: Sequence[Tensor], step: Step, steps: int | None = None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Add a loop. Returns the states after the last step, and the rows of all steps, stacked.

        The function `step` is called once. It may read every tensor of the builder. What does not depend on its
        arguments is computed once, before the first step; this includes random bits.

        states: tensors before the first step.
        sequences: tensors of one length, of which each step reads one row.
        step: takes the states and the rows of a step, and returns the next states and any rows: two lists each.
        steps: number of steps; needed if there are no sequences.
        """
        count = count_steps(self, sequences, steps)
        before = self._graph.last
        given = [self.pointwise("identity", tensor) for tensor in states]
        rows = [self.pointwise("identity", tensor[0]) for tensor in sequences]
        stand_ins = [tensor.value for tensor in (*given, *rows)]
        self._steps += 1
        try:
            after, results = call_step(self, step, given, rows)
            inner = dependents(self._graph.since(before), stand_ins)
            body, shared = trace_body(inner, stand_ins, [self._own(t).value for t in (*after, *results)])
        finally:
            self._steps -= 1
            self._erased |= erase_step(self._graph, self._graph.since(before), stand_ins)
        operands = [*states, *sequences, *(Tensor(self, value) for value in shared)]
        made = self.results(Scan(body, count, len(given), len(rows)), *operands)
        return list(made[: len(given)]), list(made[len(given) :])

    def error(self, message: str) -> ModelError:
        """Return a ModelError that names the caller's line."""
        return ModelError(f"{(self._origin or (_where(),))[0]}: {message}")

    def dtype_of(self, given: DType | str) -> DType:
        """Return a dtype by its name in the IR."""
        named = {dtype.value: dtype for dtype in NUMBERS}
        dtype = given if isinstance(given, DType) else named.get(given)
        if dtype not in NUMBERS:
            raise self.error(f"{given!r} is no dtype; these are {', '.join(named)}")
        return dtype

    def _own(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]  # users need not check types
            raise self.error(f"{type(tensor).__name__} is no tensor of this graph: use constant()")
        if tensor.builder is not self:
            raise self.error(f"{tensor!r} belongs to another builder")
        if tensor.value in self._erased:
            raise self.error(f"{tensor!r} exists only within the step of a scan: the step has to return it")
        return tensor

    @property
    def in_step(self) -> bool:
        """Tell if the function of a step is running, which `scan` has called."""
        return self._steps > 0

    @property
    def nodes(self) -> list[Node]:
        """List all nodes so far, in order."""
        return list(self._graph.nodes)

    @property
    def last(self) -> Node | None:
        """Return the node that was added last, or None."""
        return self._graph.last

    def since(self, node: Node | None) -> list[Node]:
        """List the nodes that were added after `node`."""
        return self._graph.since(node)

    def with_origin_of(self, node: Node) -> AbstractContextManager[None]:
        """Give nodes that are added meanwhile the origin of `node`, for example to its gradient."""
        return self.with_origin(*(node.origin or (node.op.name,)))

    @contextmanager
    def with_origin(self, *names: str) -> Generator[None]:
        """Give nodes that are added meanwhile an origin, which reports show as their model nodes."""
        before, self._origin = self._origin, names
        try:
            yield
        finally:
            self._origin = before

    def constant(self, array: Any, dtype: DType | str | None = None) -> Tensor:
        """Add a constant. Without `dtype` it has the dtype of the array. Integers have to hold its numbers."""
        try:
            payload = np.asarray(array)
        except ValueError as error:  # rows of different lengths
            raise self.error(f"a constant that is no array: {error}") from None
        if dtype is not None:
            to = self.dtype_of(dtype)
            if to.is_int and payload.dtype.kind in "iuf" and not to.holds(payload):
                shown = f"{payload[()]}" if payload.ndim == 0 else f"an array of {payload.dtype}"
                raise self.error(f"{to.value} does not hold {shown} as it is: convert it first")
            payload = payload.astype(to.numpy)
        return Tensor(self, self._graph.constant(payload))

    def like(self, operand: Operand, tensor: Tensor) -> Tensor:
        """Return an operand as a tensor: itself, or a constant of the dtype of `tensor`, the other operand."""
        if isinstance(operand, Tensor):
            return self._own(operand)
        if isinstance(operand, (int, float, bool)):
            key = (repr(operand), tensor.dtype)
            if key not in self._scalars:
                self._scalars[key] = self.constant(operand, tensor.dtype)
            return self._scalars[key]
        array = np.asarray(operand)
        if array.dtype != tensor.dtype.numpy:
            raise self.error(f"an array of {array.dtype} with {tensor!r}: convert it to {tensor.dtype.value} first")
        return self.constant(array)


def _where() -> str:
    """Return file and line of the nearest stack frame outside fusec."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  # inspect.stack() reads source files: far slower
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
