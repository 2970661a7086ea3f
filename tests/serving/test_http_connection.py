"""Bodies of inference requests go to shared memory, however a connection cuts them; all else to the server library."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from fusec.serving.server.http_connection import HttpConnection, give_back
from fusec.serving.server.memory.shared_arena import SharedArena
from fusec.serving.server.request_head import read_head

PATH = b"POST /v2/models/m/infer HTTP/1.1\r\n"


class Http(asyncio.Protocol):
    """Stands for the server library: what it gets."""

    def __init__(self) -> None:
        self.data = b""
        self.lost = False

    def data_received(self, data: bytes) -> None:
        self.data += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True


class Wire(asyncio.Transport):
    """Stands for the client: what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""

    def write(self, data: Any) -> None:
        self.written += data


class Connected:
    def __init__(self, arena_bytes: int = 1 << 20, most_bytes: int = 1 << 16):
        self.arena = SharedArena(arena_bytes)
        self.http, self.wire, self.all = Http(), Wire(), dict[asyncio.BaseTransport, HttpConnection]()
        self.connection = HttpConnection(self.http, self.arena, most_bytes, self.all)
        self.connection.connection_made(self.wire)

    def feed(self, data: bytes, most: int = 1 << 20) -> None:
        """Let bytes arrive, at most so many at a time."""
        while data:
            room = self.connection.get_buffer(-1)
            count = min(len(room), len(data), most)
            assert count
            room[:count] = data[:count]
            self.connection.buffer_updated(count)
            data = data[count:]

    def bodies(self) -> list[bytes | None]:
        """Take the bodies as handlers do."""
        found: list[bytes | None] = []
        while self.connection.bodies:
            body = self.connection.bodies.popleft()
            found.append(None if body is None else bytes(body.data))
            if body is not None:
                give_back(body)
        return found


def run(test: Any) -> None:
    async def within_a_loop() -> None:
        test()

    asyncio.run(within_a_loop())


def infer(body: bytes, *more: bytes) -> bytes:
    lines = b"".join(line + b"\r\n" for line in more)
    return PATH + b"Host: x\r\nContent-Length: %d\r\n" % len(body) + lines + b"\r\n" + body


def test_bodies_are_received_however_they_are_cut() -> None:
    """Requests of all kinds, one after the other, in pieces of all sizes."""

    def test() -> None:
        rng = random.Random(0)
        for most in (1, 7, 100, 5000, 1 << 20):
            connected = Connected()
            want, passed, data = list[bytes | None](), b"", b""
            for _ in range(30):
                body = rng.randbytes(rng.choice([0, 1, 3, 500, 20_000]))
                kind = rng.randrange(4)
                if kind < 2:
                    data += infer(body)
                    want.append(body)
                    passed += infer(b"")
                    continue
                head = b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n"
                if kind == 3:  # its body looks like a request
                    body += infer(b"abc")
                    head = b"POST /v2/repository/index HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body)
                else:
                    body = b""
                data += head + body
                passed += head + body
            connected.feed(data, most)
            assert connected.http.data == passed
            assert not connected.connection.lost_track
            assert connected.bodies() == want
            assert connected.arena.free_bytes == 1 << 20

    run(test)


def test_a_body_without_memory_goes_to_the_server_library() -> None:
    """It is too large, or other bodies take the memory; the next one is received again."""

    def test() -> None:
        connected = Connected(arena_bytes=1 << 15, most_bytes=20_000)
        large, first, second = infer(bytes(20_001)), infer(bytes(20_000)), infer(b"1" * 15_000)
        connected.feed(large + first + second + infer(b"last"))
        assert connected.http.data == large + infer(b"") + second + infer(b"")
        assert connected.bodies() == [None, bytes(20_000), None, b"last"]

    run(test)


def test_the_tensors_of_a_body_are_aligned() -> None:
    def test() -> None:
        connected = Connected()
        connected.feed(infer(bytes(177), b"Inference-Header-Content-Length: 77"))
        (body,) = connected.connection.bodies
        assert body is not None
        assert (body.start + 77) % 64 == 0
        assert body.head.json_bytes == 77

    run(test)


