"""Test the timer on a stand-in GPU: work that was queued too slowly is timed again."""

from __future__ import annotations

import subprocess
import sys
import time
import types
from typing import Any

import pytest
from gpu.stand_in_gpu import Machine

pytest.importorskip("cupy")
pytest.importorskip("cudnn")


def stopwatch() -> Any:
    from fusec.gpu.measure import timer as stopwatch

    return stopwatch.Stopwatch(stopwatch.cupy.cuda.Stream())


@pytest.mark.parametrize(
    ("held_s", "took_us", "want_us", "runs"),
    [
        ([0.0], [20.0], 20.0, 1),
        ([0.005, 0.0], [5020.0, 20.0], 20.0, 2),
        ([0.005, 0.005, 0.005], [5020.0, 20.0, 900.0], 20.0, 3),
        ([0.001], [1e6], 1e6, 1),  # which is long after its launch
        ([0.005, 0.005], [5020.0, 4900.0], 4900.0, 2),  # which takes that long to queue
    ],
)
def test_a_run_that_was_queued_late_is_timed_again(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    held_s: list[float],
    took_us: list[float],
    want_us: float,
    runs: int,
) -> None:
    from fusec.gpu.measure import timer as module

    now, count = 0.0, 0
    monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=lambda: now))

    def run() -> None:
        nonlocal now, count
        now += held_s[count]  # as a thread that holds Python's lock would have it
        machine.now_us += took_us[count]
        count += 1

    assert stopwatch().us(run) == pytest.approx(want_us)
    assert count == runs


def test_runs_are_queued_one_after_the_other_while_a_gate_is_shut(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fusec.gpu.measure import timer as module

    done: list[str] = []
    gate = types.SimpleNamespace(shut=lambda: done.append("shut"), open=lambda: done.append("open"))
    monkeypatch.setattr(module, "Gate", lambda: gate)
    monkeypatch.setattr(module, "time", types.SimpleNamespace(perf_counter=lambda: 0.0))  # else a busy host is slow

    def run() -> None:
        done.append("run")
        machine.now_us += 3.0

    watch = stopwatch()
    assert watch.us(run, 2) == pytest.approx(3.0)
    assert done == ["shut", "run", "run", "open"]

    def fails() -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        watch.us(fails)
    assert done[-1] == "open"


@pytest.mark.parametrize(("footprint_bytes", "runs"), [((1 << 20) + 1, 1), (1 << 20, 4)])
def test_what_fits_into_the_cache_is_timed_there(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, footprint_bytes: int, runs: int
) -> None:
    from fusec.gpu.measure import timer as module

    swept: list[int] = []
    empty = module.cupy.empty
    monkeypatch.setattr(module.cupy, "empty", lambda size, dtype: swept.append(size) or empty(size, dtype))
    count = 0

    def run() -> None:
        nonlocal count
        count += 1

    stopwatch().within_us(run, footprint_bytes)
    assert count == runs
    assert swept == ([2 << 20] if runs == 1 else [])
    stopwatch().within_us(run, footprint_bytes, whole=True)
    assert count == 2 * runs
    assert len(swept) <= 1, "a whole model sweeps the cache itself"


TRIES = 8


@pytest.mark.gpu
def test_a_gate_holds_work_back_until_it_opens_or_has_been_shut_for_long() -> None:
    import cupy

    from fusec.gpu.measure.timer import SHUT_US, Gate, Stopwatch

    stream = cupy.cuda.Stream(non_blocking=True)
    numbers = cupy.arange(1 << 10, dtype=cupy.float32)

    def slowly_queued(seconds: float) -> float:
        def run() -> None:
            time.sleep(seconds)
            numbers.fill(1.0)

        return Stopwatch(stream).us(run)

    # other processes may use the GPU in between, so one try of several has to be as it should
    slowly_queued(0.0)
    assert min(slowly_queued(0.0) for _ in range(TRIES)) < 50.0
    assert min(slowly_queued(1e-4) for _ in range(TRIES)) < 50.0, "the device waited for this process"
    assert max(slowly_queued(4e-6 * SHUT_US) for _ in range(TRIES)) > 50.0
    gate, done = Gate(), cupy.cuda.Event()
    with stream:
        gate.shut()
        done.record()
    assert not done.done
    stream.synchronize()  # it opens by itself

    def opened() -> float:
        """Shut and open the gate three times, and return the seconds until the stream is done."""
        for _ in range(3):
            with stream:
                gate.shut()
            gate.open()
            with stream:
                done.record()
        since = time.perf_counter()
        stream.synchronize()
        return time.perf_counter() - since

    assert min(opened() for _ in range(TRIES)) < 1e-6 * SHUT_US


LOSE_THE_GPU = """
import cupy
from fusec.errors import DeviceLostError, ExecutionError
from fusec.gpu.measure.timer import Stopwatch
kernel = cupy.RawKernel('extern "C" __global__ void f(int* p) { *p = 1; }', "f")
try:
    Stopwatch(cupy.cuda.Stream()).us(lambda: kernel((1,), (1,), (64,)))
except DeviceLostError as error:
    assert not isinstance(error, ExecutionError) and "illegal" in str(error), error
    print("told", flush=True)
import os
os._exit(0)  # CuPy cannot free anything any more
"""


@pytest.mark.gpu
def test_an_illegal_access_is_reported_as_the_loss_of_the_gpu() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOSE_THE_GPU], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.strip() == "told", done.stderr[-2000:]


@pytest.mark.parametrize(
    ("best_us", "want_us", "runs"), [(float("inf"), 34.0, 8), (20.1, 34.0, 8), (19.9, 30.0, 3)], ids=["", "near", "far"]
)
def test_work_far_slower_than_a_rival_is_timed_twice(
    machine: Machine, best_us: float, want_us: float, runs: int
) -> None:
    took_us = iter([500.0, 30.0, 31.0, 35.0, 34.0, 36.0, 33.0, 38.0])
    count = 0

    def run() -> None:
        nonlocal count
        machine.now_us += next(took_us)
        count += 1

    footprint_bytes = 1 << 40  # so that each time is that of one run
    assert stopwatch().median_us(run, footprint_bytes, best_us) == pytest.approx(want_us)
    assert count == runs
