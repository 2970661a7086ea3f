"""Choose the device of each worker process, and the environment that shows it this device alone."""

from __future__ import annotations

import os
from collections.abc import Sequence

from fusec.errors import TargetError
from fusec.gpu.device import visible_gpus
from fusec.system.dataclass import dataclass

VISIBLE = "CUDA_VISIBLE_DEVICES"
HOST = ("cpu", "simulated")
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True)
class WorkerDevice:
    """The device of a worker: `cuda:0`, `cpu` (NumPy), or `simulated`.

    visible: the value of CUDA_VISIBLE_DEVICES for its process.
    """

    name: str
    visible: str = ""

    def environment(self, workers: int) -> dict[str, str]:
        """Return the variables of a process on this device. workers: the number of all workers.

        Workers on the host share its cores, and see no GPU.
        """
        variables = {**os.environ, VISIBLE: self.visible}
        if self.name in HOST:
            threads = str(max(1, len(os.sched_getaffinity(0)) // workers))
            variables = {**dict.fromkeys(_THREADS, threads), **variables, "FUSEC_DEVICE": "none"}
        return variables


def worker_devices(devices: str | int | Sequence[str | int]) -> tuple[WorkerDevice, ...]:
    """Return the device of each worker.

    devices: `all` GPUs (without one: `simulated`), or a list. Its elements are the numbers of GPUs, `cuda:1`, `cpu`
        (NumPy, op by op) or `simulated`. A device that is listed twice gets two workers.
    Raises TargetError for a device that this machine does not have.
    """
    if devices == "all":
        visible = visible_gpus()
        return tuple(WorkerDevice(f"cuda:{i}", one) for i, one in enumerate(visible)) or (WorkerDevice("simulated"),)
    listed = [devices] if isinstance(devices, (str, int)) else list(devices)
    if not listed:
        raise TargetError("devices is an empty list: name at least one, or `all`")
    return tuple(map(_device, listed))


def _device(given: str | int) -> WorkerDevice:
    name = f"cuda:{given}" if isinstance(given, int) else given
    if name in HOST:
        return WorkerDevice(name)
    kind, _, number = name.partition(":")
    if kind != "cuda" or not number.isdecimal():
        raise TargetError(f"device {given!r} is none of: all, cuda:0, cuda:1, …, cpu, simulated")
    visible = visible_gpus()
    if int(number) >= len(visible):
        raise TargetError(f"there is no device {name}: this machine shows {len(visible)} GPUs")
    return WorkerDevice(name, visible[int(number)])
