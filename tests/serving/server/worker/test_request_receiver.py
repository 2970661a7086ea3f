"""Test that requests of front ends are read together, in the thread that asks for them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from fusec.serving.server.worker.queued_request import FrontEndConnection
from fusec.serving.server.worker.request_receiver import RequestReceiver


class Receiving:
    """A receiver of messages of 4 bytes, and whose they were."""

    def __init__(self) -> None:
        self.found: list[tuple[int, bytes]] = []
        self.senders: list[FrontEndConnection] = []
        self.theirs: list[socket.socket] = []
        self.receiver = RequestReceiver(self.take)

    def take(self, sender: FrontEndConnection, held: bytearray) -> None:
        whole = len(held) // 4 * 4
        self.found.append((self.senders.index(sender), bytes(held[:whole])))
        del held[:whole]

    def connect(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        nothing: Any = None
        self.senders.append(FrontEndConnection(ours, nothing))
        self.theirs.append(theirs)
        self.receiver.add(self.senders[-1])
        return theirs


@pytest.fixture
def receiving() -> Iterator[Receiving]:
    """Close what the test leaves open, as front ends that end do."""
    made = Receiving()
    yield made
    for theirs in made.theirs:
        theirs.close()
    made.receiver.receive(wait=False)
    assert all(sender.connection.fileno() == -1 for sender in made.senders)


def test_messages_of_several_front_ends_are_read_together(receiving: Receiving) -> None:
    receiver, found = receiving.receiver, receiving.found
    receiver.receive(wait=False)
    assert not found
    first, second = receiving.connect(), receiving.connect()
    first.sendall(b"aaaabbbbcc")
    first.sendall(b"cc")
    second.sendall(b"dd")
    receiver.receive(wait=False)
    assert sorted(found) == [(0, b"aaaabbbbcccc"), (1, b"")]
    second.sendall(b"ddeeee")
    receiver.receive(wait=False)
    assert found[-1] == (1, b"ddddeeee"), "the start of a message is held until the rest comes"


def test_a_front_end_that_ended_is_closed(receiving: Receiving) -> None:
    receiver = receiving.receiver
    first, second = receiving.connect(), receiving.connect()
    first.sendall(b"aaaa")
    first.close()
    receiver.receive(wait=False)
    receiver.receive(wait=False)
    assert [sender.connection.fileno() == -1 for sender in receiving.senders] == [True, False]
    second.sendall(b"bbbb")
    receiver.receive(wait=True)
    assert receiving.found == [(0, b"aaaa"), (1, b"bbbb")]


def test_a_thread_that_waits_hears_a_new_front_end(receiving: Receiving) -> None:
    waiting = threading.Thread(target=receiving.receiver.receive, args=(True,))
    waiting.start()
    time.sleep(0.05)
    receiving.connect().sendall(b"aaaa")
    waiting.join(10)
    assert not waiting.is_alive()
    assert receiving.found == [(0, b"aaaa")]
