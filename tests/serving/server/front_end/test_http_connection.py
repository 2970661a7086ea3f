"""Test that bodies of inference requests go to shared memory, and all else to the server library."""

from __future__ import annotations

import asyncio
import random
import re
import socket
from typing import Any

import pytest

from fusec.serving.server.front_end.http.http_answer import HttpAnswer
from fusec.serving.server.front_end.http.http_connection import (
    ConnectionOptions,
    HttpConnection,
    ReceivedBody,
    give_back,
)
from fusec.serving.server.front_end.http.request_head import read_head
from fusec.serving.server.memory.shared_arena import SharedArena

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
    """Stands for the client: what it gets, and if the server reads what it sends."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.reads, self.closed, self.aborted = True, False, False
        self.wake_bytes = 1

    def write(self, data: Any) -> None:
        self.written += data

    def writelines(self, list_of_data: Any) -> None:
        self.written += b"".join(list_of_data)

    def pause_reading(self) -> None:
        assert self.reads
        self.reads = False

    def resume_reading(self) -> None:
        assert not self.reads
        self.reads = True

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True

    def is_closing(self) -> bool:
        return self.closed

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        assert name == "socket"
        return self

    def setsockopt(self, level: int, option: int, value: int) -> None:
        assert (level, option) == (socket.SOL_SOCKET, socket.SO_RCVLOWAT)
        self.wake_bytes = value


class Connected:
    """A connection between a client and both that answer: the server library, and what answers plain requests."""

    def __init__(self, arena_bytes: int = 1 << 20, most_bytes: int = 1 << 16):
        self.arena = SharedArena(arena_bytes)
        self.http, self.wire, self.all = Http(), Wire(), dict[asyncio.BaseTransport, HttpConnection]()
        self.asked: list[bytes] = []
        options = ConnectionOptions(self.arena, most_bytes, self.ask, self.all)
        self.connection = HttpConnection(self.http, options)
        self.connection.connection_made(self.wire)

    def ask(self, connection: HttpConnection, body: ReceivedBody) -> None:
        assert connection is self.connection
        self.asked.append(bytes(body.data))
        give_back(body)

    def answer(self, data: bytes = b"done") -> None:
        self.connection.answered(HttpAnswer(200, [data]))

    def feed(self, data: bytes, most: int = 1 << 20) -> None:
        """Let bytes arrive, at most `most` at a time, until the server stops to read. All were read, or it stopped."""
        while data and self.wire.reads:
            room = self.connection.get_buffer(-1)
            count = min(len(room), len(data), most)
            assert count
            room[:count] = data[:count]
            self.connection.buffer_updated(count)
            data = data[count:]
        self.left = data

    def bodies(self) -> list[bytes | None]:
        """Take the bodies as handlers of the server library do."""
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
    """Return a request that the server library must answer, because the connection closes after it."""
    return plain(body, b"Connection: close", *more)


def plain(body: bytes, *more: bytes) -> bytes:
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
        assert connected.connection.is_busy
        connected.connection.expire(asyncio.get_running_loop().time() + 1)
        assert not connected.connection.is_busy
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


def test_plain_requests_are_answered_in_order() -> None:
    """Each before the next is read, and after the library's answers; the library gets only what is not plain."""

    def test() -> None:
        rng = random.Random(1)
        other = b"GET /v2 HTTP/1.1\r\nHost: x\r\n\r\n"
        for most in (1, 7, 100, 5000, 1 << 20):
            connected = Connected()
            wire, kinds, data = connected.wire, list[bytes](), b""
            for number in range(30):
                body = b"%d:" % number + rng.randbytes(rng.choice([0, 1, 3, 500, 20_000]))
                kinds.append(body if rng.randrange(3) else b"")
                data += plain(body) if kinds[-1] else other
            while kinds:
                connected.feed(data, most)
                data = connected.left
                if connected.asked:
                    assert connected.asked == [kinds.pop(0)]
                    connected.asked.clear()
                    connected.answer()
                bodies = connected.bodies()
                while connected.http.data:  # all that came before the library's first answer
                    body = kinds.pop(0)
                    head = plain(b"") if body else other
                    assert not body or bodies.pop(0) == body
                    assert connected.http.data.startswith(head)
                    connected.http.data = connected.http.data[len(head) :]
                    connected.connection.library_answered()
            assert (data, connected.http.data, connected.asked) == (b"", b"", [])
            assert wire.reads
            assert wire.written.count(b"HTTP/1.1 200 OK\r\n") == wire.written.count(b"\r\n\r\ndone")

    run(test)


def test_a_plain_request_waits_for_the_library() -> None:
    """The library answers it, because an answer of its own is still to come."""

    def test() -> None:
        connected = Connected()
        other = b"GET /v2 HTTP/1.1\r\n\r\n"
        connected.feed(other + plain(b"first"))
        assert (connected.asked, connected.http.data) == ([], other + plain(b""))
        connected.connection.library_answered()
        connected.connection.library_answered()
        connected.feed(plain(b"second"))
        assert connected.asked == [b"second"]

    run(test)


