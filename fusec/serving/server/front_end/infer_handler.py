"""Take inference requests in a front end: limits, the body, the worker, and the answer."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import field

import numpy as np
from aiohttp import web
from prometheus_client import Counter, Histogram

from fusec.serving.server import metrics
from fusec.serving.server.front_end.client_regions import ClientRegions
from fusec.serving.server.front_end.http.http_answer import HttpAnswer
from fusec.serving.server.front_end.http.http_connection import HttpConnection, ReceivedBody, give_back
from fusec.serving.server.front_end.http.request_head import JSON_LENGTH
from fusec.serving.server.front_end.infer_request import (
    MAX_JSON_BYTES,
    BadRequestError,
    GivenTensor,
    InferRequest,
    read_request,
    shown,
)
from fusec.serving.server.front_end.infer_response import write_answer
from fusec.serving.server.front_end.worker_link import WorkerAnswer, WorkerLink
from fusec.serving.server.memory.shared_arena import SharedArena
from fusec.serving.server.memory.shared_regions import RegionError
from fusec.serving.server.server_options import ServerOptions
from fusec.system.dataclass import dataclass

_log = logging.getLogger("fusec.serving")


class RefusedError(Exception):
    """A request is refused with a status of HTTP and a reason."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status = status


def refusal_of(error: Exception) -> HttpAnswer:
    """Return the answer to a request that fails. A defect of fusec is logged, and its text stays here."""
    if isinstance(error, (BadRequestError, RegionError)):
        return HttpAnswer.refusal(400, str(error))
    if isinstance(error, RefusedError):
        return HttpAnswer.refusal(error.status, str(error))
    _log.error("a request failed", exc_info=error)
    return HttpAnswer.refusal(500, "the server failed")


def library_response(answer: HttpAnswer) -> web.Response:
    """Return an answer as the server library takes it."""
    return web.Response(
        body=b"".join(answer.parts),
        status=answer.status,
        headers={**answer.headers, "Content-Type": answer.content_type},
    )


@dataclass
class Spans:
    """The memory of one request: its body, and the tensors that JSON gave."""

    arena: SharedArena
    taken: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def take(self, nbytes: int) -> int:
        """Take memory. Raises RefusedError if there is none now."""
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


@dataclass(frozen=True)
class Submitted:
    """A request that a worker has."""

    model: str
    asked: InferRequest
    future: asyncio.Future[WorkerAnswer]


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

    def answer(self, connection: HttpConnection, body: ReceivedBody) -> None:
        """Answer a plain request, not before this function has returned."""
        self.in_progress += 1

        def end(answer: HttpAnswer) -> None:
            self._count(body.head.model, answer.status, body.since)
            connection.answered(answer)

        try:
            submitted = self._submit(body, body.head.model, body.head.version)
        except Exception as error:  # noqa: BLE001 - the client gets an answer whatever happened
            asyncio.get_running_loop().call_soon(end, refusal_of(error))
        else:
            submitted.future.add_done_callback(lambda _: end(self._result(submitted)))

    async def handle(self, request: web.BaseRequest, name: str, version: str) -> web.Response:
        """Answer a request of which the server library has the head."""
        connection = self._connections.get(request.transport) if request.transport is not None else None
        body = connection.bodies.popleft() if connection is not None and connection.bodies else None
        start = asyncio.get_running_loop().time() if body is None else body.since
        self.in_progress += 1
        answer = HttpAnswer.refusal(500, "the server failed")
        try:
            submitted = self._submit(self._checked(request, body), name, version)
            await submitted.future
            answer = self._result(submitted)
        except Exception as error:  # noqa: BLE001 - the client gets an answer whatever happened
            answer = refusal_of(error)
        finally:
            self._count(name, answer.status, start)
        response = library_response(answer)
        if response.status == 408 or (body is None and (connection is None or connection.lost_track)):
            response.force_close()  # it is not known where the next request starts
        return response

    def _count(self, model: str, status: int, since: float) -> None:
        """Count an answer."""
        self.in_progress -= 1
        known = model if model in self._options.models else ""
        _requests(known, status).inc()
        if status == 200:
            _request_seconds(known).observe(asyncio.get_running_loop().time() - since)

    def _submit(self, body: ReceivedBody, name: str, version: str) -> Submitted:
        """Check a request and send it to a worker. Its memory is free once the worker has read it, or at an error."""
        spans = Spans(self._arena, [body.span])
        try:
            if name not in self._options.models or version != "1":
                raise RefusedError(404, f"there is no model {shown(name)} of that version")
            link = self._link(name)
            if self.in_progress > self._queue:
                raise RefusedError(503, f"the server is overloaded: {self._queue} requests are in progress")
            asked = read_request(body.data, _json_bytes(body), link.models[name])
            starts = [self._start(tensor, spans, body.start) for tensor in asked.inputs]
            form = self._regions.form(asked) if asked.uses_regions else asked.text
            return Submitted(name, asked, link.submit(form, asked.rows, starts, spans.release))
        except BaseException:
            spans.release()
            raise

    def _result(self, submitted: Submitted) -> HttpAnswer:
        """Return the answer to a request that the worker has answered."""
        asked, answer = submitted.asked, submitted.future.result()
        if answer.status != 200:
            return HttpAnswer.refusal(answer.status, answer.error)
        try:
            if asked.uses_regions:
                self._regions.write(asked, answer.outputs)
            return HttpAnswer(200, *write_answer(submitted.model, asked, answer.outputs))
        except Exception as error:  # noqa: BLE001 - the client gets an answer whatever happened
            return refusal_of(error)

    def _link(self, model: str) -> WorkerLink:
        """Return the ready worker that has the least to do."""
        ready = [link for link in self._links if model in link.models]
        if not ready:
            raise RefusedError(503, "no worker process is ready")
        return min(ready, key=lambda link: link.rows)

    def _checked(self, request: web.BaseRequest, body: ReceivedBody | None) -> ReceivedBody:
        """Return the body. Raises RefusedError if there is none, or it is not complete, or a header is no number."""
        if body is None:
            raise self._reason(request)
        given = request.headers.get(JSON_LENGTH)
        if body.late:
            give_back(body)
            raise RefusedError(408, "the body did not arrive in time")
        if given is not None and body.head.json_bytes is None:
            give_back(body)
            raise _bad_json_length(given, body.length)
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


def _json_bytes(body: ReceivedBody) -> int:
    """Return how many bytes of a body are JSON. Raises RefusedError if it has fewer, or JSON is too long."""
    given, length = body.head.json_bytes, body.length
    if given is not None and given > length:
        raise _bad_json_length(given, length)
    found = length if given is None else given
    if found > MAX_JSON_BYTES:
        raise RefusedError(413, f"JSON may have {MAX_JSON_BYTES} bytes: send tensors in binary")
    return found


def _bad_json_length(given: object, length: int) -> RefusedError:
    reason = f"{JSON_LENGTH} is {shown(given)}, but must be at most the {length} bytes of the body"
    return RefusedError(400, reason)


@functools.cache  # the names are those of served models
def _requests(model: str, status: int) -> Counter:
    return metrics.REQUESTS.labels(model, str(status))


@functools.cache
def _request_seconds(model: str) -> Histogram:
    return metrics.REQUEST_SECONDS.labels(model)
