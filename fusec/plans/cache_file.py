"""Write one file of the plan cache as bytes, and check such bytes: a header of JSON, and a serialized plan after it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fusec.plans.plan_record import Choice, Knobs, PlanKey
from fusec.system.untrusted import read_json

PLANS, CHOICES, QUARANTINE = "plans", "choices", "quarantine"  # folders of the cache
OLD_CHOICES = "forms"  # where fusec stored choices before; exports may still have it
_MAGIC = b"fusec plan 1\n"
_DIGEST = "[0-9a-f]{64}"
_NAME = re.compile(rf"({PLANS}|{CHOICES}|{OLD_CHOICES})/{_DIGEST}|{QUARANTINE}/{_DIGEST}/{_DIGEST}")


def is_name(name: str) -> bool:
    """Tell if this is the path of a file of the cache, relative to its folder."""
    return _NAME.fullmatch(name) is not None


def files_in(folder: Path) -> list[Path]:
    """List the files of a folder, without temporary ones; none if there is no folder."""
    if not folder.is_dir():
        return []
    return sorted(file for file in folder.iterdir() if not file.name.startswith("."))


def case_digest(graph_key: str, target: str, cudnn: str) -> str:
    """Return the name of the folder with the plans of a graph that failed a check."""
    return hashlib.sha256(json.dumps([graph_key, target, cudnn]).encode()).hexdigest()


def plan_digest(engine: int, knobs: Knobs) -> str:
    """Return the name of the file that says why a plan failed a check."""
    return hashlib.sha256(json.dumps([engine, sorted(knobs)]).encode()).hexdigest()


def pack(name: str, header: Mapping[str, Any], blob: bytes = b"") -> bytes:
    """Return magic, checksum, a line of JSON and the blob. The checksum covers the name, so files cannot swap."""
    body = json.dumps(header, sort_keys=True).encode() + b"\n" + blob
    return _MAGIC + hashlib.sha256(name.encode() + body).hexdigest().encode() + b"\n" + body


def unpack(path: str, data: bytes) -> tuple[dict[str, Any], bytes]:
    """Read what `pack` returned: the header and the blob.

    path: path of the file, relative to the folder of the cache.
    Raises ValueError for damaged data, and for a header that does not fit the path, because anyone can compute a
    checksum.
    """
    name = path.rpartition("/")[2]
    start = len(_MAGIC) + 65
    body = data[start:]
    checksum = hashlib.sha256(name.encode() + body).hexdigest().encode() + b"\n"
    if data[:start] != _MAGIC + checksum:
        raise ValueError(f"{name[:16]}…: its checksum does not fit")
    head, _, blob = body.partition(b"\n")
    header = read_json(head)
    if not isinstance(header, dict):
        raise ValueError(f"{name[:16]}…: no header")
    try:
        fits = path == _path_of(path.partition("/")[0], header)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not fits:
        raise ValueError(f"{path}: holds another plan than its name says")
    return header, blob


def _path_of(folder: str, header: Mapping[str, Any]) -> str:
    """Return the path that a header belongs to. Raises KeyError, TypeError or ValueError if it is malformed."""
    if folder == PLANS:
        Choice.from_json(header["choice"])
    elif folder in (CHOICES, OLD_CHOICES):
        data = header["choice" if folder == CHOICES else "form"]
        if not isinstance(data, dict):
            raise TypeError(f"a choice is {data!r}")
    else:
        knobs = tuple((int(k), int(v)) for k, v in header["knobs"])
        if not isinstance(header["reason"], str):
            raise TypeError(f"the reason is {header['reason']!r}")
        case = case_digest(header["graph"], header["target"], header["cudnn"])
        return f"{QUARANTINE}/{case}/{plan_digest(int(header['engine']), knobs)}"
    return f"{folder}/{PlanKey(**header['key']).digest}"


def from_old(path: str, data: bytes) -> tuple[str, bytes]:
    """Return path and data of a file as this version names and writes it."""
    folder, _, name = path.partition("/")
    if folder != OLD_CHOICES:
        return path, data
    header, _ = unpack(path, data)
    return f"{CHOICES}/{name}", pack(name, {"key": header["key"], "choice": header["form"]})
