"""Test messages between the processes of a server."""

from __future__ import annotations

import json
import random
import struct
import types
from typing import Any

import numpy as np

from fusec.serving.server.frames import split_answers
from fusec.serving.server.request_frames import ROWS, RequestForm, request_frame, split_frames
from fusec.serving.server.worker.batch_queue import BatchGroup, FormedBatch
from fusec.serving.server.worker.queued_request import QueuedRequest, by_sender, send_results


def test_requests_arrive_whole_however_they_are_cut() -> None:
    forms = [
        RequestForm("m", (("x", "FP32", (ROWS, 3), ""), ("k", "INT8", (ROWS,), "a 7")), ("y", "z")),
        RequestForm("n", (("x", "UINT8", (3, 8), ""),), ("y",)),
    ]
    rng = random.Random(0)
    given: list[tuple[RequestForm, list[tuple[int, ...]]]] = []
    for _ in range(60):
        form = rng.choice(forms)
        count = rng.randint(1, 3)
        given.append((form, [tuple(rng.randrange(1 << 50) for _ in range(2 + len(form.inputs))) for _ in range(count)]))
    data = b"".join(request_frame(form.text(), [n for each in requests for n in each]) for form, requests in given)
    held, got = bytearray(), list[Any]()
    for start in range(0, len(data), 17):
        held += data[start : start + 17]
        got += [(form, list(requests)) for form, requests in split_frames(held)]
    assert got == given
    assert not held


def answers(size: int, rows: list[int], results: dict[str, np.ndarray], senders: int) -> dict[int, dict[str, Any]]:
    """Answer requests of front ends that took turns, and return the arrays by number of the request."""
    told: list[list[bytes]] = [[] for _ in range(senders)]
    links: list[Any] = [types.SimpleNamespace(send=each.extend) for each in told]
    model: Any = None
    form = RequestForm("m", (), tuple(results))
    tickets = [QueuedRequest(links[n % senders], n, model, form, (), (), count) for n, count in enumerate(rows)]
    batch = by_sender(FormedBatch(BatchGroup("m", ()), tickets, size, [0.0] * len(rows)))
    order = [ticket.id for ticket in batch.tickets]
    given = [np.split(array, np.cumsum(rows)[:-1]) if size else [array] for array in results.values()]
    sorted_results = {
        name: np.concatenate([parts[n] for n in order] + [parts[0][:0]]) if size else parts[0]
        for name, parts in zip(results, given, strict=True)
    }
    send_results(batch, sorted_results)
    found: dict[int, dict[str, Any]] = {}
    for messages in told:
        assert len(messages) <= 1
        for message in messages:
            length, nbytes = struct.unpack("<IQ", message[:12])
            assert len(message) == 12 + length + nbytes
            for number, outputs in split_answers(json.loads(message[12 : 12 + length]), message[12 + length :]):
                assert number not in found
                found[number] = outputs
    return found


def test_each_request_of_a_batch_gets_its_rows() -> None:
    rng = np.random.default_rng(0)
    rows = [1, 3, 2, 1, 4]
    results = {
        "y": rng.standard_normal((11, 2, 3)).astype(np.float32),
        "label": rng.integers(0, 99, 11),
        "empty": np.zeros((11, 0), np.float32),
    }
    got = answers(16, rows, results, senders=2)
    start = 0
    for number, count in enumerate(rows):
        for name, array in results.items():
            tensor = got[number][name]
            want = array[start : start + count]
            assert list(tensor.shape) == list(want.shape)
            np.testing.assert_array_equal(np.frombuffer(tensor.data, want.dtype).reshape(want.shape), want)
        start += count


def test_a_request_that_ran_alone_gets_all() -> None:
    y = np.arange(6, dtype=np.int16).reshape(2, 3)
    tensor = answers(0, [1], {"y": y}, senders=1)[0]["y"]
    assert (tensor.datatype, list(tensor.shape), bytes(tensor.data)) == ("INT16", [2, 3], y.tobytes())
