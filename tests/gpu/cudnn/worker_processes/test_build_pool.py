"""Test plans that workers build: several at the same time, in the order they are needed, and after failures."""

from __future__ import annotations

import base64
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from gpu.cudnn.read_back import workspace_bytes
from gpu.cudnn_graphs import conv
from gpu.stand_in_gpu import Machine, Pygraph
from gpu.test_backend import check, compiled

from fusec.errors import ExecutionError, TargetError
from fusec.gpu.cudnn.legality.oracle import PROBE, Oracle
from fusec.gpu.cudnn.worker_processes.build_pool import BuildPool
from fusec.gpu.cudnn.worker_processes.worker_process import WorkerDeath
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.plans.plan_cache import PlanStore
from fusec.plans.plan_filter import PlanFilter
from fusec.plans.plan_record import Choice
from fusec.plans.sqlite_cache import Store
from fusec.plans.verdict import Plan
from fusec.runtime import Executable
from fusec.targets.target import load

CHOICES = [Choice(engine, ((2, engine),)) for engine in range(6)]


class Shop:
    """A crew that answers with the engine's number as the plan, each when it is let."""

    def __init__(self, workers: int = 1, **special: Callable[[], dict[str, Any] | WorkerDeath]):
        self.workers, self.special = workers, special
        self.built: dict[str, tuple[Plan, bytes]] = {}
        self.plan_filter, self.offered = PlanFilter(), tuple[Plan, ...]()
        self.similar: CudnnGraph | None = None
        self.lock = threading.Condition()
        self.allowed = 1 << 20  # answers
        self.passing: set[int] = set()  # engines that answer in any case
        self.at_once = self.most = self.closed = 0
        self.asked: list[int] = []

    def exchange(self, question: dict[str, Any]) -> tuple[dict[str, Any] | WorkerDeath, Any]:
        engine = Choice.from_json(question["choice"]).engine
        with self.lock:
            self.asked.append(engine)
            self.at_once += 1
            self.most = max(self.most, self.at_once)
            self.lock.notify_all()
            self.lock.wait_for(lambda: self.allowed > 0 or engine in self.passing)
            self.allowed -= engine not in self.passing
            self.at_once -= 1
        if f"e{engine}" in self.special:
            return self.special[f"e{engine}"](), None
        return {"choice": question["choice"], "blob": base64.b64encode(b"plan %d" % engine).decode()}, None

    def plans(self, graph: CudnnGraph) -> tuple[Plan, ...]:
        return self.offered

    def assumed_from(self, graph: CudnnGraph) -> CudnnGraph | None:
        return self.similar

    def close(self) -> None:
        with self.lock:
            self.closed += 1
            self.lock.notify_all()

    def let(self, count: int) -> None:
        with self.lock:
            self.allowed += count
            self.lock.notify_all()

    def let_pass(self, engine: int) -> None:
        with self.lock:
            self.passing.add(engine)
            self.lock.notify_all()

    def wait_until_busy(self, count: int) -> None:
        with self.lock:
            assert self.lock.wait_for(lambda: self.at_once == count, 10)

    def wait_until_closed(self, count: int) -> None:
        with self.lock:
            assert self.lock.wait_for(lambda: self.closed == count, 10)


def expect(builders: BuildPool, *engines: int) -> None:
    builders.expect([(PROBE, CHOICES[engine]) for engine in engines])


def test_several_are_built_at_once_and_no_more_than_the_limit() -> None:
    shop = Shop(2)
    shop.allowed = 0
    builders = BuildPool(shop, ends=True)
    expect(builders, *range(6))
    shop.wait_until_busy(2)
    shop.let(6)
    assert [builders.plan(PROBE, choice) for choice in CHOICES] == [b"plan %d" % engine for engine in range(6)]
    assert shop.most == 2
    assert builders.plan(PROBE, CHOICES[0]) is None, "what was handed over is not kept"
    builders.close()
    shop.wait_until_closed(1)
    shop.let(6)
    expect(builders, *range(6))
    assert builders.plan(PROBE, CHOICES[5]) == b"plan 5"


