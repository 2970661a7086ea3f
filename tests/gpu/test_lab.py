"""The laboratory on a stand-in: a run that this process could not queue in time is timed again."""

from __future__ import annotations

import types
from typing import Any

import pytest
from gpu.stand_in_gpu import Machine

pytest.importorskip("cupy")
pytest.importorskip("cudnn")


@pytest.mark.parametrize(
    ("held_s", "took_us", "want_us", "runs"),
    [
        ([0.0], [20.0], 20.0, 1),
        ([0.005, 0.0], [5020.0, 20.0], 20.0, 2),
        ([0.005, 0.005, 0.005], [5020.0, 20.0, 900.0], 20.0, 3),
        ([0.001], [1e6], 1e6, 1),  # which is long behind its launch
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
    from fusec.gpu import lab

    now, count = 0.0, 0
    monkeypatch.setattr(lab, "time", types.SimpleNamespace(perf_counter=lambda: now))

    def run() -> None:
        nonlocal now, count
        now += held_s[count]  # as a thread that holds Python's lock would have it
        machine.now_us += took_us[count]
        count += 1

    stream: Any = lab.cupy.cuda.Stream()
    assert lab.GpuLaboratory("handle", stream, 0).run_us(run) == pytest.approx(want_us)
    assert count == runs
