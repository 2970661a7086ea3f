"""Kernels of attention in training against the reference, through the emulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from gpu.kernels.cases import Case, awkward, build, check, rows
from gpu.kernels.emulator import needs_compiler

from fusec.ir import DType, Graph, TensorType, Value
from fusec.ops import AttentionTrain, Reshape, Split, Transpose

F16, BF16, F32 = DType.F16, DType.BF16, DType.F32


def attended(
    dtype: DType,
    heads: tuple[int, int, int],
    lengths: tuple[int, int],
    features: tuple[int, int],
    op: AttentionTrain | None = None,
    kept: Sequence[int] = (0, 1),
) -> Case:
    """heads: images, heads of queries, and of keys. kept: the results that are outputs."""
    (batch, own, shared), (queries, keys), (depth, width) = heads, lengths, features
    sides = [rows(dtype, batch, own, queries, depth), rows(dtype, batch, shared, keys, depth)]
    op = op or AttentionTrain(0.3)

    def make(g: Graph, *x: Value) -> list[Value]:
        made = g.insert(op, list(x)).results
        return [made[place] for place in kept]

    name = f"{dtype.value} {heads} {lengths} {features} {op} {tuple(kept)}"
    return build(name, [*sides, rows(dtype, batch, shared, keys, width)], make)


def packed(dtype: DType, length: int, heads: int, features: int) -> Case:
    """Return a case whose queries, keys and values are one projection, with a result that is stored by rows."""
    width = heads * features

    def make(g: Graph, x: Value) -> list[Value]:
        parts = [
            g.add(Transpose((0, 2, 1, 3)), g.add(Reshape((2, length, heads, features)), part))
            for part in g.insert(Split(-1, (width,) * 3), [x]).results
        ]
        y, sums = g.insert(AttentionTrain(0.5), parts).results
        return [g.add(Reshape((2, length, width)), g.add(Transpose((0, 2, 1, 3)), y)), sums]

    return build(f"packed {dtype.value} {length}", [rows(dtype, 2, length, 3 * width)], make)


def train_cases() -> list[Case]:
    return [
        attended(F16, (1, 2, 2), (70, 90), (32, 64)),
        attended(BF16, (2, 1, 1), (33, 128), (16, 48)),
        attended(F16, (1, 1, 1), (5, 50), (64, 16), AttentionTrain(-1.0)),
        attended(F16, (1, 1, 1), (1, 3), (16, 16), AttentionTrain(50.0)),  # scores far below -88, and far above 88
        attended(F16, (1, 1, 1), (197, 197), (64, 64), AttentionTrain(0.125)),
        attended(BF16, (1, 2, 2), (100, 130), (32, 16), AttentionTrain(0.3, causal=True)),
        attended(F16, (1, 1, 1), (130, 256), (16, 16), AttentionTrain(1.0, causal=True)),
        attended(F16, (1, 1, 1), (40, 24), (16, 16), kept=(0,)),
        attended(F16, (1, 1, 1), (24, 40), (16, 16), kept=(1, 0)),
        packed(F16, 20, 2, 32),
        packed(BF16, 70, 3, 16),
    ]


@needs_compiler
def test_all_variants_give_the_same(rng: np.random.Generator) -> None:
    check(train_cases(), rng, every=True)


@needs_compiler
def test_numbers_that_are_none(rng: np.random.Generator) -> None:
    check([replace(attended(F16, (1, 2, 2), (40, 50), (32, 16)), draw=awkward)], rng, every=True)


def hidden(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    """Draw positive queries, and keys of minus infinity."""
    array = np.abs(rng.standard_normal(type.shape)) + 0.1
    return np.where(type.shape[2] == 21 and type.shape[3] == 32, -np.inf, array).astype(type.dtype.numpy)


@needs_compiler
def test_a_row_without_a_finite_score_has_an_infinite_logarithm(rng: np.random.Generator) -> None:
    check([replace(attended(F16, (1, 1, 1), (19, 21), (32, 16)), draw=hidden)], rng, every=True)


@pytest.mark.parametrize(
    ("why", "case"),
    [
        ("fp32", attended(F32, (1, 1, 1), (9, 9), (16, 16))),
        ("odd features", attended(F16, (1, 1, 1), (9, 9), (24, 16))),
        ("many features", attended(F16, (1, 1, 1), (9, 9), (80, 16))),
        ("shared keys", attended(F16, (1, 2, 1), (9, 9), (16, 16))),
        ("many keys", attended(F16, (1, 1, 1), (9, 257), (16, 16))),
    ],
)
def test_others_are_left_alone(why: str, case: Case) -> None:
    assert case.kernel is None, why
