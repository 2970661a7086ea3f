"""Shorten cuDNN's nested refusals to the first reason of each engine. The other lines only name its callers."""

from __future__ import annotations

import re

MAX_REASON = 480
_ENGINE = re.compile(r'\{"engineId":(\d+)[^\n]*\n')
_WARNING = re.compile(
    r"(?:Warning|Error|Info): (CUDNN_STATUS_\w+); Reason: (.*?)(?=\n(?:Warning|Error|Info): |\Z)", re.DOTALL
)
_FINALIZE = re.compile(r"failed with message: (.*?), and code: (CUDNN_STATUS_\w+)", re.DOTALL)
_STATUS = re.compile(r"CUDNN_STATUS_[A-Z][A-Z_]*[A-Z]")
_OTHER_GPU = "_ARCH_MISMATCH"  # of an engine for another GPU generation, which gives no reason about the graph
_NEEDS_DEVICE = ("cuKernelGetFunction", "EXECUTION_FAILED_CUDART")


def reason_of(error: BaseException) -> tuple[str, str]:
    """Return the status code and the reasons in cuDNN's message, shortened."""
    text = str(error)
    code, message = _engines(text) or _finalize(text) or _plain(error)
    if any(mark in text for mark in _NEEDS_DEVICE):
        message = f"cuDNN asks for a real device here, and may accept it there: {message}"
    return code, _shorten(message)


def _engines(text: str) -> tuple[str, str] | None:
    """Return the reasons of engines, equal reasons once, without engines for other GPU generations."""
    _, *pieces = _ENGINE.split(text)
    causes: dict[tuple[str, str], list[str]] = {}
    for engine, body in zip(pieces[::2], pieces[1::2], strict=True):
        found = _WARNING.search(body)
        if found:
            cause = (found[1], _one_line(found[2]))
            if engine not in causes.setdefault(cause, []):
                causes[cause].append(engine)
    own = {c: e for c, e in causes.items() if not c[0].endswith(_OTHER_GPU)} or causes
    if not own:
        return None
    message = "; ".join(f"engine {', '.join(engines)}: {reason}" for (_, reason), engines in own.items())
    return next(iter(own))[0], message


def _finalize(text: str) -> tuple[str, str] | None:
    found = _FINALIZE.search(text)
    return (found[2], _one_line(found[1])) if found else None


def _plain(error: BaseException) -> tuple[str, str]:
    text = _one_line(str(error))
    status = _STATUS.search(text)
    return (status[0] if status else type(error).__name__), text


def _one_line(text: str) -> str:
    words = " ".join(text.split())
    return words.removesuffix(" at: true").rstrip(" ;.")


def _shorten(message: str) -> str:
    return message if len(message) <= MAX_REASON else message[: MAX_REASON - 2].rstrip() + " …"
