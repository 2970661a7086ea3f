"""Test the memory of request bodies: spans never overlap, and all of it comes back."""

from __future__ import annotations

import os
import random

import numpy as np

from fusec.serving.server.memory.request_memory import RequestMemory
from fusec.serving.server.memory.shared_arena import SharedArena


def test_spans_do_not_overlap_and_come_back() -> None:
    arena = SharedArena(1 << 16)
    rng, held = random.Random(0), dict[int, int]()
    refused = 0
    for _ in range(5000):
        if held and rng.random() < 0.5:
            start = rng.choice(list(held))
            arena.give_back(start, held.pop(start))
            continue
        nbytes = rng.choice([0, 1, 63, 64, 65, 1000, 9000])
        start = arena.take(nbytes)
        if start is None:
            refused += 1
            continue
        for other, size in held.items():
            assert start + nbytes <= other or other + size <= start
        assert 0 <= start <= (1 << 16) - nbytes
        held[start] = nbytes
    assert refused
    for start, nbytes in held.items():
        arena.give_back(start, nbytes)
    assert arena.free_bytes == 1 << 16
    assert arena.take(1 << 16) == 0


def test_a_worker_sees_what_was_written() -> None:
    arena = SharedArena(4096)
    handle = os.dup(arena.handle)
    seen = RequestMemory(handle, np).data
    os.close(handle)
    arena.memory[100:105] = b"bytes"
    assert bytes(seen[100:105]) == b"bytes"
