"""Connect a front end to a worker process: requests go out, and each gets exactly one answer or refusal."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fusec.serving.served_model import ServedModel
from fusec.serving.server.frames import AnswerTensor, read_frame, split_answers
from fusec.serving.server.memory.shared_arena import SharedArena
from fusec.serving.server.request_frames import forget_frame, request_frame
from fusec.system.dataclass import dataclass

_RETRY_S = 0.05  # seconds between attempts to connect to a worker that starts
_log = logging.getLogger("fusec.serving")


@dataclass(frozen=True)
class WorkerAnswer:
    """Answer of a worker to a request: the outputs by name, maybe with others of its batch, or an error."""

    outputs: Mapping[str, AnswerTensor]
    error: str = ""
    status: int = 200


@dataclass
class _Pending:
    future: asyncio.Future[WorkerAnswer]
    rows: int
    release: Callable[[], None]
    since: float


class WorkerLink:
    """The connection to one worker process. It connects again whenever the worker starts anew.

    models: what the worker serves; empty while it is not connected.
    """

    def __init__(self, path: str, arena: SharedArena, changed: Callable[[], None]):
        """Make a link. path: the socket of the worker; changed: called when it gets ready or ends."""
        self.models: dict[str, ServedModel] = {}
        self.device = ""
        self.rows = 0
        self._path, self._arena, self._changed = path, arena, changed
        self._numbers = itertools.count()
        self._pending: dict[int, _Pending] = {}
        self._outgoing: dict[bytes, list[int]] = {}
        self._writer: asyncio.StreamWriter | None = None

    def submit(
        self, form: bytes, rows: int, starts: Sequence[int], release: Callable[[], None]
    ) -> asyncio.Future[WorkerAnswer]:
        """Send a request, and return the future of its answer. A worker that dies is an answer, too: status 503.

        form: as `RequestForm.text` writes it. starts: of the inputs, in the shared memory.
        release: called when the worker no longer reads the request's memory, which may be later than a timeout.
        """
        assert self._writer is not None, "only links with models take requests"
        number = next(self._numbers)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[WorkerAnswer] = loop.create_future()
        self._pending[number] = _Pending(future, rows, release, loop.time())
        self.rows += rows
        if not self._outgoing:  # one write for all requests that are read in this turn of the event loop
            loop.call_soon(self._flush)
        self._outgoing.setdefault(form, []).extend((number, rows, *starts))
        return future

    def _flush(self) -> None:
        if self._writer is not None:  # else the worker has ended, and all its requests were refused
            self._writer.write(b"".join([request_frame(form, numbers) for form, numbers in self._outgoing.items()]))
        self._outgoing.clear()

    def forget(self, item: str) -> None:
        """Let the worker unmap a shared-memory object."""
        if self._writer is not None:
            self._writer.write(forget_frame(item))

    def refuse_late(self, before: float) -> None:
        """Refuse requests that were sent before some time. The worker may still read their memory."""
        for pending in self._pending.values():
            if pending.since >= before:
                break  # they are in the order in which they were sent
            if not pending.future.done():
                pending.future.set_result(WorkerAnswer({}, "the server is overloaded: the answer took too long", 503))

    async def run(self) -> None:
        """Keep the link connected until the task is cancelled."""
        while True:
            with contextlib.suppress(OSError, EOFError):  # EOFError: the worker ended, also IncompleteReadError
                await self._connected()
            if self.models:
                _log.warning("a worker process ended; %d of its requests are refused", len(self._pending))
            self._ended()
            await asyncio.sleep(_RETRY_S)

    async def _connected(self) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(connection, self._path)
            socket.send_fds(connection, [b"m"], [self._arena.handle])
        except OSError:
            connection.close()
            raise
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        try:
            hello, _ = await read_frame(reader)
            self._writer, self.device = writer, str(hello["device"])
            self.models = {name: ServedModel.from_json(data) for name, data in hello["models"].items()}
            self._changed()
            while True:
                self._answered(*await read_frame(reader))
        finally:
            writer.close()

    def _answered(self, header: Mapping[str, Any], data: bytes) -> None:
        if "error" in header:
            self._finish(header["id"], WorkerAnswer({}, header["error"], header["status"]))
            return
        for number, outputs in split_answers(header, data):
            self._finish(number, WorkerAnswer(outputs))

    def _finish(self, number: int, answer: WorkerAnswer) -> None:
        pending = self._pending.pop(number)
        self.rows -= pending.rows
        pending.release()
        if not pending.future.done():  # else its client was refused, because the answer took too long
            pending.future.set_result(answer)

    def _ended(self) -> None:
        self._writer, self.models = None, {}
        self._outgoing.clear()
        for number in list(self._pending):
            self._finish(number, WorkerAnswer({}, "the worker process ended before it answered", 503))
        self._changed()