@pytest.mark.parametrize(
    "lines",
    [
        b"Transfer-Encoding: chunked\r\nContent-Length: 5",
        b"Content-Length: 5\r\nContent-Length: 5",
        b"Content-Length: +5",
        b"Content-Length: 5, 5",
        b"Content-Length: 5\r\nContent-Encoding: gzip",
        b"Content-Length : 5",
        b"X: y\n folded\r\nContent-Length: 5",
        b"Content-Length: 5\r\nUpgrade: websocket",
        b"Content-Length: 5\r\nExpect: the best",
        b"X: no length",
    ],
)
def test_an_unusual_head_ends_the_search_for_requests(lines: bytes) -> None:
    """All that follows is the server library's, so that nothing of a body is taken for a request."""

    def test() -> None:
        connected = Connected()
        data = PATH + lines + b"\r\n\r\n" + b"hello" + infer(b"abc")
        connected.feed(data)
        assert connected.http.data == data
        assert connected.connection.lost_track
        assert not connected.connection.bodies

    run(test)


def test_a_head_that_does_not_end_goes_to_the_server_library() -> None:
    def test() -> None:
        connected = Connected()
        data = b"GET /v2 HTTP/1.1\r\nX: " + b"x" * 20_000
        connected.feed(data)
        assert connected.http.data == data
        assert connected.connection.lost_track

    run(test)


def test_a_client_may_wait_until_it_is_asked_for_the_body() -> None:
    def test() -> None:
        connected = Connected()
        connected.feed(infer(bytes(100), b"Expect: 100-Continue")[:-100])
        assert connected.wire.written == b"HTTP/1.1 100 Continue\r\n\r\n"
        assert connected.http.data == b""
        connected.feed(bytes(100))
        assert connected.http.data == infer(b"")
        assert connected.bodies() == [bytes(100)]

    run(test)


def test_a_late_body_is_given_up() -> None:
    def test() -> None:
        connected = Connected()
        connected.feed(infer(bytes(100))[:-1])
        connected.connection.expire(0.0)
        assert connected.connection.is_receiving
        connected.connection.expire(asyncio.get_running_loop().time() + 1)
        assert not connected.connection.is_receiving
        assert connected.http.data == infer(b"")
        (body,) = connected.connection.bodies
        assert body is not None
        assert body.late
        connected.feed(b"0" + infer(b"abc"))
        assert connected.http.data == infer(b""), "what follows is dropped until the connection closes"

    run(test)


def test_a_closed_connection_gives_its_memory_back() -> None:
    def test() -> None:
        connected = Connected()
        connected.feed(infer(bytes(100)) + infer(bytes(200))[:-1])
        assert connected.all == {connected.wire: connected.connection}
        assert connected.arena.free_bytes < 1 << 20
        connected.connection.connection_lost(None)
        assert connected.arena.free_bytes == 1 << 20
        assert not connected.all
        assert connected.http.lost

    run(test)


def test_heads() -> None:
    head = read_head(b"POST /v2/models/a.b/versions/1/infer?x=1 HTTP/1.0\r\nContent-Length:0012 \r\nX: \xe9\r\n\r\n")
    assert (head.length, head.infers, head.json_bytes) == (12, True, None)
    assert head.without_body.endswith(b"HTTP/1.0\r\nContent-Length: 0\r\nX: \xe9\r\n\r\n")
    assert read_head(b"GET /v2/models/a/infer HTTP/1.1\r\n\r\n").infers is False
    assert read_head(b"POST /v2/models/a/b/infer HTTP/1.1\r\nContent-Length: 5\r\n\r\n").infers is False
    assert read_head(b"POST /v2/models/a/infer HTTP/1.1\r\n\r\n").length is None
    assert read_head(b"POST http://a/v2/models/a/infer HTTP/1.1\r\nContent-Length: 5\r\n\r\n").length is None
