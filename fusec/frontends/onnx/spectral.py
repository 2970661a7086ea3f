"""What the ops of signal processing mean: Fourier transforms as products with constant matrices; and a determinant."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from fusec.frontends.onnx.emit import Emitter, Table
from fusec.frontends.onnx.tensors import dtype_of
from fusec.ir import Value
from fusec.ops import Gather, MatMul, Pad, Transpose, pw
from fusec.ops.spec import normalize_axis, require

_MAX_LENGTH = 1 << 13  # the matrix has the square of it
_MAX_DETERMINANT = 4


def dft_17(
    g: Emitter, x: Value, length: Value | None = None, /, *, axis: int = 1, inverse: int = 0, onesided: int = 0
) -> Value:
    return _dft(g, x, length, axis, bool(inverse), bool(onesided))


def dft(
    g: Emitter,
    x: Value,
    length: Value | None = None,
    axis: Value | None = None,
    /,
    *,
    inverse: int = 0,
    onesided: int = 0,
) -> Value:
    along = -2 if axis is None else int(g.number(axis, "axis"))
    return _dft(g, x, length, along, bool(inverse), bool(onesided))


def _dft(g: Emitter, x: Value, length: Value | None, axis: int, inverse: bool, onesided: bool) -> Value:
    """x[…, 1 or 2]: real, or real and imaginary parts. One-sided: the first half; its inverse has a real result."""
    rank = x.type.rank
    require(rank >= 2 and x.type.shape[-1] in (1, 2), f"takes […, 1] or […, 2], not {list(x.type.shape)}")
    axis = normalize_axis(axis, rank)
    require(axis != rank - 1, "the last axis has the real and imaginary parts")
    held = x.type.shape[axis]
    given = None if length is None else int(g.number(length, "dft_length"))
    from_half = onesided and inverse
    n = given if given is not None else 2 * (held - 1) if from_half else held
    require(0 < n <= _MAX_LENGTH, f"a transform of {n}; from 1 to {_MAX_LENGTH} are supported")
    want = n // 2 + 1 if from_half else n
    x = g.window(x, axis, 0, min(held, want))
    if held < want:
        pads = [0] * (2 * rank)
        pads[rank + axis] = want - held
        x = g(Pad(tuple(pads)), x)
    sign = 1.0 if inverse else -1.0
    if from_half:
        # what is left out is the conjugate of what is there: its terms count twice
        weight = np.where((np.arange(want) == 0) | (2 * np.arange(want) == n), 1.0, 2.0)
        phase = 2 * math.pi * np.outer(np.arange(want), np.arange(n)) / n
        real, imaginary = weight[:, None] * np.cos(phase) / n, -weight[:, None] * np.sin(phase) / n
        return _product(g, x, axis, [real], [imaginary])
    out = n // 2 + 1 if onesided else n
    phase = 2 * math.pi * np.outer(np.arange(n), np.arange(out)) / n
    scale = 1 / n if inverse else 1.0
    cos, sin = np.cos(phase) * scale, sign * np.sin(phase) * scale
    return _product(g, x, axis, [cos, sin], [-sin, cos])


def _product(g: Emitter, x: Value, axis: int, real: list[Any], imaginary: list[Any]) -> Value:
    """Contract `axis` and the parts with the matrices of each result part: one product over both."""
    rank, parts = x.type.rank, x.type.shape[-1]
    lead = [d for d in range(rank - 1) if d != axis]
    turned = g(Transpose((*lead, rank - 1, axis)), x) if lead or axis == 0 else x
    n, out, results = x.type.shape[axis], real[0].shape[1], len(real)
    flat = g.reshape(turned, (math.prod(x.type.shape[d] for d in lead), parts * n))
    blocks = [np.concatenate(m, axis=1) for m in ((real, imaginary) if parts == 2 else (real,))]
    matrix = g.constant(np.concatenate(blocks, axis=0).astype(x.type.dtype.numpy))
    y = g.reshape(g(MatMul(), flat, matrix), (*(x.type.shape[d] for d in lead), results, out))
    order = [rank - 1 if d == axis else lead.index(d) for d in range(rank - 1)]
    return g(Transpose((*order, rank - 2)), y)


def stft(
    g: Emitter,
    signal: Value,
    step: Value,
    window: Value | None = None,
    length: Value | None = None,
    /,
    *,
    onesided: int = 1,
) -> Value:
    """Frames of the signal, windowed and transformed: [batch, frames, frequencies, 2]."""
    if signal.type.rank == 2:
        signal = g.reshape(signal, (*signal.type.shape, 1))
    require(signal.type.rank == 3, f"takes [batch, length, 1 or 2], not {list(signal.type.shape)}")
    hop = int(g.number(step, "frame_step"))
    require(hop > 0, f"frame_step is {hop}")
    require(window is not None or length is not None, "needs a window or a frame_length")
    size = int(g.number(length, "frame_length")) if length is not None else window.type.size if window else 0
    total = signal.type.shape[1]
    require(0 < size <= total, f"frames of {size} in a signal of {total}")
    starts = np.arange(0, total - size + 1, hop, dtype=np.int64)
    frames = g(Gather(1), signal, g.constant(starts[:, None] + np.arange(size)))  # [batch, frames, size, parts]
    if window is not None:
        require(window.type.shape == (size,), f"a window of shape {list(window.type.shape)} for frames of {size}")
        frames = g(pw("mul"), frames, g.reshape(window, (size, 1)))
    return _dft(g, frames, None, 2, False, bool(onesided))


def mel_weight_matrix(
    g: Emitter, bins: Value, length: Value, rate: Value, low: Value, high: Value, /, *, output_datatype: int = 1
) -> Value:
    """Triangles evenly spaced on the mel scale, over the frequencies of a transform."""
    count, size = int(g.number(bins, "num_mel_bins")), int(g.number(length, "dft_length"))
    frequency = g.number(rate, "sample_rate")
    require(count > 0 and size > 0 and frequency > 0, f"{count} bins over {size} at {frequency}")
    edges = [2595 * math.log10(1 + g.number(v, "an edge") / 700) for v in (low, high)]
    step = (edges[1] - edges[0]) / (count + 2)
    points = edges[0] + step * np.arange(count + 2)
    places = ((size + 1) * (700 * (10 ** (points / 2595) - 1)) // frequency).astype(int)
    weights = np.zeros((size // 2 + 1, count))
    for i in range(count):
        left, centre, right = places[i : i + 3]
        if left == centre:
            weights[centre, i] = 1
        else:
            for k in range(left, centre + 1):
                weights[k, i] = (k - left) / (centre - left)
        if right > centre:
            for k in range(centre, right):
                weights[k, i] = (right - k) / (right - centre)
    return g.constant(weights.astype(dtype_of(output_datatype).numpy))


def det(g: Emitter, x: Value, /) -> Value:
    """By minors, along the first row: for the small matrices that have a use for it."""
    require(x.type.rank >= 2 and x.type.shape[-1] == x.type.shape[-2], f"takes square matrices, not {x.type}")
    n, rank = x.type.shape[-1], x.type.rank
    require(1 <= n <= _MAX_DETERMINANT, f"of {n}x{n} is not supported, only up to {_MAX_DETERMINANT}")
    cell = {
        (i, j): g.reshape(g.window(g.window(x, rank - 2, i, 1), rank - 1, j, 1), x.type.shape[:-2])
        for i, j in itertools.product(range(n), range(n))
    }

    def minor(rows: tuple[int, ...], columns: tuple[int, ...]) -> Value:
        if len(rows) == 1:
            return cell[rows[0], columns[0]]
        total: Value | None = None
        for k, column in enumerate(columns):
            part = g(pw("mul"), cell[rows[0], column], minor(rows[1:], columns[:k] + columns[k + 1 :]))
            total = part if total is None else g(pw("sub" if k % 2 else "add"), total, part)
        assert total is not None
        return total

    return minor(tuple(range(n)), tuple(range(n)))


TABLE: Table = {
    ("DFT", 17): dft_17,
    ("DFT", 20): dft,
    ("STFT", 17): stft,
    ("MelWeightMatrix", 17): mel_weight_matrix,
    ("Det", 11): det,
}
