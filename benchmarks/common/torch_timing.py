"""Time contenders in turns on one GPU with torch's events, and run torch as its users tune it."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from fusec.diagnostics.step_times import Bench

T = TypeVar("T")
ROUNDS, ROUND_S = 15, 0.03
PRODUCTS = "ATEN,TRITON"
POOL_S = 30.0  # limit for the start of torch.compile's worker processes


@dataclass(frozen=True)
class Autotune:
    """Options of torch.compile.

    mode: its mode.
    products: the libraries whose matrix products it times.
    freezing: weights are constants.
    """

    mode: str = "max-autotune-no-cudagraphs"
    products: str = PRODUCTS
    freezing: bool = False


def start_workers() -> None:
    """Start the worker processes that compile Triton's kernels. They import torch, which takes seconds."""
    from torch._inductor.async_compile import AsyncCompile

    AsyncCompile.warm_pool()


def _wait_for_workers() -> None:
    """Wait for the worker processes.

    Without them, torch.compile compiles its first kernels one after the other in this process.
    """
    from torch._inductor.async_compile import AsyncCompile

    start_workers()
    end = time.monotonic() + POOL_S
    while not AsyncCompile.use_process_pool() and time.monotonic() < end:
        time.sleep(0.1)


def autotuned(function: Callable[..., Any], options: Autotune) -> Callable[..., Any]:
    """Compile a function with torch.compile.

    Convolutions are cuDNN's and torch's own, because timing Triton's takes minutes.
    """
    (fast,) = autotuned_together([function], options)
    return fast


def autotuned_together(functions: Sequence[Callable[..., Any]], options: Autotune) -> list[Callable[..., Any]]:
    """Compile functions of one model with torch.compile, each alone. What was compiled before is forgotten."""
    import torch._inductor.config  # here, because the import takes seconds

    _wait_for_workers()
    torch._dynamo.reset()
    torch._inductor.config.freezing = options.freezing
    torch._inductor.config.max_autotune_conv_backends = "ATEN"
    torch._inductor.config.max_autotune_gemm_backends = options.products
    return [torch.compile(function, mode=options.mode) for function in functions]


def captured(run: Callable[[], T]) -> tuple[Callable[[], None], T]:
    """Capture torch's work as a CUDA graph. Return its replay, and the result, which each replay overwrites."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph.replay, out


def device_ms(run: Callable[[], object], count: int) -> float:
    """Return the ms of one of `count` runs on the device, between two events."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(count):
        run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / count


def host_ms(run: Callable[[], object], count: int) -> float:
    """Return the ms of one of `count` calls by the host's clock, until the device is done."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(count):
        run()
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - started) / count


def timed(
    contenders: Mapping[str, Callable[[], None]],
    rounds: int = ROUNDS,
    round_s: float = ROUND_S,
    spans: Mapping[str, Callable[[int], float]] | None = None,
) -> dict[str, dict[str, float]]:
    """Return medians and deciles of the time of a run, in ms.

    Events around many runs take the time. The contenders take turns in random order.
    spans: contenders in other processes, which take a number of runs and return the ms of one.
    """

    turns = {name: partial(device_ms, run) for name, run in contenders.items()} | dict(spans or {})
    counts = {name: max(3, int(1000 * round_s / turn(3))) for name, turn in turns.items()}
    times: dict[str, list[float]] = {name: [] for name in turns}
    rng, names = random.Random(0), list(turns)
    for _ in range(rounds):
        rng.shuffle(names)
        for name in names:
            times[name].append(turns[name](counts[name]))
    return {name: _median_and_deciles(series) for name, series in times.items()}


def _median_and_deciles(series: Sequence[float]) -> dict[str, float]:
    ordered = sorted(series)
    tenth = len(ordered) // 10
    return {"median_ms": statistics.median(ordered), "low_ms": ordered[tenth], "high_ms": ordered[-1 - tenth]}


def relative_l2(got: torch.Tensor, want: torch.Tensor) -> float:
    """Return |got - want| / |want| in float64."""
    return float((got.double() - want.double()).norm() / want.double().norm())


def best_peer_over_fusec(times: Mapping[str, Mapping[str, float]], peers: Sequence[str]) -> float:
    """Return the time of the fastest peer that was measured, divided by fusec's; NaN without a peer."""
    best = min((times[peer]["median_ms"] for peer in peers if peer in times), default=float("nan"))
    return best / times["fusec"]["median_ms"]


def limits_and_steps(bench: Bench) -> dict[str, Any]:
    """Return what a row says of the steps timed alone: their limits, their sum, and each step."""
    return {
        "limit_ms": bench.limit_us / 1000,
        "sum_ms": bench.sum_us / 1000,
        "steps": [
            {"step": s.signature, "kind": s.kind, "us": round(s.time.median_us, 2), "limit_us": round(s.limit_us, 2)}
            for s in bench.steps
        ],
    }


def free_memory() -> None:
    """Give the memory of the last case back to the GPU."""
    import cupy

    gc.collect()
    torch.cuda.empty_cache()
    cupy.get_default_memory_pool().free_all_blocks()