def test_the_kernel_collects_a_body() -> None:
    """So that a process wakes up once for it. Never for more bytes than are to come: it would never wake up."""

    def test() -> None:
        connected = Connected(most_bytes=1 << 20)
        data = plain(bytes(600_000))
        wanted = []
        while data:
            left = len(connected.connection.get_buffer(-1))
            connected.feed(data[: min(left, 100_000)])
            data = data[min(left, 100_000) :]
            assert connected.wire.wake_bytes <= max(1, len(data))
            wanted.append(connected.wire.wake_bytes)
        assert wanted[0] == 256 << 10
        assert wanted[-1] == 1

    run(test)


def test_a_client_that_does_not_read_gets_no_more_answers() -> None:
    def test() -> None:
        connected = Connected()
        connected.feed(plain(b"first"))
        connected.connection.pause_writing()
        connected.answer()
        connected.feed(plain(b"second") + plain(b"third"))
        assert connected.asked == [b"first"]
        assert not connected.wire.reads
        connected.connection.resume_writing()
        assert connected.asked == [b"first", b"second"]
        connected.answer()
        assert connected.asked == [b"first", b"second", b"third"]
        connected.answer()
        assert connected.wire.reads

    run(test)


def test_an_answer_to_a_client_that_is_gone_is_dropped() -> None:
    def test() -> None:
        connected = Connected()
        connected.feed(plain(b"first"))
        assert connected.connection.is_busy
        connected.connection.connection_lost(None)
        connected.answer()
        assert connected.wire.written == b""
        assert not connected.connection.is_busy

    run(test)


def test_connections_close_when_they_are_idle_or_the_server_ends() -> None:
    def test() -> None:
        now = asyncio.get_running_loop().time() + 1
        connected = Connected()
        connected.feed(plain(b"first"))
        connected.connection.close_idle(now)
        assert not connected.wire.closed, "a request is in progress"
        connected.answer()
        connected.connection.close_idle(now - 2)
        assert not connected.wire.closed, "one was a moment ago"
        connected.connection.close_idle(now)
        assert connected.wire.aborted, "without a wait for a client that does not read"
        connected = Connected()
        connected.feed(b"GET /v2 HTTP/1.1\r\n\r\n")
        connected.connection.close_idle(now)
        assert not connected.wire.closed, "the library has not answered"
        connected.connection.library_answered()
        connected.feed(plain(b"last"))
        connected.connection.end()
        assert not connected.wire.closed
        connected.answer()
        assert connected.wire.closed
        assert b"\r\nConnection: close\r\n" in connected.wire.written

    run(test)


def test_answers_of_http() -> None:
    head, text, binary = HttpAnswer(200, [b"{}", memoryview(b"1234")], json_bytes=2).written(closes=False)
    first, *lines = bytes(head).decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines if line)
    assert (first, bytes(text), bytes(binary)) == ("HTTP/1.1 200 OK", b"{}", b"1234")
    assert (headers["Content-Length"], headers["Inference-Header-Content-Length"]) == ("6", "2")
    assert headers["Content-Type"] == "application/octet-stream"
    assert re.fullmatch(r"\w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT", headers["Date"])
    assert "Retry-After" not in headers
    head, text = HttpAnswer.refusal(503, "busy").written(closes=True)
    assert bytes(head).startswith(b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json")
    assert b"\r\nRetry-After: 1\r\n" in head
    assert b"\r\nConnection: close\r\n" in head
    assert bytes(text) == b'{"error": "busy"}'


@pytest.mark.parametrize(
    ("first", "lines", "is_plain"),
    [
        (b"HTTP/1.1", b"", True),
        (b"HTTP/1.1", b"connection:  Keep-Alive \r\n", True),
        (b"HTTP/1.1", b"Inference-Header-Content-Length: 2\r\n", True),
        (b"HTTP/1.0", b"", False),
        (b"HTTP/1.1", b"Connection: close\r\n", False),
        (b"HTTP/1.1", b"Connection: keep-alive, close\r\n", False),
        (b"HTTP/1.1", b"Inference-Header-Content-Length: -2\r\n", False),
        (b"HTTP/1.1", b"Inference-Header-Content-Length: 2\r\ninference-header-content-length: 1\r\n", False),
    ],
)
def test_plain_heads(first: bytes, lines: bytes, is_plain: bool) -> None:
    head = read_head(b"POST /v2/models/a/infer " + first + b"\r\nContent-Length: 5\r\n" + lines + b"\r\n")
    assert (head.infers, head.is_plain, head.model, head.version) == (True, is_plain, "a", "1")


def test_heads() -> None:
    head = read_head(b"POST /v2/models/a.b/versions/1/infer?x=1 HTTP/1.0\r\nContent-Length:0012 \r\nX: \xe9\r\n\r\n")
    assert (head.length, head.infers, head.json_bytes) == (12, True, None)
    assert (head.model, head.version, head.is_plain) == ("a.b", "1", False)
    assert head.without_body.endswith(b"HTTP/1.0\r\nContent-Length: 0\r\nX: \xe9\r\n\r\n")
    assert read_head(b"GET /v2/models/a/infer HTTP/1.1\r\n\r\n").infers is False
    assert read_head(b"POST /v2/models/a/b/infer HTTP/1.1\r\nContent-Length: 5\r\n\r\n").infers is False
    assert read_head(b"POST /v2/models/a/infer HTTP/1.1\r\n\r\n").length is None
    assert read_head(b"POST http://a/v2/models/a/infer HTTP/1.1\r\nContent-Length: 5\r\n\r\n").length is None
