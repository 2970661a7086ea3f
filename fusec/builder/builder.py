"""Build a graph from Python, op by op; whatever is wrong is said at the line that asked for it."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
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
_OWN = str(Path(__file__).parent.parent)  # frames of the package itself are nobody's model


class Builder:
    """A graph under construction.

    Inputs are given with every call, parameters once (`Executable.bind`): they stay on the device. `update` says
    what replaces a parameter after a call. Raises ModelError naming the caller's line.
    """

    def __init__(self, dtype: DType | str = "f32", name: str = "main"):
        self.dtype = DType(dtype)
        self.parameters: dict[str, np.ndarray[Any, Any] | None] = {}
        self.updates: dict[str, str] = {}
        self.copies: dict[str, list[Tensor]] = {}
        self._graph = Graph(name)
        self._outputs: dict[str, Tensor] = {}
        self._scalars: dict[tuple[str, DType], Tensor] = {}
        self._origin: tuple[str, ...] | None = None
        self._streams = 0

    @classmethod
    def on(cls, graph: Graph) -> Builder:
        """A builder that goes on with a graph, in place; its outputs stay as they are unless some are added."""
        builder = cls(name=graph.name)
        builder._graph = graph
        builder._outputs = {n: Tensor(builder, v) for n, v in zip(graph.output_names, graph.outputs, strict=True)}
        return builder

    # the interface of the graph --------------------------------------------------------------------------

    def input(self, name: str, shape: Sequence[int], dtype: DType | str | None = None) -> Tensor:
        """What every call is given."""
        return self._input(name, shape, DType(dtype) if dtype else self.dtype)

    def parameter(self, name: str, array: Any = None, shape: Sequence[int] | None = None, dtype: Any = None) -> Tensor:
        """What calls find where the last one left it: its first value, or its shape and dtype alone."""
        held = None
        if array is not None:
            held = np.asarray(array)
            shape, dtype = held.shape, DType.of(held.dtype)
        if shape is None:
            raise self.error(f"parameter {name!r} needs an array or a shape")
        tensor = self._input(name, shape, DType(dtype) if dtype else self.dtype)
        self.parameters[name] = held
        return tensor

    def copy(self, parameter: Tensor, dtype: DType | str) -> Tensor:
        """A parameter in another floating-point type, kept beside it as `<name> as <dtype>`: the network reads this,
        optimisers move the other, and no call casts it. `Executable.bind`, `update` and `backward` see to both."""
        dtype, name = DType(dtype), self._parameter(parameter)
        if dtype is parameter.dtype:
            return parameter
        if not dtype.is_float or not parameter.dtype.is_float:
            raise self.error(f"a copy of {parameter!r} in {dtype.value}")
        if name in self.updates:
            raise self.error(f"{parameter!r} is updated already: copy it before")
        for made in self.copies.get(name, ()):
            if made.dtype is dtype:
                return made
        held, own = self.parameters[name], copy_name(name, dtype)
        made = self._input(own, parameter.shape, dtype)
        self.parameters[own] = None if held is None else held.astype(dtype.numpy)
        self.copies.setdefault(name, []).append(made)
        return made

    def _parameter(self, tensor: Tensor) -> str:
        if tensor.name not in self.parameters or tensor.value not in self._graph.inputs:
            raise self.error(f"{tensor!r} is no parameter of this graph")
        return tensor.name

    def _input(self, name: str, shape: Sequence[int], dtype: DType) -> Tensor:
        try:
            return Tensor(self, self._graph.add_input(name, TensorType(tuple(shape), dtype)))
        except VerifyError as error:
            raise self.error(str(error)) from None

    def output(self, tensors: Mapping[str, Tensor] | None = None, **named: Tensor) -> None:
        """Let tensors be outputs of the graph, under these names."""
        for name, tensor in {**(tensors or {}), **named}.items():
            if name in self._outputs:
                raise self.error(f"two outputs are named {name!r}")
            self._outputs[name] = self._own(tensor)

    def update(self, parameter: Tensor, new: Tensor) -> None:
        """After a call, `new` takes the place of the parameter: in its memory, if nothing reads the old value later."""
        name = self._parameter(parameter)
        if name in self.updates:
            raise self.error(f"parameter {name!r} is updated twice")
        if not new.value.type.same_value_type(parameter.value.type):
            raise self.error(f"parameter {parameter!r} cannot become {new!r}")
        self.updates[name] = f"{name}.next"
        self.output({f"{name}.next": new})
        for copy in self.copies.get(name, ()):
            self.update(copy, new.astype(copy.dtype))

    def graph(self, prune: bool = True) -> Graph:
        """The graph so far, as a copy that later calls of the builder do not change; without dead code."""
        if not self._outputs:
            raise self.error("the graph has no outputs")
        self._graph.set_outputs([t.value for t in self._outputs.values()], list(self._outputs))
        copy = self._graph.clone()
        if prune:
            copy.prune()
        return copy

    def snapshot(self, *tensors: Tensor) -> Graph:
        """A graph of its own with only these outputs, named `y0`, `y1`…, and the inputs they depend on."""
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
        """Add any op of the IR; all its results."""
        values = [self._own(t).value for t in operands]
        origin = self._origin or (_where(),)
        try:
            node = self._graph.insert(op, values, origin=origin)
        except VerifyError as error:
            raise ModelError(f"{origin[0]}: {error}") from None
        return tuple(Tensor(self, v) for v in node.results)

    def apply(self, op: Op, *operands: Tensor) -> Tensor:
        """Add an op that has one result."""
        (result,) = self.results(op, *operands)
        return result

    def error(self, message: str) -> ModelError:
        """A ModelError that names the caller's line."""
        return ModelError(f"{(self._origin or (_where(),))[0]}: {message}")

    def _own(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]  # users need not check types
            raise self.error(f"{type(tensor).__name__} is no tensor of this graph: use constant()")
        if tensor.builder is not self:
            raise self.error(f"{tensor!r} belongs to another builder")
        return tensor

    @property
    def nodes(self) -> list[Node]:
        """All nodes so far, in order."""
        return list(self._graph.nodes)

    @property
    def last(self) -> Node | None:
        """The node that was added last."""
        return self._graph.last

    def since(self, node: Node | None) -> list[Node]:
        """The nodes added after one."""
        return self._graph.since(node)

    @contextmanager
    def standing_for(self, node: Node) -> Generator[None]:
        """What is added meanwhile has the origin of a node, since that is what it belongs to."""
        before, self._origin = self._origin, node.origin or (node.op.name,)
        try:
            yield
        finally:
            self._origin = before

    def constant(self, array: Any, dtype: DType | str | None = None) -> Tensor:
        """An array known now; without a dtype, its own."""
        held = np.asarray(array)
        if dtype is not None:
            held = held.astype(DType(dtype).numpy)
        return Tensor(self, self._graph.constant(held))

    def like(self, operand: Operand, tensor: Tensor) -> Tensor:
        """An operand beside a tensor: itself, or a constant of the tensor's dtype."""
        if isinstance(operand, Tensor):
            return self._own(operand)
        if isinstance(operand, (int, float, bool)):
            key = (repr(operand), tensor.dtype)
            if key not in self._scalars:
                self._scalars[key] = self.constant(operand, tensor.dtype)
            return self._scalars[key]
        array = np.asarray(operand)
        if array.dtype != tensor.dtype.numpy:
            raise self.error(f"an array of {array.dtype} beside {tensor!r}: give it that dtype")
        return self.constant(array)

    # ops -------------------------------------------------------------------------------------------------

    def pointwise(self, name: str, first: Tensor, *others: Operand, **attributes: float) -> Tensor:
        """A pointwise op by its name in the IR."""
        try:
            op = pw(name, **attributes)
        except (KeyError, TypeError) as error:
            raise self.error(f"no pointwise op {name!r} with attributes {sorted(attributes)}") from error
        beside = others[0] if name == "where" and isinstance(others[0], Tensor) else first
        if name == "where" and len(others) == 2 and not isinstance(others[0], Tensor):
            beside = others[1]
        return self.apply(op, first, *(self.like(o, beside) for o in others))

    def where(self, condition: Tensor, x: Operand, y: Operand) -> Tensor:
        """x where the condition holds, else y; one of both is a tensor."""
        return self.pointwise("where", condition, x, y)

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """As NumPy's `@`: vectors lose the dim they were given for it."""
        if not a.rank or not b.rank:
            raise self.error(f"a matrix product of {a!r} and {b!r}")
        left, right = a[None] if a.rank == 1 else a, b[:, None] if b.rank == 1 else b
        product = self.apply(MATMUL, left, right)
        kept = list(product.shape)
        if b.rank == 1:
            del kept[-1]
        if a.rank == 1:
            del kept[-1 if b.rank == 1 else -2]
        return product.reshape(kept)

    def conv(
        self, x: Tensor, w: Tensor, stride: Sizes = 1, padding: Sizes = 0, dilation: Sizes = 1, groups: int = 1
    ) -> Tensor:
        """x[N, C, spatial…] by w[K, C/groups, window…]; pads for both ends, or all starts and then all ends."""
        n = self._spatial(x)
        op = Conv(self._each(stride, n), self._pads(padding, n), self._each(dilation, n), groups)
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
        """x[N, C, spatial…] by w[C, K/groups, window…]."""
        n = self._spatial(x)
        extra = self._each(output_padding, n)
        op = ConvTranspose(self._each(stride, n), self._pads(padding, n), self._each(dilation, n), extra, groups)
        return self.apply(op, x, w)

    def max_pool(self, x: Tensor, window: Sizes, stride: Sizes | None = None, padding: Sizes = 0) -> Tensor:
        """Windows side by side unless a stride is given."""
        n = self._spatial(x)
        size = self._each(window, n)
        return self.apply(
            MaxPool(size, size if stride is None else self._each(stride, n), self._pads(padding, n), (1,) * n), x
        )

    def avg_pool(
        self,
        x: Tensor,
        window: Sizes,
        stride: Sizes | None = None,
        padding: Sizes = 0,
        count_include_pad: bool = True,
    ) -> Tensor:
        n = self._spatial(x)
        size = self._each(window, n)
        steps = size if stride is None else self._each(stride, n)
        return self.apply(AvgPool(size, steps, self._pads(padding, n), (1,) * n, False, count_include_pad), x)

    def batch_norm(
        self, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, epsilon: float = 1e-5
    ) -> Tensor:
        """By statistics that are given: inference."""
        return self.apply(BatchNorm(epsilon), x, scale, bias, mean, variance)

    def batch_norm_train(
        self, x: Tensor, scale: Tensor, bias: Tensor, epsilon: float = 1e-5
    ) -> tuple[Tensor, Tensor, Tensor]:
        """By the batch's own statistics: the result, the mean, and the (biased) variance."""
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
        """softmax(scale * q @ k^T + bias) @ v of q[B, H, S, D], k and v[B, G, T, D]; scale is D**-0.5 by default."""
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        return self.apply(Attention(factor, causal), q, k, v, *([] if bias is None else [bias]))

    def concat(self, tensors: Iterable[Tensor], axis: int = 0) -> Tensor:
        return self.apply(Concat(axis), *tensors)

    def split(self, x: Tensor, sizes: int | Sequence[int], axis: int = 0) -> tuple[Tensor, ...]:
        """Into pieces of these sizes, or into so many equal ones."""
        if isinstance(sizes, int):
            if not -x.rank <= axis < x.rank or sizes < 1 or x.shape[axis] % sizes:
                raise self.error(f"{x!r} does not split into {sizes} along axis {axis}")
            sizes = [x.shape[axis] // sizes] * sizes
        return self.results(Split(axis, tuple(sizes)), x)

    def take(self, x: Tensor, indices: Tensor, axis: int = 0) -> Tensor:
        """Rows of x along an axis, picked by integers."""
        return self.apply(Gather(axis), x, indices)

    def pad(self, x: Tensor, pads: Sequence[int], mode: str = "constant", value: float = 0.0) -> Tensor:
        """All the starts, then all the ends."""
        return self.apply(Pad(tuple(pads), mode, value), x)

    def upsample(self, x: Tensor, factor: int, mode: str = "nearest") -> Tensor:
        """Each spatial dim `factor` times as large: nearest, or linear between the centres."""
        scales = (1.0, 1.0, *([float(factor)] * (x.rank - 2)))
        sizes = tuple(round(d * s) for d, s in zip(x.shape, scales, strict=True))
        coordinates = "asymmetric" if mode == "nearest" else "half_pixel"
        return self.apply(Resize(sizes, scales, mode, coordinates, "floor"), x)

    def one_hot(self, labels: Tensor, count: int, dtype: DType | str | None = None) -> Tensor:
        """A last dim of `count`, 1 where it is the label."""
        numbers = self.constant(np.arange(count), labels.dtype)
        return labels[..., None].eq(numbers).astype(dtype or self.dtype)

    def random_bits(self, state: Tensor, shape: Sequence[int]) -> Tensor:
        """32 random bits per element from state u64[2]; each use in a graph draws its own."""
        self._streams += 1
        return self.apply(RandomBits(tuple(shape), self._streams - 1), state)

    def random_uniform(self, state: Tensor, shape: Sequence[int]) -> Tensor:
        """f32 in [0, 1), multiples of 2^-24."""
        bits = self.random_bits(state, shape)
        # by eights, which 16 bits hold, too, should the graph be compiled for them
        parts = (bits.pointwise("shift_right", 32 - 8 * i).pointwise("bitwise_and", 255) for i in (1, 2, 3))
        first, second, third = (part.astype("f32") * 2.0 ** (-8 * i) for i, part in enumerate(parts, 1))
        return first + (second + third)

    def dropout(self, x: Tensor, rate: float, state: Tensor) -> Tensor:
        """Elements set to zero with probability `rate`, the others divided by 1 - rate."""
        if not 0.0 <= rate < 1.0:
            raise self.error(f"a dropout rate of {rate}")
        if rate == 0.0:
            return x
        kept = self.random_bits(state, x.shape) >= self.constant(round(rate * 2**32), "u32")
        return self.where(kept, x * (1.0 / (1.0 - rate)), 0.0)

    def cross_entropy(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Mean over the batch of -log softmax at the label; logits[..., classes], integer labels[...]."""
        chosen = self.one_hot(labels, logits.shape[-1], logits.dtype) * logits.log_softmax()
        return -(chosen.sum() * (1.0 / max(labels.size, 1)))

    # arguments -------------------------------------------------------------------------------------------

    def _spatial(self, x: Tensor) -> int:
        if x.rank < 3:
            raise self.error(f"{x!r} has no spatial dims")
        return x.rank - 2

    def _each(self, given: Sizes, n: int) -> tuple[int, ...]:
        return (given,) * n if isinstance(given, int) else tuple(given)

    def _pads(self, given: Sizes, n: int) -> tuple[int, ...]:
        pads = self._each(given, n)
        return pads if len(pads) == 2 * n else pads * 2


def _where() -> str:
    """File and line of the nearest frame that is not of this package."""
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]  # inspect.stack() reads source files: far slower
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OWN):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
