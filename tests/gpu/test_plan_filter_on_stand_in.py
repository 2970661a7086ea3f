"""Test heuristics, engines and workspace on the stand-in for a GPU: no other plan is built, stored or reused."""

from __future__ import annotations

from pathlib import Path

import pytest
from gpu.stand_in_gpu import Machine
from gpu.test_backend import check, compiled

from fusec.errors import ExecutionError
from fusec.plans.plan_cache import PlanStore
from fusec.plans.plan_filter import PlanFilter
from fusec.runtime import Executable


def engine(store: PlanStore, tune: str, plan_filter: PlanFilter | None = None) -> int:
    """Run a model and return the engine of its one plan."""
    from fusec.gpu.backend import CudnnBackend

    net = Executable(compiled(), CudnnBackend(tune, store=store, plan_filter=plan_filter))
    check(net, 0)
    (choice,) = net.backend.choices().values()  # type: ignore[attr-defined]
    return choice.engine


@pytest.mark.parametrize("tune", ["none", "quick", "full"])
def test_engines_are_left_out_or_insisted_on(machine: Machine, tmp_path: Path, tune: str) -> None:
    machine.times_us = {7: 1.0, 4: 20.0, 3: 5.0}  # cuDNN lists 7, 4, 3
    store = PlanStore(tmp_path)
    assert engine(store, tune) == 7
    machine.built.clear()
    first = 4 if tune == "none" else 3
    assert engine(store, tune, PlanFilter.of(engines="-7")) == first, "the stored choice is of other options"
    assert 7 not in machine.built
    assert engine(store, tune, PlanFilter.of(engines="4")) == 4
    assert engine(store, tune) == 7
    with pytest.raises(ExecutionError, match="is left out by the option engines"):
        engine(store, tune, PlanFilter.of(engines="5"))


@pytest.mark.parametrize("tune", ["none", "quick"])
def test_a_plan_with_a_larger_workspace_is_not_used(machine: Machine, tmp_path: Path, tune: str) -> None:
    machine.times_us = {7: 9.0, 4: 5.0, 3: 1.0}  # with workspaces of 0, 64 and 128 bytes
    store = PlanStore(tmp_path)
    best = engine(store, tune)
    assert best == (7 if tune == "none" else 3)
    assert engine(store, tune, PlanFilter.of(workspace_limit=64)) == (7 if tune == "none" else 4)
    assert engine(store, tune, PlanFilter.of(workspace_limit=0)) == 7
    assert engine(store, tune) == best


def test_the_modes_of_the_heuristics_are_those_of_the_caller(machine: Machine, tmp_path: Path) -> None:
    store = PlanStore(tmp_path)
    engine(store, "none")
    engine(store, "none", PlanFilter.of("B"))
    engine(store, "none", PlanFilter.of("fallback,B"))
    assert machine.modes == [[0, 1], [2], [1, 2]], "each filter has choices of its own"


def test_a_named_plan_that_is_left_out_is_replaced(machine: Machine, tmp_path: Path) -> None:
    """A `.fusec` file may name a plan that the caller leaves out when it is loaded."""
    from fusec.gpu.autotune.cache.tuning_cache import KnownChoices
    from fusec.gpu.backend import CudnnBackend
    from fusec.plans.plan_record import Choice, Entry

    (lowered,) = [each for each in compiled().lowered if each is not None]
    known = KnownChoices({lowered.graph.key: [Entry(Choice(3, ((2, 2),)))]})
    free, limited = (
        Executable(compiled(), CudnnBackend("none", known, PlanStore(tmp_path / str(limit)), plan_filter=of))
        for limit, of in ((None, PlanFilter()), (0, PlanFilter.of(workspace_limit=0)))
    )
    check(free, 0)
    check(limited, 0)
    assert [c.engine for c in free.backend.choices().values()] == [3]  # type: ignore[attr-defined]
    assert [c.engine for c in limited.backend.choices().values()] == [7]  # type: ignore[attr-defined]
