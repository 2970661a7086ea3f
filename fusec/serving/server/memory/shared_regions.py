"""Register shared memory of clients on this machine: Triton's extension `system_shared_memory` of the protocol.

A client names a POSIX shared-memory object, and requests then refer to it by that name. Front ends keep the list as
files in the folder of the server, so that all of them know what one was asked for. A worker maps an object when the
first request refers to it.
"""

from __future__ import annotations

import json
import os
import re
import stat
import threading
from collections.abc import Container, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fusec.errors import FusecError
from fusec.serving.server.memory.request_memory import RequestMemory
from fusec.system.dataclass import dataclass
from fusec.system.printable import printable
from fusec.system.untrusted import read_json

OBJECTS = Path("/dev/shm")  # where Linux shows POSIX shared memory (shm_overview(7))
MOST_REGIONS = 256
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


class RegionError(FusecError):
    """A region cannot be registered, or a request does not fit it."""


@dataclass(frozen=True)
class SharedRegion:
    """A part of a shared-memory object.

    identity: key and number of the object. Another object that has the same key later has another number.
    """

    name: str
    key: str
    offset: int
    byte_size: int
    identity: str

    def start(self, offset: int, nbytes: int) -> int:
        """Return where some bytes of the region start in the object. Raises RegionError if it has no such bytes."""
        if offset < 0 or offset + nbytes > self.byte_size:
            raise RegionError(f"region {self.name!r} has {self.byte_size} bytes, not {nbytes} from {offset} on")
        return self.offset + offset


class RegionRegistry:
    """The regions that clients have registered with a server. folder: of its files."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._known: dict[str, tuple[tuple[int, int], SharedRegion]] = {}

    def register(self, name: str, body: bytes) -> None:
        """Add a region. body: JSON with `key`, `offset` and `byte_size`. Raises RegionError if that cannot be."""
        path = self._path(name)
        try:
            given: Any = read_json(body)
        except ValueError as error:
            raise RegionError(f"the request is not JSON: {printable(str(error)[:200])}") from error
        values: Mapping[str, Any] = given if isinstance(given, dict) else {}
        key, offset, byte_size = values.get("key"), values.get("offset", 0), values.get("byte_size")
        if not isinstance(key, str) or not _NAME.fullmatch(key.removeprefix("/")):
            raise RegionError("key must be the name of a POSIX shared-memory object: letters, digits, '_', '-' and '.'")
        if type(offset) is not int or type(byte_size) is not int or offset < 0 or byte_size < 1:
            raise RegionError("offset must be a whole number from 0, and byte_size one from 1")
        handle = _open(key.removeprefix("/"))
        try:
            found = os.fstat(handle)
        finally:
            os.close(handle)
        if offset + byte_size > found.st_size:
            raise RegionError(f"{key!r} has {found.st_size} bytes, not {byte_size} from {offset} on")
        if len(list(self._folder.glob("region-*"))) >= MOST_REGIONS:
            raise RegionError(f"{MOST_REGIONS} regions are registered: unregister one first")
        region = SharedRegion(name, key, offset, byte_size, f"{key.removeprefix('/')} {found.st_ino}")
        new = path.with_name(f"new-{os.getpid()}-{name}")
        new.write_text(json.dumps(asdict(region)))
        try:
            os.link(new, path)
        except FileExistsError:
            raise RegionError(f"a region {name!r} is registered already: unregister it first") from None
        finally:
            new.unlink()

    def unregister(self, name: str) -> list[SharedRegion]:
        """Remove a region, or all if no name is given, and return them. A name that is not registered is no error."""
        removed = self.regions(name) if not name or self._path(name).exists() else []
        for region in removed:
            self._path(region.name).unlink(missing_ok=True)
        return removed

    def regions(self, name: str = "") -> list[SharedRegion]:
        """Return a region, or all by name. Raises RegionError if there is none of that name."""
        if name:
            return [self.find(name)]
        names = sorted(path.name.removeprefix("region-") for path in self._folder.glob("region-*"))
        return [self.find(each) for each in names]

    def find(self, name: str) -> SharedRegion:
        """Return a region. Raises RegionError if there is none of that name."""
        path = self._path(name)
        try:
            found = path.stat()
            version = found.st_ino, found.st_mtime_ns
            known = self._known.get(name)
            if known is None or known[0] != version:
                known = self._known[name] = version, SharedRegion(**json.loads(path.read_text()))
        except FileNotFoundError:
            self._known.pop(name, None)
            raise RegionError(f"no shared-memory region {name!r} is registered") from None
        return known[1]

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise RegionError("a region's name has letters, digits, '_', '-' and '.', and at most 128 of them")
        return self._folder / f"region-{name}"


class MappedRegions:
    """The objects that a process has mapped."""

    def __init__(self, xp: Any):
        """Map nothing. xp: cupy, or numpy in simulation, as of `RequestMemory`."""
        self._xp = xp
        self._mapped: dict[str, RequestMemory] = {}
        self._lock = threading.Lock()

    def memory(self, identity: str, end: int) -> RequestMemory:
        """Return the memory of an object. Raises RegionError if it is gone, or has fewer bytes than `end`."""
        with self._lock:
            if (found := self._mapped.get(identity)) is None:
                found = self._mapped[identity] = self._map(identity)
        if end > len(found.data):
            raise RegionError(f"shared memory {identity.partition(' ')[0]!r} is smaller now: register it again")
        return found

    def _map(self, identity: str) -> RequestMemory:
        key, _, number = identity.rpartition(" ")
        handle = _open(key)
        try:
            if os.fstat(handle).st_ino != int(number):
                raise RegionError(f"{key!r} is another object now: register it again")
            return RequestMemory(handle, self._xp)
        finally:
            os.close(handle)

    def __len__(self) -> int:
        return len(self._mapped)

    def forget(self, identity: str) -> None:
        """Unmap an object, as soon as nothing reads it."""
        with self._lock:
            self._mapped.pop(identity, None)

    def keep(self, identities: Container[str]) -> None:
        """Unmap all objects but these."""
        for identity in list(self._mapped):
            if identity not in identities:
                self.forget(identity)


def _open(key: str) -> int:
    try:
        handle = os.open(OBJECTS / key, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise RegionError(f"cannot open shared memory {key!r}: {error.strerror}") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise RegionError(f"{key!r} is no shared memory")
    return handle
