"""Cases of kernels: small graphs with arrays for their inputs, and how far results may lie from the reference's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from gpu.kernels.emulator import Emulator

from fusec.gpu.kernels import GpuFigures, Kernel, find
from fusec.ir import DType, Graph, Node, TensorType, Value, channels_last
from fusec.lowering.packing import code_bytes, from_codes, pack, to_codes, unpack
from fusec.ops import BatchNormBackward, Cast, Reduce
from fusec.reference import evaluate_node
from fusec.schedule.program import outputs_of
from fusec.targets.target import DEFAULT, load

# Of 16 bits two units: where rounding moves a norm across a tie, its epilogue rounds another number.
ROUNDING = {DType.F64: 1e-12, DType.F32: 2e-6, DType.F16: 2e-3, DType.BF16: 1.6e-2}
FLOATS = (DType.F32, DType.F16, DType.BF16)
FIGURES = GpuFigures.of(load(DEFAULT))
Draw = Callable[[np.random.Generator, TensorType], np.ndarray]


@dataclass
class Case:
    """A graph that is one step, what it is called, and the figures of the GPU that its kernel is shaped for."""

    name: str
    graph: Graph
    draw: Draw
    exact: bool = False
    figures: GpuFigures = FIGURES
    near: float = 0.0  # share of integers, rounded from approximations or near ties, that may differ by one
    fused: bool = False  # a GPU multiplies and adds in one rounding, which the emulator does not; it moves ties by one
    within: float | None = None  # the relative L2 error of sums that cancel; else each number is compared

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(n for n in self.graph.nodes if not any(v.literal is not None for v in n.results))

    @property
    def outputs(self) -> tuple[Value, ...]:
        return outputs_of(self.nodes)

    @property
    def kernel(self) -> Kernel | None:
        return find(self.nodes, self.outputs, self.figures)

    def arrays(self, rng: np.random.Generator) -> dict[Value, np.ndarray]:
        """By value: inputs drawn, constants as they are."""
        drawn = {v: self.draw(rng, v.type) for v in self.graph.inputs}
        return drawn | {v: v.literal.array for v in self.graph.values() if v.literal is not None}

    def reference(self, arrays: dict[Value, np.ndarray]) -> list[np.ndarray]:
        known = self.evaluated(arrays)
        return [known[v] for v in self.outputs]

    def magnitudes(self, arrays: dict[Value, np.ndarray]) -> list[np.ndarray | float]:
        """Return for each output that is a sum or mean the same of absolute values; zero for other outputs.

        The rounding of a sum scales with its operands, and not with a result in which they cancel.
        """
        known, sizes = self.evaluated(arrays), list[np.ndarray | float]()
        for value in self.outputs:
            node = value.node
            op = node.op if node is not None else None
            if node is None:
                sizes.append(0.0)
            elif isinstance(op, Reduce) and op.kind in ("sum", "mean") and value.type.dtype.is_float:
                operand = np.abs(known[node.operands[0]].astype(np.float64))
                (size,) = op.reference(np, operand)
                sizes.append(size)
            elif isinstance(op, BatchNormBackward) and value is not node.results[0]:  # of scale and bias
                dy, x, scale, mean, inverse = (known[v].astype(np.float64) for v in node.operands[:5])
                centre = mean.reshape(-1, *(1,) * (x.ndim - 2))
                sums = BatchNormBackward().reference(np, np.abs(dy), centre + np.abs(x - centre), scale, mean, inverse)
                sizes.append(sums[node.results.index(value)])
            else:
                sizes.append(0.0)
        return sizes

    def evaluated(self, arrays: dict[Value, np.ndarray]) -> dict[Value, np.ndarray]:
        known = dict(arrays)
        with np.errstate(all="ignore"):
            for node in self.nodes:
                results = evaluate_node(node, [known[v] for v in node.operands])
                known.update(zip(node.results, results, strict=True))
        return known


def normal(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    if type.dtype is DType.BOOL:
        return rng.random(type.shape) < 0.5
    if type.dtype.is_int:
        return rng.integers(-9 if type.dtype.value.startswith("i") else 0, 9, type.shape).astype(type.dtype.numpy)
    return rng.standard_normal(type.shape).astype(type.dtype.numpy)


def awkward(rng: np.random.Generator, type: TensorType) -> np.ndarray:
    """Normal numbers with NaN, infinities, zeros of both signs and large ones among them."""
    array = normal(rng, type)
    if not type.dtype.is_float or not array.size:
        return array
    odd = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 300.0, -300.0, 1e-7]).astype(type.dtype.numpy)
    return np.where(rng.random(type.shape) < 0.3, rng.choice(odd, type.shape), array).astype(type.dtype.numpy)


def build(
    name: str,
    types: Sequence[TensorType],
    make: Callable[..., Value | Sequence[Value]],
    draw: Draw = normal,
    exact: bool = False,
) -> Case:
    """A case whose graph `make` builds from the graph and its inputs."""
    graph = Graph(name)
    inputs = [graph.add_input(f"x{i}", type) for i, type in enumerate(types)]
    made = make(graph, *inputs)
    graph.set_outputs([made] if isinstance(made, Value) else list(made))
    graph.verify()
    return Case(name, graph, draw, exact)


def last(dtype: DType, *shape: int) -> TensorType:
    """A type that is stored channels last."""
    return TensorType(shape, dtype, channels_last(len(shape)))


def rows(dtype: DType, *shape: int) -> TensorType:
    return TensorType(shape, dtype)


def assert_same(
    case: Case, got: Sequence[np.ndarray], want: Sequence[np.ndarray], sizes: Sequence[np.ndarray | float] = ()
) -> None:
    """Compare outputs: NaN and infinities in the same places, and the rest within the rounding of the type.

    sizes: the magnitudes of what each output adds up, from `Case.magnitudes`; they widen the bound of cancelling sums.
    """
    for value, a, b, size in zip(case.outputs, got, want, sizes or [0.0] * len(want), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, case.name
        if case.near and value.type.dtype.is_int:
            apart = np.abs(a.astype(np.int64) - b.astype(np.int64))
            assert apart.max(initial=0) <= 1 and apart.mean() <= case.near, f"{case.name}: {apart.mean():.3g} apart"
            continue
        if case.exact or not value.type.dtype.is_float:
            np.testing.assert_array_equal(_exact(a), _exact(b), err_msg=case.name)
            continue
        wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
        odd = ~np.isfinite(wide_b)
        np.testing.assert_array_equal(wide_a[odd], wide_b[odd], err_msg=case.name)
        if case.within is not None:
            assert np.isfinite(wide_a[~odd]).all(), case.name
            error = np.linalg.norm(wide_a[~odd] - wide_b[~odd]) / max(float(np.linalg.norm(wide_b[~odd])), 1e-30)
            assert error <= case.within, f"{case.name}: {error:.3g} apart"
            continue
        rounding = _rounding(value)
        tolerance = rounding * np.maximum(1e-6, np.abs(wide_b[~odd]))
        scale = np.sqrt(np.mean(wide_b[~odd] ** 2)) if (~odd).any() else 0.0
        scale = np.maximum(scale, np.broadcast_to(size, wide_b.shape)[~odd])
        worst = np.abs(wide_a[~odd] - wide_b[~odd]) - tolerance - rounding * scale
        assert not (worst > 0).any(), f"{case.name}: off by {np.nanmax(worst):.3g}"
        assert np.isfinite(wide_a[~odd]).all(), case.name


def _rounding(value: Value) -> float:
    """The rounding of a value's type, or of the coarser type it was cast from."""
    cast = value.node if value.node is not None and isinstance(value.node.op, Cast) else None
    types = [value.type.dtype, *(v.type.dtype for v in (cast.operands if cast is not None else ()))]
    return max(ROUNDING[dtype] for dtype in types if dtype in ROUNDING)


