"""Receive the bodies of inference requests straight into the memory that workers read.

A server library gives a body in pieces of its own, which are copied several times. This protocol owns the connection of
a client. It finds where each request starts and receives the body of an inference request into shared memory. The
server library gets the head alone, with a Content-Length of 0. Other requests pass unchanged.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import MutableMapping
from dataclasses import dataclass

from fusec.serving.server.memory.shared_arena import ALIGNMENT, SharedArena
from fusec.serving.server.request_head import END, RequestHead, read_head

_ROOM_BYTES = 16 << 10  # for heads; what arrives of a body with its head is copied once more
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


class HttpConnection(asyncio.BufferedProtocol):
    """One connection.

    bodies: one for each request for inference that the server library has and its handler does not have yet; None where
        there is no memory for it, or it is too large.

    lost_track: it does not know where requests start, because of one that it could not read.
    """

    def __init__(
        self,
        http: asyncio.Protocol,
        arena: SharedArena,
        most_bytes: int,
        connections: MutableMapping[asyncio.BaseTransport, HttpConnection],
    ):
        """Take a connection.

        http: protocol of the server library. most_bytes: of a body. connections: all of this process by transport;
            while it is open, this one is there.
        """
        self._http, self._arena, self._most_bytes, self._connections = http, arena, most_bytes, connections
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._room = bytearray(_ROOM_BYTES)
        self._view = memoryview(self._room)
        self._filled = 0
        self._pass: float = 0  # bytes of a body that go to the server library
        self._body: ReceivedBody | None = None
        self._dropping = False
        self.bodies: deque[ReceivedBody | None] = deque()

    @property
    def lost_track(self) -> bool:
        """Tell if all bytes go to the server library from now on."""
        return self._pass == math.inf

    @property
    def is_receiving(self) -> bool:
        """Tell if a body is on its way."""
        return self._body is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to receive from a client."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._connections[transport] = self
        self._http.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Release bodies that no handler took."""
        if self._transport is not None:
            self._connections.pop(self._transport, None)
        if self._body is not None:
            self.bodies.append(self._body)
            self._body = None
        for body in self.bodies:
            if body is not None:
                give_back(body)
        self.bodies.clear()
        self._http.connection_lost(exc)

    def pause_writing(self) -> None:
        """Let the server library wait until the client reads."""
        self._http.pause_writing()

    def resume_writing(self) -> None:
        """Let the server library write again."""
        self._http.resume_writing()

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

    def expire(self, before: float) -> None:
        """Give up the body if it began before this time: refuse its request, and close the connection."""
        if self._body is not None and self._body.since < before:
            self._body.late = self._dropping = True
            self._complete(self._body)

    def _take(self) -> None:
        """Process what is in the buffer: heads, and bytes of bodies."""
        place = 0
        while place < self._filled and self._body is None:
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
                if head.infers:
                    self.bodies.append(None)
            self._http.data_received(bytes(self._view[place:end]))
            place = end
        left = self._filled - place
        self._room[:left] = self._room[place : self._filled]
        self._filled = left

    def _begin(self, head: RequestHead) -> ReceivedBody | None:
        """Take memory for the body of a request for inference; None if the server library shall refuse it."""
        if not head.infers or head.length is None or head.length > self._most_bytes:
            return None
        before = -(head.json_bytes or 0) % ALIGNMENT  # so that binary tensors are aligned, and are copied fast
        nbytes = before + head.length
        start = self._arena.take(nbytes)
        if start is None:
            return None
        if head.expects and self._transport is not None:
            self._transport.write(_CONTINUE)
        return ReceivedBody(self._arena, (start, nbytes), start + before, head, head.length, self._loop.time())

    def _start(self, body: ReceivedBody, place: int) -> int:
        """Copy what has arrived of a body with its head, and return the number of these bytes."""
        count = min(body.length, self._filled - place)
        body.left[:count] = self._view[place : place + count]
        body.place = count
        self._body = body
        if count == body.length:
            self._complete(body)
        return count

    def _complete(self, body: ReceivedBody) -> None:
        self._body = None
        self.bodies.append(body)
        self._http.data_received(body.head.without_body)


def give_back(body: ReceivedBody) -> None:
    """Free the memory of a body."""
    body.arena.give_back(*body.span)
