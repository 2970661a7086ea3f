"""Measure how cuDNN converts to int8 at the end of a graph: rounding, saturation, NaN and infinities, plan by plan.

Usage: python -m benchmarks.checks.quantized_rounding [--dry]
cuDNN has no op that rounds: an epilogue computes in fp32, and the output's type int8 converts. Each plan of each graph
runs on every int8 number times scales that give ties, and with numbers out of range. A line names the conversions
that explain all results of a plan; `none` is followed by samples. `--dry` needs no GPU: it lists the plans.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from fusec.ir import DType
from fusec.lowering.cudnn_graph import CudnnCall, CudnnGraph, CudnnTensor

Array = np.ndarray[Any, Any]

SIDE, CHANNELS = 16, 64  # 256 pixels hold every int8 number once
LONG = 4608  # channels whose sum of products passes 2**24, beyond which fp32 has no whole numbers

WINDOW = (("pre_padding", (0, 0)), ("post_padding", (0, 0)), ("stride", (1, 1)), ("dilation", (1, 1)))

ROUNDING: dict[str, Callable[[Array], Array]] = {
    "half to even": np.rint,
    "half away from zero": lambda x: np.trunc(x) + np.where(np.abs(x - np.trunc(x)) >= 0.5, np.sign(x), 0),
    "half up": lambda x: np.floor(x) + np.where(x - np.floor(x) >= 0.5, 1, 0),
    "half down": lambda x: np.ceil(x) - np.where(np.ceil(x) - x >= 0.5, 1, 0),
    "floor(x + 0.5) in fp32": lambda x: np.floor((x.astype(np.float32) + np.float32(0.5)).astype(np.float64)),
    "to zero": np.trunc,
    "down": np.floor,
}
LIMITS: dict[str, Callable[[Array], Array]] = {
    "saturates": lambda x: np.clip(x, -128, 127),
    "saturates at -127": lambda x: np.clip(x, -127, 127),
    "wraps": lambda x: np.clip(x, -(2**31), 2**31 - 1).astype(np.int64).astype(np.int8).astype(np.float64),
}


@dataclass(frozen=True)
class Case:
    """A graph, its inputs by uid, and the exact results before the conversion: products rounded, or fused (FMA)."""

    name: str
    graph: CudnnGraph
    inputs: dict[int, Array]
    expected: dict[str, Array]


class _Graph:
    """Collects the tensors and calls of a graph."""

    def __init__(self) -> None:
        self.tensors: list[CudnnTensor] = []
        self.calls: list[CudnnCall] = []
        self.inputs: dict[int, Array] = {}

    def tensor(self, dims: tuple[int, ...], dtype: DType, virtual: bool = False) -> int:
        order = (0, 2, 3, 1) if len(dims) == 4 else (0, 1, 2)
        strides, step = [0] * len(dims), 1
        for dim in reversed(order):
            strides[dim], step = step, step * dims[dim]
        self.tensors.append(CudnnTensor(len(self.tensors) + 1, dims, tuple(strides), dtype, virtual))
        return len(self.tensors)

    def input(self, array: Array, dims: tuple[int, ...]) -> int:
        uid = self.tensor(dims, DType.of(array.dtype))
        self.inputs[uid] = array.reshape(dims)
        return uid

    def call(self, op: str, inputs: tuple[int, ...], out: tuple[tuple[int, ...], DType, bool], mode: str = "") -> int:
        uid = self.tensor(*out)
        attributes = WINDOW if op == "conv_fprop" else ()
        compute = DType.I32 if op in ("conv_fprop", "matmul") else DType.F32
        self.calls.append(CudnnCall(op, inputs, (uid,), mode, attributes, compute))
        return uid

    def case(self, name: str, expected: Mapping[str, Array]) -> Case:
        return Case(name, CudnnGraph(tuple(self.tensors), tuple(self.calls)), self.inputs, dict(expected))


def scales_and_biases() -> tuple[Array, Array]:
    """Return a scale and a bias for each channel: ties, numbers out of range, NaN, infinities, and random ones."""
    pairs = [(0.5, 0.0), (0.25, 0.5), (1.5, 0.0), (1.0, 0.0), (2.0, 0.0), (1.0, 0.5), (-0.5, 0.0), (1.0, 100.0)]
    pairs += [(1.0, 0.49999997), (1.0, -0.49999997), (1.0, 127.49999), (3e7, 0.0), (1e30, 0.0), (1.0, float("nan"))]
    pairs += [(1.0, float("inf")), (1.0, float("-inf")), (1.0, 3e9), (1.0, -3e9), (1.0, 300.25), (0.5, -200.0)]
    random = np.random.default_rng(0)
    more = CHANNELS - len(pairs)
    scales = np.concatenate([[s for s, _ in pairs], random.uniform(0.01, 1.2, more)]).astype(np.float32)
    biases = np.concatenate([[b for _, b in pairs], random.uniform(-20, 20, more)]).astype(np.float32)
    return scales, biases


def _line(sums: Array, scale: Array, bias: Array) -> dict[str, Array]:
    """Return sums * scale + bias in fp32, with a product that is rounded, and with one that is not."""
    with np.errstate(all="ignore"):
        twice = sums.astype(np.float32) * scale + bias
        fused = (sums.astype(np.float64) * scale.astype(np.float64) + bias.astype(np.float64)).astype(np.float32)
    return {"rounded product": twice.astype(np.float64), "FMA": fused.astype(np.float64)}


def _then(lines: Mapping[str, Array], function: Callable[[Array], Array]) -> dict[str, Array]:
    with np.errstate(all="ignore"):
        return {k: function(v.astype(np.float32)).astype(np.float64) for k, v in lines.items()}


def image_case(name: str, out: DType, relu: bool = False, residual: bool = False, limits: bool = False) -> Case:
    """Make a 1x1 convolution by the identity, so that its sums are the image: every int8 number in each channel."""
    g, (scale, bias) = _Graph(), scales_and_biases()
    shape, vector = (1, CHANNELS, SIDE, SIDE), (1, CHANNELS, 1, 1)
    numbers = np.arange(-128, 128, dtype=np.int64).astype(np.int8).reshape(1, 1, SIDE, SIDE)
    x = np.broadcast_to(numbers, shape).copy()
    sums = g.call(
        "conv_fprop",
        (g.input(x, shape), g.input(np.eye(CHANNELS, dtype=np.int8), (CHANNELS, CHANNELS, 1, 1))),
        (shape, DType.I32, True),
    )
    hidden = (shape, DType.F32, True)
    scaled = g.call("pointwise", (sums, g.input(scale, vector)), hidden, "mul")
    lines = _line(x, scale.reshape(vector), bias.reshape(vector))
    steps: list[tuple[str, tuple[int, ...]]] = [("add", (g.input(bias, vector),))]
    if residual:
        other = np.random.default_rng(1).integers(-128, 128, shape).astype(np.int8)
        factor = np.full((1, 1, 1, 1), 0.25, np.float32)
        quarter = g.call("pointwise", (g.input(other, shape), g.input(factor, (1, 1, 1, 1))), hidden, "mul")
        steps.append(("add", (quarter,)))
        lines = _then(lines, lambda v: v + other.astype(np.float32) * np.float32(0.25))
    if relu:
        steps.append(("relu", ()))
        lines = _then(lines, lambda v: np.maximum(v, np.float32(0)))
    if limits:
        low, high = (g.input(np.full((1, 1, 1, 1), v, np.float32), (1, 1, 1, 1)) for v in (-128, 127))
        steps += [("max", (low,)), ("min", (high,))]
        lines = _then(lines, lambda v: np.minimum(np.maximum(v, np.float32(-128)), np.float32(127)))
    at = scaled
    for i, (mode, others) in enumerate(steps):
        last = i == len(steps) - 1
        at = g.call("pointwise", (at, *others), (shape, out, False) if last else hidden, mode)
    return g.case(name, lines)


def matmul_case(name: str, out: DType) -> Case:
    """Make a matmul whose sums are the rows: every int8 number in each column."""
    g, (scale, bias) = _Graph(), scales_and_biases()
    rows = np.broadcast_to(np.arange(-128, 128, dtype=np.int64).astype(np.int8)[:, None], (256, CHANNELS)).copy()
    shape, vector = (1, 256, CHANNELS), (1, 1, CHANNELS)
    operands = g.input(rows, shape), g.input(np.eye(CHANNELS, dtype=np.int8), (1, CHANNELS, CHANNELS))
    sums = g.call("matmul", operands, (shape, DType.I32, True))
    scaled = g.call("pointwise", (sums, g.input(scale, vector)), (shape, DType.F32, True), "mul")
    g.call("pointwise", (scaled, g.input(bias, vector)), (shape, out, False), "add")
    return g.case(name, _line(rows[None], scale.reshape(vector), bias.reshape(vector)))


def cast_case(name: str, source: type[np.floating[Any]], out: DType) -> Case:
    """Make a graph of one identity from fp32 or fp16 to an integer type."""
    g, (scale, bias) = _Graph(), scales_and_biases()
    shape = (1, 256, CHANNELS)
    rows = np.arange(-128, 128, dtype=np.float64)[None, :, None]
    with np.errstate(all="ignore"):
        x = (rows * scale.astype(np.float64) + bias).astype(source)
    g.call("pointwise", (g.input(x, shape),), (shape, out, False), "identity")
    return g.case(name, {"": x.astype(np.float64)})


def long_case(name: str, out: DType) -> Case:
    """Make a convolution over so many channels that fp32 sums would be rounded."""
    g, random = _Graph(), np.random.default_rng(2)
    x = random.integers(100, 128, (1, LONG, 4, 4)).astype(np.int8)
    w = random.integers(100, 128, (64, LONG, 1, 1)).astype(np.int8)
    made = (1, 64, 4, 4)
    sums = np.einsum("nchw,kc->nkhw", x.astype(np.float64), w[:, :, 0, 0].astype(np.float64))
    operands = g.input(x, (1, LONG, 4, 4)), g.input(w, (64, LONG, 1, 1))
    g.call("conv_fprop", operands, (made, out, False))
    return g.case(name, {"exact sum": sums, "rounded to fp32": sums.astype(np.float32).astype(np.float64)})


def cases() -> list[Case]:
    return [
        image_case("conv, scale, bias -> int8", DType.I8),
        image_case("conv, scale, bias, relu -> int8", DType.I8, relu=True),
        image_case("conv, scale, bias, int8 residual * 0.25 -> int8", DType.I8, residual=True),
        image_case("conv, scale, bias, int8 residual * 0.25, relu -> int8", DType.I8, relu=True, residual=True),
        image_case("conv, scale, bias, max -128, min 127 -> int8", DType.I8, limits=True),
        image_case("conv, scale, bias -> uint8", DType.U8),
        image_case("conv, scale, bias -> fp32", DType.F32),
        image_case("conv, scale, bias -> fp16", DType.F16),
        matmul_case("matmul, scale, bias -> int8", DType.I8),
        matmul_case("matmul, scale, bias -> uint8", DType.U8),
        matmul_case("matmul, scale, bias -> fp32", DType.F32),
        cast_case("fp32 -> int8", np.float32, DType.I8),
        cast_case("fp16 -> int8", np.float16, DType.I8),
        cast_case("fp32 -> uint8", np.float32, DType.U8),
        cast_case("fp32 -> int32", np.float32, DType.I32),
        long_case(f"conv of {LONG} channels -> int32", DType.I32),
        long_case(f"conv of {LONG} channels -> fp32", DType.F32),
    ]


def explain(case: Case, out: DType, result: Array) -> list[str]:
    """Name the conversions that explain a result, class by class of numbers."""
    lines: list[str] = []
    for spelling, exact in case.expected.items():
        if out.is_float:
            with np.errstate(all="ignore"):
                rounded = exact.astype(out.numpy)
            same = np.array_equal(rounded, result, equal_nan=True)
            wrong = int(np.sum(~((rounded == result) | (np.isnan(rounded) & np.isnan(result)))))
            lines.append(f"{spelling}: {'all equal' if same else f'{wrong} differ'}")
            continue
        if out is DType.I32 and np.isfinite(exact).all():
            lines.append(f"{spelling}: {int(np.sum(exact != result))} differ")
            continue
        lines.append(f"{spelling}: " + "; ".join(_classes(exact, result.astype(np.float64), out)))
    return lines


def _classes(exact: Array, got: Array, out: DType) -> list[str]:
    info = np.iinfo(out.numpy)
    low, high = float(info.min), float(info.max)
    finite = np.isfinite(exact)
    inside = finite & (exact > low - 0.5) & (exact < high + 0.5)
    whole = np.floor(np.where(finite, exact, 0))
    tie = inside & (np.where(finite, exact, 0) - whole == 0.5)
    found: list[str] = []
    for title, mask in (("ties", tie), ("other in range", inside & ~tie)):
        names = [k for k, f in ROUNDING.items() if np.array_equal(f(exact[mask]), got[mask])] if mask.any() else []
        found.append(f"{title}: {' = '.join(names) or _samples(exact, got, mask)}")
    # ties at the limits are judged with what is out of range
    near = finite & ~inside & (np.abs(exact) < 2.0**31)
    limits: dict[str, Array] = {"saturates": np.clip(np.rint(exact[near]), low, high)}
    if out is DType.I8:
        limits = {k: f(np.rint(exact[near])) for k, f in LIMITS.items()}
    elif out is DType.U8:
        limits["wraps"] = np.mod(np.rint(exact[near]), 256)
    names = [k for k, v in limits.items() if np.array_equal(v, got[near])]
    found.append(f"out of range: {' = '.join(names) or _samples(exact, got, near)}")
    for title, mask in (("beyond int32", finite & (np.abs(exact) >= 2.0**31)), ("infinite", np.isinf(exact))):
        right = np.array_equal(np.where(exact[mask] < 0, low, high), got[mask])
        found.append(f"{title}: {'saturates' if right else _samples(exact, got, mask)}")
    found.append(f"NaN: {sorted(set(got[np.isnan(exact)].tolist()))}")
    return found


def _samples(exact: Array, got: Array, mask: Array) -> str:
    pairs = list(dict.fromkeys(zip(exact[mask].tolist(), got[mask].tolist(), strict=True)))
    step = max(1, len(pairs) // 12)
    return "none, " + ", ".join(f"{x:.9g} -> {y:g}" for x, y in pairs[::step])


def plans_of(case: Case, where: Mapping[str, Any]) -> tuple[Any, int]:
    """Return the frontend graph with its list of plans, and their number. Raises what cuDNN declines with."""
    import cudnn

    from fusec.gpu.cudnn.plans.emit import emit

    g = emit(case.graph, **where)
    g.validate()
    g.build_operation_graph()
    g.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    return g, g.get_execution_plan_count()


def dry() -> None:
    """Print how many plans cuDNN offers for each graph on an H200, and their engines."""
    from fusec.gpu.cudnn.without_driver.deviceless import bring_up
    from fusec.targets.target import load

    target = load("h200")
    bring_up(target.sm)
    from fusec.gpu.cudnn.plans.plan_list import DECLINED

    for case in cases():
        try:
            g, count = plans_of(case, {"target": target})
        except DECLINED as error:
            print(f"{case.name}: refused: {str(error).splitlines()[-1][:100]}")
            continue
        engines = sorted({int(g.get_engine_and_knobs_at_index(i)[0]) for i in range(count)})
        print(f"{case.name}: {count} plans of engines {' '.join(map(str, engines))}")


def measure() -> None:
    """Run every plan of every graph on this machine's GPU, and print what explains its results."""
    import cudnn
    import cupy

    from fusec.gpu.cudnn.plans.plan_list import DECLINED

    handle = cudnn.create_handle()
    print(f"cuDNN {cudnn.backend_version()}, {cupy.cuda.runtime.getDeviceProperties(0)['name'].decode()}")
    for case in cases():
        print(f"\n{case.name}")
        try:
            g, count = plans_of(case, {"handle": handle})
        except DECLINED as error:
            print(f"  refused: {str(error).splitlines()[-1][:160]}")
            continue
        (output,) = case.graph.outputs
        held = {uid: cupy.asarray(_packed(array)) for uid, array in case.inputs.items()}
        answers: dict[str, list[str]] = {}
        for place in range(count):
            engine = int(g.get_engine_and_knobs_at_index(place)[0])
            try:
                g.build_plan_at_index(place)
                room = cupy.empty(max(1, g.get_workspace_size_plan_at_index(place)), cupy.uint8)
                # the plan has to write every element, so memory begins with a number that is seldom right
                y = cupy.full(int(np.prod(output.dims)) * output.dtype.itemsize, 0x55, cupy.uint8)
                pack = {**{uid: array.data.ptr for uid, array in held.items()}, output.uid: y.data.ptr}
                g.execute_plan_at_index(pack, room.data.ptr, place, handle)
                cupy.cuda.runtime.deviceSynchronize()
            except DECLINED as error:
                answers.setdefault(f"fails: {str(error).splitlines()[-1][:120]}", []).append(f"eng{engine}")
                continue
            result = _unpacked(y.get().view(output.dtype.numpy), output.dims)
            text = "\n    ".join(explain(case, output.dtype, result))
            answers.setdefault(text, []).append(f"eng{engine}")
        for text, engines in answers.items():
            print(f"  {' '.join(engines)}:\n    {text}", flush=True)


def _packed(array: Array) -> Array:
    """Return an array as it lies in memory: images channels last."""
    return np.ascontiguousarray(array.transpose(0, 2, 3, 1) if array.ndim == 4 else array)


def _unpacked(flat: Array, dims: tuple[int, ...]) -> Array:
    if len(dims) == 4:
        n, c, h, w = dims
        return flat.reshape(n, h, w, c).transpose(0, 3, 1, 2)
    return flat.reshape(dims)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--dry", action="store_true", help="list plans only, without a GPU")
    if options.parse_args().dry:
        dry()
    else:
        measure()


if __name__ == "__main__":
    main()
