"""What a call costs more than the steps it runs, and steps side by side against steps in order, on one GPU in fp16.

Usage, on a machine with an NVIDIA GPU, torch and torchvision: python -m benchmarks.calls [MODEL:BATCH …]
Every kind of call is timed in turns with the steps alone, in random order; differences are taken turn by turn. Writes
benchmarks/results/calls.json: cases that are not measured anew keep their rows.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import fusec
from benchmarks.machine import KEYS, RESULTS, gpu, keep
from fusec.cli.step_times import Timing
from fusec.runtime import Executable

CASES = ["resnet50:1", "resnet50:32", "unet:8", "squeezenet1_1:1", "squeezenet1_1:32", "googlenet:1"]
TOLERANCE = 2e-2  # of a whole model in fp16
ROUNDS, BURST, EACH = 21, 30, 5


def on_host(array: Any) -> np.ndarray[Any, Any]:
    return np.asarray(array) if isinstance(array, np.ndarray) else array.get()


def kinds(executable: Executable, feeds: Mapping[str, Any]) -> dict[str, Callable[[], Any]]:
    """What is timed, each waited for: a replay of the steps, and calls that do the same."""
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
    """The steps alone, in microseconds: of many replays queued one behind the other. How much more the kinds of calls
    take: waited for each time, and calls queued one behind the other as the replays are."""
    executable.run(None, feeds)
    executable.run(None, feeds)  # the first at once
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
            if turn:  # the first warms up
                times[name].append(found)
    steps = times.pop("steps")
    more = {name: [a - b for a, b in zip(one, steps, strict=True)] for name, one in times.items()}
    return {"steps": plain(steps), "more": {name: plain(one) for name, one in more.items()}}


def plain(series: list[float]) -> dict[str, float]:
    """Median and deciles."""
    timing = Timing.of(series)
    return {
        "median_us": round(timing.median_us, 2),
        "low_us": round(timing.low_us, 2),
        "high_us": round(timing.high_us, 2),
    }


def ways(executable: Executable) -> dict[str, Any]:
    """Steps in order and side by side, as they were timed in turns when they were recorded."""
    lanes, other_us, declined, this_us = executable.recorded
    row: dict[str, Any] = {"lanes": lanes, "declined": declined}
    if this_us is not None and other_us is not None:
        in_order, side = (other_us, this_us) if lanes > 1 else (this_us, other_us)
        row |= {"in_order_us": round(in_order, 2), "side_by_side_us": round(side, 2)}
    return row


def case(name: str, batch: int, tune: str, budget: float) -> dict[str, Any]:
    import cupy
    import torch

    from benchmarks.zoo import exported, halved, make

    model, inputs = make(name, batch)
    model, inputs = model.cuda(), tuple(x.cuda() for x in inputs)
    with torch.inference_mode():
        want = model(*inputs).double().clone()
    model, inputs = model.half(), tuple(map(halved, inputs))
    executable = fusec.compile(exported(model, inputs), precision="fp16", tune=tune, budget=budget)
    feeds = {f"x{i}": cupy.from_dlpack(x) for i, x in enumerate(inputs)}
    (y,) = executable.run(None, feeds)
    executable.backend.finish()
    error = float((torch.from_dlpack(y).double() - want).norm() / want.norm())
    row: dict[str, Any] = {"model": name, "batch": batch, "launches": executable.compiled.program.launches}
    row |= {"error": error, "input_bytes": sum(x.nbytes for x in feeds.values()), "output_bytes": y.nbytes}
    row |= measured(executable, feeds, ROUNDS, BURST, EACH)
    return row | ways(executable)


def line(row: Mapping[str, Any]) -> str:
    kinds = [f"{kind} {t['median_us']:+.1f} ({t['low_us']:.0f}..{t['high_us']:.0f})" for kind, t in row["more"].items()]
    timed = f"in order {row['in_order_us']} side {row['side_by_side_us']}" if "in_order_us" in row else row["declined"]
    what = f"{'ok ' if row['error'] <= TOLERANCE else 'BAD'} {row['model']}:{row['batch']}"
    return f"{what} steps {row['steps']['median_us']:.1f}  {'  '.join(kinds)}  lanes {row['lanes']} {timed[:80]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=CASES, help="MODEL:BATCH")
    parser.add_argument("--tune", default="quick")
    parser.add_argument("--budget", type=float, default=float("inf"))
    parser.add_argument("--commit", default="", help="where there is no history to ask")
    parser.add_argument("--output", type=Path, default=RESULTS / "calls.json")
    given = parser.parse_args()
    right = True
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("FUSEC_CACHE", folder)
        for item in given.cases:
            name, batch = item.split(":")
            row = case(name, int(batch), given.tune, given.budget)
            right = right and row["error"] <= TOLERANCE
            print(line(row), flush=True)
            keep(given.output, gpu(), given.commit, row, KEYS["calls.json"])
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
