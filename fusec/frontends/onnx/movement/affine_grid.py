"""Import AffineGrid, which computes the places that GridSample reads."""

from __future__ import annotations

import math

import numpy as np

from fusec.frontends.onnx.emission.emit import Emitter, Table
from fusec.ir import Array, Value
from fusec.ops import MatMul, Transpose
from fusec.ops.spec import require


def affine_grid(g: Emitter, theta: Value, size: Value, /, *, align_corners: int = 0) -> Value:
    """Multiply the places of an image by the matrices theta[N, n, n + 1], for n of 2 or 3.

    fusec does not use the op's function body in ONNX, because that squeezes away a batch of 1.

    size: N, C and the image's dims. With align_corners, the only place of a dim of one pixel is -1, as in ONNX's
        reference evaluator. The function body gives NaN there, onnxruntime 1, and torch 0.
    """
    shape = g.ints(size, "size")
    require(len(shape) in (4, 5) and min(shape) > 0, f"size is {list(shape)}, not that of a batch of images")
    batch, image = shape[0], shape[2:]
    n = len(image)
    require(theta.type.shape == (batch, n, n + 1), f"theta {theta.type} for the size {list(shape)}")

    def places(index: Array) -> Array:
        """Return the coordinates of each pixel, the last dim first, and then 1."""
        pixel, column = np.divmod(index, n + 1)
        values = np.ones(index.shape)
        for axis, place in enumerate(np.unravel_index(pixel, image)):
            length = image[axis]
            between = (2 * place / max(length - 1, 1) if align_corners else (2 * place + 1) / length) - 1
            values = np.where(column == n - 1 - axis, between, values)
        return values

    base = g.indexed((1, math.prod(image), n + 1), places, theta.type.dtype)
    grid = g(MatMul(), base, g(Transpose((0, 2, 1)), theta))
    return g.reshape(grid, (batch, *image, n))


TABLE: Table = {("AffineGrid", 20): affine_grid}
