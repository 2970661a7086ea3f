"""Generate max pooling that also stores where each maximum is, so that its gradient need not look for it.

A thread computes neighbouring channels of one window.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusec.gpu.kernels.codegen.cuda_template import cuda_template
from fusec.gpu.kernels.codegen.kernel import C_TYPES, Arguments, Kernel, compute_type
from fusec.gpu.kernels.codegen.pointwise_code import Space, strides_from, widest_vector
from fusec.gpu.kernels.pooling.first_maxima import Threads, each_tap, find_largest, unrolled, window_dims
from fusec.ir import DType, Node, Value
from fusec.ops import MaxPoolTrain

_CUDA = cuda_template(__package__, "pool.cuh")
LOWEST = {DType.F16: "0xfc00u", DType.BF16: "0xff80u"}  # minus infinity


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
    if x.type.dtype in LOWEST and vector % 2 == 0:
        cuda = cuda.bind(WORDS=vector // 2, LOWEST=LOWEST[x.type.dtype])
        taps, taps_again = (each_tap(body, x, dims, cuda, arguments) for body in ("compare_pairs", "find_nan_in_pairs"))
        lines += cuda("find_largest_of_pairs", EACH_TAP=taps, EACH_TAP_AGAIN=taps_again)
        stores = "store_maxima_of_pairs", "store_places_of_pairs"
    else:
        lines += find_largest(x, dims, cuda, arguments)
        stores = "store_maximum", "store_largest"
    space = Space(y.type.shape, ("c0", "c1", *names))
    for result, store in zip((y, places), stores, strict=True):
        if result in outputs:
            lines += cuda(store, STORED=f"{arguments.write(result)} + ({space.offset(result.type)})")
    return Kernel(pool.op.name, (arguments.early_launch(pool.op.name, lines, grid),))
