"""Contenders timed in turns on one GPU by torch's events, and torch's work captured as a CUDA graph."""

from __future__ import annotations

import random
import signal
import statistics
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")
ROUNDS, ROUND_S = 15, 0.03
PRODUCTS = "ATEN,TRITON"  # whose matrix products torch.compile chooses among
POOL_S = 30.0  # until torch.compile's helpers must be there


class TooLongError(BaseException):
    """Not caught by what catches every Exception, as autotuning does."""


@contextmanager
def within(seconds: float) -> Generator[None]:
    """Raises TooLongError in what takes longer; 0 is no limit."""

    def stop(number: int, frame: Any) -> None:
        raise TooLongError(f"not ready after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _ready_to_autotune() -> None:
    """Start the processes that compile Triton's kernels for torch.compile, and wait for them: what is asked for before
    they are there is compiled in this one, one kernel after the other."""
    from torch._inductor.async_compile import AsyncCompile

    AsyncCompile.warm_pool()
    end = time.monotonic() + POOL_S
    while not AsyncCompile.use_process_pool() and time.monotonic() < end:
        time.sleep(0.1)


def autotuned(
    function: Callable[..., Any],
    freezing: bool = False,
    mode: str = "max-autotune-no-cudagraphs",
    products: str = PRODUCTS,
) -> Callable[..., Any]:
    """By torch.compile. freezing: weights are constants. Convolutions are chosen among those of cuDNN and torch:
    Triton's take minutes to try. products: among whose those are chosen."""
    import torch._inductor.config  # which takes seconds

    _ready_to_autotune()
    torch._dynamo.reset()
    torch._inductor.config.freezing = freezing
    torch._inductor.config.max_autotune_conv_backends = "ATEN"
    torch._inductor.config.max_autotune_gemm_backends = products
    return torch.compile(function, mode=mode)


def captured(run: Callable[[], T]) -> tuple[Callable[[], None], T]:
    """What replays the work, and its result, which each replay writes anew."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph.replay, out


def timed(
    contenders: dict[str, Callable[[], None]], rounds: int = ROUNDS, round_s: float = ROUND_S
) -> dict[str, dict[str, float]]:
    """Medians and deciles of the time of a run, in ms: events around many, contenders in random order."""

    def span(run: Callable[[], None], count: int) -> float:
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for _ in range(count):
            run()
        stop.record()
        stop.synchronize()
        return start.elapsed_time(stop) / count

    counts = {name: max(3, int(1000 * round_s / span(run, 3))) for name, run in contenders.items()}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    rng, names = random.Random(0), list(contenders)
    for _ in range(rounds):
        rng.shuffle(names)
        for name in names:
            times[name].append(span(contenders[name], counts[name]))
    found: dict[str, dict[str, float]] = {}
    for name, series in times.items():
        ordered = sorted(series)
        low, high = ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]
        found[name] = {"median_ms": statistics.median(ordered), "low_ms": low, "high_ms": high}
    return found
