"""Deal the connections of clients to the front ends of a server in turn.

Front ends that accept from one socket by themselves share connections badly: the one that wakes up first takes all that
wait. Then a few of them do the work of all, and requests wait for these.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

_RETRY_S = 0.05  # between attempts, where no front end can take a connection, or this process has no descriptor left


class ConnectionDealer:
    """Accepts connections, and sends each to the next front end that lives.

    A connection that a front end has not taken when it dies goes to the process that takes its place.
    """

    def __init__(self, listening: socket.socket, count: int):
        """Make a channel to each front end."""
        self._listening = listening
        self._channels = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(count)]
        for own, _ in self._channels:
            own.setblocking(False)
        self._turn = 0
        self._closed = threading.Event()

    def handle(self, number: int) -> int:
        """Return the descriptor from which a front end takes its connections, with `take`."""
        return self._channels[number][1].fileno()

    def start(self, lives: Callable[[int], bool]) -> None:
        """Begin to accept, in a thread. lives: tells if the front end of a number runs."""
        threading.Thread(target=self._accept, args=(lives,), name="fusec-accept", daemon=True).start()

    def _accept(self, lives: Callable[[int], bool]) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listening.accept()
            except OSError:  # it was shut down, the client is gone, or there is no descriptor left
                self._closed.wait(_RETRY_S)
                continue
            with connection:
                while not self._is_sent(connection, lives) and not self._closed.is_set():
                    time.sleep(_RETRY_S)

    def _is_sent(self, connection: socket.socket, lives: Callable[[int], bool]) -> bool:
        """Send a connection to a front end; return False if none can take it now."""
        for _ in self._channels:
            number = self._turn
            self._turn = (number + 1) % len(self._channels)
            if lives(number):
                with contextlib.suppress(OSError):  # its channel is full
                    socket.send_fds(self._channels[number][0], [b"c"], [connection.fileno()])
                    return True
        return False

    def close(self) -> None:
        """Accept no more connections."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listening.close()

    def close_channels(self) -> None:
        """Release the channels. Connections that no front end has taken are closed."""
        for pair in self._channels:
            for end in pair:
                end.close()


def take(channel: socket.socket) -> list[socket.socket]:
    """Return the connections that wait in the channel of a front end, without waiting for one."""
    found: list[socket.socket] = []
    channel.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            data, handles, _, _ = socket.recv_fds(channel, 1, 1)
            found += [socket.socket(fileno=handle) for handle in handles]
            if not data:
                break
    return found
