"""Speak HTTP in a process of its own: the Open Inference Protocol, version 2, and metrics.

aiohttp is the server library. It is one package with a parser in C. It drains connections when it is asked to end.
Bodies and plain inference requests do not pass through it (`http/http_connection.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

from fusec import __version__
from fusec.serving.served_model import ServedModel
from fusec.serving.server import metrics
from fusec.serving.server.connection_dealer import take
from fusec.serving.server.front_end.client_regions import ClientRegions
from fusec.serving.server.front_end.http.http_connection import ConnectionOptions, HttpConnection
from fusec.serving.server.front_end.http.request_head import INFER_PATH, MODEL_PATH
from fusec.serving.server.front_end.infer_handler import InferHandler, RefusedError, library_response, refusal_of
from fusec.serving.server.front_end.infer_request import shown
from fusec.serving.server.front_end.worker_link import WorkerLink
from fusec.serving.server.memory.shared_arena import SharedArena
from fusec.serving.server.memory.shared_regions import RegionError
from fusec.serving.server.server_options import ServerOptions
from fusec.system.long_lived import leave_alone

_INFER = re.compile(INFER_PATH)
_ABOUT_MODEL = re.compile(MODEL_PATH + "(?P<what>/ready|/config)?")
_REGIONS = re.compile(r"/v2/systemsharedmemory(?:/region/(?P<region>[^/?#\s]+))?/(?P<what>status|register|unregister)")
_EXTENSIONS = ["binary_tensor_data", "model_configuration", "model_repository"]
_IDLE_S = 75.0  # after which a connection without a request is closed
_NEVER_S = 1e9


class FrontEnd:
    """One HTTP server with its links to all workers."""

    def __init__(self, options: ServerOptions, number: int):
        """Take the memory for request bodies, and make the links. number: of this front end."""
        self._options, self._number = options, number
        arena = SharedArena(options.memory_bytes // options.front_ends)
        workers = range(len(options.devices))
        self._links = [WorkerLink(options.socket(number), arena, self._workers_changed) for number in workers]
        self._arena = arena
        self._connections: dict[asyncio.BaseTransport, HttpConnection] = {}
        self._regions = ClientRegions(Path(options.folder), options.shared_memory, self._links)
        self._infer = InferHandler(options, arena, self._links, self._connections, self._regions)
        self._common = ConnectionOptions(arena, options.body_bytes, self._infer.answer, self._connections)
        self._draining = False
        self._routes: dict[str, tuple[str, Callable[[], object]]] = {
            "/v2": ("GET", self._server),
            "/v2/": ("GET", self._server),
            "/v2/health/live": ("GET", self._live),
            "/v2/health/ready": ("GET", self._ready),
            "/v2/repository/index": ("POST", self._index),
        }
        self._starting: set[asyncio.Task[None]] = set()

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request that the server library has got."""
        path = request.raw_path.partition("?")[0]
        connection = self._connections.get(request.transport) if request.transport is not None else None
        try:
            if found := _INFER.fullmatch(path):
                _require(request, "POST")
                response = await self._infer.handle(request, found["model"], found["version"] or "1")
            else:
                response = await self._answer(request, path)
        except web.HTTPException as error:  # a body is too large
            response = web.json_response({"error": error.reason}, status=error.status)
        except Exception as error:  # noqa: BLE001 - the client gets an answer whatever happened
            response = library_response(refusal_of(error))
        with contextlib.suppress(ConnectionError):  # the client is gone
            await response.prepare(request)
            await response.write_eof()
        if connection is not None:
            connection.library_answered()
        return response

    async def _answer(self, request: web.BaseRequest, path: str) -> web.Response:
        if path in self._routes:
            method, about = self._routes[path]
            _require(request, method)
            return web.json_response(about())
        if path == "/metrics":
            _require(request, "GET")
            headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
            self._set_gauges()
            return web.Response(body=await asyncio.to_thread(metrics.text), headers=headers)
        if found := _ABOUT_MODEL.fullmatch(path):
            _require(request, "GET")
            model = self._model(found["model"], found["version"] or "1")
            return web.json_response(self._about(model, found["what"] or ""))
        if found := _REGIONS.fullmatch(path):
            return await self._about_regions(request, found["region"] or "", found["what"])
        raise RefusedError(404, f"Not Found: {shown(request.path)}")

    async def _about_regions(self, request: web.BaseRequest, name: str, what: str) -> web.Response:
        """Answer Triton's extension `system_shared_memory`."""
        _require(request, "GET" if what == "status" else "POST")
        try:
            if what == "status":
                return web.json_response(self._regions.describe(name))
            if what == "register":
                self._regions.registry.register(name, await request.read())
            else:
                self._regions.unregister(name)
        except RegionError as error:
            raise RefusedError(400, str(error)) from error
        return web.json_response({})

    async def run(self, channel: socket.socket) -> None:
        """Serve until SIGTERM, then answer what is in progress, and end. channel: from which connections are taken."""
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, ended.set)
        tasks = [loop.create_task(link.run()) for link in self._links]
        tasks.append(loop.create_task(self._expire()))
        # aiohttp does not see all requests, and must not close connections as idle ones.
        server = web.Server(self.answer, access_log=None, auto_decompress=False, keepalive_timeout=_NEVER_S)
        runner = web.ServerRunner(server, shutdown_timeout=self._options.drain_s)
        await runner.setup()
        loop.add_reader(channel, self._accept, channel, server)
        await ended.wait()
        self._draining = True
        loop.remove_reader(channel)
        await self._answered()
        await runner.cleanup()
        for task in tasks:
            task.cancel()

    async def _expire(self) -> None:
        """Refuse requests whose bodies or answers take too long, and do what is due from time to time."""
        while True:
            await asyncio.sleep(min(0.2, self._options.timeout_s / 4))
            before = asyncio.get_running_loop().time() - self._options.timeout_s
            for connection in list(self._connections.values()):
                connection.expire(before)
                connection.close_idle(before - _IDLE_S)
            for link in self._links:
                link.refuse_late(before)
            self._regions.unmap_removed()
            self._set_gauges()

    def _set_gauges(self) -> None:
        """Set what metrics say about now. Doing it at every request would take a tenth of the time of one."""
        metrics.IN_PROGRESS.set(self._infer.in_progress)
        metrics.ARENA_BYTES.set(self._arena.size - self._arena.free_bytes)

    async def _answered(self) -> None:
        """Wait for bodies that are on their way, and for answers that the server library does not give."""
        left = [each for each in self._connections.values() if each.is_busy]
        for connection in left:
            connection.end()
        end = asyncio.get_running_loop().time() + self._options.drain_s
        while any(each.is_busy for each in left) and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.02)

    def _accept(self, channel: socket.socket, server: web.Server) -> None:
        """Serve the connections that this front end has got."""
        for connection in take(channel):
            connection.setblocking(False)
            task = asyncio.create_task(self._serve(connection, server))
            self._starting.add(task)  # the event loop holds no reference to it
            task.add_done_callback(self._starting.discard)

    async def _serve(self, connection: socket.socket, server: web.Server) -> None:
        def made() -> HttpConnection:
            return HttpConnection(server(), self._common)

        with contextlib.suppress(OSError):  # the client is gone
            await asyncio.get_running_loop().connect_accepted_socket(made, connection)

    def _workers_changed(self) -> None:
        ready = sum(bool(link.models) for link in self._links)
        metrics.WORKERS.set(ready)
        if ready == len(self._links):
            self._options.ready(self._number).touch()

    def _model(self, name: str, version: str) -> ServedModel:
        if name not in self._options.models or version != "1":
            raise RefusedError(404, f"there is no model {shown(name)} of that version")
        for link in self._links:
            if name in link.models:
                return link.models[name]
        raise RefusedError(503, "no worker process is ready")

    def _about(self, model: ServedModel, what: str) -> dict[str, Any]:
        if what == "/ready":
            return {"name": model.name, "ready": True}
        return model.config(self._options.delay_s) if what == "/config" else model.metadata()

    def _server(self) -> dict[str, Any]:
        more = ["system_shared_memory"] if self._options.shared_memory else []
        return {"name": "fusec", "version": __version__, "extensions": [*_EXTENSIONS, *more]}

    def _live(self) -> dict[str, Any]:
        return {"live": True}

    def _ready(self) -> dict[str, Any]:
        if self._draining or not any(link.models for link in self._links):
            raise RefusedError(503, "the server ends" if self._draining else "no worker process is ready")
        return {"ready": True}

    def _index(self) -> list[dict[str, Any]]:
        ready = {name for link in self._links for name in link.models}
        return [
            {"name": name, "version": "1", "state": "READY" if name in ready else "UNAVAILABLE", "reason": ""}
            for name in self._options.models
        ]


def _require(request: web.BaseRequest, method: str) -> None:
    if request.method != method and (request.method, method) != ("HEAD", "GET"):
        raise RefusedError(405, f"Method Not Allowed: {shown(request.path)}")


def main() -> None:
    """Run a front end. The command line has the options, its number, and the descriptor of its connections."""
    options, number, handle = ServerOptions.from_json(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    leave_alone()
    asyncio.run(FrontEnd(options, number).run(socket.socket(fileno=handle)))
