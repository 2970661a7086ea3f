"""Add ops to a graph by methods of `Builder`: products, windows, norms, attention, random numbers and losses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from fusec.builder.tensor import MATMUL, Operand, Tensor
from fusec.errors import ModelError
from fusec.ir import DType, Op
from fusec.ops import (
    Attention,
    AvgPool,
    BatchNorm,
    BatchNormTrain,
    Concat,
    Conv,
    ConvTranspose,
    FlippedConv,
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


class OpMethods(ABC):
    """The methods of a builder that add ops. The builder itself adds nodes and constants."""

    dtype: DType
    _draws = 0  # random_bits so far, each of which draws other bits

    @abstractmethod
    def results(self, op: Op, *operands: Tensor) -> tuple[Tensor, ...]:
        """Add an op of the IR and return all its results."""

    @abstractmethod
    def apply(self, op: Op, *operands: Tensor) -> Tensor:
        """Add an op that has one result and return it."""

    @abstractmethod
    def constant(self, array: Any, dtype: DType | str | None = None) -> Tensor:
        """Add a constant."""

    @abstractmethod
    def like(self, operand: Operand, tensor: Tensor) -> Tensor:
        """Return an operand as a tensor of the dtype of `tensor`, the other operand."""

    @abstractmethod
    def error(self, message: str) -> ModelError:
        """Return an error that names the caller's line."""

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
        self,
        x: Tensor,
        w: Tensor,
        stride: Sizes = 1,
        padding: Sizes = 0,
        dilation: Sizes = 1,
        groups: int = 1,
        flipped: bool = False,
    ) -> Tensor:
        """Convolve x[N, C, spatial…] with w[K, C/groups, window…].

        padding: one number for all dims, one per dim for both ends, or all starts followed by all ends.
        flipped: reverse the filters along each spatial dim, as convolution in mathematics does.
        """
        kind = FlippedConv if flipped else Conv
        return self.apply(kind(self._each(stride, x), self._pads(padding, x), self._each(dilation, x), groups), x, w)

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
        self._draws += 1
        return self.apply(RandomBits(tuple(shape), self._draws - 1), state)

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
