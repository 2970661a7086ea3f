"""Start a Dask cluster on this machine with one worker process for each GPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from fusec.scale.devices import HOST, worker_devices
from fusec.scale.extras import extra_module

TASKS = 2  # of a worker on a GPU at a time


def gpu_cluster(devices: str | int | Sequence[str | int] = "all", **options: Any) -> Any:
    """Return a cluster (`distributed.SpecCluster`) whose workers see one device each. A worker that dies is replaced.

    A plain `LocalCluster` would give all its workers the first GPU. For several machines, start each worker with a GPU
    of its own: `CUDA_VISIBLE_DEVICES=0 dask worker ADDRESS --nthreads 2`, or use dask-cuda.

    A worker on a GPU runs two tasks at a time: rows of one are read and copied while batches of the other one run. A
    worker on the host runs one.

    devices: as for `fusec.pool`.
    options: options of `distributed.SpecCluster`.
    """
    distributed = extra_module("distributed", "dask")
    chosen = worker_devices(devices)
    here: dict[str, Any] = {"dashboard_address": None, "host": "127.0.0.1"}
    # Dask gives a worker the memory of its cores, but these have few threads each on a machine with many cores.
    own = {**here, "memory_limit": distributed.system.MEMORY_LIMIT // len(chosen)}
    workers: dict[int, dict[str, Any]] = {}
    for number, device in enumerate(chosen):
        environment = _changes(device.environment(len(chosen)))
        threads = 1 if device.name in HOST else TASKS
        workers[number] = {"cls": distributed.Nanny, "options": {**own, "nthreads": threads, "env": environment}}
    scheduler = {"cls": distributed.Scheduler, "options": {**here, "port": 0}}
    return distributed.SpecCluster(scheduler=scheduler, workers=workers, **options)


def _changes(environment: dict[str, str]) -> dict[str, str]:
    """Return the variables that differ from those of this process, because Dask sends them in a message."""
    return {name: value for name, value in environment.items() if os.environ.get(name) != value}
