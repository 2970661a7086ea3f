"""Differentiate convolutions and pooling, with cuDNN's own backward ops where they exist."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from fusec.builder import Tensor
from fusec.gradients.core import BackwardStep, Gradients, Rule, zeros
from fusec.ops import AvgPool, Conv, ConvTranspose, ConvWgrad, FlippedConv, MaxPool, MaxPoolBackward, Slice
from fusec.ops.convolution import indices_of, reversal
from fusec.ops.pooling import Pool


def image_gradient(dy: Tensor, w: Tensor, op: Conv | ConvWgrad, spatial: tuple[int, ...]) -> Tensor:
    """Compute the gradient of a convolution by its image, as a transposed convolution.

    Its output padding adds the elements at the end that no window covers because of the stride.

    spatial: spatial dims of the image.
    """
    n = len(op.strides)
    bare = [
        s * (o - 1) + d * (k - 1) + 1 - p0 - p1
        for o, k, s, d, p0, p1 in zip(
            dy.shape[2:], w.shape[2:], op.strides, op.dilations, op.pads[:n], op.pads[n:], strict=True
        )
    ]
    extra = tuple(i - b for i, b in zip(spatial, bare, strict=True))
    return dy.builder.apply(ConvTranspose(op.strides, op.pads, op.dilations, extra, op.groups), dy, w)


def _conv(step: BackwardStep) -> Gradients:
    op, (x, w) = step.op, step.x
    dx = image_gradient(step.dy, w, op, x.shape[2:]) if step.active[0] else None
    wgrad = ConvWgrad(w.shape[2:], op.strides, op.pads, op.dilations, op.groups)
    return dx, step.b.apply(wgrad, x, step.dy) if step.active[1] else None


def _conv_flipped(step: BackwardStep) -> Gradients:
    """Differentiate a convolution of reversed filters; the gradient of these is reversed, too."""
    (x, w), reverse = step.x, reversal(step.x[1].shape)
    assert isinstance(step.op, FlippedConv)
    op = step.op.unflipped
    dx = image_gradient(step.dy, step.b.apply(reverse, w), op, x.shape[2:]) if step.active[0] else None
    wgrad = ConvWgrad(w.shape[2:], op.strides, op.pads, op.dilations, op.groups)
    return dx, step.b.apply(reverse, step.b.apply(wgrad, x, step.dy)) if step.active[1] else None


def _conv_transpose(step: BackwardStep) -> Gradients:
    op, (x, w), dy = step.op, step.x, step.dy
    n = len(op.strides)
    # no window reaches output padding of a whole stride or more: remove it from the pads first, then from dy
    beyond = [e // s * s for e, s in zip(op.output_padding, op.strides, strict=True)]
    ends = [max(0, p - e) for p, e in zip(op.pads[n:], beyond, strict=True)]
    covered = [d - max(0, e - p) for d, e, p in zip(dy.shape[2:], beyond, op.pads[n:], strict=True)]
    dy = dy[(slice(None), slice(None), *(slice(0, k) for k in covered))]
    pads = (*op.pads[:n], *ends)
    dx = step.b.apply(Conv(op.strides, pads, op.dilations, op.groups), dy, w)
    return dx, step.b.apply(ConvWgrad(w.shape[2:], op.strides, pads, op.dilations, op.groups), dy, x)


def _conv_wgrad(step: BackwardStep) -> Gradients:
    op, (x, dy), g = step.op, step.x, step.dy
    dx = image_gradient(dy, g, op, x.shape[2:]) if step.active[0] else None
    return dx, step.b.apply(Conv(op.strides, op.pads, op.dilations, op.groups), x, g)


def _max_pool(step: BackwardStep) -> Gradients:
    return step.b.apply(MaxPoolBackward(*step.op.geometry), step.dy, step.x[0])


def _max_pool_train(step: BackwardStep) -> Gradients:
    (x,), (_, places), (dy, _) = step.x, step.y, step.dys
    assert dy is not None, "integers have no gradient"
    return step.b.apply(MaxPoolBackward(*step.op.geometry, image=x.shape[2:]), dy, places)


def _max_pool_backward(step: BackwardStep) -> Gradients:
    """Differentiate the gradient of max pooling: for each window, gather the gradient at its first maximum."""
    op, (dy, _), g = step.op, step.x, step.dy
    n = len(op.window)
    pads = (0, 0, *op.pads[:n], 0, 0, *_ends(op, g.shape[2:], dy.shape[2:]))
    picked, total = step.b.pad(g, pads), zeros(dy)
    for tap, here in _at_places(step) if op.image else _at_maxima(step, pads):
        total = total + step.b.where(here, step.b.apply(tap, picked), 0.0)
    return total, None


def _taps(op: Pool, shape: tuple[int, ...]) -> Iterator[Slice]:
    """Yield the elements of each tap of all windows, from the padded image. shape: that of the pool's result."""
    for tap in indices_of(op.window):
        starts = (0, 0, *(t * d for t, d in zip(tap, op.dilations, strict=True)))
        yield Slice(starts, shape, (1, 1, *op.strides))


def _at_places(step: BackwardStep) -> Iterator[tuple[Slice, Tensor]]:
    """Yield each tap, and where it is the maximum by given places."""
    dy, places = step.x
    for number, tap in enumerate(_taps(step.op, dy.shape)):
        yield tap, places.eq(step.b.constant(np.array(number, np.uint8)))


def _at_maxima(step: BackwardStep, pads: tuple[int, ...]) -> Iterator[tuple[Slice, Tensor]]:
    """Yield each tap, and where it is the first maximum.

    The taps are visited in order, so `found` marks windows whose maximum came earlier.
    """
    op, (dy, x) = step.op, step.x
    padded = step.b.pad(x, pads, value=-math.inf)
    top = step.b.apply(MaxPool(*op.geometry), x)
    found = step.b.constant(np.zeros((), np.bool_)).expand(dy.shape)
    for tap in _taps(op, dy.shape):
        here = step.b.apply(tap, padded).eq(top) & ~found
        yield tap, here
        found = found | here


def _ends(op: Pool, spatial: tuple[int, ...], counts: tuple[int, ...]) -> tuple[int, ...]:
    """Return the pads at the end, including the elements that the last window adds in ceil mode."""
    n = len(op.window)
    return tuple(
        max(p1, (c - 1) * s + d * (k - 1) + 1 - i - p0)
        for c, s, d, k, i, p0, p1 in zip(
            counts, op.strides, op.dilations, op.window, spatial, op.pads[:n], op.pads[n:], strict=True
        )
    )


def _avg_pool(step: BackwardStep) -> Gradients:
    """Spread the gradient of each window over its elements: a transposed depthwise convolution with ones."""
    op, (x,), dy = step.op, step.x, step.dy
    assert isinstance(op, AvgPool)
    channels = x.shape[1]
    share = 1.0 / op.weights(np, x.shape[2:], np.dtype(np.float64))
    pads = (*op.pads[: len(op.window)], *_ends(op, x.shape[2:], dy.shape[2:]))
    ones = step.b.constant(np.ones((channels, 1, *op.window)), x.dtype)
    window = Conv(op.strides, pads, op.dilations, channels)
    return image_gradient(dy * step.b.constant(share, x.dtype), ones, window, x.shape[2:])


RULES: dict[str, Rule] = {
    "conv": _conv,
    "conv_flipped": _conv_flipped,
    "conv_transpose": _conv_transpose,
    "conv_wgrad": _conv_wgrad,
    "max_pool": _max_pool,
    "max_pool_train": _max_pool_train,
    "max_pool_backward": _max_pool_backward,
    "avg_pool": _avg_pool,
}
