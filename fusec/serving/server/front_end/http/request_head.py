"""Read the head of a request as far as it tells where the body ends, and if it asks for inference.

The server library reads each head in full, and refuses those that break HTTP. A head that is unusual in any way has no
known length here.
"""

from __future__ import annotations

import functools
import re

from fusec.system.dataclass import dataclass

END = b"\r\n\r\n"
JSON_LENGTH = "Inference-Header-Content-Length"  # the header that counts the bytes of JSON before binary tensors
MODEL_PATH = r"/v2/models/(?P<model>[^/?#\s]+)(?:/versions/(?P<version>[^/?#\s]+))?"
INFER_PATH = MODEL_PATH + "/infer"
_INFER = re.compile(rf"POST {INFER_PATH}(?:\?[!-~]*)? HTTP/1\.(?P<minor>[01])\r\n".encode())
_NAME = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_REQUEST = re.compile(rb"[A-Z]+ /[!-~]* HTTP/1\.[01]\r\n(?:" + _NAME + rb":[^\x00-\x08\x0a-\x1f\x7f]*\r\n)*\r\n")
_LENGTH = re.compile(rb"\r\n(content-length):[ \t]*([0-9]{1,15})[ \t]*(?=\r\n)", re.IGNORECASE)
_JSON = re.compile(rb"\r\ninference-header-content-length:[ \t]*([0-9]{1,15})[ \t]*(?=\r\n)", re.IGNORECASE)
_JSON_NAMED = re.compile(rb"\r\ninference-header-content-length:", re.IGNORECASE)
_EXPECT = re.compile(rb"\r\nexpect:[ \t]*100-continue[ \t]*(?=\r\n)", re.IGNORECASE)
_CONNECTION = re.compile(rb"\r\nconnection:(?![ \t]*keep-alive[ \t]*\r\n)", re.IGNORECASE)
_OTHER = re.compile(rb"\r\n(?:transfer-encoding|content-encoding|upgrade|expect):", re.IGNORECASE)


@dataclass(frozen=True)
class RequestHead:
    """A head.

    length: bytes of the body; None if they are not known.
    infers: it asks for inference, and says how long the body is.
    json_bytes: length of the JSON text before binary tensors, if the client says so.
    expects: the client waits for "100 Continue" before it sends the body.
    without_body: the head of the same request with no body.
    model, version: that it asks for.
    is_plain: the connection stays open after the answer, and no header needs the server library.
    """

    length: int | None = None
    infers: bool = False
    json_bytes: int | None = None
    expects: bool = False
    without_body: bytes = b""
    model: str = ""
    version: str = "1"
    is_plain: bool = False


@functools.lru_cache(maxsize=1024)  # a client sends the same head again and again
def read_head(head: bytes) -> RequestHead:
    """Read a head, which ends with an empty line."""
    expects = _EXPECT.search(head)
    plain = _EXPECT.sub(b"", head, 1)
    lengths = _LENGTH.findall(plain)
    named = plain.lower().count(b"\r\ncontent-length:")
    if not _REQUEST.fullmatch(plain) or _OTHER.search(plain) or named != len(lengths) or named > 1:
        return RequestHead()
    infers = _INFER.match(plain)
    if not lengths:
        return RequestHead(0) if infers is None else RequestHead()
    length = int(lengths[0][1])
    if infers is None:
        return RequestHead(length)
    json_bytes = _JSON.search(plain)
    stays_open = infers["minor"] == b"1" and not _CONNECTION.search(plain)
    return RequestHead(
        length,
        infers=True,
        json_bytes=None if json_bytes is None else int(json_bytes[1]),
        expects=expects is not None,
        without_body=_LENGTH.sub(rb"\r\n\1: 0", plain, 1),
        model=infers["model"].decode("latin-1"),
        version=(infers["version"] or b"1").decode("latin-1"),
        is_plain=stays_open and len(_JSON_NAMED.findall(plain)) == (json_bytes is not None),
    )
