"""Test choices from one process to the next: plans are revived instead of built, and damaged ones are dropped."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu.kernels.cases import FIGURES
from gpu.kernels.emulator import needs_compiler
from gpu.stand_in_gpu import Machine
from gpu.test_backend import build, check, compiled, fresh
from lowering.lowers_judge import LowersJudge

from fusec import lockfile
from fusec.errors import CheckError
from fusec.execution.compilation import Compiled
from fusec.gpu.autotune.cache.tuning_cache import KnownChoices
from fusec.gpu.cudnn import load_engines
from fusec.gpu.cudnn.load_engines import recorded
from fusec.ir import Graph
from fusec.lockfile import changes
from fusec.passes.base import Options
from fusec.plans.plan_cache import PlanStore
from fusec.plans.plan_record import Choice, Entry
from fusec.runtime import Executable
from fusec.schedule.program import Partition
from fusec.targets.target import load

pytest.importorskip("cupy")
pytest.importorskip("cudnn")


DEPTHWISE = """graph "g" (%x: f32[2,8,6,6]{0,2,3,1}) {
  %w = constant [W] : f32[8,1,3,3]{0,2,3,1}
  %c = conv(%x, %w) {strides=[1,1], pads=[1,1,1,1], dilations=[1,1], groups=8} : f32[2,8,6,6]{0,2,3,1}
  %r = relu(%c)
  return %r
}""".replace("W", ", ".join(f"{i}.5" for i in range(72)))


def engines(net: Executable) -> set[int]:
    return {choice.engine for choice in net.backend.choices().values()}  # type: ignore[attr-defined]


def tuned(path: Path) -> Executable:
    """Choices of steps, too."""
    from fusec.gpu.backend import CudnnBackend

    of = compiled()
    backend = CudnnBackend("quick", store=PlanStore(path))
    program = backend.tune_steps(of.program, True, 1.0)
    return Executable(type(of)(of.source, program, of.target, of.options, of.judge), backend)


@pytest.mark.parametrize("tune", ["none", "quick", "full"])
def test_the_next_process_revives_the_chosen_plan(machine: Machine, tmp_path: Path, tune: str) -> None:
    machine.times_us = {7: 30.0, 4: 20.0, 3: 5.0}
    chosen = engines(build(tmp_path, tune))
    machine.built.clear()
    machine.emitted.clear()
    machine.now_us = 0.0
    again = build(tmp_path, tune)
    assert engines(again) == chosen
    assert (machine.built, machine.emitted, machine.now_us) == ([], [], 0.0), "neither built nor timed"
    assert set(machine.revived) == chosen
    check(again, 0)
    check(again, 1)


def test_a_plan_of_each_engine_is_recorded_for_the_next_process(machine: Machine, tmp_path: Path) -> None:
    chosen = engines(build(tmp_path))
    store = PlanStore(tmp_path)
    found = recorded(store, "", "GPU")
    assert set(found) == chosen
    for engine, key in found.items():
        entry = store.get(key)
        assert entry is not None and entry.blob and entry.choice.engine == engine
    store.put_choice(load_engines._key("", "GPU"), {})
    build(tmp_path)
    assert recorded(store, "", "GPU") == found, "of plans that were read, too"


def test_a_damaged_blob_is_dropped_and_written_again(machine: Machine, tmp_path: Path) -> None:
    build(tmp_path)
    (file,) = (tmp_path / "plans").iterdir()
    whole = file.read_bytes()
    for damaged in (whole[:-7], whole[:-1] + bytes([whole[-1] ^ 1]), b""):
        file.write_bytes(damaged)
        machine.built.clear()
        with pytest.warns(UserWarning, match="dropped the cached plan .*it will be built anew"):
            net = build(tmp_path)
        assert machine.built, "it was chosen anew"
        check(net, 0)
        machine.built.clear()
        build(tmp_path)
        assert machine.built == []


def test_a_blob_of_another_cudnn_version_is_not_read(machine: Machine, tmp_path: Path) -> None:
    build(tmp_path)
    machine.revived.clear()
    machine.built.clear()
    machine.cudnn_version = 92000
    check(build(tmp_path), 0)
    assert machine.built and set(machine.revived) <= set(machine.built)


def test_a_blob_that_cudnn_refuses_is_dropped_and_its_plan_built_by_name(machine: Machine, tmp_path: Path) -> None:
    machine.times_us = {7: 30.0, 4: 20.0, 3: 5.0}
    first = build(tmp_path)
    machine.refuses_blobs = True
    machine.built.clear()
    with (
        pytest.warns(UserWarning, match=r"dropped the serialized plan in .*cuDNN does not read.*it is built anew"),
        pytest.warns(UserWarning, match=r"engine 3 cannot be stored serialized: cuDNN does not read"),
    ):
        net = build(tmp_path)
    assert engines(net) == engines(first) == {3}
    assert set(machine.built) == {3}, "the choice is kept, nothing is timed"
    check(net, 0)
    machine.refuses_blobs = False
    build(tmp_path)
    machine.built.clear()
    build(tmp_path)
    assert machine.built == [], "it was serialized again"


def test_a_blob_that_this_machine_did_not_build_is_not_used(machine: Machine, tmp_path: Path) -> None:
    build(tmp_path / "there")
    PlanStore(tmp_path / "there").export(tmp_path / "plans.zip")
    here = PlanStore(tmp_path / "here")
    here.import_(tmp_path / "plans.zip")
    machine.revived.clear()
    machine.built.clear()
    check(build(tmp_path / "here"), 0)
    assert machine.built and set(machine.built) == set(machine.revived), "built by name, then checked and kept"
    machine.built.clear()
    build(tmp_path / "here")
    assert machine.built == []


def test_a_plan_whose_blob_computes_something_else_is_not_stored(machine: Machine, tmp_path: Path) -> None:
    machine.spoils_blobs = True
    with pytest.warns(UserWarning, match=r"engine \d is not stored: read back, its results are off by 1"):
        net = build(tmp_path)
    check(net, 0)
    machine.revived.clear()
    with pytest.warns(UserWarning, match="is not stored"):
        check(build(tmp_path), 1)


def test_a_revived_plan_that_fails_is_built_and_then_replaced(machine: Machine, tmp_path: Path) -> None:
    machine.times_us = {7: 30.0, 4: 20.0, 3: 5.0}
    build(tmp_path)
    net = build(tmp_path)
    machine.failing = {3}
    with (
        pytest.warns(UserWarning, match="dropped the serialized plan"),
        pytest.warns(UserWarning, match="the serialized plan of engine 3 failed"),
        pytest.warns(UserWarning, match="^engine 3 failed, so the next plan"),
    ):
        check(net, 0)
    assert engines(net) == {4}
    check(net, 1)
    assert engines(build(tmp_path)) == {4}, "it is in quarantine"


def test_a_stored_plan_that_is_known_to_be_wrong_is_not_used(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.times_us = {7: 30.0, 4: 20.0, 3: 5.0}
    assert engines(build(tmp_path)) == {3}
    for module in ("fusec.gpu.autotune.cache.tuning_cache", "fusec.gpu.autotune.plans.plan_bench"):
        monkeypatch.setattr(f"{module}.wrong_plan", lambda graph, engine, knobs: "wrong" if engine == 3 else None)
    net = build(tmp_path)
    assert engines(net) == {4}
    check(net, 0)


def test_candidates_are_not_timed_twice(machine: Machine, tmp_path: Path) -> None:
    first = tuned(tmp_path)
    machine.built.clear()
    machine.emitted.clear()
    machine.launched.clear()
    machine.now_us = 0.0
    again = tuned(tmp_path)
    assert [s.kind for s in again.compiled.program.steps] == [s.kind for s in first.compiled.program.steps]
    assert (machine.built, machine.emitted, machine.launched, machine.now_us) == ([], [], [], 0.0)
    check(again, 0)


@needs_compiler
def test_kernels_are_not_timed_twice(machine: Machine, tmp_path: Path) -> None:
    from fusec.gpu.backend import CudnnBackend

    def tuned() -> bool:
        """Tune in a process of its own, as it were; tell if a kernel was measured, then or before."""
        backend = CudnnBackend("quick", store=PlanStore(tmp_path))
        program = backend.tune_steps(compiled(DEPTHWISE).program, True, 1.0)
        return any(backend._launcher.is_measured(k) for k in _kernels(program))

    assert tuned() and machine.launched != []
    machine.launched.clear()
    assert tuned() and machine.launched == []


def _kernels(program: Any) -> list[Any]:
    from fusec.gpu import kernels

    return [k for step in program.steps if (k := kernels.find(step.nodes, step.outputs, FIGURES)) is not None]


def test_plans_made_without_a_gpu_compete_and_the_winner_is_remembered(machine: Machine, tmp_path: Path) -> None:
    from fusec.gpu.backend import CudnnBackend

    machine.times_us = {7: 30.0, 4: 5.0, 3: 20.0}
    blobs = _carried(machine, tmp_path)

    def loaded(tune: str = "quick") -> Executable:
        machine.built.clear()
        machine.revived.clear()
        store = PlanStore(tmp_path / "here")
        return Executable(compiled(), CudnnBackend(tune, named(blobs), store))

    net = loaded()
    assert (engines(net), machine.built, set(machine.revived)) == ({4}, [], {7, 4})
    check(net, 0)
    machine.now_us = 0.0
    assert (engines(loaded()), machine.revived, machine.now_us) == ({4}, [4], 0.0), "what was found is enough"
    assert engines(loaded("none")) == {7}, "nothing is timed: the first"


def test_plans_made_without_a_gpu_and_not_trusted_are_built_by_name(machine: Machine, tmp_path: Path) -> None:
    from fusec.gpu.backend import CudnnBackend

    machine.times_us = {7: 30.0, 4: 5.0, 3: 1.0}
    strange = {key: [Entry(e.choice) for e in entries] for key, entries in _carried(machine, tmp_path).items()}
    machine.built.clear()
    store = PlanStore(tmp_path / "here")
    net = Executable(compiled(), CudnnBackend("quick", named(strange), store))
    assert engines(net) == {4} and set(machine.built) == {7, 4}, "others are not tried"
    check(net, 0)


def test_a_carried_blob_that_cudnn_refuses_is_built_by_name(machine: Machine, tmp_path: Path) -> None:
    from fusec.gpu.backend import CudnnBackend

    blobs = _carried(machine, tmp_path)
    machine.refuses_blobs = True
    machine.times_us = {7: 30.0, 4: 5.0, 3: 1.0}
    store = PlanStore(tmp_path / "here")
    refused = pytest.warns(UserWarning, match="engine [74]: cuDNN does not read its serialized plan")
    with refused, pytest.warns(UserWarning, match="engine 4 cannot be stored serialized"):
        net = Executable(compiled(), CudnnBackend("quick", named(blobs), store))
    assert engines(net) == {4}
    check(net, 0)
    machine.built.clear()
    machine.now_us = 0.0
    with pytest.warns(UserWarning, match="engine 4 cannot be stored serialized"):
        again = Executable(compiled(), CudnnBackend("quick", named(blobs), store))
    assert (engines(again), set(machine.built), machine.now_us) == ({4}, {4}, 0.0), "what was found is enough"
    machine.refuses_blobs = False
    tuned_here = Executable(compiled(), CudnnBackend("quick", store=store))
    assert engines(tuned_here) == {3}, "compiled here, all are timed"


def named(plans: dict[str, list[Entry]]) -> KnownChoices:
    return KnownChoices(plans, accept_incomplete=True)


def _carried(machine: Machine, path: Path) -> dict[str, list[Entry]]:
    """Two plans of the one graph, serialized, not measured."""
    (graph,) = {lowered.graph.key: lowered.graph for lowered in compiled().lowered if lowered is not None}.values()
    entries: list[Entry] = []
    pygraph = machine.emit(graph)
    for place in (0, 1):
        pygraph.build_plan_at_index(place)
        choice = Choice(machine.engines[place], ((2, place),), 64 * place, complete=False)
        entries.append(Entry(choice, bytes(pygraph.serialize())))
    machine.built.clear()
    return {graph.key: entries}


def test_threads_that_compile_at_once_share_the_store(machine: Machine, tmp_path: Path) -> None:
    found: list[set[int]] = []

    def work() -> None:
        found.append(engines(build(tmp_path)))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    machine.built.clear()
    net = build(tmp_path)
    assert machine.built == []
    x = fresh(0)
    assert np.isfinite(net.run(None, {"x": x})[0]).all()


COMPILER = """
import sys
from pathlib import Path
sys.path.insert(0, "tests")
from gpu.stand_in_gpu import Machine, install
install(Machine(), setattr)
from gpu.autotune.cache import test_tuning_cache as test_kept
for turn in range(int(sys.argv[2])):
    net = test_kept.tuned(Path(sys.argv[1]))
    test_kept.check(net, turn)
    print(turn, flush=True)
