"""Load files made without a GPU on the stand-in for one: the candidates of each step compete at the first load."""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu.stand_in_gpu import Machine
from gpu.test_backend import needs_compiler
from helpers import assert_close
from lowering.lowers_judge import LowersJudge

from fusec import driver
from fusec.artifacts import fusec_file
from fusec.execution.compilation import Compiled
from fusec.gpu.kernels.codegen.kernel import variants_of
from fusec.gpu.launch.cubins import NO_CHOICE, entry_of, source_of
from fusec.passes import PIPELINE
from fusec.passes.base import Options, run
from fusec.passes.partition import partition
from fusec.plans.plan_record import Choice, Entry
from fusec.plans.verdict import Plan
from fusec.runtime import Executable
from fusec.schedule.program import Kind
from fusec.targets.target import load
from fusec.text import parse

TARGET = load("h200")
MODEL = """
graph "net" (%x: f16[1,32,5,6], %y: f16[1,32,5,6]) {
  %w = constant weight("w") : f16[32,1,3,3]
  %b = constant weight("b") : f16[32,1,1]
  %c = conv(%x, %w) {strides=[1,1], pads=[1,1,1,1], dilations=[1,1], groups=32}
  %d = add(%c, %b)
  %s = add(%d, %y)
  %e = relu(%s)
  return %e
}"""
KERNEL_US = 50.0


def compiled() -> Compiled:
    rng = np.random.default_rng(3)
    weights = {"w": rng.standard_normal((32, 1, 3, 3)) / 3, "b": rng.standard_normal((32, 1, 1))}
    source = parse(MODEL, {name: array.astype(np.float16) for name, array in weights.items()})
    judge = LowersJudge((Plan(7, ((2, 0),), True),))
    options = Options("fp16", orders=(("x", (0, 2, 3, 1)), ("y", (0, 2, 3, 1))))
    program = partition(run(PIPELINE, source.clone(), options), judge, TARGET)
    return Compiled(source, program, TARGET, options, judge)


def plans(of: Compiled, graphs: Any, time_us: float | None = None) -> dict[tuple[str, str], list[Entry]]:
    entries = [Entry(Choice(engine, ((2, place),), time_us=time_us)) for place, engine in enumerate((7, 4))]
    return {(of.target.name, key): entries for key in graphs}


def kernel_entries(of: Compiled) -> dict[tuple[str, str], Entry]:
    """Return entries for the kernels that may run, as the stand-in for the GPU loads them."""
    variants = [variant for kernel in of.candidate_kernels.values() for variant in variants_of(kernel)]
    sources = [source_of(launch, TARGET.sm) for variant in variants for launch in variant.launches]
    assert len(sources) > 1
    return {(of.target.name, s.key): entry_of(s.key, s.code.encode()) for s in sources}


def kernels_of_steps(machine: Machine) -> list[str]:
    """Return the sources that this process compiled for steps, not those that arrange weights or measure."""
    return [code for code in machine.compiled if "fusec_nothing" not in code and "fusec_reorder" not in code]


def own_keys(of: Compiled) -> list[str]:
    return [lowered.graph.key for lowered in of.lowered if lowered is not None]


