"""Plans built in other processes: several at once, in the order they are wanted, and what happens when one fails."""

from __future__ import annotations

import base64
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpu.cudnn_graphs import conv
from gpu.stand_in_gpu import Machine
from gpu.test_backend import build, check

from fusec.cudnn_graph import CudnnGraph
from fusec.errors import ExecutionError, TargetError
from fusec.gpu import ahead
from fusec.gpu.ahead import Builders
from fusec.gpu.oracle import PROBE
from fusec.gpu.process import Died, WorkerProcess
from fusec.plans import Choice
from fusec.target import load

CHOICES = [Choice(engine, ((2, engine),)) for engine in range(6)]


class Shop:
    """Workers that answer with the engine's number as the plan, each when it is let."""

    def __init__(self, **special: Callable[[], dict[str, Any] | Died]):
        self.special = special
        self.lock = threading.Condition()
        self.allowed = 1 << 20  # answers
        self.at_once = self.most = self.started = self.closed = 0
        self.asked: list[int] = []

    def start(self) -> Shop:
        with self.lock:
            self.started += 1
        return self

    def exchange(self, question: dict[str, Any]) -> dict[str, Any] | Died:
        (choice,) = question["choices"]
        engine = Choice.from_json(choice).engine
        with self.lock:
            self.asked.append(engine)
            self.at_once += 1
            self.most = max(self.most, self.at_once)
            self.lock.notify_all()
            self.lock.wait_for(lambda: self.allowed > 0)
            self.allowed -= 1
            self.at_once -= 1
        if f"e{engine}" in self.special:
            return self.special[f"e{engine}"]()
        blob = base64.b64encode(b"plan %d" % engine).decode()
        return {"entries": [{"choice": choice, "blob": blob}]}

    def close(self) -> None:
        with self.lock:
            self.closed += 1
            self.lock.notify_all()

    def ends_all(self) -> bool:
        with self.lock:
            return self.lock.wait_for(lambda: self.closed == self.started, 10)

    def let(self, count: int) -> None:
        with self.lock:
            self.allowed += count
            self.lock.notify_all()

    def wait_until_busy(self, count: int) -> None:
        with self.lock:
            assert self.lock.wait_for(lambda: self.at_once == count, 10)


def expect(builders: Builders, *engines: int) -> None:
    builders.expect([(PROBE, CHOICES[engine]) for engine in engines])


def test_several_are_built_at_once_and_no_more_than_the_limit() -> None:
    shop = Shop()
    shop.allowed = 0
    builders = Builders(shop.start, 2)
    expect(builders, *range(6))
    shop.wait_until_busy(2)
    shop.let(6)
    assert [builders.plan(PROBE, choice) for choice in CHOICES] == [b"plan %d" % engine for engine in range(6)]
    assert (shop.most, shop.started) == (2, 2)
    assert builders.plan(PROBE, CHOICES[0]) is None, "what was handed over is not kept"
    builders.close()
    assert shop.ends_all()


def test_what_is_waited_for_is_built_next_and_what_is_not_wanted_any_more_is_not() -> None:
    shop = Shop()
    shop.allowed = 0
    builders = Builders(shop.start, 1)
    expect(builders, 0, 1, 2, 3, 4)
    shop.wait_until_busy(1)
    expect(builders, 1, 2, 3)
    threading.Timer(0.05, shop.let, [2]).start()
    assert builders.plan(PROBE, CHOICES[3]) == b"plan 3"
    assert shop.asked[:2] == [0, 3]
    expect(builders)
    shop.let(9)
    assert builders.plan(PROBE, CHOICES[2]) is None and builders.plan(PROBE, CHOICES[4]) is None
    assert 4 not in shop.asked


def test_a_refusal_is_an_error_and_so_is_a_plan_that_kills_its_process() -> None:
    shop = Shop(
        e0=lambda: {"failed": "cuDNN builds no plan"},
        e1=lambda: Died("cuDNN killed its process with SIGSEGV", "SIGSEGV", by_own_fault=True),
        e2=lambda: Died("the worker was ended by SIGKILL", "SIGKILL"),
        e3=lambda: {"entries": [{"choice": CHOICES[3].to_json(), "blob": None}]},
        e4=lambda: {"defect": "Traceback"},
    )
    builders = Builders(shop.start, 1)
    expect(builders, *range(6))
    with pytest.raises(ExecutionError, match="builds no plan"):
        builders.plan(PROBE, CHOICES[0])
    with pytest.raises(ExecutionError, match="SIGSEGV"):
        builders.plan(PROBE, CHOICES[1])
    assert builders.plan(PROBE, CHOICES[2]) is None, "somebody else ended it: it is built here"
    assert builders.plan(PROBE, CHOICES[3]) is None, "it cannot be serialized"
    with pytest.raises(RuntimeError, match="Traceback"):
        builders.plan(PROBE, CHOICES[4])
    assert builders.plan(PROBE, CHOICES[5]) == b"plan 5"
    assert shop.started == 3 and shop.closed == 2


