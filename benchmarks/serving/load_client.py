"""Load a server from a process of its own; `benchmarks.serving.server_load` starts several.

Usage: python -m benchmarks.serving.load_client JSON, with the keys of `Load`. Prints JSON: the CPU time of the process
while it asked, and for each answer when it came, how long it took, how long the request waited in this process before
it was sent, and its status. It uses sockets and no client library, so that one process sends thousands of requests a
second.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import random
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STATUS_AT = len("HTTP/1.1 ")


@dataclass(frozen=True)
class Load:
    """The requests of one client process.

    request: file with whole HTTP requests, which are sent in turn. lengths: of them.
    connections: as many requests are in progress at most.
    start, seconds: when to begin, on the monotonic clock of this machine, and for how long.
    rate: requests a second, at random times (Poisson), whether or not others were answered; 0: as soon as a connection
        is free.
    """

    host: str
    port: int
    request: str
    lengths: list[int]
    connections: int
    start: float
    seconds: float
    rate: float = 0.0
    seed: int = 0


class Connection(asyncio.Protocol):
    """One connection with at most one request in progress."""

    def __init__(self, client: Client):
        self.client, self.held, self.due, self.sent = client, bytearray(), 0.0, 0.0
        self.length = -1
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.set_write_buffer_limits(high=1 << 24)
        self.client.free(self)

    def send(self, due: float) -> None:
        self.due, self.sent = due, time.monotonic()
        self.transport.write(next(self.client.requests))

    def data_received(self, data: bytes) -> None:
        self.held += data
        if self.length < 0:
            end = self.held.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self.held[:end]).lower()
            self.length = end + 4 + int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
        if len(self.held) < self.length:
            return
        status = int(self.held[STATUS_AT : STATUS_AT + 3])
        self.held.clear()
        self.length = -1
        self.client.answered(self.due, self.sent - self.due, status)
        self.client.free(self)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.client.ended:
            raise SystemExit(f"the server closed a connection: {error}")


class Client:
    """All connections of this process, and the times of their answers."""

    def __init__(self, load: Load):
        self.load, data = load, Path(load.request).read_bytes()
        ends = list(itertools.accumulate(load.lengths, initial=0))
        self.requests = itertools.cycle([data[start:end] for start, end in itertools.pairwise(ends)])
        self.answers: list[tuple[float, float, float, int]] = []
        self.cpu_s = 0.0
        self.idle: deque[Connection] = deque()
        self.waiting: deque[float] = deque()
        self.begun = self.ended = False

    def free(self, connection: Connection) -> None:
        """Use a connection for the next request that is due."""
        if self.load.rate:
            if self.waiting:
                connection.send(self.waiting.popleft())
            else:
                self.idle.append(connection)
        elif self.begun and time.monotonic() < self.load.start + self.load.seconds:
            connection.send(time.monotonic())
        else:
            self.idle.append(connection)

    def answered(self, due: float, waited: float, status: int) -> None:
        now = time.monotonic()
        self.answers.append((now, now - due, waited, status))

    def ask(self, due: float) -> None:
        """Send a request now, or as soon as a connection is free; its time counts from when it was due."""
        if self.idle:
            self.idle.popleft().send(due)
        else:
            self.waiting.append(due)

    async def run(self) -> None:
        loop, load = asyncio.get_running_loop(), self.load
        for _ in range(load.connections):
            await loop.create_connection(lambda: Connection(self), load.host, load.port)
        await asyncio.sleep(max(0.0, load.start - time.monotonic()))
        self.begun, before = True, time.process_time()
        if load.rate:
            rng, due = random.Random(load.seed), load.start
            while (due := due + rng.expovariate(load.rate)) < load.start + load.seconds:
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                self.ask(due)
        else:
            for _ in range(len(self.idle)):
                self.ask(time.monotonic())
            await asyncio.sleep(load.seconds)
        self.cpu_s = time.process_time() - before
        while len(self.idle) < load.connections:
            await asyncio.sleep(0.01)
        self.ended = True


def main() -> None:
    gc.disable()  # a collection would look at all answers so far, and answers would wait for it
    client = Client(Load(**json.loads(sys.argv[1])))
    asyncio.run(client.run())
    print(json.dumps({"cpu_s": client.cpu_s, "answers": client.answers}))


if __name__ == "__main__":
    main()
