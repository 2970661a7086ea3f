"""Test kernels of pointwise ops against the reference, through the emulator."""

from __future__ import annotations

from typing import Any

import numpy as np
from gpu.kernels.cases import Case, awkward, build, check, last, normal, rows
from gpu.kernels.emulator import needs_compiler

from fusec.gpu.kernels.codegen.indexing import View
from fusec.gpu.kernels.codegen.op_table import ANY, FLOAT, INTEGER
from fusec.gpu.kernels.codegen.pointwise_code import Space
from fusec.ir import DType, TensorType, Value
from fusec.ops import Cast, pw
from fusec.ops.pointwise import TABLE

F32, F16, BF16, I32, BOOL = DType.F32, DType.F16, DType.BF16, DType.I32, DType.BOOL
INTS = (DType.I64, DType.I32, DType.I8, DType.U8, DType.U64)


def op_case(name: str, dtype: DType) -> Case:
    row = next(row for row in TABLE if row.name == name)
    types = [rows(dtype, 3, 5, 7)] * row.arity
    if row.rule == "select":
        types[0] = rows(BOOL, 3, 5, 7)
    attributes = {"min": -1.5, "max": 2.25} if name == "clip" else {"axis": 1} if name == "gen_index" else {}
    positive = name in ("log", "sqrt", "rsqrt", "pow", "acosh")

    def draw(rng: np.random.Generator, type: TensorType) -> np.ndarray:
        array = (awkward if dtype.is_float and name not in ("sin", "cos", "tan") else normal)(rng, type)
        return np.abs(array) if positive and type.dtype.is_float else array

    return build(f"{name} {dtype.value}", types, lambda g, *x: g.add(pw(name, **attributes), *x), draw)


def op_cases() -> list[Case]:
    cases: list[Case] = []
    for row in TABLE:
        by_rule = {"bool": (BOOL,), "integer": INTS, "float": (F32, F16, BF16, DType.F64), "test": (F32, F16)}
        dtypes: tuple[DType, ...] = by_rule.get(row.rule, (F32, F16, DType.F64, *INTS))
        cases += [op_case(row.name, dtype) for dtype in dtypes]
    return cases


def shape_cases() -> list[Case]:
    def residual(g: Any, x: Any, y: Any, b: Any) -> Any:
        return g.add(pw("relu"), g.add(pw("add"), g.add(pw("add"), x, y), b))

    def two_results(g: Any, x: Any) -> Any:
        a = g.add(pw("exp"), x)
        return a, g.add(pw("mul"), a, x)

    def casts(g: Any, x: Any) -> Any:
        return g.add(Cast(F16), g.add(pw("mul"), x, g.constant(np.float32(3.25))))

    cases: list[Case] = []
    for dtype in (F32, F16, BF16):
        for shape in ((2, 16, 5, 5), (1, 6, 3, 3), (2, 7, 2, 3), (1, 1, 1, 1), (0, 8, 2, 2)):
            n, c = shape[:2]
            name = f"{dtype.value} {shape}"
            cases.append(
                build(f"residual {name}", [last(dtype, *shape), last(dtype, *shape), rows(dtype, 1, c, 1, 1)], residual)
            )
            cases.append(
                build(f"gate {name}", [last(dtype, *shape), rows(dtype, n, c, 1, 1), rows(dtype, c, 1, 1)], residual)
            )
            cases.append(build(f"orders {name}", [last(dtype, *shape), rows(dtype, *shape), rows(dtype, 1)], residual))
        for shape in ((1000,), (33, 3), (), (1, 8191), (4, 1, 8)):
            name = f"{dtype.value} {shape}"
            cases.append(build(f"two {name}", [rows(dtype, *shape)], two_results))
    cases += [build(f"cast {s}", [rows(F32, *s)], casts) for s in ((64,), (3, 5), (2, 3, 4))]
    cases += [build("outer", [rows(F32, 5, 1), rows(F32, 1, 7)], lambda g, x, y: g.add(pw("add"), x, y))]
    cases += [build("two by two", [rows(F16, 3, 1, 4, 1), rows(F16, 2, 1, 8)], lambda g, x, y: g.add(pw("mul"), x, y))]
    return cases


def cast_cases() -> list[Case]:
    dtypes = (DType.F64, F32, F16, BF16, DType.I64, I32, DType.I8, DType.U8, BOOL)

    def draw(rng: np.random.Generator, type: TensorType) -> np.ndarray:
        return normal(rng, type) if not type.dtype.is_float else (normal(rng, type) * 4).astype(type.dtype.numpy)

    def case(a: DType, b: DType) -> Case:
        def positive(rng: np.random.Generator, type: TensorType) -> np.ndarray:
            return np.abs(draw(rng, type)) if b.value.startswith("u") and type.dtype is not BOOL else draw(rng, type)

        return build(f"{a.value} to {b.value}", [rows(a, 3, 37)], lambda g, x: g.add(Cast(b), x), positive, exact=True)

    return [case(a, b) for a in dtypes for b in dtypes if a is not b]


def test_offsets_with_negative_strides_have_a_sign() -> None:
    """NVRTC widens an unsigned index before it adds the start, and reads illegal addresses."""
    space = Space((2, 2), ("c0", "c1"))
    assert space.offset(View((2, 2), (-48, 8), F32, 180)) == "(i64)c0 * -48 + (i64)c1 * 8 + 180"
    assert space.offset(View((2, 2), (48, 8), F32, 180)) == "c0 * 48 + c1 * 8 + 180"


