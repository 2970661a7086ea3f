"""Bind each step of a program to its memory, and hold the constants that steps read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from weakref import WeakValueDictionary

from fusec.errors import ExecutionError
from fusec.execution.backend import Backend
from fusec.execution.shared_weights import Layout, SharedWeights, layout
from fusec.ir import Array, Literal, Node, TensorType, Value
from fusec.lower_cudnn import Lowered
from fusec.lowering.packing import stored_dtype, unpack
from fusec.ops import Concat, Scatter
from fusec.reference import evaluate_node
from fusec.schedule.aliasing import view_offset
from fusec.schedule.memory_plan import alias
from fusec.schedule.program import Kind, Partition, inputs_of


class Constants:
    """Constants on the device, one array for each layout in which steps read them.

    An array is freed with the last step that holds it.
    weights: constants that are shared with other programs; None: none are.
    packed: packs an array of NumPy as `packing.pack` does, into memory of the module.
    held: arrays of constants that were loaded before they are copied, in any memory order.
    """

    def __init__(self, weights: SharedWeights | None, packed: Callable[[Array, TensorType], Array]):
        self._shared, self._pack = weights, packed
        self.arrays: WeakValueDictionary[tuple[int, Layout], Array] = WeakValueDictionary()
        self.held: dict[Literal, Array] = {}

    def __call__(self, literal: Literal, type: TensorType) -> Array:
        """Return the literal as a flat array, in the layout of the type."""
        key = (id(literal), layout(type))
        array = self.arrays.get(key)
        if array is None:
            make = partial(self._packed, literal, type)
            array = make() if self._shared is None else self._shared.prepared(literal, layout(type), make)
            self.arrays[key] = array
        return array

    def _packed(self, literal: Literal, type: TensorType) -> Array:
        array = self.held.get(literal)
        return self._pack(literal.array if array is None else array, type)

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


class Steps:
    """Binds steps to memory.

    places: flat memory of the values that are no constants.
    kernels: the bound steps that a kernel of fusec runs.
    """

    def __init__(self, backend: Backend, constants: Constants, places: dict[Value, Array]):
        self.kernels: set[Partition] = set()
        self._backend, self._constants, self._places = backend, constants, places

    def bound(self, step: Partition, lowered: Lowered | None) -> Callable[[], None]:
        """Return a function that runs a step. lowered: the step as a cuDNN graph, if it is one."""
        if lowered is not None:
            by_name = {v.name: v for v in (*step.inputs, *step.outputs)}
            buffers = {b.uid: self._constants(b.literal, b.type) for b in lowered.constants}
            named = (*lowered.inputs, *lowered.outputs)
            buffers |= {uid: lowered.part(uid, self.buffer(by_name[name])) for uid, name in named}
            buffers |= lowered.spare_buffers(self._backend.xp)
            return self._backend.bind(lowered.graph, buffers)
        if step.kind is Kind.VIEW:
            return self._bound_view(step)
        kernel = self._backend.kernel(step, self.buffer)
        if kernel is not None:
            self.kernels.add(step)
            return kernel
        return self._bound_reference(step)

    def _bound_view(self, step: Partition) -> Callable[[], None]:
        """Return a function that copies the results of a view that cannot share the memory of its operand.

        A concat in place copies nothing, because steps write its operands into its result.
        """
        (node,) = step.nodes
        if isinstance(node.op, Concat):
            return lambda: None
        copies: list[tuple[Array, Array]] = []
        for place, value in enumerate(node.results):
            if not value.uses:
                continue
            source, start = self.buffer(node.operands[0]), view_offset(node, place)
            part = source[start : start + value.type.span]
            if alias(value, place) is None:
                copies.append((self._places[value], part))
            elif value not in self._places:  # a view of a constant
                self._places[value] = part

        def copy() -> None:
            for target, part in copies:
                target[...] = part

        return copy

    def buffer(self, value: Value, type: TensorType | None = None) -> Array:
        """Return the flat memory of a value; of a constant, in the layout of `type` (default: its own)."""
        literal = value.literal
        return self._places[value] if literal is None else self._constants(literal, type or value.type)

    def _bound_reference(self, step: Partition) -> Callable[[], None]:
        """Return a function that runs the references of the nodes, one by one.

        Raises ExecutionError for types that the array module lacks.
        """
        for value in (*inputs_of(step.nodes), *step.outputs):
            if stored_dtype(self._backend.xp, value.type.dtype) != value.type.dtype.numpy:
                raise ExecutionError(f"step {step.signature}: no kernel runs it, and {value!r} is of a type CuPy lacks")
        operands = {v: unpack(self.buffer(v), v.type) for v in inputs_of(step.nodes)}
        results = {v: unpack(self._places[v], v.type) for v in step.outputs}
        in_place = {node for node in step.nodes if self._writes_rows(node, results)}

        def run() -> None:
            held = dict(operands)
            for node in step.nodes:
                if node in in_place:
                    self._write_rows(node, held)
                    continue
                arrays = evaluate_node(node, [held[v] for v in node.operands], self._backend.xp)
                for value, array in zip(node.results, arrays, strict=True):
                    if array.dtype != value.type.dtype.numpy:
                        raise ExecutionError(f"{node!r}: the kernel gave {array.dtype}")
                    held[value] = array
            for value, place in results.items():
                if value.node not in in_place:
                    place[...] = held[value]

        return run

    def _write_rows(self, node: Node, operands: Mapping[Value, Array]) -> None:
        """Write new rows into memory that holds all other rows of the result already."""
        assert isinstance(node.op, Scatter)
        try:
            node.op.write_rows(self._backend.xp, *(operands[v] for v in node.operands))
        except IndexError as error:
            raise ExecutionError(f"{node!r}: {error}") from error

    def _writes_rows(self, node: Node, results: Mapping[Value, Array]) -> bool:
        """Tell if a node is a scatter whose result is stored in the memory of its operand."""
        if not isinstance(node.op, Scatter) or node.op.reduction != "none" or node.result not in results:
            return False
        x, result = node.operands[0], node.result
        return x.type == result.type and _address(self.buffer(x)) == _address(self.buffer(result))


def _address(array: Array) -> int:
    interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
    return int(interface["data"][0])
