"""Test targets as data: complete, distinct, and with the sources of their figures."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from fusec.errors import TargetError
from fusec.gpu import device
from fusec.targets.target import load, names

CAPABILITY = {"t4": 75, "a100": 80, "l4": 89, "h100": 90, "h200": 90, "b200": 100}


def test_the_six_targets_by_capability() -> None:
    assert {name: load(name).sm for name in names()} == CAPABILITY
    assert [load(name).sm for name in names()] == sorted(CAPABILITY.values())


def test_an_unknown_target_lists_the_known_ones() -> None:
    with pytest.raises(TargetError, match="no target 'h300'; targets are t4, a100, l4, h100, h200, b200"):
        load("h300")


@pytest.mark.parametrize("name", CAPABILITY)
def test_properties_describe_the_same_gpu_as_the_figures(name: str) -> None:
    target = load(name)
    properties = json.loads(target.properties)
    assert target.name == name
    assert properties["deviceVer"] == 10 * target.sm
    assert name.upper() in target.device_name.upper()
    assert set(properties) == set(json.loads(load("h200").properties))
    # twice the memory clock (double data rate) times the bus is the data sheet's bandwidth
    sheet = 2e3 * properties["memClockRateKHz"] * properties["memoryBusWidth"] / 8
    assert target.memory_bandwidth == pytest.approx(sheet, rel=0.15)
    assert {"fp32", "tf32", "fp16", "bf16"} == set(target.flops)
    assert target.flops["fp16"] >= target.flops["tf32"] >= target.flops["fp32"] / 2
    assert 0.5 < target.launch_us < 10


def test_only_the_h200_is_measured_and_the_others_cite_their_sheets() -> None:
    assert [name for name in names() if not load(name).derived] == ["h200"]
    for name in names():
        assert "https://" in load(name).source


def test_digests_depend_only_on_the_properties() -> None:
    assert len({load(name).digest for name in names()}) == len(names())
    h200 = load("h200")
    assert dataclasses.replace(h200, launch_us=9.0).digest == h200.digest
    assert dataclasses.replace(h200, properties="{}").digest != h200.digest


class Driver:
    """One H200, of which nothing else is known."""

    def __init__(self) -> None:
        self.ready = threading.Event()
        self.held = 0

    def cuInit(self, flags: int) -> int:  # noqa: N802  # as the driver has it
        assert self.ready.wait(10), "it is woken while something else is done"
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802
        count._obj.value = 1
        return 0

    def cuDeviceGetName(self, text: Any, size: int, number: Any) -> int:  # noqa: N802
        text.value = b"NVIDIA H200"
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, number: Any) -> int:  # noqa: N802
        self.held += 1
        return 0

    def cuDeviceGet(self, number: Any, place: int) -> int:  # noqa: N802
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, number: Any) -> int:  # noqa: N802
        value._obj.value = {75: 9, 76: 0}[attribute]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    monkeypatch.delenv("FUSEC_DEVICE", raising=False)
    made = Driver()
    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: made)
    device._first_gpu.cache_clear()
    device._hold_context.cache_clear()
    yield made
    device._first_gpu.cache_clear()
    device._hold_context.cache_clear()


def joined() -> None:
    """Wait for the threads that start the GPU."""
    for thread in threading.enumerate():
        if thread.name.startswith("fusec-init-"):
            thread.join()


def test_planning_goes_on_while_the_context_is_created(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, waited = threading.Event(), list[bool]()
    monkeypatch.setattr(driver, "cuDevicePrimaryCtxRetain", lambda *_: waited.append(goes_on.wait(10)))
    driver.ready.set()
    with device.woken("auto"):
        pass
    assert device.device_name() == "NVIDIA H200"
    goes_on.set()
    joined()
    assert waited == [True], "the body ended before"


@pytest.mark.parametrize(("target", "held"), [("auto", 1), ("h200", 1), ("t4", 0), ("h300", 0)])
def test_the_gpu_starts_during_planning_if_it_is_the_target(driver: Driver, target: str, held: int) -> None:
    with device.woken(target):
        assert not driver.held
        driver.ready.set()
    with device.woken(target):
        pass
    joined()
    assert driver.held == held, "once for all"
    assert device.device_name() == "NVIDIA H200"


@pytest.mark.parametrize(("target", "called"), [("auto", ["also"]), ("h200", ["also"]), ("t4", []), ("h300", [])])
def test_other_work_starts_with_the_gpu_if_it_is_the_target(driver: Driver, target: str, called: list[str]) -> None:
    done: list[str] = []
    driver.ready.set()
    with device.woken(target, lambda: done.append("also")):
        pass
    joined()
    assert done == called


def test_a_failure_of_the_start_is_reported(driver: Driver) -> None:
    with pytest.raises(ValueError, match="no model"), device.woken("auto"):  # noqa: PT012
        driver.ready.set()
        raise ValueError("no model")
    assert driver.held == 1


def test_without_a_gpu_none_is_started(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEC_DEVICE", "none")
    with device.woken("auto"):
        pass
    monkeypatch.delenv("FUSEC_DEVICE")
    monkeypatch.setattr(device, "cuda_driver", lambda: None)
    with device.woken("auto"):
        pass
    assert not driver.held


def test_figures_come_from_the_device_properties() -> None:
    h200 = load("h200")
    assert (h200.processors, h200.shared_memory_bytes, h200.l2_bytes) == (132, 232448, 60 << 20)
    assert load("t4").processors == 40
