"""Evaluate a graph in float64, and again with a random error in place of every rounding (Monte Carlo arithmetic).

The distance of the disturbed results from the undisturbed ones estimates the rounding error on this graph and data.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b
from typing import Any, cast

import numpy as np

from fusec.ir import HALVES, Constant, DType, Graph, HostArray, Node, Op, Value
from fusec.ops.pointwise import keeps_number
from fusec.reference import evaluate_node
from fusec.testing.error_bounds.constant_folding import (
    constant_results,
    constants_exact,
    folds_a_product,
    folds_single_ops,
    has_fp32_numbers,
)
from fusec.testing.error_bounds.discontinuities import flips, ties_before_odd_zero_point
from fusec.testing.error_bounds.op_rounding import (
    FADING,
    PRODUCTS,
    approximation,
    dropping_nan,
    flushed,
    intermediate_size,
    is_exact,
    is_move,
    is_single,
    sum_length,
)
from fusec.testing.error_bounds.overflow import MAX, overflow
from fusec.testing.error_bounds.perturbed import Rounding, Samples, digits, in_float64
from fusec.testing.error_bounds.random_errors import RandomErrors

_F32, _F64, _TF32 = 2.0**-24, 2.0**-53, 2.0**-10  # tf32 engines truncate
_ROUNDS = frozenset({"add", "sub", "mul", "leaky_relu", "prelu", "leaky_relu_backward", "cast"})
OVERFLOW = 2  # This sample overflows, as all with an even number do, and nothing that follows hides it.


def sample(graph: Graph, feeds: Mapping[str, HostArray], rounding: Rounding, count: int) -> dict[str, Samples]:
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
        self.errors = RandomErrors(count, self.unit)
        floats = [v.type.dtype for v in graph.values() if v.type.dtype.is_float]
        self.narrowest = rounding.storage if rounding.meaning else min(floats, key=digits, default=DType.F64)
        self.half = any(d in HALVES for d in (*floats, self.narrowest))
        self.constants_exact = constants_exact(graph, rounding, self.half)

    def run(self, feeds: Mapping[str, HostArray]) -> dict[str, Samples]:
        values: dict[Value, Samples] = {}
        for value in self.graph.inputs:
            values[value] = self._undisturbed(in_float64(np.asarray(feeds[value.name])))
        for node in self.graph.nodes:
            values.update(zip(node.results, self._node(node, [values[v] for v in node.operands]), strict=True))
        return {name: values[v] for name, v in zip(self.graph.output_names, self.graph.outputs, strict=True)}

    def _undisturbed(self, plain: HostArray) -> Samples:
        return Samples(plain, [plain] * self.count)

    # constants -------------------------------------------------------------------------------------------

    def _constant(self, node: Node) -> Samples:
        self.constant.add(node.result)
        return self._stored_constant(in_float64(cast(Constant, node.op).literal.array), node.result.type.dtype)

    def _stored_constant(self, plain: HostArray, dtype: DType) -> Samples:
        """Return a constant of the graph, or what a pass may compute from constants and store, with its rounding."""
        if not dtype.is_float or self.constants_exact or not plain.any():
            return self._undisturbed(plain)
        narrow = min(dtype, self.narrowest, key=digits)
        if not self.rounding.meaning and narrow is dtype:
            return self._undisturbed(plain)  # stored without rounding
        samples = self.errors.stored(plain, [plain] * self.count, narrow, 0.0, None)
        beyond = np.isfinite(plain) & (np.abs(plain) > MAX[narrow])
        for k, most in ((0, np.inf), (1, MAX[narrow])):  # a third becomes infinite, a third the largest number
            samples[k::3] = [np.where(beyond, np.copysign(most, s), s) for s in samples[k::3]]
        return Samples(plain, samples)

    # nodes -----------------------------------------------------------------------------------------------

    def _node(self, node: Node, operands: list[Samples]) -> list[Samples]:
        """Evaluate a node on samples, and disturb the results as rounding may."""
        self.errors.salt += 1
        if isinstance(node.op, Constant):
            return [self._constant(node)]
        indices = node.op.name == "gen_index" and self.rounding.exported  # a constant in ONNX
        if indices or (node.operands and all(v in self.constant for v in node.operands)):
            self.constant.update(node.results)
        self.constant.update(constant_results(node, self.constant))
        op, plain = node.op, [s.plain for s in operands]
        operands = [self._as_read(s, i) for i, s in enumerate(operands)]
        results = self._evaluate(node, plain)
        floating = any(v.type.dtype.is_float for v in node.results)
        if self.rounding.meaning and self.constant.issuperset(node.results) and all(s.exact for s in operands):
            # such as integers cast to floats: a pass may fold a factor into them, and round the products
            return [self._stored_constant(r, v.type.dtype) for r, v in zip(results, node.results, strict=True)]
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
        ties = None if self.rounding.meaning else ties_before_odd_zero_point(node, plain)
        if ties is not None:
            made = [made[0].changed(lambda k, x: x + ties if k % 2 else x)]
        if flipped is not None:
            same = [flipped.shape == s.plain.shape for s in made]
            made = [
                self._flip(s, flipped if a else np.full(s.plain.shape, flipped.any()))
                for s, a in zip(made, same, strict=True)
            ]
        return made

    def _without_nan(self, op: Op, operands: list[Samples], made: Samples) -> Samples:
        """Replace NaN in two samples of three, because cuDNN's maximum and similar modes drop NaN.

        One sample of three keeps it, since later ops may hide the replacement.
        """
        draws = np.random.default_rng((self.errors.salt, 1)).permutation(self.count) % 3
        samples: list[HostArray] = []
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
        size = np.abs(in_float64(cast(Constant, cast(Node, constants[0].node).op).literal.array))
        unit = max(_F32, self.narrowest.epsilon / 2, node.result.type.dtype.epsilon / 2)
        error = unit * np.where(np.isfinite(size), size, 0.0)
        return made.changed(lambda k, s: s + self.errors.signed(error, 7, k))

    def _as_read(self, value: Samples, place: int) -> Samples:
        """Choose how one op reads a 16-bit value: in about one sample of three, as it was before rounding.

        A fused op may read the value before it is stored. Sample OVERFLOW reads it as stored.
        """
        if value.unstored is None:
            return value
        draws = np.random.default_rng((self.errors.salt, place)).integers(0, 3, self.count)
        pairs = zip(value.disturbed, value.unstored, draws, strict=True)
        chosen = [wide if draw == 0 and k != OVERFLOW else stored for k, (stored, wide, draw) in enumerate(pairs)]
        return Samples(value.plain, chosen)

    def _approximated(self, op: Op, operands: list[HostArray], made: Samples) -> Samples:
        """Add the error of a GPU's approximation of a function.

        In one sample of three, NaN and infinities become zero, because later ops on a GPU may lose them.
        """
        lost = ~np.isfinite(made.plain) if made.plain.dtype.kind == "f" else None
        if lost is not None and lost.any():
            # one sample of three, not two, because every other sample overflows: some must have one effect alone
            made = made.changed(lambda k, s: np.where(lost, 0.0, s) if k % 3 == 0 else s)
        error = approximation(op, operands, made.plain)
        if error is None:
            return made
        error = np.where(np.isfinite(error), error, 0.0)
        return made.changed(lambda k, s: s + self.errors.signed(error, 77, k))

    def _unit(self, node: Node, at: int = 0) -> float:
        """Return the unit roundoff of the arithmetic inside a node, for one of its results.

        Passes compute constants in the same precision as a kernel.
        """
        wide = all(v.type.dtype is DType.F64 for v in node.results)
        folded = self.rounding.meaning and node.results[at] in self.constant
        return _F64 if wide else _F32 if folded else self.unit

    def _evaluate(self, node: Node, operands: list[HostArray], rounded: Op | None = None) -> list[HostArray]:
        """Evaluate a node; rounded: its op with other attributes."""
        if keeps_number(node):
            return [operands[0].astype(np.float64, copy=False)]
        return [in_float64(r) for r in (rounded.reference(np, *operands) if rounded else evaluate_node(node, operands))]

    def _rounded_attributes(self, op: Op, k: int) -> Op | None:
        """Return the op with its attributes rounded to fp32; None if none changes.

        In about one sample of four, the error has the other sign: an op may be exported without attributes, so errors
        of two ops that cancel each other in other samples may not do so in the file. Equal ops are rounded in the same
        way in a sample, because they are exported in the same way.
        """
        if not self.rounding.exported:
            return None
        numbers = {name: v for name, v in op.attributes.items() if isinstance(v, float)}
        errors = {name: float(np.float32(v)) - v for name, v in numbers.items() if math.isfinite(v)}
        if not any(errors.values()):
            return None
        # a cryptographic hash, because checksums of two ops differ in the same way for each k
        chosen = blake2b(f"{op} {k}".encode(), digest_size=1).digest()[0] % 2
        scale = self.errors.scales[k] * (-1.0 if k % 2 and chosen else 1.0)
        return replace(cast(Any, op), **{name: numbers[name] + scale * e for name, e in errors.items()})

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

    def _disturb(self, node: Node, operands: list[Samples], results: list[HostArray], exact: bool) -> list[Samples]:
        """Evaluate the op on disturbed operands.

        Operands of a sum or function also get the errors made inside the op.
        """
        rows: list[list[HostArray]] = []
        inner = 0.0 if exact else self._unit(node) * math.sqrt(sum_length(node))
        if self.rounding.meaning and node.op.name.endswith("_norm"):
            # because passes fold the parameters, and round factor and shift separately
            inner = max(inner, _F32, self.narrowest.epsilon / 2, node.results[0].type.dtype.epsilon / 2)
        if self.rounding.exported and not exact and has_fp32_numbers(node, self.constant):
            inner = max(inner, _F32)
        if self.rounding.meaning and folds_a_product(node, self.constant):
            inner = max(inner, _F32 * math.sqrt(sum_length(node)))
        if node.op.name.startswith(("attention", "recurrent", "deform_conv")) and not self.rounding.meaning:
            # kernels round the weights before the second product, the state before the next step, and what they read
            inner = max(inner, node.results[0].type.dtype.epsilon / 2)
        # because 16 bits round a constant times a factor, and the reciprocal of a divisor, on their own
        divides = self.rounding.meaning and node.op.name == "div"
        folded = self.narrowest.epsilon / 2 if self.half and not exact and (divides or self._scaled(node)) else 0.0
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
                    self.errors.disturbed(a, inner + self._stored_error(v, tf32, folded), k, i)
                    for i, (a, v) in enumerate(zip(arrays, node.operands, strict=True))
                ]
            rows.append(self._evaluate(node, arrays, self._rounded_attributes(node.op, k)))
        return [Samples(r, [row[i] for row in rows]) for i, r in enumerate(results)]

    def _stored_error(self, value: Value, tf32: bool, folded: float) -> float:
        """Return the relative error of an operand that a product reads. folded: that of a constant."""
        narrowed = _TF32 if tf32 and value.type.dtype is DType.F32 else 0.0
        return narrowed + (folded if value in self.constant else 0.0)

    # rounding --------------------------------------------------------------------------------------------

    def _rounded(self, node: Node, results: list[Samples], at: int, exact: bool, operands: list[HostArray]) -> Samples:
        """Round the result at this place if the op is inexact, or where the number cannot be represented."""
        value, made = node.results[at], results[at]
        dtype = value.type.dtype
        if not dtype.is_float:
            return made
        stored = min(dtype, self.narrowest, key=digits) if value in self.constant else dtype
        wide = self.rounding.meaning and value not in self.constant  # computed in float64
        unit = 0.0 if wide else stored.epsilon / 2
        mask: HostArray | None = None
        if exact:
            target = np.float32 if wide or stored is DType.F64 else stored.numpy  # f64 represents every number
            mask = np.not_equal(made.plain.astype(target).astype(np.float64), made.plain)
            if made.exact and not mask.any():
                return made
            if node.op.name in _ROUNDS:  # because disturbed operands give another number to round
                mask |= made.spread() > 0
        inner = self._unit(node, at) * (1.0 if exact else math.sqrt(sum_length(node)))
        samples = self.errors.stored(made.plain, made.disturbed, None if wide else stored, unit + inner, mask)
        executed, plain = not self.rounding.meaning, [s.plain for s in results]
        size = intermediate_size(node.op, executed, self.rounding.exported, operands, plain, at)
        if size is not None:
            folds = self.rounding.exported and folds_single_ops(node, self.constant)
            absolute = max(self._unit(node, at), _F32 if folds else 0.0) * size
            samples = [s + self.errors.signed(absolute, 0, k) for k, s in enumerate(samples)]
        lost = None if self.rounding.meaning or dtype is DType.F64 else flushed(node.op, operands)
        if lost is not None:
            samples = [s + self.errors.signed(lost, 0, k) for k, s in enumerate(samples)]
        squares = not exact and not self.rounding.meaning
        overflow(node, made.plain, samples, None if wide else stored, squares, operands)
        unstored = made.disturbed if not wide and stored in HALVES else None
        return Samples(made.plain, samples, unstored)

    def _flip(self, made: Samples, where: HostArray) -> Samples:
        """Move samples to the other side of a discontinuity.

        Floats become NaN (NaN becomes a number), and all other types become another number. One sample of three keeps
        its side, because a later op may hide this one in the undisturbed result alone.
        """

        def other_side(k: int, s: HostArray) -> HostArray:
            if s.dtype.kind == "f":
                if k % 3 == 2:
                    return s
                if k % 3:  # a NaN would hide another NaN, and later ops may make NaN of a zero
                    return np.where(where, np.where(np.isnan(made.plain), 2.0, np.copysign(1e30, made.plain)), s)
                return np.where(where, np.where(np.isnan(made.plain), 0.0, np.nan), s)
            if k == OVERFLOW:
                return s
            some = where if k == 0 else where & (self.errors.signs(where.shape, k) > 0)
            other = ~made.plain if s.dtype == np.bool_ else made.plain + np.ones((), s.dtype)
            return np.where(some, other, s)

        return made.changed(other_side)


def _steepest(plain: HostArray, disturbed: HostArray) -> HostArray:
    """Return the number nearest to zero between two: there, a slope that fades on both sides is steepest.

    Numbers that are close together have almost the same slope: of them, the disturbed one is returned.
    """
    least = np.where(plain * disturbed <= 0, 0.0, np.where(np.abs(plain) < np.abs(disturbed), plain, disturbed))
    return np.where(np.abs(disturbed - plain) > 0.1, least, disturbed)
