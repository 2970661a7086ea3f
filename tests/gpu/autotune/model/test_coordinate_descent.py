"""Test choices within the model: against a table of times, and on a stand-in GPU whose plans affect each other."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu.kernels.cases import FIGURES
from gpu.kernels.emulator import needs_compiler
from gpu.stand_in_gpu import Machine
from gpu.test_backend import build, check, compiled, fresh

from fusec.errors import ExecutionError
from fusec.gpu.autotune.model.coordinate_descent import MAX_OPTIONS, NEAR, Contest, contests, descend
from fusec.gpu.kernels import find
from fusec.lowering.packing import unpack
from fusec.runtime import Executable, SimulatorBackend

pytest.importorskip("cupy")
pytest.importorskip("cudnn")


@dataclass
class Sums:
    """A whole that takes the sum of its plans, and what pairs of them add, give or take."""

    times_us: Mapping[str, tuple[float, ...]]
    pairs_us: Mapping[frozenset[tuple[str, int]], float] = field(default_factory=dict[Any, float])
    noise: float = 0.002
    drift: float = 0.0
    refused: frozenset[tuple[str, int]] = frozenset()
    rng: random.Random = field(default_factory=lambda: random.Random(2))
    recordings: list[dict[str, int]] = field(default_factory=list[dict[str, int]])
    runs: int = 0
    now_us: float = 0.0  # of the recording that ran last

    def captured(self, options: Mapping[str, int]) -> Callable[[], None] | None:
        if self.refused & set(options.items()):
            return None
        self.recordings.append(dict(options))
        taken = {(key, options.get(key, 0)) for key in self.times_us}
        us = sum(self.times_us[key][option] for key, option in taken)
        us += sum(more for pair, more in self.pairs_us.items() if pair <= taken)

        def run() -> None:
            self.now_us = us

        return run

    def time_us(self, run: Callable[[], None]) -> float:
        run()
        self.runs += 1
        return self.now_us * (1.0 + self.drift * self.runs + self.noise * self.rng.random())

    def contests(self) -> list[Contest]:
        return [Contest(key, len(times)) for key, times in self.times_us.items()]


def always() -> bool:
    return True


def test_the_plan_that_makes_the_whole_faster_is_found() -> None:
    whole = Sums({"a": (100.0, 104.0, 90.0), "b": (50.0, 45.0), "c": (10.0, 10.0)})
    found = descend(whole.contests(), whole, always)
    assert found == {"a": 2, "b": 1}
    assert len(whole.recordings) == 1 + 4


@pytest.mark.parametrize(("other_us", "rounds"), [(104.0, 3), (100.5, 3), (90.0, 9)])
def test_a_plan_is_timed_until_it_cannot_win_often_enough(other_us: float, rounds: int) -> None:
    whole = Sums({"a": (100.0, other_us)}, noise=0.0)
    assert descend(whole.contests(), whole, always) is not None
    assert whole.runs == (1 + 2 * rounds) + (1 + 2 * 9), "the last rounds measure the gain of all"


def test_effects_of_plans_on_each_other_are_measured() -> None:
    pairs = {frozenset({("a", 1), ("b", 0)}): 30.0}
    whole = Sums({"a": (100.0, 90.0), "b": (50.0, 45.0)}, pairs)
    found = descend(whole.contests(), whole, always)
    assert found == {"b": 1}, "a's other plan was tried with b's first one"


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_a_clock_that_drifts_change_nothing(seed: int) -> None:
    whole = Sums({"a": (100.0, 100.0, 100.0)}, noise=0.02, drift=0.001, rng=random.Random(seed))
    found = descend(whole.contests(), whole, always)
    assert found == {}


def test_a_clock_that_drifts_hides_no_gain() -> None:
    whole = Sums({"a": (100.0, 97.0)}, drift=0.005)
    found = descend(whole.contests(), whole, always)
    assert found == {"a": 1}


def test_a_clearly_slower_option_costs_few_runs() -> None:
    whole, same = (Sums({"a": (100.0, other)}) for other in (120.0, 100.0))
    for each in (whole, same):
        descend(each.contests(), each, always)
    assert whole.runs < same.runs


def test_descent_ends_with_its_time_and_keeps_its_result() -> None:
    left = iter([True, False, False, False, False])
    whole = Sums({"a": (100.0, 90.0, 80.0), "b": (50.0, 45.0)})
    found = descend(whole.contests(), whole, lambda: next(left))
    assert found == {"a": 1}
    assert len(whole.recordings) == 1 + 1


def test_a_model_that_cannot_be_recorded_is_left_alone() -> None:
    whole = Sums({"a": (100.0, 50.0, 60.0)}, refused=frozenset({("a", 1)}))
    found = descend(whole.contests(), whole, always)
    assert found == {"a": 2}
    assert descend([], Nothing(), always) is None


class Nothing(Sums):
    def __init__(self) -> None:
        super().__init__({})

    def captured(self, options: Mapping[str, int]) -> None:
        return None


def test_contests_are_steps_with_a_large_share_and_close_options() -> None:
    known: dict[str, list[float]] = {
        "few": [20.0, 20.0 * NEAR - 0.1, 20.0 * NEAR + 0.1],
        "many": [10.0, 10.1, 10.2, 10.3, 10.4],
        "light": [0.5, 0.5],
        "alone": [70.0],
        "far": [60.0, 100.0],
        "none": [],
    }
    counts = {**dict.fromkeys(known, 1), "many": 4}
    assert contests(known, counts) == [Contest("many", MAX_OPTIONS), Contest("few", 2)]


# on the stand-in -----------------------------------------------------------------------------------


SOFTMAX = """graph "g" (%x: f32[64,96]) {
  %s = softmax(%x) {axis=1}
  return %s
}"""


def descent(path: Path, tune: str = "quick") -> Any:
    net = build(path, tune)
    net.rehearse(net.backend.tune_whole_model)
    return net


def engines(net: Any) -> list[int]:
    return [choice.engine for choice in net.backend.choices().values()]


def test_a_plan_that_is_faster_within_the_model_is_chosen_and_stored(machine: Machine, tmp_path: Path) -> None:
    machine.times_us = {7: 10.0, 4: 10.5, 3: 30.0}
    machine.within_us = {7: 10.0, 4: 6.0, 3: 1.0}
    net = descent(tmp_path)
    found = net.backend.descent
    assert engines(net) == [4], "3 is no match by itself"
    assert len(found) == 1
    for seed in range(3):
        check(net, seed)
    machine.built.clear()
    again = descent(tmp_path)
    assert (engines(again), machine.built, again.backend.descent) == ([4], [], None), "it was kept, serialized"
    check(again, 5)


def test_nothing_changes_where_the_first_plan_is_fastest_within_the_model(machine: Machine, tmp_path: Path) -> None:
    machine.times_us = {7: 10.0, 4: 10.5, 3: 11.0}
    net = descent(tmp_path)
    assert engines(net) == [7]
    assert net.backend.descent == {}
    check(net, 1)


def test_a_plan_that_computes_something_else_is_not_taken(machine: Machine, tmp_path: Path) -> None:
    machine.times_us, machine.wrong = {7: 10.0, 4: 10.5, 3: 30.0}, {4}
    machine.within_us = {7: 10.0, 4: 6.0}
    net = descent(tmp_path)
    assert engines(net) == [7]
    check(net, 2)


@needs_compiler
def test_kernels_to_time_are_compiled_in_threads(machine: Machine, tmp_path: Path) -> None:
    from fusec.gpu.kernels.codegen.kernel import variants_of
    from fusec.gpu.launch.kernel_launcher import Launcher

    net = build(tmp_path, text=SOFTMAX)
    (step,) = net.compiled.program.steps
    kernel = find(step.nodes, step.outputs, FIGURES)
    assert kernel is not None and kernel.others
    variants = net.backend.steps.variants
    variants._launcher = launcher = Launcher()
    asked = {kernel.key: kernel}
    missing = {launch.entry for _, launch in launcher.missing(variants_of(kernel))}
    assert len(missing) > 1
    variants.compile_soon(asked)
    assert set(launcher._coming) == missing
    before = len(machine.compiled)
    assert variants.times_us(asked, 0)[kernel.key] < float("inf")
    assert len(machine.compiled) <= before + len(missing), "none is compiled twice"
    variants.compile_soon(asked)
    assert not launcher._coming, "what was measured is not compiled again"


@needs_compiler
@pytest.mark.parametrize("agrees", [True, False])
def test_a_kernel_that_is_faster_within_the_model_is_stored_if_it_computes_the_same(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, agrees: bool
) -> None:
    from fusec.gpu.kernels.codegen.kernel import variants_of
    from fusec.gpu.launch.kernel_launcher import Launcher

    net = build(tmp_path, text=SOFTMAX)
    (step,) = net.compiled.program.steps
    kernel = find(step.nodes, step.outputs, FIGURES)
    assert kernel is not None and kernel.others
    net.backend.steps.variants.times_us({kernel.key: kernel}, 0)
    monkeypatch.setattr(
        Launcher, "times_us", lambda self, each: [10.0] * len(variants_of(each)) if each == kernel else []
    )
    slow, launched = net.backend._launcher.fastest(kernel), Launcher.bind

    def bind(self: Any, each: Any, memory: Any) -> Any:
        run, taken = launched(self, each, memory), self.fastest(each).key

        def timed(*instead: Any) -> None:
            run(*instead)
            machine.do(lambda: setattr(machine, "now_us", machine.now_us + (20.0 if taken == slow.key else 5.0)))

        return timed

    monkeypatch.setattr(Launcher, "bind", bind)
    if not agrees:
        monkeypatch.setattr(Launcher, "agree", lambda *ways: False)
    net.rehearse(net.backend.tune_whole_model)
    assert list(net.backend.descent) == [kernel.key]
    assert (net.backend._launcher.fastest(kernel).key != slow.key) == agrees
    assert net.backend.plans.cache.kernel_variant(kernel.key)["fastest"] == net.backend._launcher.fastest(kernel).key
    x = np.random.default_rng(0).standard_normal((64, 96)).astype(np.float32)
    want = np.exp(x) / np.exp(x).sum(1, keepdims=True)
    np.testing.assert_allclose(net(x), want, rtol=1e-4)
    machine.compiled_elsewhere.clear()
    again = build(tmp_path, text=SOFTMAX).backend
    again.steps.variants.times_us({kernel.key: kernel}, 0)
    again._launcher.compile([again._launcher.fastest(kernel)])
    assert machine.compiled_elsewhere == [], "the next process finds what was compiled for the variant"


def test_without_tuning_or_time_nothing_is_tried(machine: Machine, tmp_path: Path) -> None:
    machine.within_us = {7: 10.0, 4: 6.0}
    net = descent(tmp_path, "none")
    assert (net.backend.descent, machine.captured) == (None, 0)
    net = build(tmp_path)
    net.backend._budget_s = 0.0
    net.rehearse(net.backend.tune_whole_model)
    assert (net.backend.descent, machine.captured) == (None, 0)


def with_state(path: Path) -> Any:
    from fusec.gpu.backend import CudnnBackend
    from fusec.plans.plan_cache import PlanStore

    made = compiled()
    made = replace(made, options=replace(made.options, state=(("x", ""),)))
    return Executable(made, CudnnBackend("quick", store=PlanStore(path)))


def test_programs_with_state_are_left_alone(machine: Machine, tmp_path: Path) -> None:
    net = with_state(tmp_path)
    net.rehearse(net.backend.tune_whole_model)
    assert machine.captured == 0
    net.bind(x=fresh(0))
    net.rehearse(net.backend.tune_whole_model, {"x": fresh(1)})
    assert machine.captured == 0, "its values would be lost"
    np.testing.assert_array_equal(net.value("x"), fresh(0))
    assert len(net.run(None, {})) == 2


def test_programs_with_state_are_tried_with_given_values(machine: Machine, tmp_path: Path) -> None:
    machine.within_us = {7: 10.0, 4: 6.0}
    net = with_state(tmp_path)
    filled: list[str] = []

    def choose(inputs: Any, *more: Any) -> Any:
        filled.extend(f"{type}" for _, type in inputs)
        np.testing.assert_array_equal(unpack(net._state.buffers["x"], net._state.values["x"].type), fresh(1))
        return net.backend.tune_whole_model(inputs, *more)

    net.rehearse(choose, {"x": fresh(1)})
    assert filled == [], "only other inputs are random"
    assert machine.captured and net.backend.descent
    with pytest.raises(ExecutionError, match="has no value"):
        net.value("x")
    net.bind(x=fresh(2))
    want = Executable(compiled(), SimulatorBackend()).run(None, {"x": fresh(2)})
    for _ in range(3):
        for got, right in zip(net.run(None, {}), want, strict=True):
            np.testing.assert_array_equal(got.get() if hasattr(got, "get") else got, right)


def test_a_step_that_fails_is_left_to_the_first_call(machine: Machine, tmp_path: Path) -> None:
    net = build(tmp_path)
    machine.failing = {engines(net)[0]}
    net.rehearse(net.backend.tune_whole_model)
    assert net.backend.descent is None
    with pytest.warns(UserWarning, match="the next plan is used"):
        check(net, 3)


@pytest.mark.parametrize("wrong", [True, False])
def test_the_plan_in_use_is_verified(machine: Machine, tmp_path: Path, wrong: bool) -> None:
    net = descent(tmp_path)
    net(fresh(0))
    machine.wrong = set(engines(net)) if wrong else set()
    assert net.verify().ok != wrong
    machine.wrong = set()
    check(net, 2)