"""


def compiler(path: Path, turns: int) -> subprocess.Popen[str]:
    """A process that compiles again and again."""
    command = [sys.executable, "-W", "error", "-c", COMPILER, str(path), str(turns)]
    root = Path(__file__).parents[4]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=root)


def test_processes_that_compile_at_once_or_are_killed_leave_a_store_that_serves(
    machine: Machine, tmp_path: Path
) -> None:
    at_once = [compiler(tmp_path, 3) for _ in range(2)]
    errors = [process.communicate()[1] for process in at_once]
    assert [process.returncode for process in at_once] == [0, 0], errors
    killed = compiler(tmp_path / "killed", 1000)
    assert killed.stdout is not None
    killed.stdout.readline()
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    for path in (tmp_path, tmp_path / "killed"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            net = tuned(path)
        assert (machine.built, machine.now_us) == ([], 0.0), "what one process chose another one revives"
        check(net, 0)
        machine.now_us = 0.0


def test_a_file_saved_on_the_device_has_the_plans_chosen_there(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fusec import driver
    from fusec.targets.target import load

    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(driver.device, "is_present", lambda target: True)
    monkeypatch.setattr(driver.device, "detect", lambda: load("h200"))
    machine.times_us = {7: 30.0, 4: 20.0, 3: 5.0}
    build(tmp_path / "cache" / "plans").save(tmp_path / "model.fusec")
    (entries,) = driver.load_artifact(tmp_path / "model.fusec").plans.values()
    (entry,) = entries
    assert (entry.choice.engine, entry.choice.time_us, entry.blob is None) == (3, 5.0, False)
    machine.built.clear()
    net = driver.load(tmp_path / "model.fusec")
    assert (engines(net), machine.built) == ({3}, [])
    check(net, 0)
    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path / "elsewhere"))
    with pytest.warns(UserWarning, match="1 of its plans were not built here and are built anew"):
        there = driver.load(tmp_path / "model.fusec")
    assert (engines(there), set(machine.built)) == ({3}, {3})
    check(there, 1)


@needs_compiler
def test_choices_for_concats_are_stored_and_locked(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpu.autotune.steps.test_concat_choice import LINKED
    from passes.partition.test_concat_in_place import joins, place

    from fusec.gpu.autotune.steps import step_selection
    from fusec.gpu.backend import CudnnBackend

    def fresh_one() -> Compiled:
        program = place(LINKED)
        return Compiled(program.graph, program, load("h200"), Options(), LowersJudge())

    def improved(store: Path) -> Compiled:
        of, gpu = fresh_one(), CudnnBackend("quick", store=PlanStore(store))
        return dataclasses.replace(of, program=gpu.tune_steps(of.program, True, 1.0), tuned=gpu.tuned)

    def prices(graph: Graph, steps: Sequence[Partition], *_: object) -> list[float]:
        """A gap costs more than a copy where a sine is written, and nothing elsewhere."""
        gaps = [any(v.type.within for v in s.outputs) and s.nodes[0].op.name in ("sin", "cos") for s in steps]
        return [10.0 * gap + (s.nodes[0].op.name == "concat") for s, gap in zip(steps, gaps, strict=True)]

    monkeypatch.setattr(step_selection, "step_times_us", prices)
    first = improved(tmp_path)
    monkeypatch.setattr(step_selection, "step_times_us", None)  # nobody asks again
    again = improved(tmp_path)
    assert [str(step.body) for step in again.program.steps] == [str(step.body) for step in first.program.steps]
    lock = lockfile.make([first])
    runs = [e.split[0].runs for e in lock.entries if e.name.endswith("concat")]
    assert sorted(runs) == ["copy", "in place", "in place", "kernel"], "and the kernel that copies"
    assert lockfile.parse(lockfile.text_of(lock)).entries == lock.entries
    assert changes.changes(lock, fresh_one(), lambda graph, choice: True) == []
    kept = lockfile.apply(lock, fresh_one(), lambda graph, choice: True).compiled
    assert [str(step.body) for step in kept.program.steps] == [str(step.body) for step in first.program.steps]
    less = dataclasses.replace(lock, entries=tuple(e for e in lock.entries if e.split[0].runs != "copy"))
    with pytest.raises(CheckError, match=r"fusec\.lock: concat f32\[2,\d+,4,4\].* on h200: has no entry"):
        lockfile.apply(less, fresh_one(), lambda graph, choice: True)
    assert joins(fresh_one().program) == ["c view", "f view", "i view"]


def test_received_plans_are_used_and_stored(machine: Machine, tmp_path: Path) -> None:
    from fusec.gpu.backend import CudnnBackend

    first = build(tmp_path / "there", "none")
    handed = dict(first.backend.entries(first.backend.choices()))
    machine.built.clear()
    machine.emitted.clear()
    here = PlanStore(tmp_path / "here")
    for given in (handed, {}):
        backend = CudnnBackend("none", store=here)
        graphs = {step.graph.key: step.graph for step in compiled().lowered if step is not None}
        assert backend.plans.without_blob(graphs).keys() == given.keys()
        backend.plans.receive((graphs[key], entry) for key, entry in given.items())
        assert backend.plans.without_blob(graphs) == {}
        net = Executable(compiled(), backend)
        assert engines(net) == engines(first)
        assert (machine.built, machine.emitted) == ([], [])
        check(net, 0)
    for key, entry in handed.items():
        place = net.backend.plans.cache.environment  # type: ignore[attr-defined]
        engine, knobs = entry.choice.identity
        here.quarantine(key, place.target, place.cudnn, engine, knobs, "wrong numbers")
    backend = CudnnBackend("none", store=here)
    backend.plans.receive((graphs[key], entry) for key, entry in handed.items())
    with_another = Executable(compiled(), backend)
    assert engines(with_another).isdisjoint(engines(first))
