"""Chosen plans survive processes and damage, and quarantined ones stay so."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sqlite3
from pathlib import Path

import pytest

from fusec.plan_store import PlanStore
from fusec.plans import Choice, Entry, Place, PlanKey

PLACE = Place("NVIDIA H200", "13000", "91900", "1.28.0")
CHOICE = Choice(7, ((2, 5), (12, 29)), 4096, 12.5, 1e-4)


def key(graph: str = "a", tune: str = "quick") -> PlanKey:
    return PlanKey(graph, "NVIDIA H200", "13000", "91900", "1.28.0", tune)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "plans.sqlite"


def test_an_entry_comes_back_to_another_store(path: Path) -> None:
    PlanStore(path).put(key(), Entry(CHOICE, b"\x00plan\xff"))
    assert PlanStore(path).get(key()) == Entry(CHOICE, b"\x00plan\xff")
    PlanStore(path).put(key("b"), Entry(Choice(1, ())))
    assert PlanStore(path).get(key("b")) == Entry(Choice(1, ()), None)


@pytest.mark.parametrize(
    "other", [key("b"), key(tune="full"), PlanKey("a", "NVIDIA L4", "13000", "91900", "1.28.0", "quick")]
)
def test_other_keys_are_other_entries(path: Path, other: PlanKey) -> None:
    PlanStore(path).put(key(), Entry(CHOICE))
    assert PlanStore(path).get(other) is None


def test_what_was_used_last_is_kept(path: Path) -> None:
    store = PlanStore(path, max_entries=3)
    for name in "abc":
        store.put(key(name), Entry(CHOICE))
    assert store.get(key("a")) is not None
    store.put(key("d"), Entry(CHOICE))
    assert [name for name in "abcd" if store.get(key(name)) is not None] == ["a", "c", "d"]


def test_a_tampered_entry_counts_as_absent(path: Path) -> None:
    PlanStore(path).put(key(), Entry(CHOICE, b"plan"))
    with sqlite3.connect(path) as connection:
        connection.execute("UPDATE answers SET text = replace(text, '\"engine\": 7', '\"engine\": 8')")
    assert PlanStore(path).get(key()) is None


def test_a_quarantined_plan_is_named_with_its_reason(path: Path) -> None:
    PlanStore(path).quarantine(PLACE, "a", CHOICE, "its results are off by 0.5")
    reason = PlanStore(path).quarantined(PLACE)
    assert reason("a", CHOICE) == "quarantined: its results are off by 0.5"
    assert reason("b", CHOICE) is None
    assert reason("a", Choice(7, ((2, 5), (12, 28)))) is None
    assert PlanStore(path).quarantined(Place("NVIDIA H200", "13000", "92800", "1.28.0"))("a", CHOICE) is None


def _write(path: Path, name: str) -> None:
    store = PlanStore(path)
    for i in range(40):
        store.put(key(f"{name}{i}"), Entry(Choice(i, ((1, i),)), os.urandom(2000)))
        assert store.get(key(f"{name}{i}")) is not None


def _write_for_ever(path: Path) -> None:
    store, i = PlanStore(path), 0
    while True:
        store.put(key(f"z{i}"), Entry(CHOICE, os.urandom(20000)))
        i += 1


def test_processes_share_it_and_may_be_killed(path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    victim = context.Process(target=_write_for_ever, args=(path,))
    writers = [context.Process(target=_write, args=(path, name)) for name in "abc"]
    for process in (victim, *writers):
        process.start()
    writers[0].join(60)
    assert victim.pid is not None
    os.kill(victim.pid, signal.SIGKILL)
    for process in writers:
        process.join(60)
        assert process.exitcode == 0
    store = PlanStore(path)
    for name in "abc":
        for i in range(40):
            entry = store.get(key(f"{name}{i}"))
            assert entry is not None and entry.choice == Choice(i, ((1, i),)) and len(entry.blob or b"") == 2000
