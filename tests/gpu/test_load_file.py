"""Load `.fusec` files on the stand-in for a GPU: which variants of kernels run, and when they are timed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu.stand_in_gpu import Machine
from gpu.test_backend import EXCITATION, drawn, needs_compiler
from helpers import assert_close
from lowering.lowers_judge import LowersJudge

from fusec import driver
from fusec.execution.compilation import Compiled
from fusec.gpu import kernels
from fusec.gpu.kernels import Kernel
from fusec.passes.base import Options
from fusec.passes.partition import partition
from fusec.plans.plan_cache import PlanStore
from fusec.runtime import Executable, SimulatorBackend
from fusec.targets.target import load
from fusec.text import parse

TARGET = load("h200")
# a window for which the depthwise kernel has variants
WIDE = EXCITATION.replace("[8,1,3,3]", "[8,1,5,5]").replace("pads=[1, 1, 1, 1]", "pads=[2, 2, 2, 2]")


def untuned() -> Compiled:
    graph, judge = parse(WIDE, drawn(WIDE)), LowersJudge()
    return Compiled(graph, partition(graph, judge, TARGET), TARGET, Options(), judge)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that was made without a GPU, on a machine with one."""
    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path / "cache"))
    Executable(untuned(), SimulatorBackend()).save(tmp_path / "model.fusec")
    monkeypatch.setattr(driver.device, "is_present", lambda target: True)
    monkeypatch.setattr(driver.device, "detect", lambda: TARGET)
    return tmp_path / "model.fusec"


@pytest.fixture
def timed(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels whose variants were timed. The one that is timed last is the fastest."""
    from fusec.gpu.launch.kernel_launcher import Launcher
    from fusec.gpu.measure.timer import Stopwatch

    found, measure, us = list[str](), Launcher.measure, iter(range(1000, 0, -1))

    def counted(self: Launcher, kernel: Kernel, time_us: Callable[..., float]) -> float:
        found.append(kernel.name)
        return measure(self, kernel, time_us)

    monkeypatch.setattr(Launcher, "measure", counted)
    monkeypatch.setattr(Stopwatch, "median_us", lambda self, run, footprint_bytes, best_us=0.0: float(next(us)))
    return found


def with_variants(net: Any) -> Kernel:
    """The one kernel of a program that has variants."""
    figures = kernels.GpuFigures.of(TARGET)
    found = [k for k in net.backend.steps.variants.kernels_of(net.compiled.program.steps, figures) if k.others]
    (kernel,) = found
    return kernel


def running(net: Any) -> str:
    """The key of the variant that runs."""
    return net.backend.steps.variants._launcher.fastest(with_variants(net)).key


@needs_compiler
def test_variants_are_timed_at_the_first_load_of_a_file_made_without_a_gpu(timed: list[str], path: Path) -> None:
    x = np.random.default_rng(0).standard_normal((2, 8, 6, 6)).astype(np.float32)
    (want,) = driver.load(path, simulate=True).run(None, {"x": x})
    plain = driver.load(path, tune="none")
    assert not timed
    assert running(plain) == with_variants(plain).key
    for expected in ([with_variants(plain).name], []):  # the second load reads the choice from the cache
        timed.clear()
        tuned = driver.load(path)
        assert timed == expected
        assert running(tuned) == with_variants(tuned).others[-1].key
        assert_close(tuned.run(None, {"x": x})[0], want, 1e-5)


@needs_compiler
def test_a_file_written_again_is_timed_on_the_next_machine(
    timed: list[str], path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lock has no timed choices."""
    driver.load(path).save(tmp_path / "again.fusec")
    timed.clear()
    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path / "other"))
    with pytest.warns(UserWarning, match="were not built here"):
        driver.load(tmp_path / "again.fusec")
    assert len(timed) == 1


@needs_compiler
def test_the_variants_of_a_file_made_on_a_gpu_are_taken(
    timed: list[str], path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fusec.gpu.backend import CudnnBackend

    of, backend = untuned(), CudnnBackend("quick", store=PlanStore(tmp_path))
    program = backend.tune_steps(of.program, True, 1.0)
    Executable(replace(of, program=program, tuned=backend.tuned), backend).save(path)
    assert timed
    timed.clear()
    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path / "other"))
    with pytest.warns(UserWarning, match="were not built here"):
        loaded = driver.load(path)
    assert not timed
    assert running(loaded) != with_variants(loaded).key
