"""Import TfIdfVectorizer for integers: count the n-grams of a pool in each row, with up to some tokens skipped."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fusec.frontends.onnx.emission.emit import Emitter, Table
from fusec.frontends.onnx.model_file.limits import require_constant
from fusec.frontends.onnx.ops.strings import codes
from fusec.ir import DType, TensorType, Value
from fusec.ops import Concat, Gather, Reduce, pw
from fusec.ops.spec import require

_MAX_LENGTH = 64


def tf_idf(
    g: Emitter,
    x: Value,
    /,
    *,
    max_gram_length: int,
    max_skip_count: int,
    min_gram_length: int,
    mode: str,
    ngram_counts: Sequence[int],
    ngram_indexes: Sequence[int],
    pool_int64s: Sequence[int] = (),
    pool_strings: Sequence[str] = (),
    weights: Sequence[float] = (),
) -> Value:
    """Import TfIdfVectorizer.

    ngram_counts: for each length, index in the pool of its first n-gram.
    ngram_indexes: for each n-gram, index in the result of its count.
    """
    if pool_strings:
        require(not pool_int64s, "has a pool of integers and one of strings")
        words = [*dict.fromkeys(pool_strings)]
        numbers = {word: number for number, word in enumerate(words)}
        pool_int64s = [numbers[word] for word in pool_strings]
        x = codes(g, x, words, missing=-1)
    require(x.type.dtype.is_int and x.type.rank in (1, 2), f"takes rows of integers, not {x.type}")
    require(mode in ("TF", "IDF", "TFIDF"), f"knows no mode {mode!r}")
    require(1 <= min_gram_length <= max_gram_length <= _MAX_LENGTH, f"{min_gram_length} to {max_gram_length} tokens")
    require(0 <= max_skip_count <= _MAX_LENGTH, f"max_skip_count is {max_skip_count}")
    require(len(ngram_counts) > 0, "ngram_counts is empty")
    ends = [*ngram_counts[1:], len(pool_int64s)]
    lead = x.type.shape[:-1]
    tokens = g.cast(x, DType.I64)
    counted: list[Value] = []
    places: list[int] = []
    read = 0
    for length, (first, end) in enumerate(zip(ngram_counts, ends, strict=True), 1):
        require(0 <= first <= end <= len(pool_int64s) and (end - first) % length == 0, f"ngram_counts {ngram_counts}")
        grams = np.array(pool_int64s[first:end], np.int64).reshape(-1, length)
        indexes = ngram_indexes[read : read + len(grams)]
        require(len(indexes) == len(grams), f"{len(ngram_indexes)} ngram_indexes for the pool")
        read += len(grams)
        if len(grams) and min_gram_length <= length <= max_gram_length:
            counted.append(_occurrences(g, tokens, grams, max_skip_count if length > 1 else 0))
            places += indexes
    size = max(ngram_indexes, default=-1) + 1
    require(size > 0 and min(ngram_indexes) >= 0, f"ngram_indexes {list(ngram_indexes)}")
    none = g.full(TensorType((*lead, 1), DType.F32), np.zeros((), np.float32))
    joined = g(Concat(len(lead)), *counted, none)
    require_constant(TensorType((size,), DType.I64))
    source = np.full(size, len(places), np.int64)
    source[places] = np.arange(len(places))
    counts = g(Gather(len(lead)), joined, g.constant(source))
    if mode == "TF":
        return counts
    require(len(weights) in (0, len(ngram_indexes)), f"{len(weights)} weights for {len(ngram_indexes)} n-grams")
    factors = np.ones(size, np.float32)
    if weights:
        factors[list(ngram_indexes)] = weights
    if mode == "TFIDF":
        return g(pw("mul"), counts, g.constant(factors))
    there = g(pw("cmp_gt"), counts, g.scalar(0, counts))
    return g(pw("where"), there, g.constant(factors), g.scalar(0, counts))


def _occurrences(
    g: Emitter, tokens: Value, grams: np.ndarray[tuple[int, ...], np.dtype[np.int64]], skips: int
) -> Value:
    """Count each n-gram in each row, with distances between its tokens from 1 to `skips` + 1. Returns [row…, grams]."""
    *lead, count = tokens.type.shape
    length = grams.shape[1]
    total = g.full(TensorType((*lead, len(grams)), DType.F32), np.zeros((), np.float32))
    for step in range(1, skips + 2):
        starts = count - (length - 1) * step
        if starts <= 0:
            break
        g.require_room()
        with g.unrolling():
            windows = g.indexed((starts, length), lambda i, step=step: i // length + i % length * step)
            read = g(Gather(len(lead)), tokens, windows)
            read = g.reshape(read, (*lead, starts, 1, length))
            same = g.cast(g(pw("cmp_eq"), read, g.constant(grams)), DType.F32)
            whole = g(Reduce("min", (len(lead) + 2,), False), same)
            total = g(pw("add"), total, g(Reduce("sum", (len(lead),), False), whole))
    return total


TABLE: Table = {("TfIdfVectorizer", 9): tf_idf}
