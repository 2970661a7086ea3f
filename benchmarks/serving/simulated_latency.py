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

from fusec.serving.server.batch_queue import BatchGroup, BatchQueue
from fusec.serving.server.model_worker import SLOTS
from fusec.serving.server.server_options import ServerOptions

SIZES = (1, 8, 16, 32, 48, 64)
ROW_S, BATCH_S = 25e-6, 150e-6  # about ResNet-50 in fp16 on an H200, with the copies of images


@dataclass(frozen=True)
class Device:
    """A device that runs one batch after the other.

    row_s, batch_s: seconds of a row and of a batch. slots: batches that are gathered or run at a time.
    """

    row_s: float = ROW_S
    batch_s: float = BATCH_S
    slots: int = SLOTS

    def seconds(self, size: int) -> float:
        """Return the time of a batch."""
        return self.batch_s + size * self.row_s


def latencies(device: Device, load: float, rows: int, delay_s: float, count: int = 20_000) -> np.ndarray:
    """Return the seconds from the arrival of each request to its answer.

    load: share of the throughput of full batches. rows: of a request.
    """
    rng, now = random.Random(0), 0.0
    rate = load * SIZES[-1] / device.seconds(SIZES[-1]) / rows
    queue: BatchQueue[float] = BatchQueue(delay_s, 1e9, lambda tickets: None, lambda: now)
    group = BatchGroup("m", SIZES)
    # Times at which something happens: an arrival, the end of a batch, or the end of a wait.
    events: list[tuple[float, int]] = []
    arrival, endings, busy_until, found, arrived = 0.0, list[float](), 0.0, list[float](), 0
    heapq.heappush(events, (0.0, 0))
    while len(found) < count:
        now, kind = heapq.heappop(events)
        if kind == 0:
            queue.put(group, [(now, rows)])
            arrived += 1
            arrival = now + rng.expovariate(rate)
            heapq.heappush(events, (arrival, 0))
            heapq.heappush(events, (now + delay_s + 1e-9, 1))
        endings = [end for end in endings if end > now]
        while len(endings) < device.slots and (batch := queue.take()) is not None:
            busy_until = max(busy_until, now) + device.seconds(batch.size)
            endings.append(busy_until)
            heapq.heappush(events, (busy_until, 1))
            found += [busy_until - since for since in batch.tickets]
    return np.array(found[count // 10 :])


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
                for load in given.load:
                    times = 1e3 * latencies(Device(slots=slots), load, rows, delay / 1e3)
                    median, p99 = np.quantile(times, [0.5, 0.99])
                    case = f"requests of {rows:2}, {slots} slots, delay {delay:4.1f} ms, load {load:.0%}"
                    print(f"{case}: median {median:5.2f} ms, p99 {p99:5.2f} ms, ratio {p99 / median:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
