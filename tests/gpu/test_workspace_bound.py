"""Test on a stand-in GPU that a plan's workspace fits into the free memory, which is seldom asked for."""

from __future__ import annotations

from typing import Any

import pytest
from gpu.stand_in_gpu import Machine

from fusec.errors import ExecutionError

pytest.importorskip("cupy")
pytest.importorskip("cudnn")


def test_the_free_memory_is_asked_for_where_a_workspace_is_no_small_part_of_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fusec.gpu.autotune.plans import plan_bench

    free_bytes = [16 << 30, 4 << 30]
    monkeypatch.setattr(plan_bench.cupy.cuda.runtime, "memGetInfo", lambda: (free_bytes.pop(0), 1 << 37))
    context: Any = plan_bench.CudnnContext(None, None, stopwatch=None)  # type: ignore[arg-type]  # nothing is timed
    no_quarantine = plan_bench.Quarantine(lambda graph, choice: None, lambda graph, choice, reason: None)
    bench = plan_bench.GpuPlanBench(context, 0, no_quarantine, None)
    for workspace_bytes in (0, 1 << 20, 1 << 30):
        bench._require_workspace(workspace_bytes)
    assert len(free_bytes) == 1, "the first workspace asks"
    with pytest.raises(ExecutionError, match=r"a workspace of 5120 MB, \d+ MB are free"):
        bench._require_workspace(5 << 30)
    assert not free_bytes
