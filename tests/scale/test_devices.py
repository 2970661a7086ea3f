"""Test which device each worker gets, and what its process sees of the machine."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from fusec.errors import TargetError
from fusec.gpu import device
from fusec.scale.devices import WorkerDevice, worker_devices


class Driver:
    """A driver that shows some GPUs."""

    def __init__(self, count: int):
        self.count = count

    def cuInit(self, flags: int) -> int:  # noqa: N802  # the driver's name
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:  # noqa: N802  # the driver's name
        count._obj.value = self.count
        return 0


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: Driver(4))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("FUSEC_DEVICE", raising=False)


@pytest.mark.usefixtures("four")
def test_a_worker_sees_its_own_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [d.visible for d in worker_devices("all")] == ["0", "1", "2", "3"]
    assert worker_devices([2, "cuda:0", "cpu"]) == (
        WorkerDevice("cuda:2", "2"),
        WorkerDevice("cuda:0", "0"),
        WorkerDevice("cpu"),
    )
    made = worker_devices("cuda:3")[0].environment(1)
    assert made["CUDA_VISIBLE_DEVICES"] == "3"
    assert "FUSEC_DEVICE" not in made
    with pytest.raises(TargetError, match="no device cuda:4: this machine shows 4 GPUs"):
        worker_devices(4)


def test_the_names_of_visible_gpus_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.ctypes, "CDLL", lambda name: Driver(2))
    monkeypatch.delenv("FUSEC_DEVICE", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-8932f937")
    assert device.visible_gpus() == ("5", "GPU-8932f937")
    monkeypatch.setenv("FUSEC_DEVICE", "none")
    assert device.visible_gpus() == ()


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> ctypes.CDLL:
        raise OSError(name)

    monkeypatch.setattr(device.ctypes, "CDLL", missing)
    assert worker_devices("all") == (WorkerDevice("simulated"),)
    made = worker_devices("cpu")[0].environment(1)
    assert made["CUDA_VISIBLE_DEVICES"] == ""
    assert made["FUSEC_DEVICE"] == "none"
    with pytest.raises(TargetError, match="shows 0 GPUs"):
        worker_devices([0])
    with pytest.raises(TargetError, match="empty list"):
        worker_devices([])
