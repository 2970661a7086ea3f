"""Write HTTP answers to inference requests, with the few headers that they need."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Sequence
from email.utils import formatdate
from http import HTTPStatus

from fusec import __version__
from fusec.serving.server.front_end.http.request_head import JSON_LENGTH
from fusec.system.dataclass import dataclass

RETRY_AFTER_S = "1"


@dataclass(frozen=True)
class HttpAnswer:
    """An answer.

    parts: the body is these bytes, one part after the other.
    json_bytes: length of the JSON text before binary tensors; None if the body is JSON alone.
    """

    status: int
    parts: Sequence[bytes | memoryview]
    json_bytes: int | None = None

    @classmethod
    def refusal(cls, status: int, reason: str) -> HttpAnswer:
        """Return the answer to a request that is refused."""
        return cls(status, [json.dumps({"error": reason}).encode()])

    @property
    def content_type(self) -> str:
        """Return the media type of the body."""
        return "application/json; charset=utf-8" if self.json_bytes is None else "application/octet-stream"

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers that are not on every answer. An answer to an overload says when to try again."""
        found = {} if self.json_bytes is None else {JSON_LENGTH: str(self.json_bytes)}
        return found | ({"Retry-After": RETRY_AFTER_S} if self.status == HTTPStatus.SERVICE_UNAVAILABLE else {})

    def written(self, closes: bool) -> list[bytes | memoryview]:
        """Return the head and the body. closes: the connection is closed after it."""
        length = sum(map(len, self.parts))
        return [_head(self.status, length, self.json_bytes, closes, int(time.time())), *self.parts]


@functools.lru_cache(maxsize=256)  # answers of one second to requests of one kind have the same head
def _head(status: int, length: int, json_bytes: int | None, closes: bool, second: int) -> bytes:
    answer = HttpAnswer(status, (), json_bytes)
    lines = {
        "Content-Type": answer.content_type,
        **answer.headers,
        "Content-Length": str(length),
        "Date": formatdate(second, usegmt=True),
        "Server": f"fusec/{__version__}",
        **({"Connection": "close"} if closes else {}),
    }
    first = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
    return "".join([first, *(f"{name}: {text}\r\n" for name, text in lines.items()), "\r\n"]).encode()
