"""Build a graph from Python, op by op. Errors name the line of the caller."""

from __future__ import annotations

import operator
import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fusec.builder.tensor import MATMUL, Operand, Tensor
from fusec.errors import ModelError, VerifyError
from fusec.ir import DType, Graph, Node, Op, TensorType, Value, copy_name
from fusec.ops import (
    Attention,
    AvgPool,
    BatchNorm,
    BatchNormTrain,
    Concat,
    Conv,
    ConvTranspose,
    Gather,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    MaxPool,
    Pad,
    RandomBits,
    Resize,
    RmsNorm,
    Split,
    pw,
)

Sizes = int | Sequence[int]
_PACKAGE = str(Path(__file__).parent.parent)  # stack frames of fusec itself are not the caller's line


class Builder:
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
        self._streams = 0

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

    def error(self, message: str) -> ModelError:
        """Return a ModelError that names the caller's line."""
        return ModelError(f"{(self._origin or (_where(),))[0]}: {message}")

    def dtype_of(self, given: DType | str) -> DType:
        """Return a dtype by its name in the IR."""
        try:
            return DType(given)
        except ValueError:
            names = ", ".join(dtype.value for dtype in DType)
            raise self.error(f"{given!r} is no dtype; these are {names}") from None

    def _own(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]  # users need not check types
            raise self.error(f"{type(tensor).__name__} is no tensor of this graph: use constant()")
        if tensor.builder is not self:
            raise self.error(f"{tensor!r} belongs to another builder")
        return tensor

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

    # ops -------------------------------------------------------------------------------------------------

    def pointwise(self, name: str, first: Tensor, *others: Operand, **attributes: float) -> Tensor:
        """Add a pointwise op by its name in the IR."""
        try:
            op = pw(name, **attributes)
        except (KeyError, TypeError) as error:
            raise self.error(f"no pointwise op {name!r} with attributes {sorted(attributes)}") from error
        typed = first  # numbers get the dtype of this tensor
        if name == "where":  # `first` is the condition, whose dtype is not that of the result
            typed = next((o for o in others if isinstance(o, Tensor)), None)
            if typed is None:
                raise self.error(f"where() of {others!r}: one of them has to be a tensor, use constant()")
        return self.apply(op, first, *(self.like(o, typed) for o in others))

    def where(self, condition: Tensor, x: Operand, y: Operand) -> Tensor:
        """Choose x where the condition holds, else y. At least one of x and y is a tensor."""
        return self.pointwise("where", condition, x, y)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """Multiply matrices as NumPy's `@` does: a vector gets a dim for the product, which the result lacks."""
        if not a.rank or not b.rank:
            raise self.error(f"a matrix product of {a!r} and {b!r}")
        left, right = a[None] if a.rank == 1 else a, b[:, None] if b.rank == 1 else b
        product = self.apply(MATMUL, left, right)
        shape = list(product.shape)
        if b.rank == 1:
            del shape[-1]
        if a.rank == 1:
            del shape[-1 if b.rank == 1 else -2]
        return product.reshape(shape)

    def conv(
        self, x: Tensor, w: Tensor, stride: Sizes = 1, padding: Sizes = 0, dilation: Sizes = 1, groups: int = 1
    ) -> Tensor:
        """Convolve x[N, C, spatial…] with w[K, C/groups, window…].

        padding: one number for all dims, one per dim for both ends, or all starts followed by all ends.
        """
        op = Conv(self._each(stride, x), self._pads(padding, x), self._each(dilation, x), groups)
        return self.apply(op, x, w)

    def conv_transpose(
        self,
        x: Tensor,
        w: Tensor,
        stride: Sizes = 1,
        padding: Sizes = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        output_padding: Sizes = 0,
    ) -> Tensor:
        """Convolve x[N, C, spatial…], transposed, with w[C, K/groups, window…]."""
        pads, extra = self._pads(padding, x), self._each(output_padding, x)
        op = ConvTranspose(self._each(stride, x), pads, self._each(dilation, x), extra, groups)
        return self.apply(op, x, w)

    def max_pool(self, x: Tensor, window: Sizes, stride: Sizes | None = None, padding: Sizes = 0) -> Tensor:
        """Take the maximum of each window. The default stride is the window, so windows do not overlap."""
        size, steps = self._each(window, x), self._each(window if stride is None else stride, x)
        return self.apply(MaxPool(size, steps, self._pads(padding, x), self._each(1, x)), x)

    def avg_pool(
        self,
        x: Tensor,
        window: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        count_include_pad: bool = True,
    ) -> Tensor:
        """Average each window. The default stride is the window, so windows do not overlap."""
        size, steps = self._each(window, x), self._each(window if stride is None else stride, x)
        return self.apply(AvgPool(size, steps, self._pads(padding, x), self._each(1, x), False, count_include_pad), x)

    def batch_norm(
        self, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, epsilon: float = 1e-5
    ) -> Tensor:
        """Normalise by a given mean and variance, as for inference."""
        return self.apply(BatchNorm(epsilon), x, scale, bias, mean, variance)

    def batch_norm_train(
        self, x: Tensor, scale: Tensor, bias: Tensor, epsilon: float = 1e-5
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Normalise by the statistics of the batch. Returns the result, the mean, and the biased variance."""
        y, mean, inverse = self.results(BatchNormTrain(epsilon), x, scale, bias)
        return y, mean, 1.0 / (inverse * inverse) - epsilon

    def layer_norm(
        self, x: Tensor, scale: Tensor, bias: Tensor | None = None, axis: int = -1, epsilon: float = 1e-5
    ) -> Tensor:
        return self.apply(LayerNorm(axis, epsilon), x, scale, *([] if bias is None else [bias]))

    def rms_norm(self, x: Tensor, scale: Tensor, axis: int = -1, epsilon: float = 1e-5) -> Tensor:
        return self.apply(RmsNorm(axis, epsilon), x, scale)

    def group_norm(self, x: Tensor, scale: Tensor, bias: Tensor, groups: int, epsilon: float = 1e-5) -> Tensor:
        return self.apply(GroupNorm(groups, epsilon), x, scale, bias)

    def instance_norm(self, x: Tensor, scale: Tensor, bias: Tensor, epsilon: float = 1e-5) -> Tensor:
        return self.apply(InstanceNorm(epsilon), x, scale, bias)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None = None,
        scale: float | None = None,
        causal: bool = False,
    ) -> Tensor:
        """Compute softmax(scale * q @ k^T + bias) @ v for q[B, H, S, D] and k, v[B, G, T, D].

        scale: D**-0.5 by default.
        """
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        return self.apply(Attention(factor, causal), q, k, v, *([] if bias is None else [bias]))

    def concat(self, tensors: Iterable[Tensor], axis: int = 0) -> Tensor:
        return self.apply(Concat(axis), *tensors)

    def split(self, x: Tensor, sizes: int | Sequence[int], axis: int = 0) -> tuple[Tensor, ...]:
        """Split x into pieces of these sizes, or into `sizes` equal pieces if it is one number."""
        if isinstance(sizes, int):
            if not -x.rank <= axis < x.rank or sizes < 1 or x.shape[axis] % sizes:
                raise self.error(f"{x!r} does not split into {sizes} along axis {axis}")
            sizes = [x.shape[axis] // sizes] * sizes
        return self.results(Split(axis, tuple(sizes)), x)

    def take(self, x: Tensor, indices: Tensor, axis: int = 0) -> Tensor:
        """Gather slices of x along an axis, chosen by integer indices."""
        return self.apply(Gather(axis), x, indices)

    def pad(self, x: Tensor, pads: Sequence[int], mode: str = "constant", value: float = 0.0) -> Tensor:
        """Pad x. `pads` has all starts followed by all ends."""
        return self.apply(Pad(tuple(pads), mode, value), x)

    def upsample(self, x: Tensor, factor: int, mode: str = "nearest") -> Tensor:
        """Enlarge each spatial dim `factor` times: to the nearest element, or linear between the centres."""
        scales = (1.0, 1.0, *([float(factor)] * (x.rank - 2)))
        sizes = tuple(round(d * s) for d, s in zip(x.shape, scales, strict=True))
        coordinates = "asymmetric" if mode == "nearest" else "half_pixel"
        return self.apply(Resize(sizes, scales, mode, coordinates, "floor"), x)

    def one_hot(self, labels: Tensor, count: int, dtype: DType | str | None = None) -> Tensor:
        """Encode labels as one-hot: a new last dim of size `count`, 1 at the label and 0 elsewhere."""
        numbers = self.constant(np.arange(count), labels.dtype)
        return labels[..., None].eq(numbers).astype(dtype or self.dtype)

    def random_bits(self, state: Tensor, shape: Sequence[int]) -> Tensor:
        """Draw 32 random bits per element from a state u64[2]. Each call draws other bits from the same state."""
        self._streams += 1
        return self.apply(RandomBits(tuple(shape), self._streams - 1), state)

    def random_uniform(self, state: Tensor, shape: Sequence[int]) -> Tensor:
        """Draw f32 numbers in [0, 1), which are multiples of 2^-24."""
        bits = self.random_bits(state, shape)
        # eight bits at a time, because a graph compiled for fp16 or bf16 holds these exactly
        parts = (bits.pointwise("shift_right", 32 - 8 * i).pointwise("bitwise_and", 255) for i in (1, 2, 3))
        first, second, third = (part.astype("f32") * 2.0 ** (-8 * i) for i, part in enumerate(parts, 1))
        return first + (second + third)

    def dropout(self, x: Tensor, rate: float, state: Tensor) -> Tensor:
        """Set elements to zero with probability `rate` and divide the others by 1 - rate."""
        threshold = round(rate * 2**32) if 0.0 <= rate < 1.0 else 2**32
        if threshold == 2**32:  # also for the next number to 1
            raise self.error(f"a dropout rate of {rate}")
        if rate == 0.0:
            return x
        survives = self.random_bits(state, x.shape) >= self.constant(threshold, "u32")
        return self.where(survives, x * (1.0 / (1.0 - rate)), 0.0)

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Average -log softmax at the label over the batch, for logits[..., classes] and integer labels[...]."""
        chosen = self.one_hot(labels, logits.shape[-1], logits.dtype) * logits.log_softmax()
        return -(chosen.sum() * (1.0 / max(labels.size, 1)))

    # arguments -------------------------------------------------------------------------------------------

    def _each(self, given: Sizes, x: Tensor) -> tuple[int, ...]:
        """Return a number for each spatial dim of x."""
        if x.rank < 3:
            raise self.error(f"{x!r} has no spatial dims")
        return (given,) * (x.rank - 2) if isinstance(given, int) else tuple(given)

    def _pads(self, given: Sizes, x: Tensor) -> tuple[int, ...]:
        pads = self._each(given, x)
        return pads if len(pads) == 2 * (x.rank - 2) else pads * 2


def _where() -> str:
    """Return file and line of the nearest stack frame outside fusec."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  # inspect.stack() reads source files: far slower
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
