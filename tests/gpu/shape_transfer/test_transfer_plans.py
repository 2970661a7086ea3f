"""Test plans for a new size from those of sizes before, by the real cuDNN without a GPU."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gpu.cudnn.legality.test_similar_graphs import batch
from gpu.cudnn.read_back import workspace_bytes
from gpu.cudnn_graphs import conv, image, pointwise

from fusec.gpu.cudnn.legality.oracle import Oracle
from fusec.gpu.cudnn.worker_processes.worker_process import WorkerDeath
from fusec.gpu.shape_transfer import transfer_plans
from fusec.gpu.shape_transfer.predict_graphs import extrapolate, scale_batch
from fusec.gpu.shape_transfer.transfer_plans import SizePlans
from fusec.ir import DType
from fusec.lowering.cudnn_graph import CudnnCall, CudnnGraph
from fusec.plans.plan_record import BLAS, Choice, Entry
from fusec.plans.sqlite_cache import Store
from fusec.plans.verdict import Legal, Refused
from fusec.targets.target import load

pytestmark = pytest.mark.cudnn

READY, COMPILED = conv("bias", "relu"), conv("bias", "swish")


@pytest.fixture
def oracle(tmp_path: Path) -> Iterator[Oracle]:
    with Oracle(load("h200"), store=Store(tmp_path / "answers.sqlite"), workers=1, max_factor=math.inf) as oracle:
        yield oracle


def first(oracle: Oracle, graphs: list[CudnnGraph]) -> dict[str, Choice]:
    """cuDNN's first plan of each, as `tune="none"` takes it."""
    oracle.judge(graphs)
    return {graph.key: Choice.of(oracle.plans(graph)[0]) for graph in graphs}


def made(plans: SizePlans, graphs: list[CudnnGraph]) -> dict[str, Entry]:
    found = {graph.key: entry for graph, entry in plans.plans_for(graphs)}
    assert None not in found.values()
    return found  # type: ignore[return-value]  # as just asserted