def test_the_awaited_plan_is_built_next_and_dropped_plans_are_not_built() -> None:
    shop = Shop()
    shop.allowed = 0
    builders = BuildPool(shop)
    expect(builders, 0, 1, 2, 3, 4)
    shop.wait_until_busy(1)
    expect(builders, 1, 2, 3)
    threading.Timer(0.05, shop.let, [2]).start()
    assert builders.plan(PROBE, CHOICES[3]) == b"plan 3"
    assert shop.asked[:2] == [0, 3]
    expect(builders)
    shop.let(9)
    assert builders.plan(PROBE, CHOICES[4]) is None
    assert 4 not in shop.asked
    builders.close()
    assert shop.closed == 0, "the crew is somebody else's"


def test_a_plan_that_kills_its_worker_is_an_error_and_plans_not_built_there_are_built_here() -> None:
    shop = Shop(
        e0=lambda: {"failed": "cuDNN builds no plan"},
        e1=lambda: WorkerDeath("cuDNN killed its process with SIGSEGV", "SIGSEGV", by_own_fault=True),
        e2=lambda: WorkerDeath("the worker was ended by SIGKILL", "SIGKILL"),
        e3=lambda: {"choice": CHOICES[4].to_json(), "blob": base64.b64encode(b"another").decode()},
        e4=defect,
    )
    builders = BuildPool(shop)
    expect(builders, *range(6))
    with pytest.raises(ExecutionError, match="SIGSEGV"):
        builders.plan(PROBE, CHOICES[1])
    assert [builders.plan(PROBE, CHOICES[place]) for place in (0, 2, 3)] == [None] * 3
    with pytest.raises(RuntimeError, match="Traceback"):
        builders.plan(PROBE, CHOICES[4])
    assert builders.plan(PROBE, CHOICES[5]) == b"plan 5"


def defect() -> dict[str, Any]:
    raise RuntimeError("Traceback")