def _exact(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64) if array.dtype.kind in "fV" or array.dtype.itemsize == 2 else array


def check(cases: Sequence[Case], rng: np.random.Generator, every: bool = False) -> None:
    """Each case has a kernel, and in the emulator that gives what the reference gives; so does every way to share out
    its work, if asked for."""
    kernels = [case.kernel for case in cases]
    missing = [case.name for case, kernel in zip(cases, kernels, strict=True) if kernel is None]
    assert not missing, f"no kernel for {missing}"
    ways = [each_way(k) if every else [k] for k in kernels if k is not None]
    emulator = Emulator([way for some in ways for way in some])
    for case, some in zip(cases, ways, strict=True):
        arrays = case.arrays(rng)
        for way in some:
            got = emulator.run(way, arrays, case.outputs)
            assert_same(case, got, case.reference(arrays), case.magnitudes(arrays))


def each_way(kernel: Kernel) -> list[Kernel]:
    """The kernel by itself, and those that do the same."""
    return [replace(kernel, others=()), *kernel.others]


def on_the_device(
    launcher: Any, kernel: Kernel, arrays: dict[Value, np.ndarray], outputs: Sequence[Value]
) -> list[np.ndarray]:
    """The outputs as a GPU writes them."""
    import cupy

    held: dict[tuple[Value, TensorType], Any] = {
        (v, v.type): cupy.full(code_bytes(v.type.span, v.type.dtype), 0xA5, cupy.uint8) for v in outputs
    }

    def memory(value: Value, type: TensorType) -> Any:
        if (value, type) not in held:
            held[value, type] = cupy.asarray(to_codes(pack(np, arrays[value], type), type.dtype))
        return held[value, type]

    launcher.bind(kernel, memory)()
    return [unpack(from_codes(held[v, v.type].get(), v.type.span, v.type.dtype), v.type) for v in outputs]
