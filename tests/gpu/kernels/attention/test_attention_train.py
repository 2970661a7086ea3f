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
        attended(F16, (1, 2, 2), (70, 90), (32, 32)),
        attended(F16, (2, 1, 1), (33, 128), (48, 48)),
        attended(F16, (1, 1, 1), (5, 50), (64, 64), AttentionTrain(-1.0)),
        attended(F16, (1, 1, 1), (1, 3), (16, 16), AttentionTrain(50.0)),  # scores far below -88, and far above 88
        attended(F16, (1, 1, 1), (20, 200), (16, 16), AttentionTrain(50.0)),
        attended(F16, (1, 1, 1), (197, 197), (64, 64), AttentionTrain(0.125)),
        attended(F16, (35, 4, 4), (32, 16), (16, 16)),  # more heads than blocks
        attended(F16, (1, 1, 1), (130, 256), (16, 16), AttentionTrain(1.0)),
        attended(F16, (1, 1, 1), (40, 24), (16, 16), kept=(0,)),
        attended(F16, (1, 1, 1), (24, 40), (16, 16), kept=(1, 0)),
        packed(F16, 20, 2, 32),
        packed(F16, 70, 3, 16),
    ]


@needs_compiler
def test_all_variants_give_the_results(rng: np.random.Generator) -> None:
    check(train_cases(), rng, every=True)


@needs_compiler
def test_numbers_that_are_none(rng: np.random.Generator) -> None:
    check([replace(attended(F16, (1, 2, 2), (40, 150), (32, 32)), draw=awkward)], rng, every=True)


def hidden(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    """Draw positive numbers, but infinite keys: all of 21 keys, or the first 100 of more."""
    array = (np.abs(rng.standard_normal(type.shape)) + 0.1).astype(type.dtype.numpy)
    array[:, :100] = np.inf if type.shape[1] > 1 else array[:, :100]
    return array


@needs_compiler
@pytest.mark.parametrize("keys", [21, 150])
def test_rows_without_a_finite_score_so_far(rng: np.random.Generator, keys: int) -> None:
    """The logarithm is infinite if there is none at all. Other scores are far below -88."""

    def make(g: Graph, q: Value, k: Value, v: Value) -> list[Value]:
        return list(g.insert(AttentionTrain(-30.0), [q, g.add(Transpose((0, 2, 1, 3)), k), v]).results)

    types = [rows(F16, 1, 1, 19, 32), rows(F16, 1, keys, 1, 32), rows(F16, 1, 1, keys, 32)]
    check([replace(build(f"hidden {keys}", types, make), draw=hidden)], rng, every=True)


@pytest.mark.parametrize(
    ("why", "case"),
    [
        ("fp32", attended(F32, (1, 1, 1), (9, 9), (16, 16))),
        ("bf16", attended(BF16, (1, 1, 1), (9, 9), (16, 16))),
        ("odd features", attended(F16, (1, 1, 1), (9, 9), (24, 24))),
        ("many features", attended(F16, (1, 1, 1), (9, 9), (80, 80))),
        ("other features of values", attended(F16, (1, 1, 1), (9, 9), (16, 32))),
        ("shared keys", attended(F16, (1, 2, 1), (9, 9), (16, 16))),
        ("many keys", attended(F16, (1, 1, 1), (9, 257), (16, 16))),
        ("many queries", attended(F16, (1, 1, 1), (257, 9), (16, 16))),
        ("a causal mask", attended(F16, (1, 1, 1), (9, 9), (16, 16), AttentionTrain(1.0, causal=True))),
    ],
)
def test_others_are_left_alone(why: str, case: Case) -> None:
    assert case.kernel is None, why
