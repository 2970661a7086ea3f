"""Import matrix products and convolutions with transposes, a scale, a residual or an activation fused into them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusec.frontends.onnx.contrib.activations import activated
from fusec.frontends.onnx.emission.emit import Emitter, OpFunction
from fusec.frontends.onnx.ops.convolution import conv
from fusec.frontends.onnx.ops.matmul import gemm, matmul
from fusec.ir import Value
from fusec.ops import Transpose, pw
from fusec.ops.spec import require


def fused_matmul(
    g: Emitter,
    a: Value,
    b: Value,
    /,
    *,
    alpha: float = 1.0,
    transA: int = 0,  # noqa: N803 - attributes keep the op's names
    transB: int = 0,  # noqa: N803
    transBatchA: int = 0,  # noqa: N803
    transBatchB: int = 0,  # noqa: N803
) -> Value:
    """Import FusedMatMul: alpha * op(a) @ op(b). transBatch moves the first dim to just before the last."""
    y = matmul(g, _transposed(g, a, transA, transBatchA), _transposed(g, b, transB, transBatchB))
    return y if alpha == 1.0 else g(pw("mul"), y, g.scalar(alpha, y))


def transpose_matmul(
    g: Emitter,
    a: Value,
    b: Value,
    /,
    *,
    alpha: float = 1.0,
    transA: int = 0,  # noqa: N803
    transB: int = 0,  # noqa: N803
) -> Value:
    return fused_matmul(g, a, b, alpha=alpha, transA=transA, transB=transB)


def _transposed(g: Emitter, x: Value, transposed: int, batch: int) -> Value:
    """Transpose an operand: [d0, d1, …, r, c] to [d1, …, r, d0, c] if `batch`, then its last two dims."""
    rank = x.type.rank
    order = list(range(rank))
    if batch:
        require(rank >= 3, f"transposes the batch of {x.type}, which has no batch dim")
        order = [*order[1:-1], 0, order[-1]]
    if transposed and rank > 1:
        order = [*order[:-2], order[-1], order[-2]]
    return x if order == list(range(rank)) else g(Transpose(tuple(order)), x)


def fused_gemm(
    g: Emitter,
    a: Value,
    b: Value,
    c: Value | None = None,
    /,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,  # noqa: N803
    transB: int = 0,  # noqa: N803
    activation: str = "",
    activation_alpha: float | None = None,
    activation_beta: float | None = None,
    activation_gamma: float | None = None,
) -> Value:
    y = gemm(g, a, b, c, alpha=alpha, beta=beta, transA=transA, transB=transB)
    return activated(g, y, activation, (activation_alpha, activation_beta, activation_gamma))


def fused_conv(
    g: Emitter,
    x: Value,
    w: Value,
    b: Value | None = None,
    z: Value | None = None,
    /,
    *,
    activation: str = "",
    activation_params: Sequence[float] = (),
    auto_pad: str = "NOTSET",
    dilations: Sequence[int] = (),
    group: int = 1,
    kernel_shape: Sequence[int] = (),
    pads: Sequence[int] = (),
    strides: Sequence[int] = (),
) -> Value:
    """Import FusedConv: activation(conv(x, w) + b + z)."""
    y = conv(
        g,
        x,
        w,
        b,
        auto_pad=auto_pad,
        dilations=dilations,
        group=group,
        kernel_shape=kernel_shape,
        pads=pads,
        strides=strides,
    )
    if z is not None:
        require(z.type.shape == y.type.shape, f"a residual {z.type} for a result {y.type}")
        y = g(pw("add"), y, z)
    alpha, beta = (*activation_params, None, None)[:2]
    return activated(g, y, activation, (alpha, beta, None))


TABLE: Mapping[str, OpFunction] = {
    "FusedMatMul": fused_matmul,
    "TransposeMatMul": transpose_matmul,
    "FusedGemm": fused_gemm,
    "FusedConv": fused_conv,
}
