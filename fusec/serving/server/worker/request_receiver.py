"""Read the requests of all front ends in a worker, in the thread that forms batches, when it forms one.

A thread for each front end would wake up for every request, and take Python's lock from the threads that run batches.
What arrives while a batch is prepared waits in the sockets, and is then read together.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable

from fusec.serving.server.worker.queued_request import FrontEndConnection

_READ_BYTES = 1 << 20


class RequestReceiver:
    """The connections to front ends. take: called with one of them and what has arrived; it removes whole messages."""

    def __init__(self, take: Callable[[FrontEndConnection, bytearray], None]):
        self._take = take
        self._poll = select.epoll()
        self._senders: dict[int, tuple[FrontEndConnection, bytearray]] = {}

    def add(self, sender: FrontEndConnection) -> None:
        """Read from a front end, too. Any thread may call it, also while another one waits."""
        self._senders[sender.connection.fileno()] = sender, bytearray()
        self._poll.register(sender.connection.fileno(), select.EPOLLIN)

    def receive(self, wait: bool) -> None:
        """Take what has arrived. wait: until there is something."""
        for handle, _ in self._poll.poll(None if wait else 0):
            sender, held = self._senders[handle]
            try:
                data = sender.connection.recv(_READ_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
            except ConnectionError:
                data = b""
            if data:
                held += data
                self._take(sender, held)
            else:
                self._poll.unregister(handle)
                del self._senders[handle]
                sender.connection.close()
