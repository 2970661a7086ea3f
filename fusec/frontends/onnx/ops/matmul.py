"""Import MatMul and Gemm. Transposes, scales and the bias become separate ops."""

from __future__ import annotations

from fusec.frontends.onnx.emission.emit import Emitter, Table
from fusec.ir import Value
from fusec.ops import MatMul, Transpose, pw
from fusec.ops.spec import broadcast, require


def matmul(g: Emitter, a: Value, b: Value, /) -> Value:
    """Import MatMul, as numpy.matmul: a vector gets a dim for the product, which the result lacks."""
    require(a.type.rank >= 1 and b.type.rank >= 1, "takes no scalars")
    left = a if a.type.rank > 1 else g.reshape(a, (1, *a.type.shape))
    right = b if b.type.rank > 1 else g.reshape(b, (*b.type.shape, 1))
    y = g(MatMul(), left, right)
    rows = y.type.shape[-2:-1] if a.type.rank > 1 else ()
    columns = y.type.shape[-1:] if b.type.rank > 1 else ()
    return g.reshape(y, (*y.type.shape[:-2], *rows, *columns))


def gemm(
    g: Emitter,
    a: Value,
    b: Value,
    c: Value | None = None,
    /,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,  # noqa: N803 - attributes keep ONNX's names
    transB: int = 0,  # noqa: N803
) -> Value:
    require(a.type.rank == b.type.rank == 2, f"takes matrices, not {list(a.type.shape)} and {list(b.type.shape)}")
    whole = float(alpha).is_integer() and float(beta).is_integer()
    require(a.type.dtype.is_float or whole, f"alpha {alpha} and beta {beta} of {a.type.dtype.value} must be whole")
    left = g(Transpose((1, 0)), a) if transA else a
    right = g(Transpose((1, 0)), b) if transB else b
    y = g(MatMul(), left, right)
    if alpha != 1.0:
        y = g(pw("mul"), y, g.scalar(alpha, y))
    if c is None or beta == 0.0:
        return y
    require(
        broadcast([c.type.shape, y.type.shape]) == y.type.shape,
        f"C of shape {list(c.type.shape)} does not broadcast to {list(y.type.shape)}",
    )
    if beta != 1.0:
        c = g(pw("mul"), c, g.scalar(beta, c))
    return g(pw("add"), y, c)


TABLE: Table = {
    ("MatMul", 1): matmul,
    ("Gemm", 7): gemm,
}
