"""Import ops of signal processing (Fourier transforms become products with constant matrices), and Det."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np

from fusec.frontends.onnx.emission.emit import Emitter, Table
from fusec.frontends.onnx.model_file.tensors import dtype_of
from fusec.ir import Array, Value
from fusec.ops import Gather, MatMul, Pad, Transpose, pw
from fusec.ops.spec import normalize_axis, require

_MAX_LENGTH = 1 << 13  # the matrix has the square of this many elements
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
    """Transform x[…, 1 or 2], whose last dim has the real part, or the real and the imaginary part.

    onesided: the result has the first half of the frequencies; the inverse takes this half and gives a real signal.
    """
    rank = x.type.rank
    require(rank >= 2 and x.type.shape[-1] in (1, 2), f"takes […, 1] or […, 2], not {list(x.type.shape)}")
    axis = normalize_axis(axis, rank)
    require(axis != rank - 1, "the last axis has the real and imaginary parts")
    size = x.type.shape[axis]
    given = None if length is None else int(g.number(length, "dft_length"))
    from_half = onesided and inverse
    n = given if given is not None else 2 * (size - 1) if from_half else size
    require(0 < n <= _MAX_LENGTH, f"a transform of {n}; from 1 to {_MAX_LENGTH} are supported")
    needed = n // 2 + 1 if from_half else n
    x = g.window(x, axis, 0, min(size, needed))
    if size < needed:
        pads = [0] * (2 * rank)
        pads[rank + axis] = needed - size
        x = g(Pad(tuple(pads)), x)
    if from_half:

        def half(part: Array, j: Array, _: Array, k: Array) -> Array:
            """Count most terms twice, because the missing half is the conjugate of the given one."""
            weight = np.where((j == 0) | (2 * j == n), 1.0, 2.0)
            phase = 2 * math.pi * (j * k) / n
            return weight * np.where(part == 0, np.cos(phase), -np.sin(phase)) / n

        return _product(g, x, axis, (1, n), half)
    sign = 1.0 if inverse else -1.0
    scale = 1 / n if inverse else 1.0

    def whole(part: Array, j: Array, result: Array, k: Array) -> Array:
        phase = 2 * math.pi * (j * k) / n
        sine = np.where(part == 0, sign, -sign) * np.sin(phase)
        return scale * np.where(part == result, np.cos(phase), sine)

    return _product(g, x, axis, (2, n // 2 + 1 if onesided else n), whole)


Entries = Callable[[Array, Array, Array, Array], Array]  # (part of x, index in x, part of y, index in y) -> factors


def _product(g: Emitter, x: Value, axis: int, made: tuple[int, int], entries: Entries) -> Value:
    """Multiply `axis` and the last dim of x, together, by one matrix.

    made: number of parts (1 or 2) of the result, and length of its axis.
    entries: gives the elements of the matrix.
    """
    rank, parts = x.type.rank, x.type.shape[-1]
    lead = [d for d in range(rank - 1) if d != axis]
    axis_last = g(Transpose((*lead, rank - 1, axis)), x) if lead or axis == 0 else x
    n, (results, out) = x.type.shape[axis], made
    flat = g.reshape(axis_last, (math.prod(x.type.shape[d] for d in lead), parts * n))

    def factors(index: Array) -> Array:
        row, column = np.divmod(index, results * out)
        return entries(row // n, row % n, column // out, column % out)

    matrix = g.indexed((parts * n, results * out), factors, x.type.dtype)
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
    """Import STFT: split the signal into frames, multiply by the window and transform.

    Returns [batch, frames, frequencies, 2].
    """
    if signal.type.rank == 2:
        signal = g.reshape(signal, (*signal.type.shape, 1))
    require(signal.type.rank == 3, f"takes [batch, length, 1 or 2], not {list(signal.type.shape)}")
    hop = int(g.number(step, "frame_step"))
    require(hop > 0, f"frame_step is {hop}")
    require(window is not None or length is not None, "needs a window or a frame_length")
    size = int(g.number(length, "frame_length")) if length is not None else window.type.size if window else 0
    total = signal.type.shape[1]
    require(0 < size <= total, f"frames of {size} in a signal of {total}")
    places = g.indexed(((total - size) // hop + 1, size), lambda i: i // size * hop + i % size)
    frames = g(Gather(1), signal, places)  # [batch, frames, size, parts]
    if window is not None:
        require(window.type.shape == (size,), f"a window of shape {list(window.type.shape)} for frames of {size}")
        frames = g(pw("mul"), frames, g.reshape(window, (size, 1)))
    return _dft(g, frames, None, 2, False, bool(onesided))


def mel_weight_matrix(
    g: Emitter, bins: Value, length: Value, rate: Value, low: Value, high: Value, /, *, output_datatype: int = 1
) -> Value:
    """Import MelWeightMatrix: triangles that are evenly spaced on the mel scale, over the frequencies of a DFT."""
    count, size = int(g.number(bins, "num_mel_bins")), int(g.number(length, "dft_length"))
    frequency = g.number(rate, "sample_rate")
    require(count > 0 and size > 0 and frequency > 0, f"{count} bins over {size} at {frequency}")
    bounds = [g.number(v, "an edge") for v in (low, high)]
    require(0 <= bounds[0] <= bounds[1] < math.inf, f"edges of {bounds[0]} and {bounds[1]} Hz")
    mels = [2595 * math.log10(1 + bound / 700) for bound in bounds]
    step = (mels[1] - mels[0]) / (count + 2)

    def place(point: Array) -> Array:
        """Return the row of the frequency that is `point` steps above the lower edge."""
        return (size + 1) * (700 * (10 ** ((mels[0] + step * point) / 2595) - 1)) // frequency

    def weights(index: Array) -> Array:
        row, triangle = np.divmod(index, count)
        left, centre, right = (place(triangle + i) for i in range(3))
        rising = np.where(left == centre, row == centre, (row - left) / (centre - left))
        within = np.where((left <= row) & (row <= centre), rising, 0.0)
        return np.where((centre <= row) & (row < right), (right - row) / (right - centre), within)

    return g.indexed((size // 2 + 1, count), weights, dtype_of(output_datatype))


def det(g: Emitter, x: Value, /) -> Value:
    """Import Det by minors along the first row, for small matrices only."""
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
