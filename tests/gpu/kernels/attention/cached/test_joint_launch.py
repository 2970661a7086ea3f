"""Test that candidates that are about as fast alone are timed between their neighbours, and the faster one is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from gpu.kernels.attention.cached.test_cached_candidates import ATTENDS, TUNING, WRITES, launches, program
from gpu.stand_in_gpu import Machine

from fusec.gpu.autotune.candidates.candidate_times import Timers, choose_steps
from fusec.gpu.autotune.candidates.step_candidates import Candidate
from fusec.gpu.autotune.fusion.step_fusion import fuse_steps
from fusec.gpu.autotune.plans.plan_search import RivalTimes
from fusec.gpu.autotune.step_choices import StepChoice, apply_choices
from fusec.gpu.kernels import Kernel
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.plans.plan_cache import PlanStore
from fusec.schedule.program import Kind, Program

APART_US = 5.0 + 14.0 + 2.0  # of two launches


def names(candidate: Candidate) -> list[str]:
    return [step.signature for step in candidate if step.kind is not Kind.VIEW]


class Comparisons:
    """Times alone, and the sequences of steps that were compared."""

    def __init__(self, joint_us: float, joint_wins: bool, other_us: float = 0.0) -> None:
        self.joint_us, self.joint_wins, self.other_us = joint_us, joint_wins, other_us
        self.graph_us = 9.0
        self.asked: list[tuple[list[str], list[str]]] = []

    def is_faster(self, other: Candidate, best: Candidate) -> bool:
        self.asked.append((names(other), names(best)))
        return (len(names(other)) < len(names(best))) == self.joint_wins

    def kernel_us(self, name: str) -> float:
        return self.joint_us if "attention" in name else 5.0 if "scatter" in name else 1.0 + self.other_us

    def choose(self, before: Program) -> dict[str, StepChoice]:
        def graphs_us(graphs: Mapping[str, CudnnGraph], rivals_us: RivalTimes) -> dict[str, float]:
            return {
                key: 14.0 if "sdpa" in str(graph) else self.graph_us + 2 * self.other_us
                for key, graph in graphs.items()
            }

        def kernels_us(found: Mapping[str, Kernel]) -> dict[str, float]:
            return {key: self.kernel_us(kernel.name) for key, kernel in found.items()}

        fused = fuse_steps(before, TUNING.figures, products=True)
        return choose_steps(fused, TUNING, Timers(graphs_us, kernels_us, is_faster=self.is_faster))


@pytest.mark.parametrize("joint_us", [APART_US - 3.0, APART_US + 3.0])
@pytest.mark.parametrize("joint_wins", [False, True])
def test_the_faster_one_between_its_neighbours_is_chosen(joint_us: float, joint_wins: bool) -> None:
    before, comparisons = program(), Comparisons(joint_us, joint_wins)
    after = apply_choices(before, comparisons.choose(before), TUNING.figures)
    found = launches(after)
    assert ("attention" in found[0]) == joint_wins
    assert joint_wins or found[:2] == [WRITES, ATTENDS]
    assert len(comparisons.asked) == 1


def test_what_is_compared_has_the_steps_around_it() -> None:
    before, comparisons = program(), Comparisons(APART_US, True)
    comparisons.choose(before)
    ((first, second),) = comparisons.asked
    joint, apart = sorted((first, second), key=len)
    assert apart == [WRITES, ATTENDS, "neg"]
    assert len(joint) == 2 and "attention" in joint[0] and joint[1] == "neg"


def test_a_kernel_and_a_plan_are_compared() -> None:
    """One launch each, but only a kernel may begin while the launch before it still runs."""
    before, comparisons = program(), Comparisons(0.5 * APART_US, False)
    comparisons.graph_us = 1.0
    comparisons.choose(before)
    (pair,) = comparisons.asked
    assert pair[0] == pair[1] and pair[0][-1] == "neg"


@pytest.mark.parametrize(("joint_us", "other_us"), [(1.4 * APART_US, 0.0), (0.7 * APART_US, 0.0), (APART_US, 1e5)])
def test_nothing_is_compared_that_cannot_gain(joint_us: float, other_us: float) -> None:
    """One candidate is far slower alone, or all of them take a small share of the whole."""
    before, comparisons = program(), Comparisons(joint_us, True, other_us)
    comparisons.choose(before)
    assert not comparisons.asked


@pytest.mark.parametrize("fits", [True, False])
def test_both_run_over_the_same_memory(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fits: bool
) -> None:
    """If there is not enough of it, the fastest alone stays."""
    from fusec.gpu.backend import CudnnBackend
    from fusec.gpu.launch import kernel_launcher, stream_calls

    backend, memories = CudnnBackend("quick", store=PlanStore(tmp_path)), list[Any]()

    def bind(launcher: Any, kernel: Kernel, memory: Any) -> Callable[[], None]:
        memories.append(memory)
        if not fits:
            raise stream_calls.cupy.cuda.memory.OutOfMemoryError(1 << 40, 0)
        us = 9.0 if "attention" in kernel.name else 12.0
        return lambda: machine.do(lambda: setattr(machine, "now_us", machine.now_us + us))

    monkeypatch.setattr(kernel_launcher.Launcher, "bind", bind)
    before = program()
    (joint, *_) = [s for s in fuse_steps(before, TUNING.figures, products=True).steps if "attention" in s.signature]
    windows = (joint,), tuple(before.steps)
    assert backend.steps._is_faster(windows, TUNING, backend.bind, 0) == fits
    assert len(set(map(id, memories))) == 1