def test_where_no_process_starts_plans_are_built_here() -> None:
    def start() -> Shop:
        raise TargetError("no driver")

    builders = Builders(start, 2)
    expect(builders, *range(6))
    with pytest.warns(UserWarning, match="no driver"):
        assert builders.plan(PROBE, CHOICES[0]) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert builders.plan(PROBE, CHOICES[1]) is None
        expect(builders, *range(6))
        assert builders.plan(PROBE, CHOICES[0]) is None


def test_for_a_few_plans_no_process_is_started() -> None:
    shop = Shop()
    builders = Builders(shop.start, 4)
    expect(builders, 0, 1)
    assert builders.plan(PROBE, CHOICES[0]) is None
    expect(builders, 0, 1, 2)
    assert builders.plan(PROBE, CHOICES[0]) == b"plan 0"
    expect(builders, 4)
    assert builders.plan(PROBE, CHOICES[4]) == b"plan 4", "there are processes"
    builders.close()
    none = Builders(shop.start, 0)
    expect(none, *range(6))
    assert none.plan(PROBE, CHOICES[0]) is None


def test_after_the_end_others_start() -> None:
    shop = Shop()
    builders = Builders(shop.start, 2)
    for _ in range(2):
        expect(builders, *range(6))
        assert [builders.plan(PROBE, choice) for choice in CHOICES] == [b"plan %d" % engine for engine in range(6)]
        builders.close()
    assert shop.ends_all() and shop.started >= 2


def test_there_may_be_processes_and_plans_to_begin_with() -> None:
    shop, lent = Shop(), Shop()
    built = {(PROBE.key, *CHOICES[0].identity): b"built before"}
    builders = Builders(shop.start, 1, workers=[lent], built=built)
    expect(builders, 0, 1)
    assert builders.plan(PROBE, CHOICES[0]) == b"built before"
    assert builders.plan(PROBE, CHOICES[1]) == b"plan 1"
    assert (shop.started, lent.asked) == (0, [1])
    builders.close()
    with lent.lock:
        assert lent.lock.wait_for(lambda: lent.closed == 1, 10)


@pytest.mark.cudnn
def test_a_process_builds_the_plan_that_was_asked_for() -> None:
    from fusec.gpu.blobs import reload, serialize

    target = load("h200")
    graphs: list[CudnnGraph] = [PROBE, conv("bias", "sigmoid")]
    offered = {g.key: g for g in graphs}
    firsts = {key: each[0] for key, each in serialize(graphs, target, count=1, workers=1).items()}
    builders = Builders(lambda: WorkerProcess(target, False), 1)
    wrong = Choice(4711, ())
    builders.expect([*((g, firsts[key].choice) for key, g in offered.items()), (PROBE, wrong)])
    for key, graph in offered.items():
        blob = builders.plan(graph, firsts[key].choice)
        assert blob is not None
        assert reload(graph, blob, target) == firsts[key].choice.workspace_bytes
    with pytest.raises(ExecutionError, match="4711"):
        builders.plan(PROBE, wrong)
    builders.close()


def test_the_backend_reads_what_another_process_built(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And builds none of these itself; the fastest is found among them all the same."""
    from fusec.gpu import backend

    pytest.importorskip("cupy")
    machine.runtime_compiled = True
    machine.times_us = {7: 30.0, 4: 5.0, 3: 20.0}
    asked: list[Choice] = []

    class Process(Shop):
        def exchange(self, question: dict[str, Any]) -> dict[str, Any] | Died:
            choice = Choice.from_json(question["choices"][0])
            asked.append(choice)
            graph = CudnnGraph.from_json(question["graph"])
            pygraph = machine.emit(graph)
            pygraph.selected = machine.engines.index(choice.engine)
            return {"entries": [{"choice": {}, "blob": base64.b64encode(bytes(pygraph.serialize())).decode()}]}

    monkeypatch.setattr(backend.device, "detect", lambda: load("h200"))
    monkeypatch.setattr(ahead, "WorkerProcess", lambda *_: Process())
    monkeypatch.setattr(ahead.os, "cpu_count", lambda: 4)
    net = build(tmp_path)
    assert {choice.engine for choice in net.backend.choices().values()} == {4}
    assert {choice.engine for choice in asked} == {7, 4, 3} and machine.built == []
    check(net, 0)
    machine.revived.clear()
    again = build(tmp_path)
    assert machine.revived == [4] and machine.built == [], "it is kept"
    check(again, 0)
