"""Evaluate a graph in float64, and again with a random error in place of every rounding (Monte Carlo arithmetic).

The distance of the disturbed results from the undisturbed ones estimates the rounding error on this graph and data.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import ml_dtypes
import numpy as np

from fusec.ir import Constant, DType, Graph, Node, Op, Value
from fusec.reference import evaluate_node, keeps_number
from fusec.testing.error_bounds.discontinuities import flips
from fusec.testing.error_bounds.op_rounding import (
    FADING,
    POLES,
    PRODUCTS,
    approximation,
    dropping_nan,
    flushed,
    intermediate_size,
    is_exact,
    is_move,
    is_single,
    never_zero,
    sum_length,
)
from fusec.testing.error_bounds.perturbed import SAFETY, Rounding, Samples

Array = np.ndarray[Any, Any]

_F32, _F64, _TF32 = 2.0**-24, 2.0**-53, 2.0**-10  # tf32 engines truncate
_POOL = 1 << 14
# This number of samples have errors of full size. Each further one has errors REDUCED times those of the one before.
FULL, REDUCED = 24, 10.0**-1.5
_ROUNDS = frozenset({"add", "sub", "mul", "leaky_relu", "prelu", "leaky_relu_backward", "cast"})
_HALVES = (DType.F16, DType.BF16)
_MAX = {d: float(ml_dtypes.finfo(d.numpy).max) for d in DType if d.is_float}


def sample(graph: Graph, feeds: Mapping[str, Array], rounding: Rounding, count: int) -> dict[str, Samples]:
    """Evaluate the outputs by name: once undisturbed and `count` times disturbed.

    The undisturbed outputs are those of `evaluate` in float64.
    """
    with np.errstate(all="ignore"):
        return _Sampler(graph, rounding, count).run(feeds)


class _Sampler:
    def __init__(self, graph: Graph, rounding: Rounding, count: int):
        self.graph = graph
        self.rounding = rounding
        self.count = count
        self.constant: set[Value] = set()  # values that depend on constants alone
        self.unit = _F64 if rounding.meaning else 8 * _F32 if rounding.device else _F32
        self.signs = np.random.default_rng(count).choice([-1.0, 1.0], _POOL)
        self.scales = [1.0] * min(count, FULL) + [REDUCED**j for j in range(1, count - FULL + 1)]
        self.salt = 0
        floats = [v.type.dtype for v in graph.values() if v.type.dtype.is_float]
        self.narrowest = rounding.storage if rounding.meaning else min(floats, key=_digits, default=DType.F64)
        self.half = any(d in _HALVES for d in (*floats, self.narrowest))
        self.constants_exact = self._constants_exact()

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Samples]:
        values: dict[Value, Samples] = {}
        for value in self.graph.inputs:
            values[value] = self._undisturbed(_wide(np.asarray(feeds[value.name])))
        for node in self.graph.nodes:
            values.update(zip(node.results, self._node(node, [values[v] for v in node.operands]), strict=True))
        return {name: values[v] for name, v in zip(self.graph.output_names, self.graph.outputs, strict=True)}

    def _undisturbed(self, plain: Array) -> Samples:
        return Samples(plain, [plain] * self.count)

    # constants -------------------------------------------------------------------------------------------

    def _constants_exact(self) -> bool:
        """Tell if all that passes compute from the constants is exact: numbers of few bits, exact ops."""
        if not self.rounding.meaning:
            return not self.half  # because a spelling may store f32 constants in the 16 bits of the other operand
        if self.half:
            return False
        for node in self.graph.nodes:
            if isinstance(node.op, Constant):
                if not _few_bits(_wide(node.op.literal.array)):
                    return False
            elif any(v.literal is not None for v in node.operands):
                sums = node.op.name in PRODUCTS or node.op.name in ("reduce", "max_pool")
                if not (sums or is_move(node.op) or is_single(node.op)):
                    return False
        return True

    def _constant(self, node: Node) -> Samples:
        plain = _wide(cast(Constant, node.op).literal.array)
        self.constant.add(node.result)
        dtype = node.result.type.dtype
        if not dtype.is_float or self.constants_exact or not plain.any():
            return self._undisturbed(plain)
        narrow = min(dtype, self.narrowest, key=_digits)
        if not self.rounding.meaning and narrow is dtype:
            return self._undisturbed(plain)  # stored without rounding
        samples = self._stored(plain, [plain] * self.count, narrow, 0.0, None)
        beyond = np.isfinite(plain) & (np.abs(plain) > _MAX[narrow])
        for k, most in ((0, np.inf), (1, _MAX[narrow])):  # a third becomes infinite, a third the largest number
            samples[k::3] = [np.where(beyond, np.copysign(most, s), s) for s in samples[k::3]]
        return Samples(plain, samples)

    # nodes -----------------------------------------------------------------------------------------------

    def _node(self, node: Node, operands: list[Samples]) -> list[Samples]:
        self.salt += 1
        if isinstance(node.op, Constant):
            return [self._constant(node)]
        indices = node.op.name == "gen_index" and self.rounding.exported  # a constant in ONNX
        if indices or (node.operands and all(v in self.constant for v in node.operands)):
            self.constant.update(node.results)
        if node.op.name == "attention_train" and all(
            v in self.constant for v in (*node.operands[:2], *node.operands[3:])
        ):
            self.constant.add(node.results[1])  # the sums do not depend on v
        op, plain = node.op, [s.plain for s in operands]
        operands = [self._as_read(s, i) for i, s in enumerate(operands)]
        results = self._evaluate(node, plain)
        floating = any(v.type.dtype.is_float for v in node.results)
        exact = is_move(op) or (not floating) or is_single(op)
        summed = not exact and not self._scaled(node) and is_exact(node, plain, *self._precision(node))
        flipped = flips(node, operands, results[0], self.rounding)
        made = [self._undisturbed(r) for r in results]
        if not all(s.exact for s in operands) or not (exact or summed):
            made = self._disturb(node, operands, results, exact or summed)
        if not self.rounding.meaning:
            made = [self._without_nan(op, operands, s) for s in made]
        if floating and not is_move(op):
            made = [self._rounded(node, made, i, exact or summed, plain) for i in range(len(made))]
        if op.name in ("add", "sub") and self.rounding.meaning and not self.constants_exact:
            made = [self._joined(node, s) for s in made]
        if self.rounding.device:
            made = [self._approximated(op, plain, s) for s in made]
        if flipped is not None:
            alike = [flipped.shape == s.plain.shape for s in made]
            made = [
                self._flip(s, flipped if a else np.full(s.plain.shape, flipped.any()))
                for s, a in zip(made, alike, strict=True)
            ]
        return made

    def _without_nan(self, op: Op, operands: list[Samples], made: Samples) -> Samples:
        """Replace NaN in two samples of three, because cuDNN's maximum and similar modes drop NaN.

        One sample of three keeps it, since later ops may hide the replacement.
        """
        draws = np.random.default_rng((self.salt, 1)).permutation(self.count) % 3
        samples: list[Array] = []
        for k, (sample, draw) in enumerate(zip(made.disturbed, draws, strict=True)):
            other = dropping_nan(op, [s.disturbed[k] for s in operands], draw == 2) if draw else None
            samples.append(sample if other is None else other)
        return Samples(made.plain, samples)

    def _joined(self, node: Node, made: Samples) -> Samples:
        """Disturb a sum with a constant, because passes may add that constant to others first.

        The sum of the constants is then rounded on its own.
        """
        constants = [v for v in node.operands if v in self.constant and v.literal is not None]
        if node.result in self.constant or not constants or not node.result.type.dtype.is_float:
            return made
        size = np.abs(_wide(cast(Constant, cast(Node, constants[0].node).op).literal.array))
        unit = max(_F32, self.narrowest.epsilon / 2, node.result.type.dtype.epsilon / 2)
        error = unit * np.where(np.isfinite(size), size, 0.0)
        return Samples(made.plain, [s + self._signed(error, 7, k) for k, s in enumerate(made.disturbed)])

    def _as_read(self, value: Samples, place: int) -> Samples:
        """Choose how one op reads a 16-bit value: in one sample of three, as it was before rounding.

        A fused op may read the value before it is stored.
        """
        if value.unstored is None:
            return value
        draws = np.random.default_rng((self.salt, place)).integers(0, 3, self.count)
        pairs = zip(value.disturbed, value.unstored, draws, strict=True)
        return Samples(value.plain, [wide if draw == 0 else stored for stored, wide, draw in pairs])

    def _approximated(self, op: Op, operands: list[Array], made: Samples) -> Samples:
        """Add the error of a GPU's approximation of a function.

        In one sample of three, NaN and infinities become zero, because later ops on a GPU may lose them.
        """
        lost = ~np.isfinite(made.plain) if made.plain.dtype.kind == "f" else None
        if lost is not None and lost.any():
            # one sample of three, not two, because every other sample overflows: some must have one effect alone
            samples = [np.where(lost, 0.0, s) if k % 3 == 0 else s for k, s in enumerate(made.disturbed)]
            made = Samples(made.plain, samples)
        error = approximation(op, operands, made.plain)
        if error is None:
            return made
        error = np.where(np.isfinite(error), error, 0.0)
        return Samples(made.plain, [s + self._signed(error, 77, k) for k, s in enumerate(made.disturbed)])

    def _unit(self, node: Node) -> float:
        """Return the unit roundoff of the arithmetic inside a node.

        Passes compute constants in the same precision as a kernel.
        """
        wide = all(v.type.dtype is DType.F64 for v in node.results)
        folded = self.rounding.meaning and node.results[0] in self.constant
        return _F64 if wide else _F32 if folded else self.unit

    def _evaluate(self, node: Node, operands: list[Array], rounded: Op | None = None) -> list[Array]:
        """Evaluate a node; rounded: its op with other attributes."""
        if keeps_number(node):
            return [operands[0].astype(np.float64, copy=False)]
        return [_wide(r) for r in (rounded.reference(np, *operands) if rounded else evaluate_node(node, operands))]

    def _rounded_attributes(self, op: Op, k: int) -> Op | None:
        """Return the op with its attributes rounded to fp32; None in about one sample of four, and if none changes.

        Equal ops are rounded alike in a sample, because they are exported alike.
        """
        if not self.rounding.exported or (k % 2 and zlib.crc32(f"{op} {k}".encode()) % 2):
            return None
        numbers = {name: v for name, v in op.attributes.items() if isinstance(v, float)}
        errors = {name: float(np.float32(v)) - v for name, v in numbers.items() if math.isfinite(v)}
        if not any(errors.values()):
            return None
        return replace(cast(Any, op), **{name: numbers[name] + self.scales[k] * e for name, e in errors.items()})

    def _scaled(self, node: Node) -> bool:
        """Tell if passes may fold a factor into a product's constant operand.

        The factor is then rounded in each term.
        """
        folds = self.rounding.meaning and not self.constants_exact
        return folds and node.op.name in PRODUCTS and any(v in self.constant for v in node.operands)

    def _precision(self, node: Node) -> tuple[int, int]:
        """Return the bits in which sums are accumulated, and the bits that remain of an operand."""
        if self.rounding.meaning:
            return 24, 53
        return 24, 11 if self.rounding.tensor_cores and node.op.name in PRODUCTS else 24

    def _disturb(self, node: Node, operands: list[Samples], results: list[Array], exact: bool) -> list[Samples]:
        """Evaluate the op on disturbed operands.

        Operands of a sum or function also get the errors made inside the op.
        """
        rows: list[list[Array]] = []
        inner = 0.0 if exact else self._unit(node) * math.sqrt(sum_length(node))
        if self.rounding.meaning and node.op.name.endswith("_norm"):
            # because passes fold the parameters, and round factor and shift separately
            inner = max(inner, _F32, self.narrowest.epsilon / 2, node.results[0].type.dtype.epsilon / 2)
        if self.rounding.exported and not exact and self._has_fp32_numbers(node):
            inner = max(inner, _F32)
        if self.rounding.meaning and self._folds_a_product(node):
            inner = max(inner, _F32 * math.sqrt(sum_length(node)))
        if node.op.name.startswith("attention") and not self.rounding.meaning:
            # kernels round the weights before the second product
            inner = max(inner, node.results[0].type.dtype.epsilon / 2)
        tf32 = self.rounding.tensor_cores and not self.rounding.meaning and node.op.name in PRODUCTS and not exact
        for k in range(self.count):
            arrays = [s.disturbed[k] for s in operands]
            if k % 2 and node.op.name in FADING:
                arrays[-1] = _steepest(operands[-1].plain, arrays[-1])
            if inner == 0.0 and all(a is s.plain for a, s in zip(arrays, operands, strict=True)):
                rows.append(results)
                continue
            if inner:
                arrays = [
                    self._shaken(a, inner + (_TF32 if tf32 and v.type.dtype is DType.F32 else 0.0), k, i)
                    for i, (a, v) in enumerate(zip(arrays, node.operands, strict=True))
                ]
            rows.append(self._evaluate(node, arrays, self._rounded_attributes(node.op, k)))
        return [Samples(r, [row[i] for row in rows]) for i, r in enumerate(results)]

    def _has_fp32_numbers(self, node: Node) -> bool:
        """Tell if ONNX writes an op as single ops with fp32 numbers: its own, or such that are folded."""
        own = node.op.name in ("gelu_backward", "gelu_tanh_backward")
        return own or (node.op.name not in PRODUCTS and any(v in self.constant for v in node.operands))

    def _folds_a_product(self, node: Node) -> bool:
        """Tell if a product inside attention has constant operands alone.

        In ONNX, attention is written as single ops, and such a product is folded in fp32.
        """
        if not node.op.name.startswith("attention"):
            return False
        factors = ((1, 2), (0, 3)) if node.op.name == "attention_backward" else ((0, 1),)
        return any(all(node.operands[i] in self.constant for i in pair) for pair in factors)

    def _shaken(self, x: Array, relative: float, k: int, operand: int) -> Array:
        """Disturb each element of sample k by a relative error whose sign depends on the element's place."""
        if x.dtype.kind != "f":
            return x
        return x * (1.0 + relative * self.scales[k] * self._signs(x.shape, k * 31 + operand))

    def _signed(self, error: Array, place: int, k: int) -> Array:
        """Return the errors of sample k, with signs that depend on the element's place."""
        return error * (self.scales[k] * self._signs(error.shape, place + k))

    def _signs(self, shape: tuple[int, ...], place: int) -> Array:
        size = math.prod(shape)
        start = (self.salt * 7919 + place * 104729) % max(_POOL - size, 1)
        return np.resize(self.signs[start : start + size], size).reshape(shape)

    # rounding --------------------------------------------------------------------------------------------

    def _rounded(self, node: Node, results: list[Samples], at: int, exact: bool, operands: list[Array]) -> Samples:
        """Round the result at this place if the op is inexact, or where the number cannot be represented."""
        value, made = node.results[at], results[at]
        dtype = value.type.dtype
        if not dtype.is_float:
            return made
        stored = min(dtype, self.narrowest, key=_digits) if value in self.constant else dtype
        wide = self.rounding.meaning and value not in self.constant  # computed in float64
        unit = 0.0 if wide else stored.epsilon / 2
        mask: Array | None = None
        if exact:
            target = np.float32 if wide or stored is DType.F64 else stored.numpy  # f64 represents every number
            mask = np.not_equal(made.plain.astype(target).astype(np.float64), made.plain)
            if made.exact and not mask.any():
                return made
            if node.op.name in _ROUNDS:  # because disturbed operands give another number to round
                mask |= made.spread() > 0
        inner = self._unit(node) * (1.0 if exact else math.sqrt(sum_length(node)))
        samples = self._stored(made.plain, made.disturbed, None if wide else stored, unit + inner, mask)
        executed, plain = not self.rounding.meaning, [s.plain for s in results]
        spelled = self.rounding.exported and (executed or value in self.constant)
        size = intermediate_size(node.op, executed, spelled, operands, plain, at)
        if size is not None:
            absolute = self._unit(node) * size
            samples = [s + self._signed(absolute, 0, k) for k, s in enumerate(samples)]
        lost = None if self.rounding.meaning or dtype is DType.F64 else flushed(node.op, operands)
        if lost is not None:
            samples = [s + self._signed(lost, 0, k) for k, s in enumerate(samples)]
        self._overflow(node, made.plain, samples, None if wide else stored, exact, operands)
        unstored = made.disturbed if not wide and stored in _HALVES else None
        return Samples(made.plain, samples, unstored)

    def _stored(
        self, plain: Array, samples: list[Array], dtype: DType | None, relative: float, mask: Array | None
    ) -> list[Array]:
        """Disturb samples by a relative error whose sign is a hash of the number.

        Equal numbers are thus rounded alike.
        """
        relative = relative or (dtype.epsilon / 2 if dtype is not None else self.unit)
        mixed = _mixed(np.abs(plain))
        least = dtype.least if dtype is not None else 0.0
        tiny = (plain != 0) & (np.abs(plain) < least / relative) if least else None
        if tiny is not None and not tiny.any():
            tiny = None
        result: list[Array] = []
        for k, sample in enumerate(samples):
            sign = np.where(_mixed(_mixed(mixed ^ self._key(k))) >> np.uint64(63), 1.0, -1.0) * self.scales[k]
            error = sign * relative if mask is None else sign * relative * mask
            disturbed = sample * (1.0 + error)
            result.append(disturbed if tiny is None else disturbed + np.where(tiny, sign * least, 0.0))
        return result

    def _key(self, k: int) -> np.uint64:
        return np.uint64((self.salt * 1000 + k) * 0x9E3779B97F4A7C15 & (2**64 - 1))

    def _overflow(
        self, node: Node, plain: Array, samples: list[Array], dtype: DType | None, exact: bool, operands: list[Array]
    ) -> None:
        """Let every other sample overflow where storage or fp32 may overflow; the others neither over- nor underflow.

        Results that depend on the overflow therefore differ among samples.
        """
        most = float(np.fmax.reduce(np.abs(plain), axis=None, initial=0.0))  # NaN is no number
        own = node.results[0].type.dtype  # a constant is computed in its own type before it is narrowed
        limit = 0.999 * min(_MAX[dtype], _MAX[own]) if dtype is not None and own.is_float else math.inf
        if limit < math.inf and (beyond := _may_exceed(limit, plain, samples)) is not None:
            samples[::2] = [np.where(beyond & ~np.isnan(s), np.copysign(np.inf, s), s) for s in samples[::2]]
        if np.isinf(most) and node.op.name not in POLES and all(np.isfinite(x).all() for x in operands):
            endless = np.isinf(plain)
            samples[1::2] = [np.where(endless, np.copysign(1e300, plain), s) for s in samples[1::2]]
        if never_zero(node.op) and (np.abs(plain) < 1e-290).any():
            vanished = (np.abs(plain) < 1e-290) & ~np.isneginf(operands[0])  # subnormal in float64, or less
            samples[1::2] = [np.where(vanished, 1e-290, s) for s in samples[1::2]]
        if (
            not exact
            and not self.rounding.meaning
            and most > 1e18
            and ((np.abs(plain) > 1e18) & np.isfinite(plain)).any()
        ):
            # squares inside the op overflow fp32
            samples[::2] = [np.full_like(s, np.nan) for s in samples[::2]]

    def _flip(self, made: Samples, where: Array) -> Samples:
        """Move samples to the other side of a discontinuity.

        Floats become NaN (NaN becomes a number), and all other types become another number. One sample of three keeps
        its side, because a later op may hide this one in the undisturbed result alone.
        """
        samples: list[Array] = []
        for k, s in enumerate(made.disturbed):
            if s.dtype.kind == "f":
                if k % 3 == 2:
                    other = s
                elif k % 3:  # a NaN would hide another NaN, and later ops may make NaN of a zero
                    other = np.where(np.isnan(made.plain), 2.0, np.copysign(1e30, made.plain))
                else:
                    other = np.where(np.isnan(made.plain), 0.0, np.nan)
                samples.append(np.where(where, other, s))
                continue
            some = where if k == 0 else where & (self._signs(where.shape, k) > 0)
            other = ~made.plain if s.dtype == np.bool_ else made.plain + np.ones((), s.dtype)
            samples.append(np.where(some, other, s))
        return Samples(made.plain, samples)


