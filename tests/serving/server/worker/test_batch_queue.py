"""Test which requests run together, with a clock that the test sets."""

from __future__ import annotations

import random

import pytest

from fusec.serving.server.worker.batch_queue import BatchGroup, BatchQueue

GROUP = BatchGroup("m", (1, 4, 8))


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def made(delay_s: float = 1.0, wait_s: float = 5.0) -> tuple[BatchQueue[str], Clock, list[str]]:
    clock, refused = Clock(), list[str]()
    return BatchQueue(delay_s, wait_s, refused.extend, clock), clock, refused


def names(queue: BatchQueue[str]) -> tuple[list[str], int] | None:
    batch = queue.take()
    return None if batch is None else (list(batch.tickets), batch.size)


def test_a_full_batch_does_not_wait() -> None:
    queue, _, _ = made()
    queue.put(GROUP, [(str(i), 1) for i in range(9)])
    assert names(queue) == ([str(i) for i in range(8)], 8)
    assert names(queue) is None


def test_a_batch_that_is_not_full_waits_for_the_delay() -> None:
    queue, clock, _ = made()
    queue.put(GROUP, [("a", 1), ("b", 2)])
    assert names(queue) is None
    clock.now += 0.6
    queue.put(GROUP, [("c", 1)])
    assert names(queue) is None
    clock.now += 0.4
    batch = queue.take()
    assert batch is not None
    assert (list(batch.tickets), batch.size) == (["a", "b", "c"], 4)
    assert list(batch.waited_s) == pytest.approx([1.0, 1.0, 0.4])


def test_a_batch_that_would_be_mostly_padding_is_smaller() -> None:
    queue, clock, _ = made()
    wide = BatchGroup("m", (4, 32))
    queue.put(wide, [(str(i), 1) for i in range(6)])
    clock.now += 1
    assert names(queue) == (["0", "1", "2", "3"], 4)
    assert names(queue) == (["4", "5"], 4)
    queue.put(wide, [(str(i), 1) for i in range(20)])
    clock.now += 1
    assert names(queue) == ([str(i) for i in range(20)], 32)


def test_requests_are_not_split_and_large_ones_run_alone() -> None:
    queue, clock, _ = made()
    queue.put(GROUP, [("a", 5), ("b", 5), ("c", 20), ("d", 1)])
    assert names(queue) == (["a"], 8)
    assert names(queue) == (["b"], 8)
    assert names(queue) == (["c"], 0)
    assert names(queue) is None
    clock.now += 1
    assert names(queue) == (["d"], 1)


def test_requests_that_cannot_be_joined_run_alone_at_once() -> None:
    queue, _, _ = made()
    queue.put(BatchGroup("m", ()), [("a", 1), ("b", 1)])
    assert names(queue) == (["a"], 0)
    assert names(queue) == (["b"], 0)


def test_groups_take_turns_by_age() -> None:
    queue, clock, _ = made()
    queue.put(GROUP, [(f"a{i}", 1) for i in range(16)])
    clock.now += 0.1
    queue.put(BatchGroup("n", (1,)), [("b", 1)])
    assert names(queue) == ([f"a{i}" for i in range(8)], 8)
    assert names(queue) == ([f"a{i}" for i in range(8, 16)], 8)
    assert names(queue) == (["b"], 1)


def test_a_request_that_waited_too_long_is_refused() -> None:
    queue, clock, refused = made()
    queue.put(GROUP, [("a", 1)])
    clock.now += 3
    queue.put(GROUP, [("b", 1)])
    clock.now += 2.5
    queue.drop_late()
    assert refused == ["a"]
    assert names(queue) == (["b"], 1)
    clock.now += 10
    assert names(queue) is None
    assert refused == ["a"]


def test_every_request_is_in_one_batch_or_refused() -> None:
    """Random requests, groups and times."""
    rng = random.Random(3)
    queue, clock, refused = made()
    groups = [BatchGroup("m", (1, 4, 8)), BatchGroup("n", (3,)), BatchGroup("o", ())]
    given, taken = list[str](), list[str]()
    for number in range(3000):
        if rng.random() < 0.6:
            group, rows = rng.choice(groups), rng.choice([1, 1, 1, 2, 3, 9])
            given.append(f"{number}:{group.key}:{rows}")
            queue.put(group, [(given[-1], rows)])
        elif (batch := queue.take()) is not None:
            rows = sum(int(ticket.split(":")[2]) for ticket in batch.tickets)
            assert {ticket.split(":")[1] for ticket in batch.tickets} == {batch.group.key}
            assert batch.size in (*batch.group.sizes, 0)
            assert rows <= batch.size or (len(batch.tickets) == 1 and batch.size == 0)
            taken += batch.tickets
        clock.now += rng.choice([0.0, 0.1, 0.5, 2.0])
    clock.now += 1
    while (batch := queue.take()) is not None:
        taken += batch.tickets
    assert sorted(taken + refused) == sorted(given)
    assert refused
    for key in "mno":  # in the order of arrival
        mine = [int(ticket.split(":")[0]) for ticket in taken if ticket.split(":")[1] == key]
        assert mine == sorted(mine)


def test_the_time_until_a_batch_is_due() -> None:
    queue, clock, _ = made()
    assert queue.left_s() is None
    queue.put(GROUP, [("a", 1)])
    assert queue.left_s() == pytest.approx(1.0)
    clock.now += 0.3
    queue.put(BatchGroup("n", (1, 9)), [("b", 1)])
    assert queue.left_s() == pytest.approx(0.7), "that of the oldest request"
    clock.now += 2
    assert queue.left_s() == 0
    assert names(queue) == (["a"], 1)
    queue.put(GROUP, [(str(i), 1) for i in range(8)])
    assert queue.left_s() == 0, "a full batch is due"
