"""Join the probabilities of each pair of classes, which a support vector machine gives, to one for each class."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np

from fusec.frontends.onnx.classical.features import floats
from fusec.frontends.onnx.emission.emit import Emitter
from fusec.ir import Value
from fusec.ops import Concat, Gather, Reduce, Transpose, pw

LEAST = 1e-7  # the least probability of a class against another one, as in libsvm


def joined_probabilities(
    g: Emitter, scores: Value, count: int, slopes: Sequence[float], offsets: Sequence[float]
) -> Value:
    """Join the probabilities of pairs to one for each class (Wu, Lin and Weng 2004, their second approach).

    They minimise p' Q p with a sum of 1. Added ones do not move the minimum, and make Q positive definite where pairs
    agree, so p is proportional to the solution of (Q + ones) p = 1. libsvm and onnxruntime iterate until an error of
    0.005 / classes; this is the exact minimum.
    """
    line = g(pw("add"), g(pw("mul"), scores, floats(g, slopes)), floats(g, offsets))
    first = g(pw("sigmoid"), g(pw("neg"), line))
    first = g(pw("min"), g(pw("max"), first, g.scalar(LEAST, first)), g.scalar(1 - LEAST, first))
    second = g(pw("sub"), g.scalar(1.0, first), first)
    if count == 2:
        return g(Concat(1), first, second)
    beats = _table(g, first, second, count)
    beaten = g(Transpose((0, 2, 1)), beats)
    diagonal = g(pw("mul"), g(Reduce("sum_square", (1,)), beats), g.constant(np.eye(count, dtype=np.float32)))
    matrix = g(pw("add"), g(pw("sub"), diagonal, g(pw("mul"), beats, beaten)), g.scalar(1.0, beats))
    ones = g.constant(np.ones((scores.type.shape[0], count, 1), np.float32))
    solved = _solved(g, g(Concat(2), matrix, ones), count)
    return g(pw("div"), solved, g(Reduce("sum", (1,)), solved))


def _table(g: Emitter, first: Value, second: Value, count: int) -> Value:
    """Return the probability of each class against each other one: [rows, class, other], with zeros on the diagonal."""
    places = np.full((count, count), count * (count - 1))
    pairs = list(combinations(range(count), 2))
    for number, (one, other) in enumerate(pairs):
        places[one, other], places[other, one] = number, len(pairs) + number
    zeros = g.constant(np.zeros((first.type.shape[0], 1), np.float32))
    found = g(Gather(1), g(Concat(1), first, second, zeros), g.constant(places.ravel().astype(np.int64)))
    return g.reshape(found, (first.type.shape[0], count, count))


def _solved(g: Emitter, system: Value, count: int) -> Value:
    """Solve one linear system for each row by elimination, without pivots because the matrices are positive definite.

    system: [rows, count, count + 1]; the last column is the right side.
    """
    for step in range(count):
        column = g.window(system, 2, step, 1)
        pivot = g(pw("div"), g.window(system, 1, step, 1), g.window(column, 1, step, 1))
        others = g.constant((np.arange(count) != step).reshape(1, count, 1))
        system = g(pw("where"), others, g(pw("sub"), system, g(pw("mul"), column, pivot)), pivot)
    return g.reshape(g.window(system, 2, count, 1), (system.type.shape[0], count))
