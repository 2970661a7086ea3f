"""Take inference requests in a front end: limits, the body, the worker, and the answer."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from aiohttp import web
from prometheus_client import Counter, Histogram

from fusec.serving.server import metrics
from fusec.serving.server.client_regions import ClientRegions
from fusec.serving.server.http_connection import HttpConnection, ReceivedBody
from fusec.serving.server.infer_request import (
    MAX_JSON_BYTES,
    BadRequestError,
    GivenTensor,
    InferRequest,
    read_request,
    shown,
)
from fusec.serving.server.infer_response import write_answer
from fusec.serving.server.memory.shared_arena import SharedArena
from fusec.serving.server.memory.shared_regions import RegionError
from fusec.serving.server.request_head import JSON_LENGTH
from fusec.serving.server.server_options import ServerOptions
from fusec.serving.server.worker_link import WorkerAnswer, WorkerLink

RETRY_AFTER_S = "1"


class RefusedError(Exception):
    """A request is refused with a status of HTTP and a reason."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status = status

    def response(self) -> web.Response:
        """Return the answer. One for an overload says when to try again."""
        headers = {"Retry-After": RETRY_AFTER_S} if self.status == 503 else None
        return web.json_response({"error": str(self)}, status=self.status, headers=headers)


@dataclass
class Spans:
    """The memory of one request: its body, and the tensors that JSON gave."""

    arena: SharedArena
    taken: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def take(self, nbytes: int) -> int:
        """Take memory. Raises RefusedError: when there is none now."""
        start = self.arena.take(nbytes)
        if start is None:
            raise RefusedError(503, "the server is overloaded: the bodies of other requests take its memory")
        self.taken.append((start, nbytes))
        return start

    def release(self) -> None:
        """Give the memory back."""
        for start, nbytes in self.taken:
            self.arena.give_back(start, nbytes)
        self.taken.clear()


class InferHandler:
    """Answer inference requests of one front end.

    in_progress: requests that have no answer yet.
    links: to all workers. connections: by transport, with the bodies of requests. regions: shared memory of clients.
    """

    def __init__(
        self,
        options: ServerOptions,
        arena: SharedArena,
        links: Sequence[WorkerLink],
        connections: Mapping[asyncio.BaseTransport, HttpConnection],
        regions: ClientRegions,
    ):
        self._options, self._arena, self._links, self._connections = options, arena, links, connections
        self._regions = regions
        self._queue = max(1, options.queue // options.front_ends)
        self.in_progress = 0

    async def handle(self, request: web.BaseRequest, name: str, version: str) -> web.Response:
        """Answer one request; every one gets exactly one answer."""
        connection = self._connections.get(request.transport) if request.transport is not None else None
        body = connection.bodies.popleft() if connection is not None and connection.bodies else None
        start = asyncio.get_running_loop().time() if body is None else body.since
        self.in_progress += 1
        try:
            response = await self._answer(request, body, name, version)
        except RefusedError as refused:
            response = refused.response()
        except (BadRequestError, RegionError) as error:
            response = RefusedError(400, str(error)).response()
        finally:
            self.in_progress -= 1
        if response.status == 408 or (body is None and (connection is None or connection.lost_track)):
            response.force_close()  # it is not known where the next request starts
        known = name if name in self._options.models else ""
        _requests(known, response.status).inc()
        if response.status == 200:
            _request_seconds(known).observe(asyncio.get_running_loop().time() - start)
        return response

    async def _answer(
        self, request: web.BaseRequest, body: ReceivedBody | None, name: str, version: str
    ) -> web.Response:
        spans = Spans(self._arena)
        if body is not None:
            spans.taken.append(body.span)
        submitted = False
        try:
            if name not in self._options.models or version != "1":
                raise RefusedError(404, f"there is no model {shown(name)} of that version")
            link = self._link(name)
            body = self._checked(request, body)
            if self.in_progress > self._queue:
                raise RefusedError(503, f"the server is overloaded: {self._queue} requests are in progress")
            json_bytes = body.length if body.head.json_bytes is None else body.head.json_bytes
            asked = read_request(body.data, json_bytes, link.models[name])
            starts = [self._start(tensor, spans, body.start) for tensor in asked.inputs]
            form = self._regions.form(asked) if asked.uses_regions else asked.text
            future = link.submit(form, asked.rows, starts, spans.release)
            submitted = True
        finally:
            if not submitted:
                spans.release()
        answer = await future
        if answer.status != 200:
            raise RefusedError(answer.status, answer.error)
        if asked.uses_regions:
            self._regions.write(asked, answer.outputs)
        return self._written(name, asked, answer)

    def _link(self, model: str) -> WorkerLink:
        """Return the ready worker that has the least to do."""
        ready = [link for link in self._links if model in link.models]
        if not ready:
            raise RefusedError(503, "no worker process is ready")
        return min(ready, key=lambda link: link.rows)

    def _checked(self, request: web.BaseRequest, body: ReceivedBody | None) -> ReceivedBody:
        """Return the body. Raises RefusedError: when there is none, or it does not fit its headers."""
        if body is None:
            raise self._reason(request)
        if body.late:
            raise RefusedError(408, "the body did not arrive in time")
        given, length = request.headers.get(JSON_LENGTH), body.length
        if given is not None and (body.head.json_bytes is None or body.head.json_bytes > length):
            raise RefusedError(
                400, f"{JSON_LENGTH} is {shown(given)}, but must be at most the {length} bytes of the body"
            )
        if (length if body.head.json_bytes is None else body.head.json_bytes) > MAX_JSON_BYTES:
            raise RefusedError(413, f"JSON may have {MAX_JSON_BYTES} bytes: send tensors in binary")
        return body

    def _reason(self, request: web.BaseRequest) -> RefusedError:
        """Return the reason why a request has no body in the shared memory."""
        if request.headers.get("Content-Encoding", "identity") != "identity":
            return RefusedError(415, "bodies must not be compressed")
        length = request.content_length
        if length is None:
            return RefusedError(411, "a request needs a Content-Length")
        if length > self._options.body_bytes:
            return RefusedError(413, f"the body has {length} bytes; the limit is {self._options.body_bytes}")
        return RefusedError(503, "the server is overloaded: the bodies of other requests take its memory")

    def _start(self, tensor: GivenTensor, spans: Spans, body: int) -> int:
        """Return where an input is in the shared memory."""
        if tensor.region:
            return self._regions.start(tensor)
        if tensor.values is None:
            return body + tensor.start
        start = spans.take(tensor.values.nbytes)
        room = self._arena.memory[start : start + tensor.values.nbytes]
        room[:] = np.ascontiguousarray(tensor.values).reshape(-1).view(np.uint8).data
        return start

    def _written(self, name: str, asked: InferRequest, answer: WorkerAnswer) -> web.Response:
        body, json_bytes = write_answer(name, asked, answer.outputs)
        if json_bytes is None:
            return web.Response(body=body, content_type="application/json")
        headers = {JSON_LENGTH: str(json_bytes)}
        return web.Response(body=body, content_type="application/octet-stream", headers=headers)


@functools.cache  # the names are those of served models
def _requests(model: str, status: int) -> Counter:
    return metrics.REQUESTS.labels(model, str(status))


@functools.cache
def _request_seconds(model: str) -> Histogram:
    return metrics.REQUEST_SECONDS.labels(model)
