"""Generate max pooling that also stores where each maximum is, so that its gradient need not look for it.

A thread computes neighbouring channels of one window.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusec.gpu.kernels.codegen.cuda_template import cuda_template
from fusec.gpu.kernels.codegen.kernel import C_TYPES, Arguments, Kernel, compute_type
from fusec.gpu.kernels.codegen.pointwise_code import Space, strides_from, widest_vector
from fusec.gpu.kernels.pooling.first_maxima import Threads, find_largest, unrolled, window_dims
from fusec.ir import Node, Value
from fusec.ops import MaxPoolTrain

_CUDA = cuda_template(__package__, "pool.cuh")


def max_pool_train(nodes: Sequence[Node], outputs: Sequence[Value]) -> Kernel | None:
    """Return the kernel of a max_pool_train; None for other steps, and for more than 2^31 elements."""
    (pool, *rest) = nodes
    if rest or not isinstance(pool.op, MaxPoolTrain):
        return None
    (x,), (y, places) = pool.operands, pool.results
    if x.type.dtype not in C_TYPES or x.type.size >= 1 << 31:
        return None
    if y.type.size == 0:
        return Kernel(pool.op.name, ())
    types = [y.type, places.type, x.type]
    packs = all(t.strides[1] == 1 for t in types)
    vector = widest_vector(y.type.shape[1], types, [strides_from(t, y.type.rank, 1) for t in types]) if packs else 1
    dims = window_dims(pool.op, x.type.shape[2:], y.type.shape[2:])
    names = [f"o{d}" for d in range(len(dims))]
    lines, grid = Threads(y.type.shape[0], y.type.shape[1], vector, packs).setup(names, [d.count for d in dims])
    types_in_c = {"TYPE": C_TYPES[x.type.dtype], "NUMBER": compute_type(x.type.dtype), "INDEX": "u8"}
    cuda = _CUDA.bind(VECTOR=vector, UNROLL=unrolled(dims), **types_in_c)
    arguments = Arguments()
    lines += find_largest(x, dims, cuda, arguments)
    space = Space(y.type.shape, ("c0", "c1", *names))
    if y in outputs:
        lines += cuda("store_maximum", STORED=f"{arguments.write(y)} + ({space.offset(y.type)})")
    if places in outputs:
        lines += cuda("store_largest", STORED=f"{arguments.write(places)} + ({space.offset(places.type)})")
    return Kernel(pool.op.name, (arguments.early_launch(pool.op.name, lines, grid),))