def test_every_pointwise_op_has_an_expression() -> None:
    for row in TABLE:
        floats = row.name in FLOAT or row.name in ANY
        integers = row.name in INTEGER or row.name in ANY
        assert floats if row.rule in ("float", "test") else integers if row.rule == "integer" else True
        assert floats and integers if row.rule == "number" else True
        assert row.name in ANY if row.rule in ("any", "compare", "bool", "select") else True
    assert {*ANY, *FLOAT, *INTEGER} == {row.name for row in TABLE}


@needs_compiler
def test_ops(rng: np.random.Generator) -> None:
    check(op_cases(), rng)


@needs_compiler
def test_shapes_and_orders(rng: np.random.Generator) -> None:
    check(shape_cases(), rng)


@needs_compiler
def test_casts(rng: np.random.Generator) -> None:
    check(cast_cases(), rng)


def saturation(dtype: DType = DType.F8E4M3, limits: tuple[float, float] = (-448.0, 448.0)) -> Case:
    """Scale, limit and round to floats of 8 bits. Inputs are ties, limits, and numbers beyond them."""
    odd = np.array([17.0, -19.0, 0.0, -0.0, 448.0, 460.0, -464.0, 465.0, 1e30, np.inf, -np.inf, np.nan], np.float32)

    def make(g: Any, x: Value) -> Value:
        scaled = g.add(pw("mul"), x, g.constant(np.float32(1.0)))
        return g.add(Cast(dtype), g.add(pw("clip", min=limits[0], max=limits[1]), scaled))

    def draw(rng: np.random.Generator, type: TensorType) -> np.ndarray:
        some = np.where(rng.random(type.shape) < 0.5, rng.choice(odd, type.shape), rng.uniform(-600, 600, type.shape))
        return some.astype(np.float32)

    return build(f"saturate {dtype} {limits}", [rows(F32, 64, 16)], make, draw)


@needs_compiler
def test_floats_of_eight_bits_saturate(rng: np.random.Generator) -> None:
    """By the instruction that rounds them, if the limits are those of the type."""
    case, others = saturation(), [saturation(limits=(-448.0, 300.0)), saturation(DType.F8E5M2)]
    assert case.kernel is not None and "saturated_e4m3(v" in case.kernel.launches[0].source
    for each in others:
        assert each.kernel is not None and "saturated_e4m3(v" not in each.kernel.launches[0].source
    for each in (case, *others):
        each.exact = True
    check([case, *others], rng)


def rounding(scale: float, dtype: DType = DType.I8, limits: tuple[float, float] = (-128.0, 127.0)) -> Case:
    """Scale, and round to bytes. Inputs are ties, limits, and numbers beyond them."""
    odd = np.array([0.5, 1.5, -0.5, -2.5, 127.5, -128.5, 255.5, 300.0, -1e9, 1e30, np.inf, -np.inf, np.nan], np.float32)

    def make(g: Any, x: Value) -> Value:
        scaled = g.add(pw("mul"), x, g.constant(np.float32(scale)))
        return g.add(Cast(dtype), g.add(pw("clip", min=limits[0], max=limits[1]), g.add(pw("round"), scaled)))

    def draw(rng: np.random.Generator, type: TensorType) -> np.ndarray:
        return np.where(rng.random(type.shape) < 0.5, rng.choice(odd, type.shape), rng.uniform(-300, 300, type.shape))

    return build(f"round {scale} {dtype} {limits}", [rows(F32, 64, 16)], make, lambda *a: draw(*a).astype(np.float32))


@needs_compiler
def test_bytes_are_rounded_to_even_between_limits(rng: np.random.Generator) -> None:
    cases = [rounding(1.0), rounding(1.0, DType.U8, (0.0, 255.0)), rounding(0.37, limits=(-3.0, 90.0))]
    for case in cases:
        assert case.kernel is not None and "whole_number<" in case.kernel.launches[0].source
        case.exact = True
    others = [rounding(1.0, limits=(-2.5, 127.0))]  # half a step as a limit is rounded after it
    others.append(rounding(1.0, DType.F8E4M3, (-127.0, 127.0)))  # most whole numbers are no floats of 8 bits
    for case in others:
        assert case.kernel is not None and "whole_number<" not in case.kernel.launches[0].source
    check([*cases, *others], rng)


@needs_compiler
def test_a_cast_without_rounding_cuts_off(rng: np.random.Generator) -> None:
    def make(g: Any, x: Value) -> Value:
        y = g.add(pw("mul"), x, g.constant(np.float32(3.3)))
        return g.add(Cast(DType.I8), g.add(pw("clip", min=-128.0, max=127.0), y))

    check([build("cut off", [rows(F32, 64)], make, exact=True)], rng)


def test_layers_that_differ_in_a_scale_have_one_source() -> None:
    sources = {rounding(scale).kernel.launches[0].source for scale in (0.37, 1 / 127, 21.7)}  # type: ignore[union-attr]
    assert len(sources) == 1
    assert "0.5f" in rounding(0.5).kernel.launches[0].source  # type: ignore[union-attr]
