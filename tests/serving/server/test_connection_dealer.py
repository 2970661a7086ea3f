"""Test how connections of clients reach the front ends of a server: evenly, and only those that live."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from fusec.serving.server.connection_dealer import ConnectionDealer, take


class Dealt:
    """A dealer with clients and the channels of its front ends."""

    def __init__(self, stack: ExitStack, count: int):
        self._stack, self._listening = stack, socket.create_server(("127.0.0.1", 0))
        self.dealer = ConnectionDealer(self._listening, count)
        self.address = self._listening.getsockname()
        self.channels = [stack.enter_context(socket.socket(fileno=self._copy(n))) for n in range(count)]
        self.taken: list[list[socket.socket]] = [[] for _ in range(count)]

    def _copy(self, number: int) -> int:
        with socket.socket(fileno=self.dealer.handle(number)) as shared:
            copy = shared.dup()
            shared.detach()
        return copy.detach()

    def connect(self, count: int) -> list[socket.socket]:
        return [self._stack.enter_context(socket.create_connection(self.address)) for _ in range(count)]

    def take(self, total: int) -> list[int]:
        """Take `total` connections; return how many each front end has."""
        end = time.monotonic() + 10
        while sum(map(len, self.taken)) < total and time.monotonic() < end:
            for taken, channel in zip(self.taken, self.channels, strict=True):
                taken += [self._stack.enter_context(connection) for connection in take(channel)]
            time.sleep(0.01)
        return [len(taken) for taken in self.taken]


@pytest.fixture
def deal() -> Iterator[Callable[[int], Dealt]]:
    with ExitStack() as stack:

        def made(count: int) -> Dealt:
            dealt = Dealt(stack, count)
            stack.callback(dealt.dealer.close_channels)
            stack.callback(dealt.dealer.close)
            return dealt

        yield made


def test_each_front_end_gets_as_many_connections(deal: Callable[[int], Dealt]) -> None:
    dealt = deal(3)
    dealt.dealer.start(lambda number: True)
    clients = dealt.connect(30)
    assert dealt.take(30) == [10, 10, 10]
    for number, client in enumerate(clients):
        client.sendall(bytes([number]))
    assert sorted(connection.recv(1)[0] for taken in dealt.taken for connection in taken) == list(range(30))


def test_dead_front_ends_get_none(deal: Callable[[int], Dealt]) -> None:
    dealt = deal(3)
    alive = {0, 2}
    dealt.dealer.start(lambda number: number in alive)
    dealt.connect(8)
    assert dealt.take(8) == [4, 0, 4]
    alive.clear()
    dealt.connect(2)  # they wait until one lives
    assert dealt.take(8) == [4, 0, 4]
    time.sleep(0.1)
    assert [take(channel) for channel in dealt.channels] == [[], [], []]
    alive.add(1)
    assert dealt.take(10) == [4, 2, 4]


def test_a_closed_dealer_takes_no_connections(deal: Callable[[int], Dealt]) -> None:
    dealt = deal(1)
    dealt.dealer.start(lambda number: True)
    dealt.connect(1)
    assert dealt.take(1) == [1]
    dealt.dealer.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(dealt.address)
