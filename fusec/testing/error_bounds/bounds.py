"""Bound the differences that rounding explains on a given graph and data; a larger difference is a mismatch.

Bounds follow from dtypes, lengths of sums and conditioning. `Allowances` computes them; `compare` applies them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from fusec.ir import HALVES, DType, Graph, HostArray
from fusec.lowering.unroll_scan import unrolled
from fusec.system.dataclass import dataclass
from fusec.testing.case import MismatchError
from fusec.testing.error_bounds.montecarlo import sample
from fusec.testing.error_bounds.perturbed import SAFETY, Rounding, Samples, distance
from fusec.testing.error_bounds.random_errors import FULL

FIRST, REFINED = 2, FULL + 8  # numbers of samples: at first, and before a mismatch is reported
SUBNORMAL = 2.0**-24  # the smallest positive f16: the spacing of tiny numbers
# Factor on the refined bounds of types with 24 bits or more: of 60,000 correct graphs, three were 3 times outside.
REFINED_FACTOR = 4.0


@dataclass(frozen=True, eq=False)
class Allowance:
    """The right result of one output, and the allowed difference of each element.

    bound: 0 means that the element must be equal; infinity means that the element is not checked.
    """

    want: HostArray
    bound: HostArray


class Allowances:
    """The right outputs of a graph, and the error that rounding may cause in them.

    The method is Monte Carlo arithmetic (D. S. Parker, Monte Carlo Arithmetic, UCLA CSD-970002, 1997). The graph is
    evaluated in float64, and a few more times with random relative errors in place of rounding errors. Each error has
    the size of a unit roundoff:
    - of the dtype where a value is stored,
    - of fp32 times the square root of the length for sums (N. J. Higham, Accuracy and Stability of Numerical
      Algorithms, 2nd ed., 2.8 and 4.2),
    - 2^-10 for operands of tf32 products.

    An element may differ by SAFETY times the largest observed distance. Two units of itself and one unit of the root
    mean square of its tensor are added. Cancellation, exponentials and quotients amplify the random errors as they
    amplify rounding. So an ill-conditioned graph gets a wide bound, and other graphs do not.

    Small errors: a function may be flat where the error of an ill-conditioned operand is large, and steep where it is
    small. Before a mismatch is reported, eight more samples are drawn, with ever smaller errors (FULL and REDUCED).
    A slope that fades on both sides of zero is also taken where it is steepest between the operand and its sample.

    Exact results: an op whose result can be represented gets no error. The same holds for a sum of small multiples of a
    power of two. If nothing got an error, results must be equal.

    Loops: the graph is unrolled first, so that each op of each step gets its own errors.

    Discontinuities: these are floor, comparisons, casts to integers, poles, and the end of a domain. If a
    discontinuity is closer than SAFETY spreads, the sample takes the other side. Values that depend on it then differ
    widely among samples, so these elements alone get a wide or infinite bound. So do values that depend on:
    - a result that may overflow its storage (or fp32),
    - a cast of a number that the integer type cannot hold,
    - in an execution, the sign of an infinity that comes from the sign of a zero divisor.
    """

    def __init__(self, graph: Graph, feeds: Mapping[str, HostArray], rounding: Rounding):
        self._graph = unrolled(graph)
        self._feeds = feeds
        self._rounding = rounding
        self._count = FIRST
        self._samples = sample(self._graph, feeds, rounding, FIRST)
        self._known: dict[str, Allowance] = {}

    @cached_property
    def want(self) -> dict[str, HostArray]:
        """Return the outputs in float64."""
        return {name: s.plain for name, s in self._samples.items()}

    def __getitem__(self, name: str) -> Allowance:
        if name not in self._known:
            index = list(self._samples).index(name)
            dtype = self._graph.outputs[index].type.dtype
            halves = {v.type.dtype for v in self._graph.values()} | {self._rounding.storage}
            half = not halves.isdisjoint(HALVES)
            safety = SAFETY * (REFINED_FACTOR if self._count == REFINED and not half else 1.0)
            least = SUBNORMAL if DType.F16 in halves else 0.0
            self._known[name] = _allowance(self._samples[name], self._rounding, dtype, safety, least)
        return self._known[name]

    def refine(self) -> None:
        """Draw more samples: bounds grow if the first samples happened to be close together."""
        if self._count < REFINED:
            self._count = REFINED
            self._samples = sample(self._graph, self._feeds, self._rounding, REFINED)
            self._known.clear()


def allowed(graph: Graph, feeds: Mapping[str, HostArray], rounding: Rounding) -> Allowances:
    """Compute the allowed outputs of a graph on these inputs, for an evaluation with this rounding."""
    return Allowances(graph, feeds, rounding)


def meaning(storage: DType = DType.F32, exported: bool = False) -> Rounding:
    """Describe the rounding between two graphs that are both evaluated in float64.

    storage: one graph may hold constants that were computed from the other's and narrowed to this type.
    exported: one graph was written as ONNX, which rounds attributes to fp32.
    """
    return Rounding(True, storage, exported=exported)


def execution(tensor_cores: bool = False, device: bool = False, exported: bool = False) -> Rounding:
    """Describe the rounding of a graph that is executed: fp32 arithmetic, results stored in their dtypes.

    exported: the graph is executed as ONNX, which rounds attributes to fp32.
    """
    return Rounding(False, tensor_cores=tensor_cores, device=device, exported=exported)


def _allowance(samples: Samples, rounding: Rounding, dtype: DType, safety: float, least: float) -> Allowance:
    want = samples.plain
    if samples.exact:
        return Allowance(want, np.zeros(want.shape))
    spread = samples.spread()
    if want.dtype.kind != "f":
        return Allowance(want, np.where(spread > 0, np.inf, 0.0))
    unit = 2.0**-53 if rounding.meaning else max(dtype.epsilon / 2, 2.0**-24)
    said = np.isfinite(want) & np.isfinite(spread)
    least = max(least, 0.0 if rounding.meaning else float(np.finfo(np.float32).tiny))
    with np.errstate(all="ignore"):
        floor = unit * (2 * np.abs(want) + _root_mean_square(want[said])) + least
    return Allowance(want, np.where(np.isfinite(want), safety * spread + floor, np.where(spread > 0, np.inf, 0.0)))


def compare(got: Mapping[str, HostArray], allowances: Sequence[Allowances], what: str, room: float = 0.0) -> None:
    """Raise MismatchError unless each output is within the sum of all allowances of the first one's result.

    NaN must match NaN, and an infinity the same infinity, except for elements that an allowance does not check.
    what: the name of the compared evaluation, for the message.
    room: a further allowed error of floats, relative to the element plus the root mean square of its tensor.
    """
    want = allowances[0].want
    if list(got) != list(want):
        raise MismatchError(f"{what}: outputs {list(got)} instead of {list(want)}", got, want)
    for name, right in want.items():
        array = np.asarray(got[name])
        if array.shape != right.shape:
            raise MismatchError(f"{what}: {name} has shape {array.shape}, not {right.shape}", got, want)
        if right.dtype.kind != "f" and array.dtype != right.dtype:
            raise MismatchError(f"{what}: {name} is {array.dtype}, not {right.dtype}", got, want)
        far = distance(array, right)
        if not far.any() or not (far > _bound(allowances, name, room)).any():
            continue
        for allowance in allowances:
            allowance.refine()
        bound = _bound(allowances, name, room)
        wrong = far > bound
        if wrong.any():
            message = f"{what}: {name} differs{_describe(array, right, far, bound, wrong)}"
            raise MismatchError(message, {name: array}, {name: right})


def _bound(allowances: Sequence[Allowances], name: str, room: float) -> HostArray:
    bound = np.sum([a[name].bound for a in allowances], axis=0)
    want = allowances[0].want[name]
    if room and want.dtype.kind == "f":
        further = room * (np.abs(want) + _root_mean_square(want[np.isfinite(want)]))
        bound = bound + np.where(np.isnan(further), 0.0, further)
    return bound


def _root_mean_square(numbers: HostArray) -> float:
    most = float(np.abs(numbers).max(initial=0.0))  # because squares of large numbers overflow
    return most * math.sqrt(float(np.square(numbers / most).mean())) if most else 0.0


def _describe(got: HostArray, want: HostArray, far: HostArray, bound: HostArray, wrong: HostArray) -> str:
    with np.errstate(over="ignore"):
        excess = np.where(wrong, far / np.maximum(bound, 1e-300), 0.0)
    worst = np.unravel_index(int(np.argmax(excess)), wrong.shape)
    place = f" at {list(map(int, worst))}" if worst else ""
    return (
        f" in {int(wrong.sum())} of {wrong.size} elements, most{place}: {got[worst]} instead of {want[worst]}, "
        f"{far[worst]:.2g} apart, {bound[worst]:.2g} allowed"
    )
