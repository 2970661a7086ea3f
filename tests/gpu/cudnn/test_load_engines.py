"""Test which plans are recorded, one of each engine, and which of them a process reads when it starts."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fusec
from fusec.dynamic_shapes.load_shapes import load_program
from fusec.gpu import device
from fusec.gpu.cudnn import load_engines
from fusec.gpu.cudnn.load_engines import MOST_ENGINES, record, recorded
from fusec.plans.plan_cache import PlanStore
from fusec.plans.plan_record import Choice, Entry, PlanKey
from fusec.targets.target import load

RELU = 'graph "g" (%x: f32[2,3]) {\n  %y = relu(%x)\n  return %y\n}'
KEY = PlanKey("graph", "h200", "NVIDIA H200", "13000", "91900", "1.28.0", "quick")


@pytest.fixture
def store(tmp_path: Path) -> PlanStore:
    return PlanStore(tmp_path)


def plan(store: PlanStore, name: str, engine: int, size: int = 100, like: PlanKey = KEY) -> PlanKey:
    """Store a plan of an engine, whose blob names it."""
    key = replace(like, graph=name)
    store.put(key, Entry(Choice(engine, ()), name.encode() + bytes(size)))
    return key


def test_one_stored_plan_of_each_engine_is_recorded(store: PlanStore) -> None:
    record(store, {})
    assert recorded(store, "h200", "NVIDIA H200") == {}
    store.put(replace(KEY, graph="no blob"), Entry(Choice(8, ())))
    first, second = plan(store, "a", 0), plan(store, "b", 47)
    record(store, {0: [replace(KEY, graph="missing"), first], 47: [second], 8: [replace(KEY, graph="no blob")]})
    assert recorded(store, "h200", "NVIDIA H200") == {0: first, 47: second}
    assert recorded(store, "h200", "another GPU") == recorded(store, "l4", "NVIDIA H200") == {}
    third = plan(store, "c", 8)
    record(store, {0: [plan(store, "d", 0)], 8: [third]})
    assert recorded(store, "h200", "NVIDIA H200") == {0: first, 47: second, 8: third}, "a known engine is as it was"


def test_the_record_is_bounded_and_of_one_cudnn_and_driver(store: PlanStore) -> None:
    for engine in range(MOST_ENGINES + 2):
        record(store, {engine: [plan(store, f"g{engine}", engine)]})
    found = recorded(store, "h200", "NVIDIA H200")
    assert list(found) == list(range(MOST_ENGINES + 2))[:1:-1], "the newest ones"
    for newer in (replace(KEY, cudnn="91901"), replace(KEY, driver="13010", cudnn="91901")):
        only = plan(store, "newer", 0, like=newer)
        record(store, {0: [only]})
        assert recorded(store, "h200", "NVIDIA H200") == {0: only}


def test_a_record_of_another_form_is_none(store: PlanStore) -> None:
    key = load_engines._key("h200", "NVIDIA H200")
    for plans in (1, [1], [["x", KEY.to_json()]], [[1, {"graph": "g"}]], [[1, 7]]):
        store.put_choice(key, {"plans": plans})
        assert recorded(store, "h200", "NVIDIA H200") == {}
    store.put_choice(key, {})
    assert recorded(store, "h200", "NVIDIA H200") == {}


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with an H200, whose driver and cuDNN are those of KEY."""

    def driver_version(place: Any) -> int:
        place._obj.value = 13000
        return 0

    monkeypatch.setattr(device, "detect", lambda: load("h200"))
    monkeypatch.setattr(device, "device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(device, "cuda_driver", lambda: SimpleNamespace(cuDriverGetVersion=driver_version))
    made = SimpleNamespace(cudnnGetVersion=lambda: 91900)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: made)
    monkeypatch.setattr(load_engines, "read_plan", lambda library, blob: len(blob) if library is made else -1)
    return made


def test_recorded_plans_are_read_small_ones_first(store: PlanStore, library: SimpleNamespace) -> None:
    assert load_engines.load_engines(store) == []
    for number, size in enumerate((300, 100, 200)):
        record(store, {number: [plan(store, f"{number}", number, size)]})
    assert load_engines.load_engines(store) == [101, 201, 301]
    library.cudnnGetVersion = lambda: 91901
    assert load_engines.load_engines(store) == [], "its plans are of another cuDNN"
    library.cudnnGetVersion = lambda: 91000
    assert load_engines.load_engines(store) == []


def test_an_untrusted_or_dropped_plan_is_not_read(store: PlanStore, library: SimpleNamespace) -> None:
    key = plan(store, "mine", 0)
    record(store, {0: [key]})
    assert load_engines.load_engines(store) == [104]
    store._trusted.path.unlink()
    assert load_engines.load_engines(PlanStore(store.folder)) == []
    (store.folder / "plans" / key.digest).unlink(missing_ok=True)
    assert load_engines.load_engines(store) == []


STARTS: dict[str, Callable[[Path], object]] = {
    "compile": lambda path: fusec.compile(fusec.parse(RELU)),
    "compile for shapes": lambda path: fusec.compile(fusec.parse(RELU), shapes={"x": (2, 3)}),
    "load": fusec.load,
    "load a program": lambda path: load_program(path, "auto", "none", None),
}


@pytest.mark.cudnn
@pytest.mark.parametrize("start", STARTS)
def test_every_start_loads_engines_while_it_reads(start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Woken(Exception):  # noqa: N818 - nothing goes on after it
        pass

    def woken(target: str, also: object = None) -> None:
        raise Woken(target, also)

    path = tmp_path / "net.fusec"
    net = fusec.compile(fusec.parse(RELU), target="h200", simulate=True)
    fusec.save(path, [net.compiled])  # type: ignore[union-attr]
    monkeypatch.setattr(device, "woken", woken)
    with pytest.raises(Woken) as found:
        STARTS[start](path)
    assert found.value.args == ("auto", load_engines.load_engines_once)


def test_engines_load_once_and_a_failure_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def broken(store: PlanStore) -> list[int]:
        calls.append("read")
        raise OSError("no libcudnn")

    monkeypatch.setattr(load_engines, "load_engines", broken)
    monkeypatch.setattr(load_engines, "_ONCE", threading.Lock())
    load_engines.load_engines_once()
    load_engines.load_engines_once()
    assert calls == ["read"]
