"""Read and write a file of named members: an uncompressed zip whose members are aligned and have checksums.

The last member, `manifest.json`, holds the SHA-256 of each other member. No member is code.
Members are read, and not mapped into memory, because another process may change the file. Truncating a mapped file ends
this process (SIGBUS), and writing to it changes bytes that were checked before.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import struct
import weakref
import zipfile
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from fusec.errors import ModelError, writing
from fusec.system import atomic_write
from fusec.system.untrusted import read_json

MANIFEST = "manifest.json"
ALIGNMENT = 64  # of the first byte of each member in the file
MAX_MANIFEST_BYTES = 64 << 20
_EPOCH = (1980, 1, 1, 0, 0, 0)  # a fixed time, so that equal contents make equal files
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_PADDING = 0xD935  # id of an extra field that holds padding, as zipalign uses it
_CHUNK_BYTES = 4 << 20  # small enough to be hashed while it is in the cache of the processor
_ZIP64_BYTES = 20  # of the additional local header of a large member


class Writer:
    """Writes members one after the other; `finish` writes the manifest, `close` completes the file."""

    def __init__(self, file: IO[bytes]):
        self._file = file
        self._archive = zipfile.ZipFile(file, "w", zipfile.ZIP_STORED)
        self._digests: dict[str, str] = {}

    def add(self, name: str, data: bytes) -> None:
        """Write a member of these bytes."""

        def write(file: IO[bytes]) -> str:
            file.write(data)
            return hashlib.sha256(data).hexdigest()

        self.stream(name, write)

    def stream(self, name: str, write: Callable[[IO[bytes]], str]) -> None:
        """Write a member through `write`, which returns the SHA-256 of the bytes it wrote."""
        info = zipfile.ZipInfo(name, _EPOCH)
        start = self._file.tell() + _LOCAL_HEADER.size + len(name.encode()) + _ZIP64_BYTES + 4
        info.extra = struct.pack("<HH", _PADDING, -start % ALIGNMENT) + bytes(-start % ALIGNMENT)
        with self._archive.open(info, "w", force_zip64=True) as member:
            self._digests[name] = write(member)

    def finish(self, manifest: dict[str, Any]) -> None:
        """Write the manifest, with the digests of all members."""
        self.add(MANIFEST, json.dumps({**manifest, "members": self._digests}, indent=1).encode())

    def close(self) -> None:
        """Write the directory of the zip. A file without a manifest cannot be read."""
        self._archive.close()


@contextlib.contextmanager
def written(path: Path, *, durable: bool = True) -> Generator[Writer]:
    """Open a writer; the file appears under its name when the block ends without an error.

    durable: see `atomic_write.written`.
    Raises FusecError if the file cannot be written.
    """
    with writing(path), atomic_write.written(path.resolve(), durable=durable) as file:
        writer = Writer(file)
        try:
            yield writer
        finally:
            writer.close()


class Reader:
    """Reads members of a file, which stays open. Raises ModelError that names the damaged member."""

    def __init__(self, path: Path):
        self.path = path
        try:
            if path.exists() and not path.is_file():  # a pipe would wait for ever
                raise ModelError(f"{path}: is not a regular file")
            file = path.open("rb")  # open as long as this object exists, because members are read later
            weakref.finalize(self, file.close)
            self._handle = file.fileno()
            self._bytes = os.fstat(self._handle).st_size
            with zipfile.ZipFile(file) as archive:
                self._places = {info.filename: self._place(info) for info in archive.infolist()}
                self.manifest: dict[str, Any] = self._manifest(archive)
        except OSError as error:
            raise ModelError(f"{path}: {error.strerror or error}") from error
        except (zipfile.BadZipFile, struct.error, EOFError, ValueError, NotImplementedError, OverflowError) as error:
            reason = "fusec.compile reads ONNX models" if path.suffix == ".onnx" else str(error)
            raise ModelError(f"{path}: not a readable .fusec file, or truncated: {reason}") from error
        self._digests: dict[str, str] = self.manifest["members"]

    def _manifest(self, archive: zipfile.ZipFile) -> dict[str, Any]:
        if MANIFEST not in self._places or archive.getinfo(MANIFEST).file_size > MAX_MANIFEST_BYTES:
            raise ModelError(f"{self.path}: not a .fusec file: it has no {MANIFEST}")
        manifest = read_json(archive.read(MANIFEST))  # zipfile checks the checksum of the zip
        members = manifest.get("members") if isinstance(manifest, dict) else None
        if not isinstance(members, dict):
            raise ModelError(f"{self.path}: {MANIFEST}: lists no members")
        for name in {*members, *self._places} - {MANIFEST}:
            if name not in members or name not in self._places:
                raise ModelError(f"{self.path}: {name}: is {'missing' if name in members else 'not in the manifest'}")
        return manifest

    def _place(self, info: zipfile.ZipInfo) -> tuple[int, int]:
        name, at = info.filename, info.header_offset
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
            raise ModelError(f"{self.path}: {name}: is compressed or encrypted")
        if not 0 <= at <= self._bytes - _LOCAL_HEADER.size:
            raise ModelError(f"{self.path}: {name}: is outside the file")
        magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(os.pread(self._handle, _LOCAL_HEADER.size, at))
        start = at + _LOCAL_HEADER.size + name_bytes + extra_bytes
        if magic != b"PK\3\4" or info.file_size < 0 or start + info.file_size > self._bytes:
            raise ModelError(f"{self.path}: {name}: is outside the file, or the file is damaged there")
        return start, start + info.file_size

    def __contains__(self, name: str) -> bool:
        return name in self._digests

    def __iter__(self) -> Iterator[str]:
        return iter(self._digests)

    def room(self, name: str) -> memoryview:
        """Reserve memory for a member. Nothing is read yet, and pages are allocated when they are written."""
        if name not in self:
            raise ModelError(f"{self.path}: {name}: is missing")
        start, end = self._places[name]
        return memoryview(mmap.mmap(-1, max(end - start, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))[: end - start]

    def fill(self, name: str, room: memoryview) -> str:
        """Read the first bytes of a member, as many as fit into `room`, and return their SHA-256.

        A thread hashes each chunk while the next one is read, because both take about as long.
        """
        start, _ = self._places[name]
        sha, done = hashlib.sha256(), 0
        with ThreadPoolExecutor(1, thread_name_prefix="fusec-sha256") as hashing:
            while done < len(room):
                chunk = room[done : done + _CHUNK_BYTES]
                try:
                    count = os.preadv(self._handle, [chunk], start + done)
                except OSError as error:
                    raise ModelError(f"{self.path}: {name}: {error.strerror or error}") from error
                if not count:
                    raise ModelError(f"{self.path}: {name}: was truncated after the file was opened")
                done += count
                if len(room) <= _CHUNK_BYTES:  # a thread would take longer to start
                    sha.update(chunk[:count])
                else:
                    hashing.submit(sha.update, chunk[:count])
        return sha.hexdigest()

    def check(self, name: str, room: memoryview | None = None) -> memoryview:
        """Read a member, into `room` if given. Raises ModelError if its checksum is not that of the manifest."""
        room = self.room(name) if room is None else room
        if self.fill(name, room) != self._digests[name]:
            raise ModelError(f"{self.path}: {name}: its checksum does not fit: the file is damaged or was changed")
        return room.toreadonly()

    def text(self, name: str) -> str:
        """Read and check a member that is text."""
        try:
            return bytes(self.check(name)).decode()
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.path}: {name}: {error}") from error

    def json(self, name: str) -> Any:
        """Read and check a member that is JSON."""
        try:
            return read_json(self.text(name))
        except ValueError as error:
            raise ModelError(f"{self.path}: {name}: {error}") from error