def until(true: Callable[[], bool]) -> None:
    """Wait for other threads."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_legal_graph_is_assumed_legal_in_another_batch(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = oracle.judge([READY, COMPILED])
    asked = oracle.asked
    others = oracle.judge([batch(READY, 9), batch(COMPILED, 16)])
    assert oracle.asked == asked
    for before, verdict in zip(verdicts, others, strict=True):
        assert isinstance(before, Legal) and isinstance(verdict, Legal)
        assert [p.engine for p in verdict.plans] == [p.engine for p in before.plans]
        assert not any(p.built for p in verdict.plans)
    assert oracle.assumed_from(batch(READY, 9)) == READY
    assert oracle.assumed_from(READY) is None
    assert oracle._store.get([oracle._entry(batch(READY, 9).key)]) == {}, "belief is not for the disk"
    pooled = (image(1, (8, 64, 28, 28)), image(2, (8, 64, 1, 1), DType.F32))
    wrong = CudnnGraph(pooled, (CudnnCall("reduction", (1,), (2,), "add"),))
    assert isinstance(oracle.judge([wrong])[0], Refused)
    oracle.judge([batch(wrong, 9)])
    assert oracle.asked == asked + 2, "a refusal may depend on the size"
    oracle.ask_again(batch(READY, 9))
    (verdict,) = oracle.judge([batch(READY, 9)])
    assert oracle.asked == asked + 3
    assert isinstance(verdict, Legal) and any(p.built for p in verdict.plans)
    assert oracle.assumed_from(batch(READY, 9)) is None


def test_only_near_sizes_are_assumed_legal(tmp_path: Path) -> None:
    with Oracle(load("h200"), store=Store(tmp_path / "answers.sqlite"), workers=1, max_factor=4) as oracle:
        oracle.judge([READY])
        oracle.judge([batch(READY, 32), batch(READY, 2)])
        assert oracle.assumed_from(batch(READY, 32)) == oracle.assumed_from(batch(READY, 2)) == READY
        asked = oracle.asked
        oracle.judge([batch(READY, 33)])
        assert oracle.asked == asked + 1


def test_plans_are_built_by_name_and_compiled_once_for_all_sizes(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices, plans = first(oracle, [READY, COMPILED]), SizePlans(oracle)
    questions: list[dict[str, Any]] = []
    exchange = oracle.exchange

    def heard(question: dict[str, Any], worker: Any = None) -> Any:
        questions.append(question)
        return exchange(question, worker)

    monkeypatch.setattr(oracle, "exchange", heard)
    plans.learn((8,), [READY, COMPILED], choices)
    ready = plans._ready[COMPILED.key].result()
    assert ready is not None
    assert list(plans._ready) == [COMPILED.key], "what is precompiled is there for all sizes"
    until(lambda: len(questions) == 2)
    assert [q["all_sizes"] for q in questions] == [True, False], "and compared with one for another size"
    until(lambda: not oracle._starting and oracle._idle == oracle._all)
    for size in (9, 16):
        graphs = [batch(READY, size), batch(COMPILED, size)]
        questions.clear()
        oracle.judge(graphs)
        entries = made(plans, graphs)
        named = {question["all_sizes"]: Choice.from_json(question["choice"]) for question in questions}
        assert {a: c.identity for a, c in named.items()} == {
            False: choices[READY.key].identity,
            True: ready[1].identity,
        }
        for graph in graphs:
            entry = entries[graph.key]
            assert entry.blob is not None
            assert workspace_bytes(graph, entry.blob, load("h200")) == entry.choice.workspace_bytes
        assert entries[graphs[0].key].choice.identity == choices[READY.key].identity
        plans.learn((size,), graphs, {key: entry.choice for key, entry in entries.items()})
    assert list(plans._ready) == [COMPILED.key]
    assert made(plans, [conv("relu")]) == {}, "nothing is known of it"


@pytest.mark.slow
def test_a_plan_that_compiles_quickly_is_compiled_for_each_size(
    oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_plans, "QUICK_S", 60.0)
    choices, plans = first(oracle, [COMPILED]), SizePlans(oracle)
    plans.learn((8,), [COMPILED], choices)
    until(lambda: plans._ready == {})
    other = batch(COMPILED, 12)
    oracle.judge([other])
    entry = made(plans, [other])[other.key]
    assert entry.choice.identity == choices[COMPILED.key].identity


def test_far_sizes_and_plans_that_do_not_build_get_cudnns_first_plan(oracle: Oracle) -> None:
    choices, plans = first(oracle, [READY]), SizePlans(oracle)
    other = Choice.of([plan for plan in oracle.plans(READY) if plan.precompiled][5])
    assert other.identity != choices[READY.key].identity
    plans.learn((8,), [READY], {READY.key: other})
    near, far = batch(READY, 16), batch(READY, 256)
    oracle.judge([near, far])
    entries = made(plans, [near, far])
    assert entries[near.key].choice.identity == other.identity
    assert entries[far.key].choice.identity != other.identity
    plans._choices[READY.key] = Choice(7777, ())
    assert made(plans, [near])[near.key].blob


def test_other_libraries_plans_are_named_and_built_where_they_run(oracle: Oracle) -> None:
    first(oracle, [READY])
    plans = SizePlans(oracle)
    plans.learn((8,), [READY], {READY.key: Choice(BLAS, ((1, 2),))})
    near, far = batch(READY, 16), batch(READY, 256)
    oracle.judge([near, far])
    assert made(plans, [near]) == {}
    assert plans.choices_near([near, far]) == {near.key: Choice(BLAS, ((1, 2),))}
    assert made(plans, [far])[far.key].choice.engine != BLAS
    assert plans._ready == {}


@pytest.mark.slow
def test_a_worker_that_is_gone_is_replaced(oracle: Oracle) -> None:
    choices, plans = first(oracle, [COMPILED]), SizePlans(oracle)
    plans.learn((8,), [COMPILED], choices)
    ready = plans._ready[COMPILED.key].result()
    assert ready is not None
    ready[0]._process.kill()
    ready[0]._process.wait()
    other = batch(COMPILED, 9)
    oracle.judge([other])
    assert made(plans, [other])[other.key].blob
    assert len(oracle._all) == 1 and oracle._all[0] is not ready[0]


def test_a_thread_waits_for_its_worker_and_the_limit_of_workers_holds(oracle: Oracle) -> None:
    oracle.judge([READY])
    worker = oracle._take()
    got: list[Any] = []

    def use(wanted: Any) -> None:
        taken = oracle._take(wanted)
        got.append(taken)
        oracle._give_back(taken)

    threads = [threading.Thread(target=use, args=(wanted,)) for wanted in (worker, None)]
    for thread in threads:
        thread.start()
        thread.join(0.1)
    assert got == [] and oracle._all == [worker], "there may be one"
    oracle._give_back(worker)
    for thread in threads:
        thread.join(10)
    assert got == [worker, worker]


def test_a_plan_that_kills_its_worker_is_not_used(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    choices, plans = first(oracle, [READY]), SizePlans(oracle)
    plans.learn((8,), [READY], choices)
    other = batch(READY, 9)
    oracle.judge([other])
    monkeypatch.setattr(oracle, "exchange", lambda question, worker=None: (WorkerDeath("gone"), worker))
    assert list(plans.plans_for([other])) == [(other, None)]
    monkeypatch.setattr(oracle, "exchange", lambda question, worker=None: ({"failed": "no"}, worker))
    assert list(plans.plans_for([other])) == [(other, None)]
    assert transfer_plans.NEAR == 4


def test_graphs_of_the_next_size_are_extrapolated(oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    choices, plans = first(oracle, [READY]), SizePlans(oracle)
    plans.learn((8, 3), [READY], choices)
    plans.prefetch((12, 3), lambda graphs: [])
    assert plans._prefetched == {}
    plans.prefetch((12, 3), list)
    assert list(plans._prefetched) == [batch(READY, 12).key], "a guess"
    next(iter(plans._prefetched.values())).result()
    plans.learn((12, 3), [batch(READY, 12)], choices | {batch(READY, 12).key: choices[READY.key]})
    for other in ((12, 3), (8, 3), (20, 4), (16, 6)):
        plans.prefetch(other, list)
        assert plans._prefetched == {}, "known, or another dim"
    plans.prefetch((64, 3), lambda graphs: [])
    assert plans._prefetched == {}, "it is kept"
    plans.prefetch((64, 3), list)
    (begun,) = plans._prefetched.values()
    assert list(plans._prefetched) == [batch(READY, 64).key]
    asked = begun.result()
    assert asked is not None and asked.blob
    monkeypatch.setattr(oracle, "exchange", lambda question, worker=None: ({"failed": "asked again"}, worker))
    oracle.judge([batch(READY, 64)])
    assert made(plans, [batch(READY, 64)]) == {batch(READY, 64).key: asked}


def test_graphs_that_do_not_grow_evenly_are_not_extrapolated() -> None:
    one, other = (8,), (12,)
    assert extrapolate((one, READY), (other, batch(READY, 12)), (20,)) == batch(READY, 20)
    assert extrapolate((one, READY), (other, batch(READY, 12)), (1,)) == batch(READY, 1)
    assert extrapolate((one, READY), (other, batch(READY, 24)), (10,)) == batch(READY, 16)
    assert extrapolate((one, READY), (other, batch(READY, 9)), (9,)) is None, "a quarter of a row"
    assert extrapolate((one, READY), (other, batch(READY, 24)), (3,)) is None, "fewer than one row"


def test_the_graph_of_the_next_size_is_guessed_from_one() -> None:
    for graph in (READY, COMPILED, conv("bias", "relu", filters=8)):
        assert scale_batch(((8, 3), graph), (12, 3)) == batch(graph, 12) or graph.tensors[1].dims[0] == 8
    filters = scale_batch(((8, 3), conv("bias", "relu", filters=8)), (12, 3))
    assert filters is not None and [t.dims[0] for t in filters.tensors[:2]] == [12, 8], "filters stay as many"
    assert scale_batch(((8, 3), READY), (12, 4)) is None, "two sizes"
    assert scale_batch(((8, 3), READY), (8, 3)) is None
    assert scale_batch(((3, 8), READY), (3, 7)) == batch(READY, 7)
    assert scale_batch(((16,), READY), (3,)) is None, "one and a half"
    assert scale_batch(((8,), READY), (1,)) is None, "a dim of one is another graph"
    flat = pointwise("gelu", (1, 12, 64), result=(1, 12, 64))
    assert scale_batch(((12,), flat), (13,)) is None


def test_only_the_first_sizes_are_stored(oracle: Oracle) -> None:
    choices, plans = first(oracle, [READY]), SizePlans(oracle)
    for size in range(8, 40):
        graph = batch(READY, size)
        plans.learn((size,), [graph], {graph.key: choices[READY.key]})
    assert len(plans._first) == len(plans._choices) == transfer_plans.MAX_SIZES
    assert plans.choices_near([batch(READY, 60)]) == {batch(READY, 60).key: choices[READY.key]}
    assert plans.choices_near([batch(READY, 61)]) == {}


def test_only_missing_workers_are_started(tmp_path: Path) -> None:
    with Oracle(load("h200"), store=Store(tmp_path / "answers.sqlite"), workers=2, max_factor=math.inf) as oracle:
        busy = oracle._take()
        oracle.start()
        oracle.start()
        assert oracle._starting == 1, "one is there, and one asked for"
        with oracle._changed:
            assert oracle._changed.wait_for(lambda: not oracle._starting, 60)
        assert len(oracle._all) == 2 and busy not in oracle._idle, "and nobody waits for one that is busy"
        oracle._give_back(busy)
        assert sorted(w.pid for w in oracle._idle) == sorted(w.pid for w in oracle._all)
