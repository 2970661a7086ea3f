"""Load a server from a process of its own; `benchmarks.serving.server_load` starts several.

Usage: python -m benchmarks.serving.load_client JSON, with the keys of `Load`. Prints JSON: the CPU time of the process
while it asked, and for each answer when it came, how long it took, how long the request waited in this process before
it was sent, and its status.

Clients share the cores of this machine with the server that they measure. So this one uses sockets and `epoll`, and no
event loop: a request costs little more than the kernel's copies of its bytes.
"""

from __future__ import annotations

import gc
import itertools
import json
import random
import select
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

CLOSED = "the server closed a connection"
STATUS_AT = len("HTTP/1.1 ")
LENGTH = b"\r\ncontent-length:"  # not the end of another header
RECEIVE_BYTES = 256 << 10
SEND_BYTES = 4 << 20  # of a socket's buffer, so that a request is sent by one call


@dataclass(frozen=True)
class Load:
    """The requests of one client process.

    request: file with whole HTTP requests, which are sent in turn. lengths: the bytes of each.
    connections: largest number of requests in progress.
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


class Connection:
    """One connection with at most one request in progress.

    due: the time at which its request was due. waited: seconds from then until it was sent.
    """

    def __init__(self, address: tuple[str, int]):
        self.socket = socket.create_connection(address)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.setblocking(False)
        self.held, self.length = bytearray(), -1
        self.left = memoryview(b"")  # bytes of the request that the socket has not taken
        self.due = self.waited = 0.0

    def send(self, request: memoryview, due: float) -> None:
        """Begin to send a request."""
        self.due, self.waited = due, time.monotonic() - due
        self.left = request
        self.push()

    def push(self) -> None:
        """Send as much as the socket takes."""
        try:
            self.left = self.left[self.socket.send(self.left) :]
        except BlockingIOError:
            pass
        except ConnectionError as error:
            raise SystemExit(CLOSED) from error

    def receive(self) -> int:
        """Read what has arrived, and return the status of the answer; 0 if it is not there yet."""
        data = b""
        while not data or len(data) == RECEIVE_BYTES:  # fewer bytes are all that there are
            try:
                data = self.socket.recv(RECEIVE_BYTES)
            except BlockingIOError:
                break
            except ConnectionError as error:
                raise SystemExit(CLOSED) from error
            if not data:
                raise SystemExit(CLOSED)
            self.held += data
        if self.length < 0:
            end = self.held.find(b"\r\n\r\n")
            if end < 0:
                return 0
            head = bytes(self.held[:end]).lower()
            self.length = end + 4 + int(head.partition(LENGTH)[2].partition(b"\r\n")[0])
        if len(self.held) < self.length:
            return 0
        status = int(self.held[STATUS_AT : STATUS_AT + 3])
        self.held.clear()
        self.length = -1
        return status


class Client:
    """All connections of this process, and the times of their answers."""

    def __init__(self, load: Load):
        self.load, data = load, memoryview(Path(load.request).read_bytes())
        ends = list(itertools.accumulate(load.lengths, initial=0))
        self.requests = itertools.cycle([data[start:end] for start, end in itertools.pairwise(ends)])
        self.answers: list[tuple[float, float, float, int]] = []
        self.idle = deque(Connection((load.host, load.port)) for _ in range(load.connections))
        self.poll = select.epoll()
        self.by_handle = {each.socket.fileno(): each for each in self.idle}
        for handle in self.by_handle:
            self.poll.register(handle, select.EPOLLIN | select.EPOLLOUT | select.EPOLLET)
        self.cpu_s = 0.0

    def wait(self, seconds: float) -> None:
        """Take the answers that come within a time, or until one comes."""
        for handle, events in self.poll.poll(max(0.0, seconds)):
            connection = self.by_handle[handle]
            if connection.left and events & select.EPOLLOUT:
                connection.push()
            if events & ~select.EPOLLOUT and (status := connection.receive()):
                now = time.monotonic()
                self.answers.append((now, now - connection.due, connection.waited, status))
                self.idle.append(connection)

    def run(self) -> None:
        """Send requests for `seconds`, then wait for the last answers."""
        load = self.load
        time.sleep(max(0.0, load.start - time.monotonic()))
        before, end = time.process_time(), load.start + load.seconds
        if load.rate:
            self.ask_at_random_times(end)
        else:
            while time.monotonic() < end:
                while self.idle:
                    self.idle.popleft().send(next(self.requests), time.monotonic())
                self.wait(end - time.monotonic())
        self.cpu_s = time.process_time() - before
        while len(self.idle) < load.connections:
            self.wait(1.0)
        self.poll.close()
        for connection in self.idle:
            connection.socket.close()

    def ask_at_random_times(self, end: float) -> None:
        """Send each request when it is due, or as soon as a connection is free. Its time counts from when due."""
        rng, due, waiting = random.Random(self.load.seed), self.load.start, deque[float]()
        while True:
            now = time.monotonic()
            while due <= now:
                waiting.append(due)
                due += rng.expovariate(self.load.rate)
            if now >= end:
                return
            while waiting and self.idle and waiting[0] < end:
                self.idle.popleft().send(next(self.requests), waiting.popleft())
            self.wait(min(due, end) - now)


def main() -> None:
    gc.disable()  # a collection would look at all answers so far, and answers would wait for it
    client = Client(Load(**json.loads(sys.argv[1])))
    client.run()
    print(json.dumps({"cpu_s": client.cpu_s, "answers": client.answers}))


if __name__ == "__main__":
    main()
