"""Test kernels of attention's gradients against the reference, through the emulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from gpu.kernels.cases import Case, build, normal, rows
from gpu.kernels.emulator import Emulator, needs_compiler

from fusec.gpu.kernels import GpuFigures
from fusec.ir import DType, Graph, TensorType, Value
from fusec.ops import AttentionBackward, AttentionTrain, Reshape, Split, Transpose, pw
from fusec.targets.target import load

F16, BF16, F32 = DType.F16, DType.BF16, DType.F32
WITHIN = 1e-3  # relative L2 error: weights and their gradients are rounded before they are multiplied


def drawn(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    """Draw normal numbers, and logarithms of sums that are large enough for small weights."""
    return normal(rng, type) + np.float32(3.0) if type.dtype is F32 else normal(rng, type)


def types_of(
    dtype: DType, heads: tuple[int, int, int], lengths: tuple[int, int], features: tuple[int, int]
) -> list[TensorType]:
    """Return the types of the operands. heads: images, heads of queries, and of keys."""
    (batch, own, shared), (queries, keys), (depth, width) = heads, lengths, features
    result = rows(dtype, batch, own, queries, width)
    sides = [rows(dtype, batch, own, queries, depth), rows(dtype, batch, shared, keys, depth)]
    return [result, *sides, rows(dtype, batch, shared, keys, width), result, rows(F32, batch, own, queries, 1)]


def gradients(
    dtype: DType,
    heads: tuple[int, int, int],
    lengths: tuple[int, int],
    features: tuple[int, int],
    op: AttentionBackward | None = None,
    results: Sequence[int] = (0, 1, 2),
) -> Case:
    """Return a case of attention's gradients.

    results: the gradients that are outputs
    """
    op = op or AttentionBackward(0.3)

    def make(g: Graph, *x: Value) -> list[Value]:
        made = g.insert(op, list(x)).results
        return [made[place] for place in results]

    name = f"{dtype.value} {heads} {lengths} {features} {op} {tuple(results)}"
    return build(name, types_of(dtype, heads, lengths, features), make)


def packed(dtype: DType, length: int, heads: int, features: int) -> Case:
    """Return a case whose queries, keys and values are one projection, with gradients that are stored by rows."""
    width = heads * features

    def make(g: Graph, x: Value, dy: Value, y: Value, sums: Value) -> list[Value]:
        parts = [
            g.add(Transpose((0, 2, 1, 3)), g.add(Reshape((2, length, heads, features)), part))
            for part in g.insert(Split(-1, (width,) * 3), [x]).results
        ]
        dy, y = (g.add(Transpose((0, 2, 1, 3)), v) for v in (dy, y))
        made = g.insert(AttentionBackward(0.25), [dy, *parts, y, sums]).results  # steeper ones overflow fp16
        return [g.add(Reshape((2, length, width)), g.add(Transpose((0, 2, 1, 3)), v)) for v in made]

    result = rows(dtype, 2, length, heads, features)
    types = [rows(dtype, 2, length, 3 * width), result, result, rows(F32, 2, heads, length, 1)]
    return build(f"packed {dtype.value} {length}", types, make)


def with_forward(case: Case, arrays: dict[Value, np.ndarray]) -> dict[Value, np.ndarray]:
    """Replace the drawn result of attention, and its logarithms, by those of the drawn queries, keys and values."""
    node, op = next((node, node.op) for node in case.nodes if isinstance(node.op, AttentionBackward))
    known = case.evaluated(arrays)
    q, k, v = (known[value].astype(np.float64) for value in node.operands[1:4])
    y, sums = AttentionTrain(op.scale, op.causal).reference(np, q, k, v)
    for value, array in zip(node.operands[4:6], (y, sums), strict=True):
        if value.node is not None:  # of a transpose
            value, array = value.node.operands[0], array.transpose(0, 2, 1, 3)
        arrays[value] = array.astype(value.type.dtype.numpy)
    return arrays


def backward_cases() -> list[Case]:
    found = [
        gradients(F16, (1, 2, 2), (70, 90), (32, 32)),
        gradients(F16, (2, 1, 1), (33, 128), (48, 48)),
        gradients(F16, (1, 1, 1), (5, 50), (64, 64), AttentionBackward(-0.1)),
        gradients(F16, (1, 1, 1), (1, 3), (16, 16)),
        gradients(F16, (1, 1, 1), (197, 197), (64, 64), AttentionBackward(0.125)),
        gradients(F16, (1, 1, 1), (220, 210), (64, 64), AttentionBackward(0.125)),  # no room for the next values
        gradients(F16, (1, 1, 1), (64, 2), (16, 16), AttentionBackward(0.4, ordered=True)),
        gradients(F16, (35, 4, 4), (32, 16), (16, 16)),  # more heads than blocks
        gradients(F16, (1, 1, 1), (130, 256), (16, 16)),
        gradients(F16, (1, 1, 1), (40, 24), (16, 16), results=(0,)),
        gradients(F16, (1, 1, 1), (24, 40), (16, 16), results=(2, 1)),
        packed(F16, 20, 2, 32),
        packed(F16, 70, 3, 16),
    ]
    return [replace(case, draw=drawn, within=WITHIN) for case in found]


def low_scores() -> list[Case]:
    """Return a case whose scores are far below -88, so that a score of zero would have an infinite weight.

    The numbers of a key have the same sum, so that several keys have weights. With one weight, gradients would cancel.
    """

    def draw(rng: np.random.Generator, type: TensorType) -> np.ndarray:
        if type.shape[2:] == (21, 32):
            return rng.permuted(np.broadcast_to(np.tile([-1.5, -0.5], 16), type.shape), axis=-1).astype(np.float16)
        return (1.0 + np.abs(rng.standard_normal(type.shape)) / 4).astype(type.dtype.numpy)

    case = gradients(F16, (1, 2, 2), (19, 21), (32, 32), AttentionBackward(5.0))
    return [replace(case, draw=draw, name="low scores")]


@needs_compiler
def test_the_kernel_gives_the_gradients(rng: np.random.Generator) -> None:
    # the scores of a query are far apart, so that one key has nearly all weight
    steep = gradients(F16, (1, 1, 1), (64, 2), (16, 16), AttentionBackward(2.0, ordered=True))
    cases = [*backward_cases(), *low_scores(), replace(steep, draw=drawn)]
    kernels = {case.name: case.kernel for case in cases if case.kernel is not None}
    assert len(kernels) == len(cases)
    emulator = Emulator(list(kernels.values()))
    for case in cases:
        arrays = with_forward(case, case.arrays(rng))
        exact = case.evaluated({v: a.astype(np.float64) for v, a in arrays.items()})
        for value, got in zip(case.outputs, emulator.run(kernels[case.name], arrays, case.outputs), strict=True):
            error = np.linalg.norm(got.astype(np.float64) - exact[value]) / np.linalg.norm(exact[value])
            assert error < WITHIN, f"{case.name} {value.name}: {error}"


@pytest.mark.parametrize(
    ("why", "case"),
    [
        ("fp32", gradients(F32, (1, 1, 1), (9, 9), (16, 16))),
        ("bf16", gradients(BF16, (1, 1, 1), (9, 9), (16, 16))),
        ("odd features", gradients(F16, (1, 1, 1), (9, 9), (24, 24))),
        ("many features", gradients(F16, (1, 1, 1), (9, 9), (80, 80))),
        ("other features of values", gradients(F16, (1, 1, 1), (9, 9), (16, 32))),
        ("shared keys", gradients(F16, (1, 2, 1), (9, 9), (16, 16))),
        ("many keys", gradients(F16, (1, 1, 1), (9, 300), (16, 16))),
        ("long sequences", gradients(F16, (1, 1, 1), (700, 200), (64, 64))),
        ("a causal mask", gradients(F16, (1, 1, 1), (9, 9), (16, 16), AttentionBackward(1.0, causal=True))),
    ],
)
def test_other_gradients_are_left_alone(why: str, case: Case) -> None:
    assert case.kernel is None, why


def test_a_bias_is_left_alone() -> None:
    types = [*types_of(F16, (1, 1, 1), (9, 9), (16, 16)), rows(F16, 1, 1, 9, 9)]
    case = build("bias", types, lambda g, *x: list(g.insert(AttentionBackward(0.3), list(x)).results))
    assert case.kernel is None


def test_an_op_that_is_no_view_is_left_alone() -> None:
    def make(g: Graph, *x: Value) -> list[Value]:
        made = g.insert(AttentionBackward(0.3), list(x)).results
        return [g.add(pw("neg"), made[0]), *made[1:]]

    assert build("negated", types_of(F16, (1, 1, 1), (9, 9), (16, 16)), make).kernel is None


def test_only_hopper_has_the_products() -> None:
    case = gradients(F16, (1, 1, 1), (64, 64), (64, 64))
    assert case.kernel is not None
    assert all(replace(case, figures=GpuFigures.of(load(name))).kernel is None for name in ("a100", "b200"))
