"""Simulate the latency of a server in virtual time, with the queue that forms batches and a device of a known speed.

Usage: python -m benchmarks.serving.simulated_latency [--delay-ms …] [--load …]. Requests come at random times
(Poisson). No process runs and no clock of the machine is read, so that other work does not disturb the figures.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fusec.serving.server.server_options import ServerOptions
from fusec.serving.server.worker.batch_queue import BatchGroup, BatchQueue
from fusec.serving.server.worker.model_worker import SLOTS

SIZES = (1, 8, 16, 32, 48, 64)


@dataclass(frozen=True)
class Device:
    """A device that runs one batch after the other, and a thread that gathers one after the other. Times are seconds.

    row_s, batch_s: times of a row and of a batch on the device; about ResNet-50 in fp16 on an H200.
    gather_row_s, gather_batch_s: the same for the thread that gathers, with the copies to the device.
    answer_s: from the end of a batch until the thread that answers has woken up.
    slots: batches that are gathered or run at a time.
    """

    row_s: float = 25e-6
    batch_s: float = 100e-6
    gather_row_s: float = 20e-6
    gather_batch_s: float = 100e-6
    answer_s: float = 150e-6
    slots: int = SLOTS

    def run_s(self, size: int) -> float:
        """Return the time of a batch on the device."""
        return self.batch_s + size * self.row_s

    def gather_s(self, rows: int) -> float:
        """Return the time to gather a batch."""
        return self.gather_batch_s + rows * self.gather_row_s


def latencies(device: Device, load: float, rows: int, delay_s: float, count: int = 20_000) -> np.ndarray:
    """Return the seconds from the arrival of each request to its answer.

    load: share of the throughput of full batches on the device. rows: rows of a request.
    """
    rng, now = random.Random(0), 0.0
    rate = load * SIZES[-1] / device.run_s(SIZES[-1]) / rows
    queue: BatchQueue[float] = BatchQueue(delay_s, 1e9, lambda tickets: None, lambda: now)
    group = BatchGroup("m", SIZES)
    events = [(0.0, True)]  # times, and if a request arrives then; else a batch ends, is gathered, or may be due
    gathered = ended = 0.0
    endings, found = list[float](), list[float]()
    while len(found) < count:
        now, arrives = heapq.heappop(events)
        if arrives:
            queue.put(group, [(now, rows)])
            heapq.heappush(events, (now + rng.expovariate(rate), True))
            heapq.heappush(events, (now + delay_s + 1e-9, False))
        endings = [end for end in endings if end > now]
        while now >= gathered and len(endings) < device.slots and (batch := queue.take()) is not None:
            gathered = now + device.gather_s(len(batch.tickets) * rows)
            ended = max(ended, gathered) + device.run_s(batch.size)
            answered = ended + device.answer_s
            endings.append(answered)
            heapq.heappush(events, (gathered, False))
            heapq.heappush(events, (answered, False))
            found += [answered - since for since in batch.tickets]
    return np.array(found[count // 10 :])


def throughput(device: Device, rows: int, delay_s: float, count: int = 20_000) -> float:
    """Return the rows a second that are answered if more come than that, as a share of full batches on the device."""
    load = 2.0
    waits = latencies(device, load, rows, delay_s, count)
    return load / (1 + (waits[-1] - waits[0]) / (len(waits) * rows * device.run_s(SIZES[-1]) / SIZES[-1] / load))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print median and 99th percentile for each combination."""
    options = argparse.ArgumentParser(description=__doc__)
    default = ServerOptions(models={})
    options.add_argument("--delay-ms", type=float, nargs="+", default=[1e3 * default.delay_s])
    options.add_argument("--load", type=float, nargs="+", default=[0.3, 0.5, 0.7, 0.9])
    options.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16])
    options.add_argument("--slots", type=int, nargs="+", default=[SLOTS])
    given = options.parse_args(arguments)
    for rows in given.rows:
        for slots in given.slots:
            for delay in given.delay_ms:
                print(f"{throughput(Device(slots=slots), rows, delay / 1e3):.0%} of the device at full load")
                for load in given.load:
                    times = 1e3 * latencies(Device(slots=slots), load, rows, delay / 1e3)
                    median, p99 = np.quantile(times, [0.5, 0.99])
                    case = f"requests of {rows:2}, {slots} slots, delay {delay:4.1f} ms, load {load:.0%}"
                    print(f"{case}: median {median:5.2f} ms, p99 {p99:5.2f} ms, ratio {p99 / median:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
