"""Receive the bodies of inference requests straight into the memory that workers read.

A server library gives a body in pieces of its own, which are copied several times. This protocol owns the connection of
a client. It finds where each request starts and receives the body of an inference request into shared memory.

A plain request for inference is answered here, because that takes a fraction of the library's time. Of an unusual one,
the library gets the head, with a Content-Length of 0. Other requests pass to it unchanged.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections import deque
from collections.abc import Callable, MutableMapping
from typing import Any

from fusec.serving.server.front_end.http.http_answer import HttpAnswer
from fusec.serving.server.front_end.http.request_head import END, RequestHead, read_head
from fusec.serving.server.memory.shared_arena import ALIGNMENT, SharedArena
from fusec.system.dataclass import dataclass

_ROOM_BYTES = 16 << 10  # for heads; what arrives of a body with its head is copied once more
_WAKE_BYTES = 256 << 10  # of a body, which the kernel collects before it wakes up this process
_HEAD_BYTES = 8 << 10  # longer heads are for the server library to refuse
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@dataclass
class ReceivedBody:
    """A body in shared memory. late: it did not arrive in time, and is not complete."""

    arena: SharedArena
    span: tuple[int, int]
    start: int
    head: RequestHead
    length: int
    since: float
    place: int = 0
    late: bool = False

    @property
    def data(self) -> memoryview:
        """Return its bytes."""
        return self.arena.memory[self.start : self.start + self.length]

    @property
    def left(self) -> memoryview:
        """Return the memory of the bytes that have not arrived."""
        return self.arena.memory[self.start + self.place : self.start + self.length]


@dataclass(frozen=True)
class ConnectionOptions:
    """Hold the options that all connections of a front end share.

    arena: memory for bodies. most_bytes: of a body.
    answer: called with a connection and the body of a plain request for inference; it calls `answered` later.
    all: the connections that are open, by transport.
    """

    arena: SharedArena
    most_bytes: int
    answer: Callable[[HttpConnection, ReceivedBody], None]
    all: MutableMapping[asyncio.BaseTransport, HttpConnection]


class HttpConnection(asyncio.BufferedProtocol):
    """One connection.

    A request that is answered here is answered before the next one is read, and after the library has answered all
    that it got. So answers have the order of requests.

    bodies: one for each request for inference that the server library has and its handler does not have yet; None where
        there is no memory for it, or it is too large.
    """

    def __init__(self, http: asyncio.Protocol, options: ConnectionOptions):
        """Take a connection. http: protocol of the server library."""
        self._http, self._options = http, options
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._socket: Any = None
        self._room = bytearray(_ROOM_BYTES)
        self._view = memoryview(self._room)
        self._filled = 0
        self._pass: float = 0  # bytes of a body that go to the server library
        self._body: ReceivedBody | None = None
        self._wake_bytes = 1
        self._dropping = self._ending = False
        self._answering = self._is_full = self._is_paused = False
        self._of_library = 0  # requests that it has not answered
        self._active_at = self._loop.time()
        self.bodies: deque[ReceivedBody | None] = deque()

    @property
    def lost_track(self) -> bool:
        """Tell if all bytes go to the server library from now on, because a request could not be read."""
        return self._pass == math.inf

    @property
    def is_busy(self) -> bool:
        """Tell if a body is on its way, or an answer that the server library does not give."""
        return self._body is not None or self._answering

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to receive from a client."""
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._socket = transport, transport.get_extra_info("socket")
        self._options.all[transport] = self
        self._http.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Release bodies that no handler took."""
        if self._transport is not None:
            self._options.all.pop(self._transport, None)
            self._transport = None
        if self._body is not None:
            self.bodies.append(self._body)
            self._body = None
        for body in self.bodies:
            if body is not None:
                give_back(body)
        self.bodies.clear()
        self._http.connection_lost(exc)

    def pause_writing(self) -> None:
        """Read no more requests, and let the server library wait, until the client reads."""
        self._is_full = True
        self._http.pause_writing()

    def resume_writing(self) -> None:
        """Let the server library, and this connection, write again."""
        self._is_full = False
        self._http.resume_writing()
        self._go_on()

    def eof_received(self) -> bool | None:
        """Tell the server library that the client sends no more."""
        return self._http.eof_received()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where the next bytes go."""
        return self._view[self._filled :] if self._body is None else self._body.left

    def buffer_updated(self, nbytes: int) -> None:
        """Process bytes that have arrived in the buffer."""
        if self._dropping:
            return
        if self._body is None:
            self._filled += nbytes
            self._take()
            return
        self._body.place += nbytes
        if self._body.place == self._body.length:
            self._complete(self._body)
        else:
            self._wake_after(self._body.length - self._body.place)

    def expire(self, before: float) -> None:
        """Give up the body if it began before this time: refuse its request, and close the connection."""
        if self._body is not None and self._body.since < before:
            self._body.late = self._dropping = True
            self._complete(self._body)

    def close_idle(self, before: float) -> None:
        """Close the connection if nothing is in progress, and nothing was since some time."""
        is_idle = not self.is_busy and (not self._of_library or self.lost_track)
        if is_idle and self._active_at < before and self._transport is not None:
            self._transport.abort()  # not `close`, which waits for a client that does not read

    def end(self) -> None:
        """Close the connection after the answer that is in progress here, if there is one."""
        self._ending = True

    def answered(self, answer: HttpAnswer) -> None:
        """Send an answer to the request that `ConnectionOptions.answer` got last, and take the next request."""
        self._answering, self._active_at = False, self._loop.time()
        if self._transport is None:  # the client is gone
            return
        self._transport.writelines(answer.written(self._ending))
        if self._ending:
            self._transport.close()
        self._go_on()

    def library_answered(self) -> None:
        """Count an answer that the server library has sent, and take the next request."""
        self._of_library = max(0, self._of_library - 1)
        self._active_at = self._loop.time()

    def _go_on(self) -> None:
        if self._transport is None or self._transport.is_closing() or self._answering or self._is_full:
            return
        self._take()
        if self._is_paused and not self._answering and not self._is_full:
            self._is_paused = False
            self._transport.resume_reading()

    def _take(self) -> None:
        """Process what is in the buffer: heads, and bytes of bodies."""
        place = 0
        while place < self._filled and self._body is None and not self._answering and not self._is_full:
            if self._pass:
                end = int(min(self._filled, place + self._pass))
                self._pass -= end - place
            elif (end := self._room.find(END, place, self._filled) + len(END)) < len(END):
                if self._filled - place < _HEAD_BYTES:
                    break
                self._pass = math.inf
                continue
            else:
                head = read_head(bytes(self._view[place:end]))
                if (body := self._begin(head)) is not None:
                    place = end + self._start(body, end)
                    continue
                self._pass = math.inf if head.length is None else head.length
                self._of_library += 1
                if head.infers:
                    self.bodies.append(None)
            self._active_at = self._loop.time()
            self._http.data_received(bytes(self._view[place:end]))
            place = end
        left = self._filled - place
        self._room[:left] = self._room[place : self._filled]
        self._filled = left
        if left and (self._answering or self._is_full) and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def _begin(self, head: RequestHead) -> ReceivedBody | None:
        """Take memory for the body of a request for inference; None if the server library shall refuse it."""
        if not head.infers or head.length is None or head.length > self._options.most_bytes:
            return None
        before = -(head.json_bytes or 0) % ALIGNMENT  # so that binary tensors are aligned, and are copied fast
        nbytes, arena = before + head.length, self._options.arena
        start = arena.take(nbytes)
        if start is None:
            return None
        if head.expects and self._transport is not None:
            self._transport.write(_CONTINUE)
        return ReceivedBody(arena, (start, nbytes), start + before, head, head.length, self._loop.time())

    def _start(self, body: ReceivedBody, place: int) -> int:
        """Copy what has arrived of a body with its head, and return the number of these bytes."""
        count = min(body.length, self._filled - place)
        body.left[:count] = self._view[place : place + count]
        body.place = count
        self._body = body
        if count == body.length:
            self._complete(body)
        else:
            self._wake_after(body.length - count)
        return count

    def _wake_after(self, nbytes: int) -> None:
        """Let the kernel wake up this process when `nbytes` bytes have arrived, or enough to copy them efficiently."""
        wanted = min(nbytes, _WAKE_BYTES)
        if wanted != self._wake_bytes and self._socket is not None:
            self._wake_bytes = wanted
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)

    def _complete(self, body: ReceivedBody) -> None:
        self._body = None
        self._wake_after(1)
        if body.head.is_plain and not self._of_library and not body.late:
            self._answering = True
            self._options.answer(self, body)
            return
        self.bodies.append(body)
        self._of_library += 1
        self._http.data_received(body.head.without_body)


def give_back(body: ReceivedBody) -> None:
    """Free the memory of a body."""
    body.arena.give_back(*body.span)