@pytest.fixture
def saved(machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A function that writes a file, on a machine whose kernels take KERNEL_US."""
    from fusec.gpu.autotune.steps.step_selection import StepSelector
    from fusec.gpu.measure.timer import Stopwatch

    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(driver.device, "is_present", lambda target: True)
    monkeypatch.setattr(driver.device, "detect", lambda: TARGET)
    monkeypatch.setattr(Stopwatch, "median_us", lambda self, run, footprint_bytes, best_us=0.0: KERNEL_US)
    monkeypatch.setattr(StepSelector, "_sequence_us", lambda self, asked, *_: [10 * KERNEL_US] * len(asked))

    def save(
        of: Compiled, given: dict[tuple[str, str], list[Entry]], kernels: dict[tuple[str, str], Entry] | None = None
    ) -> Path:
        fusec_file.save(tmp_path / "model.fusec", [of], given, kernels=kernels)
        return tmp_path / "model.fusec"

    return save


def kinds(net: Executable) -> set[Kind]:
    return {step.kind for step in net.compiled.program.steps if any(node.op.name == "conv" for node in step.nodes)}


@needs_compiler
@pytest.mark.parametrize(("plan_us", "kind"), [(KERNEL_US / 10, Kind.CUDNN), (KERNEL_US * 10, Kind.KERNEL)])
def test_the_faster_of_plans_and_kernels_runs(
    machine: Machine, saved: Callable[..., Path], plan_us: float, kind: Kind
) -> None:
    of = compiled()
    path = saved(of, plans(of, of.candidate_graphs))
    machine.times_us = {7: 2 * plan_us, 4: plan_us, 3: 0.001}
    rng = np.random.default_rng(0)
    feeds = {name: rng.standard_normal((1, 32, 5, 6)).astype(np.float16) for name in ("x", "y")}
    (want,) = driver.load(path, simulate=True).run(None, feeds)
    for turn in range(2):
        machine.now_us = 0.0
        net = driver.load(path)
        assert kinds(net) == {kind}
        assert (machine.now_us > 0) == (turn == 0), "the second load reads the choice from the cache"
        assert 3 not in machine.built, "an engine that the file does not name"
        assert_close(net.run(None, feeds)[0], want, 1e-2)


@needs_compiler
def test_only_graphs_with_plans_in_the_file_compete(machine: Machine, saved: Callable[..., Path]) -> None:
    of = compiled()
    own = own_keys(of)
    assert of.candidate_graphs.keys() - own
    machine.times_us = dict.fromkeys(machine.engines, 1.0)
    driver.load(saved(of, plans(of, own)))
    assert {graph.key for graph, _ in machine.emitted} == set(own)


@needs_compiler
def test_plans_of_a_file_are_built_by_name_without_a_list(machine: Machine, saved: Callable[..., Path]) -> None:
    """A list takes longer than the builds of the plans that the file names."""
    of = compiled()
    machine.times_us = {7: 2.0, 4: 1.0}
    net = driver.load(saved(of, plans(of, of.candidate_graphs)))
    assert kinds(net) == {Kind.CUDNN}
    assert {4, 7} == set(machine.built)
    assert not machine.modes, "no list was asked for"


@needs_compiler
def test_a_plan_that_this_gpu_lacks_is_left_out(machine: Machine, saved: Callable[..., Path]) -> None:
    of = compiled()
    machine.engines = (7, 3)
    machine.times_us = {7: 1.0, 3: 0.001}
    net = driver.load(saved(of, plans(of, of.candidate_graphs)))
    assert kinds(net) == {Kind.CUDNN}
    assert set(machine.built) == {7}


@needs_compiler
@pytest.mark.parametrize("why", ["none", "timed", "locked"])
def test_no_kernel_replaces_a_plan_that_was_chosen(machine: Machine, saved: Callable[..., Path], why: str) -> None:
    """No kernel replaces a plan that was timed, or that a lock names; with tune="none" nothing is timed."""
    of = compiled()
    given = plans(of, own_keys(of), 1.0 if why == "timed" else None)
    if why == "locked":
        from fusec import lockfile

        of = replace(of, tuned=lockfile.make([of], given))
    machine.times_us = dict.fromkeys(machine.engines, 10 * KERNEL_US)
    net = driver.load(saved(of, given), tune="none" if why == "none" else "quick")
    assert kinds(net) == {Kind.CUDNN}


@needs_compiler
@pytest.mark.parametrize("trusted", [True, False])
def test_nothing_is_compiled_that_is_trusted_or_was_compiled_before(
    machine: Machine, saved: Callable[..., Path], trusted: bool
) -> None:
    of = compiled()
    kernels = kernel_entries(of)
    path = saved(of, plans(of, of.candidate_graphs), kernels)
    machine.times_us = dict.fromkeys(machine.engines, 10 * KERNEL_US)
    if trusted:
        assert fusec_file.trust(path) == len(kernels)
        driver.load(path)
    else:
        with pytest.warns(UserWarning, match=f"{len(kernels)} of its kernels were not compiled here"):
            driver.load(path)
    assert not kernels_of_steps(machine)
    assert bool(machine.compiled_elsewhere) == (not trusted)
    assert len(set(machine.compiled_elsewhere)) == len(machine.compiled_elsewhere)
    machine.compiled_elsewhere.clear()
    machine.loaded.clear()
    with warnings.catch_warnings(action="default" if trusted else "ignore"):
        net = driver.load(path)
    assert kinds(net) == {Kind.KERNEL}
    assert not kernels_of_steps(machine)
    assert not machine.compiled_elsewhere
    assert machine.loaded
    assert not trusted or len(machine.loaded) < len(kernels), "only what was chosen is loaded"


@needs_compiler
def test_a_deterministic_program_also_runs_the_compiled_kernels_of_its_file(
    machine: Machine, saved: Callable[..., Path]
) -> None:
    """The plans of a file may give other bits from run to run; its kernels do not."""
    of = compiled()
    of = replace(of, options=replace(of.options, deterministic=True))
    path = saved(of, {}, kernel_entries(of))
    fusec_file.trust(path)
    machine.times_us = dict.fromkeys(machine.engines, 10 * KERNEL_US)
    driver.load(path)
    assert machine.loaded and not machine.compiled_elsewhere


@needs_compiler
def test_a_cubin_is_used_for_its_own_source_only(machine: Machine, saved: Callable[..., Path]) -> None:
    """A file may give trusted bytes another name, which must not make another kernel run."""
    of = compiled()
    kernels = kernel_entries(of)
    names, entries = list(kernels), list(kernels.values())
    others = dict(zip(names, [*entries[1:], entries[0]], strict=True))
    path = saved(of, plans(of, of.candidate_graphs), others)
    fusec_file.trust(path)
    machine.times_us = dict.fromkeys(machine.engines, 10 * KERNEL_US)
    driver.load(path)
    assert machine.loaded
    assert set(machine.loaded) <= set(machine.compiled_elsewhere)


@needs_compiler
def test_a_cubin_that_the_driver_refuses_is_compiled_with_a_warning(
    machine: Machine, saved: Callable[..., Path]
) -> None:
    of = compiled()
    path = saved(of, plans(of, of.candidate_graphs), kernel_entries(of))
    fusec_file.trust(path)
    machine.refuses_cubins = True
    machine.times_us = dict.fromkeys(machine.engines, 10 * KERNEL_US)
    with pytest.warns(UserWarning, match="does not load, so it is compiled"):
        net = driver.load(path)
    assert kinds(net) == {Kind.KERNEL}
    assert [code for code in machine.compiled if "fusec_nothing" not in code]


def test_a_file_tells_plans_from_compiled_kernels(saved: Callable[..., Path]) -> None:
    """Their keys are of different kinds: one of a cuDNN graph, one of a CUDA source."""
    of = compiled()
    given = plans(of, of.candidate_graphs)
    kernels = {**kernel_entries(of), ("l4", "kernel 1"): Entry(NO_CHOICE, b"of another target")}
    path = saved(of, given, kernels)
    assert driver.load_artifact(path).kernels == {}, "none is trusted"
    fusec_file.trust(path)
    read = driver.load_artifact(path)
    assert read.plans.keys() == of.candidate_graphs.keys()
    assert {(TARGET.name, key): entry for key, entry in read.kernels.items()} == kernel_entries(of)
    digests = [name for name in zipfile.ZipFile(path).namelist() if name.startswith(f"{TARGET.name}/kernels/")]
    assert all(re.fullmatch(r"h200/kernels/[0-9a-f]{64}", name) for name in digests), "as earlier versions named them"


def test_plans_of_candidates_are_trusted_like_others(saved: Callable[..., Path]) -> None:
    of = compiled()
    given = plans(of, of.candidate_graphs)
    given = {key: [replace(entry, blob=str(key).encode()) for entry in entries] for key, entries in given.items()}
    path = saved(of, given)
    with pytest.warns(UserWarning, match=f"{2 * len(given)} of its plans were not built here"):
        assert len(driver.load(path, tune="none").compiled.program.steps)
    assert fusec_file.trust(path) == 2 * len(given)
    plans_read = driver.load_artifact(path).plans
    assert plans_read.keys() == of.candidate_graphs.keys()
    assert all(entry.blob for entries in plans_read.values() for entry in entries)
