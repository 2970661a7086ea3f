"""Take inference requests in a front end: limits, the body, the worker, and the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from aiohttp import web

from fusec.serving.served_model import ServedModel
from fusec.serving.server import metrics
from fusec.serving.server.infer_request import MAX_JSON_BYTES, BadRequestError, InferRequest, read_request, shown
from fusec.serving.server.infer_response import write_answer
from fusec.serving.server.server_options import ServerOptions
from fusec.serving.server.shared_arena import ALIGNMENT, SharedArena
from fusec.serving.server.worker_link import WorkerAnswer, WorkerLink

JSON_LENGTH = "Inference-Header-Content-Length"  # the header that counts the bytes of JSON before binary tensors
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
        metrics.ARENA_BYTES.inc(nbytes)
        return start

    def release(self) -> None:
        """Give the memory back."""
        for start, nbytes in self.taken:
            self.arena.give_back(start, nbytes)
            metrics.ARENA_BYTES.dec(nbytes)
        self.taken.clear()


class InferHandler:
    """Answer inference requests of one front end. links: to all workers."""

    def __init__(self, options: ServerOptions, arena: SharedArena, links: Sequence[WorkerLink]):
        self._options, self._arena, self._links = options, arena, links
        self._queue = max(1, options.queue // options.front_ends)
        self._in_progress = 0

    async def handle(self, request: web.Request) -> web.Response:
        """Answer one request; every one gets exactly one answer."""
        name, start = request.match_info["model"], asyncio.get_running_loop().time()
        self._in_progress += 1
        metrics.IN_PROGRESS.inc()
        try:
            response = await self._answer(request, name)
        except RefusedError as refused:
            response = refused.response()
        except BadRequestError as error:
            response = RefusedError(400, str(error)).response()
        finally:
            self._in_progress -= 1
            metrics.IN_PROGRESS.dec()
        known = name if name in self._options.models else ""
        metrics.REQUESTS.labels(known, str(response.status)).inc()
        if response.status == 200:
            metrics.REQUEST_SECONDS.labels(known).observe(asyncio.get_running_loop().time() - start)
        return response

    async def _answer(self, request: web.Request, name: str) -> web.Response:
        if name not in self._options.models or request.match_info.get("version", "1") != "1":
            raise RefusedError(404, f"there is no model {shown(name)} of that version")
        model = self._link(name).models[name]
        length, json_bytes = self._lengths(request)
        if self._in_progress > self._queue:
            raise RefusedError(503, f"the server is overloaded: {self._queue} requests are in progress")
        spans = Spans(self._arena)
        submitted = False
        try:
            before = -(json_bytes or 0) % ALIGNMENT  # so that binary tensors are aligned, and NumPy copies them fast
            start = spans.take(before + length) + before
            body = self._arena.memory[start : start + length]
            await self._receive(request, body)
            asked = read_request(body, json_bytes or length, model)
            header = self._header(asked, model, spans, start)
            future = self._link(name).submit(header, asked.rows, spans.release)
            submitted = True
        finally:
            if not submitted:
                spans.release()
        return self._written(name, asked, await self._in_time(future))

    def _link(self, model: str) -> WorkerLink:
        """Return the ready worker that has the least to do."""
        ready = [link for link in self._links if model in link.models]
        if not ready:
            raise RefusedError(503, "no worker process is ready")
        return min(ready, key=lambda link: link.rows)

    def _lengths(self, request: web.Request) -> tuple[int, int | None]:
        """Return the bytes of the body, and those of its JSON if binary tensors follow."""
        if request.headers.get("Content-Encoding", "identity") != "identity":
            raise RefusedError(415, "bodies must not be compressed")
        length = request.content_length
        if length is None:
            raise RefusedError(411, "a request needs a Content-Length")
        if length > self._options.body_bytes:
            raise RefusedError(413, f"the body has {length} bytes; the limit is {self._options.body_bytes}")
        given = request.headers.get(JSON_LENGTH)
        if given is not None and not (given.isascii() and given.isdigit() and len(given) < 16 and int(given) <= length):
            raise RefusedError(
                400, f"{JSON_LENGTH} is {shown(given)}, but must be at most the {length} bytes of the body"
            )
        json_bytes = None if given is None else int(given)
        if (length if json_bytes is None else json_bytes) > MAX_JSON_BYTES:
            raise RefusedError(413, f"JSON may have {MAX_JSON_BYTES} bytes: send tensors in binary")
        return length, json_bytes

    async def _receive(self, request: web.Request, body: memoryview) -> None:
        """Copy the body to the memory that workers share, as it arrives."""
        place = 0
        try:
            async with asyncio.timeout(self._options.timeout_s):
                async for chunk, _ in request.content.iter_chunks():  # `iter_any` joins chunks, in a copy
                    if place + len(chunk) > len(body):
                        raise RefusedError(400, "the body is longer than its Content-Length")
                    body[place : place + len(chunk)] = chunk
                    place += len(chunk)
        except TimeoutError:
            raise RefusedError(408, "the body did not arrive in time") from None
        if place < len(body):
            raise RefusedError(400, f"the body has {place} of the {len(body)} bytes of its Content-Length")

    def _header(self, asked: InferRequest, model: ServedModel, spans: Spans, body: int) -> dict[str, object]:
        """Return what the worker gets: where each input is in the shared memory."""
        inputs: list[tuple[str, str, tuple[int, ...], int]] = []
        for tensor in asked.inputs:
            start = body + tensor.start
            if tensor.values is not None:
                start = spans.take(tensor.values.nbytes)
                room = self._arena.memory[start : start + tensor.values.nbytes]
                room[:] = np.ascontiguousarray(tensor.values).reshape(-1).view(np.uint8).data
            inputs.append((tensor.name, tensor.datatype, tensor.shape, start))
        outputs = [wanted.name for wanted in asked.outputs]
        return {"model": model.name, "inputs": inputs, "outputs": outputs, "rows": asked.rows}

    async def _in_time(self, future: asyncio.Future[WorkerAnswer]) -> WorkerAnswer:
        try:
            async with asyncio.timeout(self._options.timeout_s):
                answer = await future
        except TimeoutError:
            raise RefusedError(503, "the server is overloaded: the answer took too long") from None
        if answer.status != 200:
            raise RefusedError(answer.status, answer.error)
        return answer

    def _written(self, name: str, asked: InferRequest, answer: WorkerAnswer) -> web.Response:
        body, json_bytes = write_answer(name, asked, answer.outputs)
        if json_bytes is None:
            return web.Response(body=body, content_type="application/json")
        headers = {JSON_LENGTH: str(json_bytes)}
        return web.Response(body=body, content_type="application/octet-stream", headers=headers)
