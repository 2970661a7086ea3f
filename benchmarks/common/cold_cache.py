"""Time work on a GPU with an empty L2 cache, as a step of a large model finds it."""

from __future__ import annotations

import statistics
from collections.abc import Callable

SWEEP_BYTES = 1 << 28  # more than any L2 cache holds


def cold_timer(runs: int) -> Callable[[Callable[[], object]], float]:
    """Make a function that returns the median time of `runs` runs, in us.

    It times CuPy's current stream, and overwrites the L2 cache before each run.
    """
    import cupy

    sweep = cupy.empty(SWEEP_BYTES, cupy.uint8)

    def median_us(run: Callable[[], object]) -> float:
        stream = cupy.cuda.get_current_stream()
        times: list[float] = []
        for _ in range(runs):
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            sweep.fill(0)
            start.record(stream)
            run()
            stop.record(stream)
            stop.synchronize()
            times.append(1000.0 * float(cupy.cuda.get_elapsed_time(start, stop)))
        return statistics.median(times)

    return median_us
