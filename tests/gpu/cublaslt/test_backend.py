"""Test cuBLASLt and cuDNN together in the GPU backend, on stand-ins: which plan is chosen, stored, named or dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu.stand_in_blaslt import Bindings
from gpu.stand_in_gpu import Machine
from gpu.test_backend import build, compiled
from helpers import assert_close

from fusec.diagnostics import step_times
from fusec.execution.compilation import Compiled
from fusec.gpu.autotune.cache.tuning_cache import KnownChoices
from fusec.gpu.cublaslt import algorithms
from fusec.passes.partition import kernels_only
from fusec.plans.plan_cache import PlanStore
from fusec.plans.plan_filter import PlanFilter
from fusec.plans.plan_record import BLAS, Choice, Entry
from fusec.runtime import Executable, SimulatorBackend

pytest.importorskip("cupy")
pytest.importorskip("cudnn")

TEXT = """graph "g" (%x: f16[4,6,8], %z: f16[4,6,5]) {
  %w = constant [W] : f16[8,5]
  %b = constant [1.0, 2.0, -3.0, 4.0, -1.0] : f16[5]
  %m = matmul(%x, %w)
  %a = add(%m, %b)
  %s = add(%a, %z)
  %r = relu(%s)
  return %r
}""".replace("W", ", ".join(f"{i % 7 - 3}.5" for i in range(40)))


def feeds(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {n: rng.standard_normal(s).astype(np.float16) for n, s in (("x", (4, 6, 8)), ("z", (4, 6, 5)))}


def check(net: Executable, seed: int, text: str = TEXT) -> None:
    want = Executable(compiled(text), SimulatorBackend()).run(None, feeds(seed))
    assert_close(net.run(None, feeds(seed))[0], want[0], 1e-3)


def libraries(net: Executable) -> list[str]:
    return list(net.libraries().values())


@pytest.fixture
def fast(bindings: Bindings) -> Bindings:
    bindings.times_us = {66: 9.0, 71: 4.0, 52: 6.0}
    return bindings


def test_the_faster_library_runs_a_product_and_is_captured(machine: Machine, fast: Bindings, tmp_path: Path) -> None:
    net = build(tmp_path, text=TEXT)
    assert libraries(net) == ["cublaslt"]
    (choice,) = net.backend.choices().values()
    assert (choice.engine, dict(choice.knobs)[0], choice.time_us) == (BLAS, 71, 4.0)
    check(net, 0)
    check(net, 1)
    check(net, 2)
    assert (machine.captured, machine.replayed) == (1, 2)


def test_cudnn_keeps_what_it_is_faster_at(machine: Machine, fast: Bindings, tmp_path: Path) -> None:
    machine.times_us = {7: 1.0}
    net = build(tmp_path, text=TEXT)
    assert libraries(net) == ["cudnn"]
    check(net, 0)


def test_the_next_process_revives_the_algorithm_without_asking(
    machine: Machine, fast: Bindings, tmp_path: Path
) -> None:
    build(tmp_path, text=TEXT)
    machine.built.clear()
    machine.emitted.clear()
    machine.now_us, fast.asked = 0.0, 0
    net = build(tmp_path, text=TEXT)
    assert libraries(net) == ["cublaslt"]
    assert (fast.asked, machine.built, machine.emitted, machine.now_us) == (0, [], [], 0.0)
    check(net, 0)
    check(net, 1)


def test_plans_chosen_with_and_without_the_library_have_separate_keys(
    machine: Machine, fast: Bindings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as without:
        without.setattr(algorithms, "version", lambda: "")
        assert libraries(build(tmp_path, text=TEXT)) == ["cudnn"]
    assert libraries(build(tmp_path, text=TEXT)) == ["cublaslt"]
    monkeypatch.setattr(algorithms, "version", lambda: "")
    net = build(tmp_path, text=TEXT)
    assert libraries(net) == ["cudnn"]
    check(net, 0)


def test_a_wrong_algorithm_is_put_in_quarantine(machine: Machine, fast: Bindings, tmp_path: Path) -> None:
    fast.wrong = {71}
    net = build(tmp_path, text=TEXT)
    (choice,) = net.backend.choices().values()
    assert dict(choice.knobs)[0] == 52
    check(net, 0)
    fast.wrong = set()
    (choice,) = build(tmp_path, "full", text=TEXT).backend.choices().values()
    assert dict(choice.knobs)[0] == 52


def test_an_algorithm_that_fails_gives_way(machine: Machine, fast: Bindings, tmp_path: Path) -> None:
    net = build(tmp_path, text=TEXT)
    fast.failing = {71}
    with pytest.warns(UserWarning, match="cuBLASLt failed, so the next plan"):
        check(net, 0)
    check(net, 1)
    (choice,) = net.backend.choices().values()
    assert dict(choice.knobs)[0] != 71


def test_an_algorithm_that_is_no_longer_taken_is_chosen_anew(machine: Machine, fast: Bindings, tmp_path: Path) -> None:
    build(tmp_path, text=TEXT)
    fast.algorithms = (66, 52)
    with pytest.warns(UserWarning, match="does not take the algorithm"):
        net = build(tmp_path, text=TEXT)
    (choice,) = net.backend.choices().values()
    assert dict(choice.knobs)[0] == 52
    check(net, 0)


def test_a_kernel_runs_an_activation_that_the_library_lacks(machine: Machine, fast: Bindings, tmp_path: Path) -> None:
    from fusec.gpu.backend import CudnnBackend

    machine.times_us = {7: 30.0, 4: 30.0, 3: 30.0}
    machine.runtime_compiled = True
    text = TEXT.replace("relu", "gelu").replace("%s = add(%a, %z)", "%s = sub(%a, %z)")
    of = compiled(text)
    backend = CudnnBackend("full", store=PlanStore(tmp_path))
    program = backend.tune_steps(of.program, True, 1.0)
    net = Executable(type(of)(of.source, program, of.target, of.options, of.judge), backend)
    assert "cublaslt" in libraries(net)
    assert "gelu" not in next(step.signature for step in net.libraries())
    check(net, 0, text)


def test_named_plans_of_the_library_are_built_without_measuring(
    machine: Machine, fast: Bindings, tmp_path: Path
) -> None:
    from fusec.gpu.backend import CudnnBackend

    (key,) = {lowered.graph.key for lowered in compiled(TEXT).lowered if lowered is not None}
    choice = Choice(BLAS, ((0, 52), *((i, i) for i in range(1, 9))), 2048, 6.0)
    backend: Any = CudnnBackend("none", store=PlanStore(tmp_path), known=KnownChoices({key: [Entry(choice)]}))
    net = Executable(compiled(TEXT), backend)
    assert backend.choices()[key].identity == choice.identity
    check(net, 0)
    assert libraries(build(tmp_path / "other", "none", text=TEXT)) == ["cudnn"]


def test_bench_and_explain_name_the_library(machine: Machine, fast: Bindings, tmp_path: Path) -> None:
    net = build(tmp_path, text=TEXT)
    found = step_times.measure(net, feeds(0), 3)
    assert [step.kind for step in found.steps] == ["cublaslt"]
    said = net.explain()
    assert [step.runs_as for step in said.steps if step.kind == "cudnn"] == ["cublaslt"]
    assert said.totals["cublaslt"] == 1 and "1 steps of cuBLASLt" in said.summary
    assert said.totals["cudnn"] == 0
    machine.times_us = {7: 1.0}
    other = build(tmp_path / "other", text=TEXT).explain()
    assert other.totals["cublaslt"] == 0 and "cuBLASLt" not in str(other)


DECLINED = """graph "g" (%x: f32[4,6,8], %k: f32[4,6,8]{2,0,1}) {
  %w = constant [W] : f32[8,8]{1,0}
  %a = matmul(%x, %w)
  %t = transpose(%k) {perm=[0,2,1]} : f32[4,8,6]
  %s = matmul(%a, %t)
  return %s
}""".replace("W", ", ".join(f"{i % 7 - 3}.5" for i in range(64)))


def left_to_kernels(text: str) -> Compiled:
    of = compiled(text)
    return Compiled(of.source, kernels_only(of.source), of.target, of.options, of.judge)


def run_declined(path: Path, text: str, tune: str = "quick") -> tuple[Any, list[np.ndarray], list[np.ndarray]]:
    """The executable, and its results of several calls next to the right ones."""
    from fusec.gpu.backend import CudnnBackend

    net = Executable(left_to_kernels(text), CudnnBackend(tune, store=PlanStore(path)))
    got: list[np.ndarray] = []
    want: list[np.ndarray] = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        feeds = {s.name: rng.standard_normal(s.shape).astype(s.dtype) for s in net.inputs}
        got += net.run(None, feeds)
        want += Executable(left_to_kernels(text), SimulatorBackend()).run(None, feeds)
    return net, got, want


@pytest.mark.parametrize("tune", ["quick", "none"])
def test_products_that_cudnn_declines_are_the_librarys(
    machine: Machine, fast: Bindings, tmp_path: Path, tune: str
) -> None:
    net, got, want = run_declined(tmp_path, DECLINED, tune)
    for array, right in zip(got, want, strict=True):
        assert_close(array, right, 1e-5)
    assert list(net.libraries().values()).count("cublaslt") == 2
    assert {told[-1] for told in fast.operations.values()} == {68}, "true fp32"
    assert [s.runs_as for s in net.explain().steps].count("cublaslt") == 2
    assert machine.captured in (1, 2), "in order, and perhaps side by side as well"


def test_a_product_it_computes_wrongly_or_lacks_is_left_to_the_reference(
    machine: Machine, fast: Bindings, tmp_path: Path
) -> None:
    fast.wrong = {66, 71, 52}
    net, got, want = run_declined(tmp_path, DECLINED)
    assert_close(got[0], want[0], 1e-5)  # the stand-in does not capture what CuPy runs
    assert "cublaslt" not in net.libraries().values()
    fast.wrong, fast.failing = set(), {66, 71, 52}
    assert "cublaslt" not in run_declined(tmp_path / "failing", DECLINED)[0].libraries().values()
    fast.wrong, fast.failing = {66}, set()
    net, got, want = run_declined(tmp_path / "other", DECLINED)
    assert 71 in fast.ran and "cublaslt" in net.libraries().values()
    assert_close(got[0], want[0], 1e-5)


def algorithms_that_ran(machine: Machine, fast: Bindings, path: Path, tune: str = "quick") -> set[int]:
    """Return the algorithms of the products of DECLINED, as a model that is captured runs them."""
    net, got, want = run_declined(path, DECLINED, tune)
    for array, right in zip(got, want, strict=True):
        assert_close(array, right, 1e-5)
    fast.ran.clear()
    rng = np.random.default_rng(9)
    net.run(None, {s.name: rng.standard_normal(s.shape).astype(s.dtype) for s in net.inputs})
    return set(fast.ran)


def test_the_fastest_algorithm_of_a_declined_product_runs_and_is_stored(
    machine: Machine, fast: Bindings, tmp_path: Path
) -> None:
    assert algorithms_that_ran(machine, fast, tmp_path) == {71}
    fast.times_us = {66: 1.0}
    assert algorithms_that_ran(machine, fast, tmp_path) == {71}, "nothing is timed again"
    assert algorithms_that_ran(machine, fast, tmp_path, "none") == {71}
    assert algorithms_that_ran(machine, fast, tmp_path / "other") == {66}


def test_without_tuning_the_first_right_algorithm_of_a_declined_product_runs(
    machine: Machine, fast: Bindings, tmp_path: Path
) -> None:
    assert algorithms_that_ran(machine, fast, tmp_path, "none") == {66}
    fast.wrong = {66}
    assert algorithms_that_ran(machine, fast, tmp_path / "wrong", "none") == {71}
    fast.wrong, fast.failing = {66}, {71}
    assert algorithms_that_ran(machine, fast, tmp_path / "failing", "none") == {52}


def test_a_wrong_algorithm_of_a_declined_product_is_put_in_quarantine(
    machine: Machine, fast: Bindings, tmp_path: Path
) -> None:
    fast.wrong = {71}
    assert algorithms_that_ran(machine, fast, tmp_path) == {52}
    fast.wrong = set()
    assert algorithms_that_ran(machine, fast, tmp_path, "none") == {52}


def test_a_declined_product_keeps_to_the_limit_of_the_workspace(
    machine: Machine, fast: Bindings, tmp_path: Path
) -> None:
    from fusec.gpu.backend import CudnnBackend

    backend = CudnnBackend("quick", store=PlanStore(tmp_path), plan_filter=PlanFilter(workspace_limit=1023))
    net = Executable(left_to_kernels(DECLINED), backend)
    net.run(None, {s.name: np.ones(s.shape, s.dtype) for s in net.inputs})
    assert set(fast.ran) == {66}, "the others need 1024 bytes and more"


def test_a_declined_product_in_bf16_is_the_librarys(machine: Machine, fast: Bindings, tmp_path: Path) -> None:
    net = run_declined(tmp_path, DECLINED.replace("f32", "bf16"))[0]
    assert list(net.libraries().values()).count("cublaslt") == 2
