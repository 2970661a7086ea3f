"""Compare kernels of attention with a bias with the reference, through the emulator."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gpu.kernels.attention.test_attention_forward import BF16, F16, attended
from gpu.kernels.cases import Case, Draw, assert_same, awkward, build, check, each_way, normal, on_the_device, rows
from gpu.kernels.emulator import needs_compiler

from fusec.ir import DType, Graph, TensorType, Value
from fusec.ops import Attention, Reshape, Slice, Transpose

ONE = (2, 2, 2)  # images, heads of queries, and of keys


def windows(dtype: DType, tokens: int, bias: tuple[int, ...], op: Attention) -> Case:
    """Windows of a packed projection, whose results are transposed back, as Swin's blocks have them."""

    def make(g: Graph, x: Value, added: Value) -> Value:
        parts = g.add(Transpose((2, 0, 3, 1, 4)), g.add(Reshape((4, tokens, 3, 2, 16)), x))
        split = [
            g.add(Reshape((4, 2, tokens, 16)), g.add(Slice((i, 0, 0, 0, 0), (1, 4, 2, tokens, 16), (1,) * 5), parts))
            for i in range(3)
        ]
        y = g.add(op, *split, added)
        return g.add(Reshape((4, tokens, 32)), g.add(Transpose((0, 2, 1, 3)), y))

    return build(f"{dtype.value} {tokens} {bias} {op}", [rows(dtype, 4, tokens, 96), rows(dtype, *bias)], make)


def bias_cases() -> list[Case]:
    odd = [windows(F16, n, (1, 2, n, n), Attention(0.25)) for n in (1, 7, 33, 49, 50, 63, 64)]
    return [
        *odd,
        windows(BF16, 49, (4, 2, 49, 49), Attention(0.25, hides=True, seen=True)),
        attended(F16, ONE, (49, 50), (32, 40), bias=(50,)),
        attended(BF16, (2, 4, 2), (20, 64), (8, 16), bias=(2, 1, 20, 1)),
        attended(F16, ONE, (17, 30), (24, 24), Attention(0.3, causal=True), bias=(17, 30)),
        attended(F16, ONE, (130, 197), (16, 32), Attention(-0.3), bias=(2, 2, 130, 197)),
        attended(BF16, ONE, (256, 256), (16, 64), bias=(1, 2, 256, 256)),
    ]


def masked(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    """Normal numbers; in a bias, many are minus infinity, and all of its second row."""
    array = rng.standard_normal(type.shape)
    if type.shape[-1] == 49:
        array[rng.random(type.shape) < 0.5] = -np.inf
        array[..., 1, :] = -np.inf
    return array.astype(type.dtype.numpy)


def lowest(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    """Normal numbers; in a bias, zeros and a number far below any score, which begins rows and fills the second one."""
    array = rng.standard_normal(type.shape)
    if type.shape[-1] == 49:
        least = {F16: -1e4, BF16: -3.3895e38}[type.dtype]
        array = np.where(rng.random(type.shape) < 0.5, 0.0, least)
        array[..., 1, :] = array[..., ::3, :20] = least
    return array.astype(type.dtype.numpy)


@needs_compiler
def test_all_variants_add_the_bias(rng: np.random.Generator) -> None:
    assert all(case.kernel is not None for case in bias_cases())
    check(bias_cases(), rng, every=True)


@needs_compiler
@pytest.mark.parametrize("draw", [masked, lowest, awkward])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_masks_and_numbers_that_are_none(rng: np.random.Generator, dtype: DType, draw: Draw) -> None:
    ops = (Attention(0.3), Attention(0.3, hides=True), Attention(0.3, guarded=True))
    cases = [attended(dtype, ONE, (33, 49), (16, 16), op, bias=(2, 1, 33, 49)) for op in ops]
    check([replace(case, draw=draw) for case in cases], rng, every=True)


@needs_compiler
def test_a_guard_without_a_bias(rng: np.random.Generator) -> None:
    check([attended(F16, ONE, (20, 20), (16, 16), Attention(0.3, guarded=True))], rng, every=True)


def test_long_biases_are_left_alone() -> None:
    assert attended(F16, ONE, (9, 256), (8, 8), bias=(9, 256)).kernel is not None
    assert attended(F16, ONE, (9, 257), (8, 8), bias=(9, 257)).kernel is None


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 33, 49, 50, 64, 197])
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_every_variant_on_a_gpu(rng: np.random.Generator, dtype: DType, tokens: int) -> None:
    pytest.importorskip("cupy")
    from fusec.gpu.launch.kernel_launcher import Launcher

    shape = (20, 3, tokens, tokens)
    case = attended(dtype, (20, 3, 3), (tokens, tokens), (32, 32), Attention(0.2), bias=shape)
    kernel = case.kernel
    assert kernel is not None
    launcher = Launcher()
    launcher.compile(each_way(kernel))
    for case.draw in (normal, masked, lowest):
        arrays = case.arrays(rng)
        want = case.reference(arrays)
        for way in each_way(kernel):
            assert_same(case, on_the_device(launcher, way, arrays, case.outputs), want)
