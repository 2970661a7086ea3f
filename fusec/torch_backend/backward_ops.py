"""Write gradients of torch's ops by ops that ONNX has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch  # pyright: ignore[reportMissingImports] - an extra, and absent where the code is checked
from torch._decomp import (  # pyright: ignore[reportMissingImports] - as above
    core_aten_decompositions,
    get_decompositions,
)

_aten = torch.ops.aten
# beyond torch's core set, which leaves them whole
_ALSO = (
    "_native_batch_norm_legit_functional",
    "_batch_norm_with_update_functional",
    "batch_norm_backward",
    "native_batch_norm",
    "native_batch_norm_backward",
    "cudnn_batch_norm",
    "cudnn_batch_norm_backward",
    "native_layer_norm",
    "native_layer_norm_backward",
    "native_group_norm",
    "native_group_norm_backward",
    "native_dropout",
    "native_dropout_backward",
    "nll_loss_forward",
    "nll_loss_backward",
    "embedding_dense_backward",
)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the functions that replace ops in the graphs of training."""
    also = [getattr(_aten, name) for name in _ALSO if hasattr(_aten, name)]
    return {
        **core_aten_decompositions(),
        **get_decompositions(also),
        _aten.convolution_backward.default: convolution_backward,
        _aten.max_pool2d_with_indices_backward.default: max_pool2d_with_indices_backward,
    }


def convolution_backward(
    dy: Any,
    x: Any,
    weight: Any,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    mask: Sequence[bool],
) -> tuple[Any, Any, Any]:
    """Write the gradients of a convolution as convolutions. mask: which of image, filters and bias are wanted."""
    if transposed:
        return NotImplemented
    n = x.ndim - 2
    spatial = list(range(2, 2 + n))
    dx = dw = db = None
    if mask[0]:
        covered = [
            (dy.shape[d + 2] - 1) * stride[d] - 2 * padding[d] + dilation[d] * (weight.shape[d + 2] - 1) + 1
            for d in range(n)
        ]
        rest = [x.shape[d + 2] - covered[d] for d in range(n)]
        dx = _aten.convolution(dy, weight, None, stride, padding, dilation, True, rest, groups)
    if mask[1]:
        batch, channels = x.shape[:2]
        split = x.reshape(batch, groups, channels // groups, *x.shape[2:])
        order = [2, 1, 0, *[d + 1 for d in spatial]]
        images = split.permute(order).reshape(channels // groups, groups * batch, *x.shape[2:])
        filters = dy.permute(1, 0, *spatial)
        # strides and dilations change places
        found = _aten.convolution(images, filters, None, dilation, padding, stride, False, [0] * n, groups)
        for d in spatial:
            found = found.narrow(d, 0, weight.shape[d])
        dw = found.permute(1, 0, *spatial)
    if mask[2]:
        db = dy.sum([0, *spatial])
    return dx, dw, db


def max_pool2d_with_indices_backward(
    dy: Any,
    x: Any,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Any,
) -> Any:
    """Add each gradient at the place of its maximum."""
    flat = torch.zeros_like(x).flatten(-2)
    return flat.scatter_add(-1, indices.flatten(-2), dy.flatten(-2)).reshape(x.shape)