def test_without_workers_plans_are_built_here() -> None:
    """Two threads fail, and the second one after the user was warned."""

    def start() -> dict[str, Any]:
        raise TargetError("no driver")

    shop = Shop(2, **{f"e{engine}": start for engine in range(6)})
    shop.allowed = 0
    builders = BuildPool(shop)
    expect(builders, *range(6))
    shop.wait_until_busy(2)
    shop.let_pass(0)
    with pytest.warns(UserWarning, match="no driver"):
        assert builders.plan(PROBE, CHOICES[0]) is None
    shop.let_pass(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert builders.plan(PROBE, CHOICES[1]) is None
        expect(builders, *range(6))
        assert builders.plan(PROBE, CHOICES[0]) is None


def test_few_plans_are_built_here_and_no_plan_is_built_twice() -> None:
    shop = Shop(4)
    builders = BuildPool(shop)
    expect(builders, 0, 1)
    assert builders.plan(PROBE, CHOICES[0]) is None and shop.asked == []
    shop.built[PROBE.key] = (Plan(0, CHOICES[0].knobs, False, 0, True), b"built before")
    expect(builders, *range(4))
    assert builders.plan(PROBE, CHOICES[0]) == b"built before"
    assert builders.plan(PROBE, CHOICES[1]) == b"plan 1" and 0 not in shop.asked
    strict = BuildPool(shop, plan_filter=PlanFilter(deterministic=True))
    expect(strict, *range(4))
    assert strict.plan(PROBE, CHOICES[0]) == b"plan 0", "which may give other bits from run to run"


@pytest.mark.cudnn
def test_a_process_builds_the_plan_that_was_asked_for(tmp_path: Path) -> None:
    from fusec.gpu.cudnn.plans.plan_serialization import serialize

    target = load("h200")
    graphs = [PROBE, conv("bias", "sigmoid")]
    firsts = {key: each[0] for key, each in serialize(graphs, target, count=1, workers=1).items()}
    with Oracle(target, store=Store(tmp_path / "answers.sqlite"), workers=1) as oracle:
        builders = BuildPool(oracle)
        wrong = Choice(4711, ())
        builders.expect([*((graph, firsts[graph.key].choice) for graph in graphs), (PROBE, wrong)])
        for graph in graphs:
            blob = builders.plan(graph, firsts[graph.key].choice)
            assert blob is not None
            assert workspace_bytes(graph, blob, target) == firsts[graph.key].choice.workspace_bytes
        assert builders.plan(PROBE, wrong) is None
        strict = BuildPool(oracle, plan_filter=PlanFilter(deterministic=True))
        strict.expect([*((graph, firsts[graph.key].choice) for graph in graphs), (PROBE, wrong)])
        assert strict.plan(PROBE, firsts[PROBE.key].choice) is not None


def test_the_backend_reads_what_another_process_built(machine: Machine, tmp_path: Path) -> None:
    """And builds none of these itself; the fastest is found among them all the same."""
    from fusec.gpu.backend import CudnnBackend

    machine.runtime_compiled = True
    machine.times_us = {7: 30.0, 4: 5.0, 3: 20.0}
    asked: list[Choice] = []

    class Process(Shop):
        def exchange(self, question: dict[str, Any]) -> tuple[dict[str, Any] | WorkerDeath, Any]:
            choice = Choice.from_json(question["choice"])
            asked.append(choice)
            pygraph = machine.emit(CudnnGraph.from_json(question["graph"]))
            pygraph.selected = machine.engines.index(choice.engine)
            blob = base64.b64encode(bytes(pygraph.serialize())).decode()
            return {"choice": choice.to_json(), "blob": blob}, None

    def build() -> Executable:
        backend = CudnnBackend("quick", store=PlanStore(tmp_path), build_pool=BuildPool(Process(2)))
        return Executable(compiled(), backend)

    net = build()
    backend = net.backend
    assert isinstance(backend, CudnnBackend)
    assert {choice.engine for choice in backend.choices().values()} == {4}
    assert {choice.engine for choice in asked} == {7, 4, 3} and machine.built == []
    check(net, 0)
    machine.revived.clear()
    again = build()
    assert machine.revived == [4] and machine.built == [], "it is kept"
    check(again, 0)


@pytest.mark.parametrize("created", [True, False])
def test_plans_that_a_worker_listed_are_created_by_name(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, created: bool
) -> None:
    """To list them again takes longer. A plan that cuDNN does not create by name is still found in its list."""
    from fusec.gpu.backend import CudnnBackend

    if not created:
        monkeypatch.setattr(Pygraph, "create_execution_plan", _declined)
    machine.times_us = {7: 30.0, 4: 5.0, 3: 20.0}
    shop = Shop()
    shop.offered = tuple(Plan(engine, ((2, place),), True) for place, engine in enumerate(machine.engines))
    backend = CudnnBackend("quick", store=PlanStore(tmp_path), build_pool=BuildPool(shop))
    net = Executable(compiled(), backend)
    assert {choice.engine for choice in backend.choices().values()} == {4}
    assert set(machine.built) == {7, 4, 3}
    assert bool(machine.modes) is not created
    check(net, 0)


def _declined(*_: Any) -> None:
    raise RuntimeError("no such plan")


def test_plans_of_a_worker_are_used_only_where_they_are_all() -> None:
    """With a filter, or without tensor cores, a worker's list has only the plans that it built."""
    plan = Plan(3, (), True)
    for pool_filter, workers_filter, graph, similar, wanted in (
        (PlanFilter(), PlanFilter(), PROBE, None, (plan,)),
        (PlanFilter(deterministic=True), PlanFilter(), PROBE, None, ()),
        (PlanFilter(), PlanFilter(deterministic=True), PROBE, None, ()),
        (PlanFilter(), PlanFilter(), replace(PROBE, tensor_cores=False), None, ()),
        (PlanFilter(), PlanFilter(), PROBE, PROBE, ()),
    ):
        shop = Shop()
        shop.offered, shop.plan_filter, shop.similar = (plan,), workers_filter, similar
        assert BuildPool(shop, plan_filter=pool_filter).offered(graph) == wanted
