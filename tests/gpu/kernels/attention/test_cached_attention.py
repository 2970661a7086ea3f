"""Attention over a cache that the same step writes into, against the reference, through the emulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from gpu.kernels.cases import Case, assert_same, build, check, rows
from gpu.kernels.emulator import Emulator, needs_compiler

from fusec.gpu.kernels.codegen.kernel import variants_of
from fusec.ir import DType, Graph, TensorType, Value
from fusec.ops import Attention, Reshape, Rotary, Scatter, Slice

F16, BF16, I64 = DType.F16, DType.BF16, DType.I64
Heads = tuple[int, int, int]  # images, heads of queries, heads of keys


def drawn(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    """Indices of different rows, a bias that hides two thirds of the keys, and normal numbers."""
    if type.dtype.is_int:
        return rng.permutation(type.size * 2)[: type.size].astype(type.dtype.numpy)
    if type.shape[-2] == 1 and type.rank == 4 and type.shape[1] == 1 and type.shape[3] % 16:
        return np.where(rng.random(type.shape) < 0.6, -np.inf, 0.0).astype(type.dtype.numpy)
    return rng.standard_normal(type.shape).astype(type.dtype.numpy)


def placed(keys: int) -> Callable[[np.random.Generator, TensorType], np.ndarray]:
    """Draw like that, with one new row for each sequence of so many keys, in turn from the end or the start."""

    def draw(rng: np.random.Generator, type: TensorType) -> np.ndarray:
        if not type.dtype.is_int:
            return drawn(rng, type)
        at = np.arange(type.size) * keys + rng.integers(0, keys, type.size)
        return np.where(np.arange(type.size) % 2, at - type.size * keys, at).astype(type.dtype.numpy)

    return draw


def rotated(
    dtype: DType, heads: Heads, keys: int, features: int, op: Attention | None = None, bias: bool = True
) -> Case:
    """Embeddings of queries and keys: one of joined products for one image, else two."""
    batch, own, shared = heads
    joined = batch == 1

    def make(g: Graph, x: Value, k: Value, cos: Value, sin: Value, *more: Value) -> list[Value]:
        old_keys, old_values, at, v, *mask = more
        y = g.add(Rotary(), x, cos, sin)
        q = g.add(Slice((0, 0, 0, 0), (1, own, 1, features), (1,) * 4), y) if joined else y
        k = g.add(Rotary(), k, cos, sin) if not joined else y
        k = g.add(Slice((0, own, 0, 0), (1, shared, 1, features), (1,) * 4), k) if joined else k
        new = g.add(Scatter(), old_keys, at, g.add(Reshape((batch * shared, features)), k))
        present = g.add(Reshape((batch, shared, keys, features)), new)
        values = g.add(Reshape((batch, shared, keys, features)), g.add(Scatter(), old_values, at, v))
        return [present, values, g.add(op or Attention(0.125), q, present, values, *mask)]

    angles, cache = rows(dtype, batch, 1, 1, features), rows(dtype, batch * shared * keys, features)
    types = [rows(dtype, batch, own + shared * joined, 1, features), rows(dtype, batch, shared, 1, features)]
    types += [angles, angles, cache, cache, rows(I64, batch * shared), rows(dtype, batch * shared, features)]
    types += [rows(dtype, batch, 1, 1, keys)] if bias else []
    return build(f"{dtype.value} {heads} {keys} {features} {op} {bias}", types, make, placed(keys))


def apart(dtype: DType, heads: Heads, keys: int, features: int) -> Case:
    """Embeddings of queries and of keys apart, or none, and queries that are a part of a row."""
    batch, own, shared = heads

    def make(g: Graph, x: Value, k: Value, old_keys: Value, old_values: Value, at: Value, v: Value) -> list[Value]:
        part = g.add(Slice((0, 0, features), (batch, 1, own * features), (1,) * 3), x)
        q = g.add(Reshape((batch, own, 1, features)), part)
        new = g.add(Scatter(), old_keys, at, k)
        present = g.add(Reshape((batch, shared, keys, features)), new)
        values = g.add(Reshape((batch, shared, keys, features)), g.add(Scatter(), old_values, at, v))
        return [new, values, g.add(Attention(0.125), q, present, values)]

    cache, fresh = rows(dtype, batch * shared * keys, features), rows(dtype, batch * shared, features)
    types = [rows(dtype, batch, 1, own * features + features), fresh, cache, cache, rows(I64, batch * shared), fresh]
    return build(f"apart {dtype.value} {heads} {keys} {features}", types, make, drawn)


def cached_cases() -> list[Case]:
    return [
        rotated(F16, (1, 8, 2), 300, 128),
        rotated(BF16, (2, 4, 4), 70, 64),
        rotated(F16, (2, 9, 1), 1030, 32, Attention(0.25, hides=True)),
        rotated(F16, (1, 2, 2), 33, 16, bias=False),
        apart(F16, (2, 4, 2), 130, 64),
        apart(BF16, (1, 3, 1), 257, 48),
    ]


@needs_compiler
def test_all_variants_compute_attention_and_the_cache(rng: np.random.Generator) -> None:
    check(cached_cases(), rng, every=True)
