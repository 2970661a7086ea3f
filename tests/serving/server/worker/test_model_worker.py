"""Test a worker process whose device fails, or whose front end does not read."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import types
from typing import Any

import pytest

from fusec.errors import ExecutionError
from fusec.serving.server.request_frames import RequestForm
from fusec.serving.server.server_options import ServerOptions
from fusec.serving.server.worker import model_worker, queued_request
from fusec.serving.server.worker.batch_buffer import Feeds
from fusec.serving.server.worker.batch_queue import BatchGroup, FormedBatch
from fusec.serving.server.worker.loaded_model import PreparedBatch
from fusec.serving.server.worker.model_worker import MAX_FAILURES, ModelWorker
from fusec.serving.server.worker.queued_request import FrontEndConnection, QueuedRequest


def failing(takes_other_shapes: bool) -> Any:
    def run(batch: Any, outputs: Any) -> None:
        raise ExecutionError("the GPU fell off the bus")

    return types.SimpleNamespace(
        run=run,
        release=lambda batch: None,
        takes_other_shapes=takes_other_shapes,
        served=types.SimpleNamespace(name="m"),
    )


def answered(model: Any, size: int, times: int) -> list[dict[str, Any]]:
    """Let batches fail, and return the answers of their requests."""
    told: list[bytes] = []
    sender: Any = types.SimpleNamespace(send=told.extend)
    feeds = Feeds({})
    worker = ModelWorker(ServerOptions(models={}), 0)
    for number in range(times):
        request = QueuedRequest(sender, number, model, RequestForm("m", (), ("y",)), (), (), 1)
        worker._run(FormedBatch(BatchGroup("m", ()), [request], size, [0.0]), PreparedBatch(feeds, None))
    return [json.loads(message[12:]) for message in told]


def test_a_device_that_fails_again_and_again_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    error = "the GPU fell off the bus"
    told = answered(failing(takes_other_shapes=True), 4, MAX_FAILURES - 1)
    assert told == [{"id": n, "error": error, "status": 500} for n in range(MAX_FAILURES - 1)]
    assert not ended
    assert answered(failing(takes_other_shapes=False), 0, MAX_FAILURES)[-1]["status"] == 500
    assert ended == [model_worker.EXIT_FAILED]


def test_a_request_that_does_not_fit_is_no_failure_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "_exit", lambda status: pytest.fail("the worker ended"))
    told = answered(failing(takes_other_shapes=True), 0, 2 * MAX_FAILURES)
    assert {each["status"] for each in told} == {400}


def test_a_front_end_that_does_not_read_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the worker would answer no request."""
    monkeypatch.setattr(queued_request, "SEND_S", 1)
    mine, theirs = socket.socketpair()
    with mine, theirs:
        nothing: Any = None
        sender = FrontEndConnection(mine, nothing)
        sending = threading.Thread(target=sender.send, args=([bytes(8 << 20)],))
        start = time.monotonic()
        sending.start()
        sending.join(10)
        assert not sending.is_alive()
        assert time.monotonic() - start < 5
        while theirs.recv(1 << 20):
            pass
        sender.send([b"more"])
