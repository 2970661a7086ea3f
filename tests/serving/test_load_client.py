"""Test the client that loads a server: it finds the end of each answer, and counts its time from when it was due."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest

from benchmarks.serving.load_client import Client, Load

HEAD = b"HTTP/1.1 %d X\r\nInference-Header-Content-Length: 3\r\nContent-Length: 5000\r\n\r\n"
REQUESTS = [b"one request", b"another"]
PAUSE_S = 0.002  # within an answer


def answer(connection: socket.socket, got: list[bytes]) -> None:
    """Answer requests in pieces; every third one is refused."""
    with connection:
        while data := connection.recv(100):
            got.append(data)
            text = HEAD % (503 if len(got) % 3 == 0 else 200) + bytes(5000)
            for end in (20, 3000, len(text)):
                connection.sendall(text[:end] if end == 20 else text[20:end] if end == 3000 else text[3000:end])
                time.sleep(PAUSE_S)


@pytest.mark.parametrize("rate", [0.0, 50.0])
def test_answers_are_read_whole(rate: float, tmp_path: Path) -> None:
    got: list[bytes] = []
    file = tmp_path / "requests"
    file.write_bytes(b"".join(REQUESTS))
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        start = time.monotonic() + 0.1
        load = Load(host, port, str(file), [len(each) for each in REQUESTS], 1, start, 0.4, rate)
        client = Client(load)
        connection, _ = server.accept()
        threading.Thread(target=answer, args=(connection, got), daemon=True).start()
        client.run()
    assert len(client.answers) == len(got) > 3
    assert got == [REQUESTS[number % 2] for number in range(len(got))]
    assert [status for *_, status in client.answers] == [503 if n % 3 == 0 else 200 for n in range(1, len(got) + 1)]
    for when, took, waited, _ in client.answers:
        assert start <= when - took
        assert took - waited >= 2 * PAUSE_S


def test_a_server_that_ends_is_one_line(tmp_path: Path) -> None:
    """The client sends a request of which the server has read nothing when it ends."""
    file = tmp_path / "requests"
    file.write_bytes(bytes(1 << 24))
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        client = Client(Load(host, port, str(file), [1 << 24], 1, time.monotonic(), 60.0))
        connection, _ = server.accept()
        ended = threading.Timer(0.2, connection.close)
        ended.start()
        with pytest.raises(SystemExit, match="the server closed a connection"):
            client.run()
        ended.join()
        for each in client.by_handle.values():
            each.socket.close()
        client.poll.close()
