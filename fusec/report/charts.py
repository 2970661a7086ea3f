"""Compute the coordinates of the charts: memory step by step, the roofline, and bars of shares."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fusec.report.records import MemoryUse, ReportedProgram
from fusec.system.dataclass import dataclass

WIDTH, HEIGHT = 720, 220
LEFT, BOTTOM, TOP = 64, 28, 12


@dataclass(frozen=True)
class Bar:
    """A part of a stacked bar, in percent of its width. kind: names its colour."""

    label: str
    kind: str
    start: float
    share: float
    amount: float


def shares(amounts: Mapping[str, float], labels: Mapping[str, str] | None = None) -> tuple[Bar, ...]:
    """Return the parts of a bar, in the order given; parts of nothing are left out."""
    total, start = sum(amounts.values()), 0.0
    bars: list[Bar] = []
    for kind, amount in amounts.items():
        if amount > 0:
            share = 100 * amount / total
            bars.append(Bar((labels or {}).get(kind, kind), kind, round(start, 3), round(share, 3), amount))
            start += share
    return tuple(bars)


@dataclass(frozen=True)
class Area:
    """Bytes alive by step, as SVG path data. peak: the point of most bytes."""

    path: str
    peak: tuple[float, float]
    width: int
    height: int
    left: int
    base: int


def memory_area(memory: MemoryUse) -> Area:
    """Return the chart of the bytes that are alive while each step runs, as steps of a stair."""
    count, most = len(memory.by_step), max(memory.by_step, default=0) or 1
    across, base = WIDTH - LEFT - 8, HEIGHT - BOTTOM

    def x(place: float) -> float:
        return round(LEFT + across * place / max(count, 1), 2)

    def y(nbytes: int) -> float:
        return round(base - (base - TOP) * nbytes / most, 2)

    parts = [f"M{LEFT} {base}"]
    for place, nbytes in enumerate(memory.by_step):
        parts.append(f"L{x(place)} {y(nbytes)}H{x(place + 1)}")
    path = "".join((*parts, f"V{base}Z"))
    return Area(path, (x(memory.peak_step + 0.5), y(most if count else 0)), WIDTH, HEIGHT, LEFT, base)


@dataclass(frozen=True)
class RoofPoint:
    """A step on the roofline chart. rate: operations per second, measured or at the limit."""

    x: float
    y: float
    step: int
    kind: str
    intensity: float
    rate: float


@dataclass(frozen=True)
class Tick:
    """A mark on an axis, at a place in pixels."""

    at: float
    label: str


@dataclass(frozen=True)
class Roof:
    """The roofline chart: bandwidth on the left, a peak for each precision on the right; both axes are logarithmic.

    peaks: for each precision the SVG path of its roof. left_out: steps without products, which have no place here.
    """

    peaks: tuple[tuple[str, str, float], ...]
    points: tuple[RoofPoint, ...]
    left_out: int
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    width: int
    height: int
    left: int
    base: int


ROOF_HEIGHT = 340


def roofline(program: ReportedProgram) -> Roof:
    """Place the steps with products by operations per byte; without times each is at its limit.

    The chart is after S. Williams et al., Roofline, CACM 52(4), 2009.
    """
    found: list[tuple[int, str, float, float]] = []
    for step in program.working:
        moved = step.explained.read_bytes + step.explained.written_bytes
        took = step.limit_us if step.time_us is None else step.time_us
        if step.flops and moved and took:
            found.append((step.index, step.runner, step.flops / moved, step.flops / took * 1e6))
    best = max(program.peaks.values())
    ridge = best / program.bandwidth
    x_range = _decades([f[2] for f in found] + [ridge / 30, ridge * 10])
    y_range = _decades([f[3] for f in found] + [best, best / 1000])
    across, base = WIDTH - LEFT - 16, ROOF_HEIGHT - BOTTOM - 12

    def x(value: float) -> float:
        return _place(value, x_range, LEFT, LEFT + across)

    def y(value: float) -> float:
        return _place(value, y_range, base, TOP)

    def roof(peak: float) -> str:
        start = max(10.0 ** x_range[0], 10.0 ** y_range[0] / program.bandwidth)
        corner, end = peak / program.bandwidth, 10.0 ** x_range[1]
        points = [(start, start * program.bandwidth), (corner, peak), (end, peak)]
        return "M" + "L".join(f"{x(a)} {y(b)}" for a, b in points)

    peaks: dict[float, list[str]] = {}
    for precision, peak in program.peaks.items():
        peaks.setdefault(peak, []).append(precision)
    return Roof(
        tuple((", ".join(names), roof(peak), y(peak)) for peak, names in peaks.items()),
        tuple(RoofPoint(x(a), y(r), index, kind, a, r) for index, kind, a, r in found),
        len(program.working) - len(found),
        tuple(Tick(x(10.0**p), _power(p)) for p in range(x_range[0], x_range[1] + 1)),
        tuple(Tick(y(10.0**p), f"{_power(p - 12)}") for p in range(y_range[0], y_range[1] + 1)),
        WIDTH,
        ROOF_HEIGHT,
        LEFT,
        base,
    )


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """Return the powers of ten around all values."""
    logs = [math.log10(value) for value in values]
    return math.floor(min(logs)), math.ceil(max(logs))


def _place(value: float, decades: tuple[int, int], start: float, end: float) -> float:
    low, high = decades
    share = (math.log10(value) - low) / max(high - low, 1)
    return round(start + (end - start) * share, 2)


def _power(power: int) -> str:
    """Write a power of ten for an axis: 0.01, 1, 100, 1e5."""
    return f"{10.0**power:g}" if -4 < power < 5 else f"1e{power}"
