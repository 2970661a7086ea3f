"""Measure the overhead of a call, and compare steps in order with steps in parallel, on one GPU in fp16.

Usage, with a GPU, torch and torchvision: python -m benchmarks.serving.call_overhead [MODEL:BATCH …]
Calls of every kind and the steps alone take turns in random order; the overhead is the difference within a turn.
Writes benchmarks/results/calls.json: cases that are not measured again keep their rows.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import fusec
from benchmarks.common.result_files import KEYS, gpu_and_torch, parser, write_row
from fusec.diagnostics.step_times import Timing
from fusec.runtime import Executable

CASES = ["resnet50:1", "resnet50:32", "unet:8", "squeezenet1_1:1", "squeezenet1_1:32", "googlenet:1"]
TOLERANCE = 2e-2  # relative L2 of a whole model in fp16
ROUNDS, BURST, EACH = 21, 30, 5


def on_host(array: Any) -> np.ndarray[Any, Any]:
    return np.asarray(array) if isinstance(array, np.ndarray) else array.get()


def kinds(executable: Executable, feeds: Mapping[str, Any]) -> dict[str, Callable[[], Any]]:
    """Return what is timed by its name: a replay of the steps, and each kind of call that computes the same."""
    out = dict(zip((spec.name for spec in executable.outputs), executable.run(None, feeds), strict=True))
    host, buffers = {name: on_host(array) for name, array in feeds.items()}, executable.input_buffers
    return {
        "replay": executable.replay,
        "call": lambda: executable.run(None, feeds),
        "out": lambda: executable.run(None, feeds, out=out),
        "buffers": lambda: executable.run(None, buffers),
        "buffers, out": lambda: executable.run(None, buffers, out=out),
        "host": lambda: executable.run(None, host),
    }


def measured(executable: Executable, feeds: Mapping[str, Any], rounds: int, burst: int, each: int) -> dict[str, Any]:
    """Time the steps alone, and how much more each kind of call takes, in us.

    The time of the steps is that of replays that are queued one after the other. The host waits for each call, except
    for those of kind "queued".
    rounds: turns of all kinds. burst: queued runs in a turn. each: runs in a turn that the host waits for.
    """
    executable.run(None, feeds)
    executable.run(None, feeds)  # the first call runs step by step and captures the graph
    single = kinds(executable, feeds)
    rng, finish = random.Random(0), executable.backend.finish

    def us(run: Callable[[], Any], count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            run()
        finish()
        return 1e6 * (time.perf_counter() - start) / count

    series: dict[str, Callable[[], float]] = {
        name: lambda run=run: statistics.median(us(run, 1) for _ in range(each)) for name, run in single.items()
    }
    series["steps"] = lambda: us(executable.replay, burst)
    series["queued"] = lambda: us(single["call"], burst)
    names, times = list(series), {name: list[float]() for name in series}
    for turn in range(rounds + 1):
        rng.shuffle(names)
        for name in names:
            found = series[name]()
            if turn:  # the first is a warm-up
                times[name].append(found)
    steps = times.pop("steps")
    more = {name: [a - b for a, b in zip(one, steps, strict=True)] for name, one in times.items()}
    return {"steps": summary(steps), "more": {name: summary(one) for name, one in more.items()}}


def summary(series: list[float]) -> dict[str, float]:
    """Return median and deciles."""
    timing = Timing.of(series)
    return {
        "median_us": round(timing.median_us, 2),
        "low_us": round(timing.low_us, 2),
        "high_us": round(timing.high_us, 2),
    }


def stream_times(executable: Executable) -> dict[str, Any]:
    """Return the times of the steps in order and in parallel, which were measured in turns at capture."""
    lanes, other_us, declined, this_us = executable.recorded
    row: dict[str, Any] = {"lanes": lanes, "declined": declined}
    if this_us is not None and other_us is not None:
        in_order, side = (other_us, this_us) if lanes > 1 else (this_us, other_us)
        row |= {"in_order_us": round(in_order, 2), "side_by_side_us": round(side, 2)}
    return row


def case(name: str, batch: int, tune: str, budget: float) -> dict[str, Any]:
    import torch

    from benchmarks.common.model_zoo import feeds_of, make, on_gpu
    from benchmarks.common.torch_timing import relative_l2

    _, inputs, data, want = on_gpu(*make(name, batch))
    executable = fusec.compile(data, precision="fp16", tune=tune, budget=budget)
    feeds = feeds_of(inputs)
    (y,) = executable.run(None, feeds)
    executable.backend.finish()
    error = relative_l2(torch.from_dlpack(y), want)
    row: dict[str, Any] = {"model": name, "batch": batch, "launches": executable.compiled.program.launches}
    row |= {"error": error, "input_bytes": sum(x.nbytes for x in feeds.values()), "output_bytes": y.nbytes}
    row |= measured(executable, feeds, ROUNDS, BURST, EACH)
    return row | stream_times(executable)


def line(row: Mapping[str, Any]) -> str:
    kinds = [f"{kind} {t['median_us']:+.1f} ({t['low_us']:.0f}..{t['high_us']:.0f})" for kind, t in row["more"].items()]
    timed = f"in order {row['in_order_us']} side {row['side_by_side_us']}" if "in_order_us" in row else row["declined"]
    what = f"{'ok ' if row['error'] <= TOLERANCE else 'BAD'} {row['model']}:{row['batch']}"
    return f"{what} steps {row['steps']['median_us']:.1f}  {'  '.join(kinds)}  lanes {row['lanes']} {timed[:80]}"


def main() -> int:
    options = parser(__doc__, "calls.json", budget=True)
    options.add_argument("cases", nargs="*", default=CASES, help="MODEL:BATCH")
    options.add_argument("--tune", default="quick")
    given = options.parse_args()
    right = True
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("FUSEC_CACHE", folder)
        for item in given.cases:
            name, batch = item.split(":")
            row = case(name, int(batch), given.tune, given.budget)
            right = right and row["error"] <= TOLERANCE
            print(line(row), flush=True)
            write_row(given.output, gpu_and_torch(), given.commit, row, KEYS["calls.json"])
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
