"""Measure `fusec serve` against the executable that it runs: throughput with few images a request, then latency.

Usage: python -m benchmarks.serving.server_load [resnet50 | small …]. On a GPU the default is resnet50 in fp16 with
images of 224²; without one it is a small network in simulation. Images are bytes; preprocessing is part of the model.
The extra `serve` must be installed.

1. The executable alone, with the largest batch: images on the device, and on the host (`executable_rate.py`). A server
   is compared with both: `of_device` and `of_host`.
2. The server at full load: processes with many connections send requests of one image (`--rows`: of several), as fast
   as answers come (`client_processes.py`); the server forms the batches.
3. The server at 70 % of that load: requests at random times. Latency counts from when a request was due.

The case `stub` has a device that only waits, so that the server itself is measured, also without a GPU.

A figure is printed as soon as it is known, and goes to the row of its case in benchmarks/results/serving.json. Cases
that are not measured again keep their rows. `--limit` stops a run that takes too long: with status 1, and the row of
the case that did not fit stays as it was before.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import fusec
from benchmarks.common.attempt import TooLongError, within
from benchmarks.common.live_rows import LiveRows
from benchmarks.common.result_files import KEYS, gpu, parser
from benchmarks.serving.client_processes import error, loaded, quantiles, requests_of
from benchmarks.serving.executable_rate import alone
from benchmarks.serving.served_models import CASES, Case, compiled
from benchmarks.serving.server_process import Clients, served
from fusec.gpu import device

LOAD = 0.7  # of the throughput, at which latency is measured


def measured(case: Case, path: Path, clients: Clients, figures: Mapping[str, Any], tell: Callable[..., None]) -> None:
    """Measure one case. figures: of the executable alone. tell: takes figures by name."""
    own = dict(figures)
    if clients.stub_us:
        a_row, a_batch = clients.stub_us
        speed = 1e6 * case.batches[-1] / (a_batch + a_row * case.batches[-1])
        own |= {"device": "stub", "device_images_s": speed, "host_images_s": speed}
    answer = own.pop("answer")[: clients.rows]
    tell(precision=case.precision, side=case.side, **own)
    tell(front_ends=clients.front_ends, clients=clients.processes, connections=clients.connections)
    output = "y" if case.model in ("small", "stub") else fusec.Predictor(path, warm_up=False).outputs[0].name
    window_s = 0.8 * clients.seconds
    with served(path, clients) as server, requests_of(case, output, clients, server.address) as requests:
        tell(error=error(case, server.address, requests, answer))
        full = loaded(server, requests, clients)
        rate = clients.rows * len(full.good) / window_s
        tell(images_s=rate, of_device=rate / own["device_images_s"], of_host=rate / own["host_images_s"])
        tell(**{f"full_{name}": value for name, value in quantiles(full).items()})
        tell(**{f"{part}_cpu_us": 1e6 * seconds for part, seconds in full.cpu_s.items()})
        at_load = loaded(server, requests, clients, LOAD * rate / clients.rows)
    latency = quantiles(at_load)
    tell(**{f"load_{name}": value for name, value in latency.items()})
    tell(
        load_images_s=clients.rows * len(at_load.answers) / window_s,
        load_p99_in_client_ms=1e3 * float(np.quantile(at_load.good[:, 2], 0.99)),
        p99_of_median=latency["p99_ms"] / latency["median_ms"],
        refused=sum(len(each.answers) - len(each.good) for each in (full, at_load)),
    )


def machine() -> Mapping[str, Any]:
    """Name the GPU, or the CPU that simulates."""
    if device.device_name() is not None:
        return gpu()
    return {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}


def main() -> int:
    options = parser(__doc__, "serving.json", budget=True)
    options.add_argument("cases", nargs="*", help=", ".join(CASES))
    options.add_argument("--tune", default="quick")
    options.add_argument("--processes", type=int, default=max(1, min(6, (os.cpu_count() or 1) // 3)), help="clients")
    options.add_argument("--connections", type=int, default=0, help="of each client; default: five batches in all")
    options.add_argument("--rows", type=int, nargs="+", default=[1], help="images of a request: a run for each number")
    options.add_argument("--batches", type=int, nargs="+", help="sizes to compile for; the last is the largest batch")
    options.add_argument("--limit", type=float, default=0.0, help="stop after this many seconds; 0: no limit")
    options.add_argument("--front-ends", type=int, default=max(1, min(8, (os.cpu_count() or 1) // 2)))
    options.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    options.add_argument("--file", type=Path, help="a .fusec file of the case, in place of compiling it")
    options.add_argument(
        "--stub-us", type=float, nargs=2, metavar=("ROW", "BATCH"), default=(25.0, 100.0), help="times of the case stub"
    )
    options.add_argument("--shared-memory", action="store_true", help="images are in shared memory of the clients")
    options.add_argument("--option", action="append", default=[], help="of fusec serve, as --option=--delay-ms=1")
    return run(options.parse_args())


def run(given: argparse.Namespace) -> int:
    """Measure the cases, and return the status: 1 if the limit was reached."""
    on_gpu = device.device_name() is not None
    output = None if given.cases == ["stub"] else given.output  # a stub is no result
    rows = LiveRows(output, given.commit, machine(), KEYS["serving.json"])
    begun: tuple[str, Mapping[str, Any]] = ("", {})
    try:
        with tempfile.TemporaryDirectory() as folder, within(given.limit):
            for name in given.cases or ["resnet50" if on_gpu else "small"]:
                begun = name, {}
                case = replace(CASES[name], batches=tuple(given.batches or CASES[name].batches))
                start = time.perf_counter()
                path = given.file or compiled(case, Path(folder), given.tune, given.budget)
                rows(name, {}, compile_s=time.perf_counter() - start)
                own = alone(case, path, given.seconds / 2)
                for count in given.rows:
                    key = {"model": name, "batch": case.batches[-1], "rows": count}
                    begun = f"{name}, requests of {count}", {**key, "shared_memory": given.shared_memory}
                    measured(case, path, clients_of(given, case, count), own, partial(rows, *begun))
    except TooLongError as reason:
        print(f"{begun[0]}: stopped by --limit: {reason}", flush=True)
        rows.give_up(begun[1])
        return 1
    return 0


def clients_of(given: argparse.Namespace, case: Case, count: int) -> Clients:
    """Return the load by the options for requests of `count` images."""
    connections = given.connections or max(2, -(-5 * case.batches[-1] // (given.processes * count)))
    stub_us = tuple(given.stub_us) if case.model == "stub" else None
    served_as = (given.front_ends, count, stub_us, tuple(given.option), given.shared_memory)
    return Clients(given.processes, connections, given.seconds, *served_as)


if __name__ == "__main__":
    sys.exit(main())