def _may_exceed(limit: float, plain: Array, samples: list[Array]) -> Array | None:
    """Find the numbers that rounding may put beyond a limit; None if there are none."""
    most = max(float(np.fmax.reduce(np.abs(x), axis=None, initial=0.0)) for x in (plain, *samples))
    if most * (1 + 2 * SAFETY) < limit:  # samples are at most twice `most` apart
        return None
    beyond = np.abs(plain) + SAFETY * Samples(plain, samples).spread() >= limit
    return beyond if beyond.any() else None


def _steepest(plain: Array, disturbed: Array) -> Array:
    """Return the number nearest to zero between two: there, a slope that fades on both sides is steepest.

    Numbers that are close together have almost the same slope: of them, the disturbed one is returned.
    """
    least = np.where(plain * disturbed <= 0, 0.0, np.where(np.abs(plain) < np.abs(disturbed), plain, disturbed))
    return np.where(np.abs(disturbed - plain) > 0.1, least, disturbed)


def _wide(array: Array) -> Array:
    return array.astype(np.float64, copy=False) if DType.of(array.dtype).is_float else array


def _mixed(array: Array) -> Array:
    """Hash each element's bits (two rounds of multiplication and folding, as in MurmurHash3's finaliser)."""
    bits = array.view(np.uint64)
    bits = (bits ^ (bits >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    return (bits ^ (bits >> np.uint64(29))) * np.uint64(0xC4CEB9FE1A85EC53)


def _digits(dtype: DType) -> int:
    """Count the bits of a floating type's significand."""
    return 1 - round(math.log2(dtype.epsilon))


def _few_bits(array: Array) -> bool:
    """Tell if every significand has at most 8 bits: products of three such numbers are exact in fp32."""
    mantissa, exponent = np.frexp(array)
    scaled = mantissa * 256
    return bool((scaled == np.rint(scaled)).all() and (np.abs(exponent) < 10).all())
