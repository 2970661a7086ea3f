"""Choose the GPU of a worker process, before the CUDA driver of that process is initialised."""

from __future__ import annotations

import ctypes
import os

from fusec.errors import TargetError
from fusec.gpu.device import cuda_driver, visible_gpus

AUTO, SIMULATED = "auto", "simulated"
_NOT_INITIALISED = 3  # CUDA_ERROR_NOT_INITIALIZED, CUDA driver API (cuda.h)
_chosen: dict[str, int] = {}  # the GPU that this process was restricted to


def choose(device: str | int) -> bool:
    """Restrict this process to one GPU, and tell if models must run in simulation.

    device: `auto`: GPU 0 of those that the process sees, as Dask, Ray and CUDA_VISIBLE_DEVICES set them; `simulated`;
        or the number of a GPU among those. fusec uses GPU 0 of a process, so a number hides all other GPUs.
    Raises TargetError if the number is no GPU, or another GPU is in use in this process.
    """
    if isinstance(device, str):
        if device not in (AUTO, SIMULATED):
            raise TargetError(f"device is {device!r}, but must be {AUTO}, {SIMULATED} or the number of a GPU")
        return device == SIMULATED
    if _chosen.get("gpu", device) != device:
        raise TargetError(
            f"GPU {device} was asked for, but this process uses GPU {_chosen['gpu']}: use one process each"
        )
    if "gpu" not in _chosen:
        _hide_others(device)
        _chosen["gpu"] = device
    return False


def _hide_others(number: int) -> None:
    driver = cuda_driver()
    if driver is None:
        raise TargetError(f"GPU {number} was asked for, but this machine has no NVIDIA driver")
    count = ctypes.c_int()
    if driver.cuDeviceGetCount(ctypes.byref(count)) != _NOT_INITIALISED and (number or count.value > 1):
        raise TargetError(
            f"GPU {number} was asked for, but CUDA is in use in this process already: choose the GPU in a new process"
        )
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = None if before is None else [name.strip() for name in before.split(",") if name.strip()]
    if number < 0 or (visible is not None and number >= len(visible)):
        known = "0 and more" if visible is None else f"0 to {len(visible) - 1}" if visible else "none"
        raise TargetError(f"GPU {number} was asked for, but the GPUs that this process sees are {known}")
    os.environ["CUDA_VISIBLE_DEVICES"] = str(number) if visible is None else visible[number]
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        raise TargetError(f"GPU {number} was asked for, but the driver finds no such GPU")


def devices_of(text: str) -> list[str | int]:
    """Read `all`, `simulated`, or numbers of GPUs joined by commas, as devices of worker processes.

    Raises TargetError if it is something else.
    """
    if text == "all":
        return list[str | int](range(len(visible_gpus()))) or [SIMULATED]
    if text == SIMULATED:
        return [SIMULATED]
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [-1]
    if any(number < 0 for number in numbers) or len(set(numbers)) < len(numbers):
        raise TargetError(f"--device {text}: must be all, {SIMULATED}, or numbers of GPUs joined by commas")
    return list[str | int](numbers)
