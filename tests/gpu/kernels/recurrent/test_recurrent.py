"""Test the kernel of recurrent layers against the reference, through the emulator."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gpu.kernels.cases import FIGURES, ROUNDING, Case, build, check, on_the_device, rows
from gpu.kernels.emulator import Emulator, needs_compiler

from fusec.gpu.kernels import GpuFigures
from fusec.gpu.kernels.recurrent import recurrent_plan
from fusec.ir import DType, TensorType
from fusec.ops import Recurrent
from fusec.targets.target import load, names

F32, F16, BF16 = DType.F32, DType.F16, DType.BF16


def small(rng: np.random.Generator, type: TensorType) -> np.ndarray[Any, Any]:
    """Draw weights and states so small that activations are not flat, and lengths from 0 to 5."""
    if type.dtype.is_int:
        return rng.integers(0, 6, type.shape).astype(type.dtype.numpy)
    return (rng.standard_normal(type.shape) / math.sqrt(type.shape[-1])).astype(type.dtype.numpy)


def layer(op: Recurrent, dtype: DType, sizes: tuple[int, int, int], more: str = "") -> Case:
    """A layer of (steps, batch, size). `more`: `p` for the parameter of the cell, `l` for lengths, `t` for states that
    are stored in another order."""
    (steps, batch, size), count, width = sizes, op.directions, op.gates * sizes[2]
    states = TensorType((count, batch, size), dtype, (2, 0, 1) if "t" in more else ())
    types = [rows(dtype, steps, batch, count * width), rows(dtype, count, width, size), *[states] * op.states]
    if "p" in more:
        types.append(rows(dtype, count, 3 * size if op.cell == "lstm" else size))
    if "l" in more:
        types.append(rows(DType.I64 if batch % 2 else DType.I32, batch))
    name = f"{op.cell} {op.direction} {dtype.value} {sizes} {more}"
    return build(name, types, lambda g, *operands: g.insert(op, operands).results, small)


def recurrent_cases() -> list[Case]:
    """All cells and directions, sizes that fill no tile, several blocks and groups of sequences, and one step."""
    slopes = ("hard_sigmoid", "leaky_relu", "softsign")
    lbr: dict[str, Any] = {"linear_before_reset": True}
    return [
        layer(Recurrent("lstm"), F16, (5, 3, 32)),
        layer(Recurrent("lstm"), F32, (5, 3, 20), "l"),
        layer(Recurrent("lstm", "bidirectional", clip=0.5), F16, (4, 11, 13), "pl"),
        layer(Recurrent("lstm", "reverse", input_forget=True), BF16, (3, 2, 40), "l"),
        layer(
            Recurrent("lstm", "bidirectional", slopes * 2, (0.25, 0.5, 0.0) * 2, (0.5, 0.0, 0.0) * 2), F32, (3, 2, 9)
        ),
        layer(Recurrent("lstm", "bidirectional", (*slopes, "sigmoid", "tanh", "relu")), F16, (3, 5, 18), "t"),
        layer(Recurrent("lstm", "reverse"), F32, (1, 9, 5), "p"),
        layer(Recurrent("lstm"), F16, (1, 2, 3)),
        layer(Recurrent("gru", **lbr), F16, (4, 9, 24), "p"),
        layer(Recurrent("gru", "bidirectional", **lbr), F32, (4, 3, 17), "pl"),
        layer(Recurrent("gru", "reverse", **lbr, clip=1.0), BF16, (3, 17, 16), "l"),
        layer(Recurrent("gru"), F16, (5, 3, 24), "l"),
        layer(Recurrent("gru", "bidirectional", clip=0.5), F32, (4, 9, 20), "t"),
        layer(Recurrent("gru", "reverse"), BF16, (1, 2, 11)),
        layer(Recurrent("rnn"), F16, (4, 3, 50)),
        layer(Recurrent("rnn", "bidirectional", ("relu", "affine"), (0.0, 0.5), (0.0, 0.25)), F32, (4, 2, 21), "l"),
        layer(Recurrent("rnn", "reverse", ("scaled_tanh",), (0.5,), (0.75,)), BF16, (3, 33, 7), "t"),
    ]


@needs_compiler
def test_layers(rng: np.random.Generator) -> None:
    check(recurrent_cases(), rng)


@needs_compiler
@pytest.mark.parametrize(("processors", "nbytes"), [(3, 200 << 10), (2, 64 << 10)])
def test_few_processors_take_a_large_batch_in_several_launches(
    rng: np.random.Generator, processors: int, nbytes: int
) -> None:
    few = replace(FIGURES, processors=processors, shared_bytes=nbytes)
    lstm, gru = Recurrent("lstm", "bidirectional"), Recurrent("gru", linear_before_reset=True)
    cases = [layer(lstm, F16, (3, 70, 9), "l"), layer(gru, F32, (3, 150, 9), "p")]
    cases = [replace(case, figures=few) for case in cases]
    kernels = [case.kernel for case in cases if case.kernel is not None]
    assert len(kernels) == 2
    assert all(len(kernel.launches) > 1 and kernel.launches[0].grid <= processors for kernel in kernels)
    check(cases, rng)


@needs_compiler
def test_weights_that_registers_cannot_hold_are_read_every_step(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recurrent_plan, "HELD_REGISTERS", 0)
    monkeypatch.setattr(recurrent_plan, "WARPS", 2)
    lstm, gru = Recurrent("lstm", "reverse"), Recurrent("gru", linear_before_reset=True)
    cases = [
        layer(lstm, F16, (3, 20, 70)),
        layer(gru, F32, (3, 5, 35), "pl"),
        layer(Recurrent("rnn"), BF16, (3, 4, 90)),
    ]
    assert not any("held[" in case.kernel.launches[0].source for case in cases if case.kernel)
    check(cases, rng)


@needs_compiler
def test_every_number_of_blocks_gives_the_same_bits(rng: np.random.Generator) -> None:
    for dtype in (F16, F32):
        case = layer(Recurrent("lstm"), dtype, (4, 20, 40))
        sized = [replace(case, figures=replace(FIGURES, processors=count)).kernel for count in (20, 6, 3)]
        ways, arrays = list({kernel.key: kernel for kernel in sized if kernel is not None}.values()), case.arrays(rng)
        assert len(ways) > 1
        emulator = Emulator(ways)
        first, *others = ([a.tobytes() for a in emulator.run(way, arrays, case.outputs)] for way in ways)
        assert all(other == first for other in others)


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("sizes", [(400, 16, 512), (3, 500, 1024), (10, 1, 2048), (2, 5000, 64)])
@pytest.mark.parametrize("dtype", [F16, F32])
def test_all_blocks_of_a_launch_fit_on_the_target(dtype: DType, sizes: tuple[int, int, int], name: str) -> None:
    figures = GpuFigures.of(load(name))
    kernel = replace(layer(Recurrent("lstm", "bidirectional"), dtype, sizes), figures=figures).kernel
    for launch in kernel.launches if kernel is not None else ():
        assert (
            launch.cooperative and launch.grid <= figures.processors and launch.resident_bytes <= figures.dynamic_bytes
        )


@pytest.mark.parametrize("name", names())
def test_every_target_has_a_kernel_of_an_ordinary_layer(name: str) -> None:
    case = replace(layer(Recurrent("lstm"), F16, (400, 16, 512)), figures=GpuFigures.of(load(name)))
    assert case.kernel is not None


def test_other_layers_are_left_alone() -> None:
    assert layer(Recurrent("lstm"), DType.F64, (3, 2, 8)).kernel is None
    assert layer(Recurrent("lstm"), F32, (0, 2, 8)).kernel is None
    assert layer(Recurrent("lstm"), F16, (3, 2, 8192)).kernel is None


def drawn(rng: np.random.Generator) -> Case:
    """A layer of any cell, direction, type and size that the kernel takes."""
    cell = str(rng.choice(["lstm", "gru", "rnn"]))
    direction = str(rng.choice(["forward", "reverse", "bidirectional"]))
    linear = cell == "gru" and rng.random() < 0.6
    op = Recurrent(cell, direction, clip=float(rng.choice([0.0, 1.0])), linear_before_reset=linear)
    sizes = (int(rng.integers(1, 60)), int(rng.integers(1, 70)), int(rng.choice([7, 32, 100, 256, 512, 777, 1024])))
    more = "".join(letter for letter in "lt" if rng.random() < 0.4)
    if (linear or cell == "lstm") and rng.random() < 0.4:
        more += "p"
    return layer(op, [F16, BF16, F32][rng.integers(3)], sizes, more)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(24))
def test_random_layers_on_the_device(seed: int) -> None:
    """Twice in a row, against the reference in float64: the second run finds the memory that the first has left."""
    pytest.importorskip("cupy")
    from fusec.gpu.launch.kernel_launcher import Launcher

    rng, launcher = np.random.default_rng(seed), Launcher()
    case = drawn(rng)
    assert case.kernel is not None and launcher.runs(case.kernel)
    arrays = case.arrays(rng)
    wide = {v: a.astype(np.float64) if v.type.dtype.is_float else a for v, a in arrays.items()}
    want = case.reference(wide)
    for _ in range(2):
        got = on_the_device(launcher, case.kernel, arrays, case.outputs)
        for value, a, b in zip(case.outputs, got, want, strict=True):
            rounding = 4 * ROUNDING[value.type.dtype]
            np.testing.assert_allclose(a.astype(np.float64), b, rounding, rounding, err_msg=case.name)
