"""Speak HTTP in a process of its own: the Open Inference Protocol, version 2, and metrics.

aiohttp is the server library. It is one package with a parser in C. It gives bodies in chunks, so that each is copied
once, into the memory that workers share. It drains connections when it is asked to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from fusec import __version__
from fusec.serving.served_model import ServedModel
from fusec.serving.server import metrics
from fusec.serving.server.connection_dealer import take
from fusec.serving.server.infer_handler import InferHandler, RefusedError
from fusec.serving.server.infer_request import shown
from fusec.serving.server.server_options import ServerOptions
from fusec.serving.server.shared_arena import SharedArena
from fusec.serving.server.worker_link import WorkerLink

_MODEL = "/v2/models/{model}"
_EXTENSIONS = ["binary_tensor_data", "model_configuration", "model_repository"]
READ_BYTES = 1 << 18  # that a connection holds before it waits for the handler; with aiohttp's 64 KiB it waits often
_log = logging.getLogger("fusec.serving")


class FrontEnd:
    """One HTTP server with its links to all workers."""

    def __init__(self, options: ServerOptions, number: int):
        """Take the memory for request bodies, and make the links. number: of this front end."""
        self._options, self._number = options, number
        arena = SharedArena(options.memory_bytes // options.front_ends)
        workers = range(len(options.devices))
        self._links = [WorkerLink(options.socket(number), arena, self._workers_changed) for number in workers]
        self._infer = InferHandler(options, arena, self._links)
        self._draining = False
        self._starting: set[asyncio.Task[None]] = set()

    def app(self) -> web.Application:
        """Return the application with all routes."""
        app = web.Application(middlewares=[_json_errors])
        app.router.add_get("/v2", self._server)
        app.router.add_get("/v2/", self._server)
        app.router.add_get("/v2/health/live", self._live)
        app.router.add_get("/v2/health/ready", self._ready)
        app.router.add_post("/v2/repository/index", self._index)
        app.router.add_get("/metrics", self._metrics)
        for prefix in (_MODEL, _MODEL + "/versions/{version}"):
            app.router.add_get(prefix, self._metadata)
            app.router.add_get(prefix + "/ready", self._model_ready)
            app.router.add_get(prefix + "/config", self._config)
            app.router.add_post(prefix + "/infer", self._infer.handle)
        return app

    async def run(self, channel: socket.socket) -> None:
        """Serve until SIGTERM, then answer what is in progress, and end. channel: from which connections are taken."""
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, ended.set)
        links = [loop.create_task(link.run()) for link in self._links]
        runner = web.AppRunner(
            self.app(),
            access_log=None,
            auto_decompress=False,
            read_bufsize=READ_BYTES,
            shutdown_timeout=self._options.drain_s,
        )
        await runner.setup()
        loop.add_reader(channel, self._accept, channel, runner.server)
        await ended.wait()
        self._draining = True
        loop.remove_reader(channel)
        await runner.cleanup()
        for link in links:
            link.cancel()

    def _accept(self, channel: socket.socket, server: Any) -> None:
        """Serve the connections that this front end has got."""
        for connection in take(channel):
            connection.setblocking(False)
            task = asyncio.create_task(_serve(connection, server))
            self._starting.add(task)  # the event loop holds no reference to it
            task.add_done_callback(self._starting.discard)

    def _workers_changed(self) -> None:
        ready = sum(bool(link.models) for link in self._links)
        metrics.WORKERS.set(ready)
        if ready == len(self._links):
            self._options.ready(self._number).touch()

    def _model(self, request: web.Request) -> ServedModel:
        name = request.match_info["model"]
        if name not in self._options.models or request.match_info.get("version", "1") != "1":
            raise RefusedError(404, f"there is no model {shown(name)} of that version")
        for link in self._links:
            if name in link.models:
                return link.models[name]
        raise RefusedError(503, "no worker process is ready")

    async def _server(self, request: web.Request) -> web.Response:
        return web.json_response({"name": "fusec", "version": __version__, "extensions": _EXTENSIONS})

    async def _live(self, request: web.Request) -> web.Response:
        return web.json_response({"live": True})

    async def _ready(self, request: web.Request) -> web.Response:
        if self._draining or not any(link.models for link in self._links):
            raise RefusedError(503, "the server ends" if self._draining else "no worker process is ready")
        return web.json_response({"ready": True})

    async def _metadata(self, request: web.Request) -> web.Response:
        return web.json_response(self._model(request).metadata())

    async def _model_ready(self, request: web.Request) -> web.Response:
        return web.json_response({"name": self._model(request).name, "ready": True})

    async def _config(self, request: web.Request) -> web.Response:
        return web.json_response(self._model(request).config(self._options.delay_s))

    async def _index(self, request: web.Request) -> web.Response:
        ready = {name for link in self._links for name in link.models}
        rows = [
            {"name": name, "version": "1", "state": "READY" if name in ready else "UNAVAILABLE", "reason": ""}
            for name in self._options.models
        ]
        return web.json_response(rows)

    async def _metrics(self, request: web.Request) -> web.Response:
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=await asyncio.to_thread(metrics.text), headers=headers)


async def _serve(connection: socket.socket, server: Any) -> None:
    with contextlib.suppress(OSError):  # the client is gone
        await asyncio.get_running_loop().connect_accepted_socket(server, connection)


@web.middleware
async def _json_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer each error as the protocol writes it. A defect of fusec is logged, and its text stays here."""
    try:
        return await handler(request)
    except RefusedError as refused:
        return refused.response()
    except web.HTTPException as error:
        return web.json_response({"error": f"{error.reason}: {shown(request.path)}"}, status=error.status)
    except Exception:  # noqa: BLE001 - the client gets an answer whatever happened
        _log.exception("a request failed")
        return web.json_response({"error": "the server failed"}, status=500)


def main() -> None:
    """Serve with the options on the command line, as that front end, from the channel with that descriptor."""
    options, number, handle = ServerOptions.from_json(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    asyncio.run(FrontEnd(options, number).run(socket.socket(fileno=handle)))
