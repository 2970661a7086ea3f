"""Store chosen plans and candidates on disk, a file each, with plans found bad and the blobs this machine built.

Several processes share the folder. Readers see each file whole or not at all, also after kill -9.
A file that fails its checksum is dropped, with a warning. A read-only folder still serves what it holds.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import threading
import warnings
import zipfile
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from fusec.errors import FusecError
from fusec.plans.plan_record import Choice, Entry, Knobs, PlanKey
from fusec.plans.sqlite_cache import READ_ONLY, ReadOnlyError
from fusec.plans.sqlite_cache import folder as cache_folder
from fusec.system import atomic_write
from fusec.system.untrusted import read_json

MAX_BYTES = 512 << 20  # a serialized plan takes 3 to 200 KB
MAX_TRUSTED_BYTES = 8 << 20  # of the list of trusted hashes, 65 bytes each; the older half goes
MAX_MEMBER_BYTES = 64 << 20  # of one file of an import
SCAN_EVERY = 32  # puts between two looks at the size of the folder, which other processes fill too
LOCK_S = 60.0
_MAGIC = b"fusec plan 1\n"
_PLAN = re.compile(r"(plans|forms)/[0-9a-f]{64}")
_BAD = re.compile(r"quarantine/[0-9a-f]{64}/[0-9a-f]{64}")


@dataclass(frozen=True)
class Info:
    """Size and contents of the store."""

    folder: Path
    entries: int
    forms: int  # what was measured of steps and kernels
    blobs: int  # entries with a serialized plan that this machine trusts
    bytes: int
    max_bytes: int
    quarantined: int
    trusted: int


class PlanStore:
    """Plans and candidates by key, in `folder` (default: `plans` in the cache folder).

    It holds at most `max_bytes`, blobs included, and drops first those unused for longest.
    Many threads and processes can use it. Raises FusecError when the folder cannot be used.
    """

    def __init__(self, folder: Path | None = None, max_bytes: int = MAX_BYTES):
        self.folder = folder or cache_folder() / "plans"
        self.max_bytes = max_bytes
        self._trusted: set[str] = set()
        self._trust_read = 0  # bytes of the list that `_trusted` holds
        self._until_scan = 0
        self._room = 0
        self._said = False  # that the folder cannot be written
        self._mutex = threading.Lock()

    # entries -----------------------------------------------------------------------------------------

    def get(self, key: PlanKey) -> Entry | None:
        """Return the entry of that key, or None; without a blob that this machine did not build."""
        path = self._place("plans", key.digest)
        found = self._used(path)
        if found is None:
            return None
        header, blob = found
        try:
            choice = Choice.from_json(header["choice"])
        except (KeyError, ValueError) as error:
            self._drop(path, str(error))
            return None
        return Entry(choice, blob if blob and self.trusts(blob) else None)

    def put(self, key: PlanKey, entry: Entry) -> None:
        """Write an entry built on this machine, and replace any other of that key; its blob is trusted."""
        self.put_all({key: entry})

    def put_all(self, entries: Mapping[PlanKey, Entry]) -> None:
        """Write entries as `put` does."""
        with self._remembers():
            self.trust(*(entry.blob for entry in entries.values() if entry.blob))
            for key, entry in entries.items():
                header = {"key": key.to_json(), "choice": entry.choice.to_json()}
                self._write(self._place("plans", key.digest), _pack(key.digest, header, entry.blob or b""))
                self._bound()

    def drop_blob(self, key: PlanKey, reason: str) -> None:
        """Keep the choice of that key, and drop its serialized plan, which failed; warn with the reason."""
        path = self._place("plans", key.digest)
        found = self._read(path)
        if found is not None and found[1]:
            with self._remembers():
                self._write(path, _pack(key.digest, found[0], b""))
            warnings.warn(f"dropped the serialized plan in {path} ({reason}); it is built anew", stacklevel=4)

    # forms -------------------------------------------------------------------------------------------

    def form(self, key: PlanKey) -> dict[str, Any] | None:
        """Return what `put_form` stored for that key, or None."""
        found = self._used(self._place("forms", key.digest))
        return None if found is None else found[0]["form"]

    def put_form(self, key: PlanKey, form: Mapping[str, Any]) -> None:
        """Store what was measured of a step, as plain data, and replace any other of that key."""
        header = {"key": key.to_json(), "form": dict(form)}
        with self._remembers():
            self._write(self._place("forms", key.digest), _pack(key.digest, header, b""))
            self._bound()

    # trust -------------------------------------------------------------------------------------------

    def trusts(self, blob: bytes) -> bool:
        """Tell if this machine built that serialized plan, or its user said to trust it."""
        return hashlib.sha256(blob).hexdigest() in self._hashes()

    def trust(self, *blobs: bytes) -> None:
        """Trust serialized plans from now on."""
        known = self._hashes()
        new = [digest for blob in blobs if (digest := hashlib.sha256(blob).hexdigest()) not in known]
        if not new:
            return
        with self._errors(), self._lock("trusted"):
            path = self._trust_path
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and path.stat().st_size > MAX_TRUSTED_BYTES:
                lines = path.read_text(encoding="ascii", errors="replace").split("\n")
                with atomic_write.written(path, durable=False) as kept:
                    kept.write("\n".join(lines[len(lines) // 2 :]).encode(errors="replace"))
            with path.open("ab") as file:
                file.write("".join(f"\n{d}" for d in new).encode())  # newlines first: a torn line before spoils nothing

    @property
    def _trust_path(self) -> Path:
        return self.folder / "trusted"

    def _hashes(self) -> set[str]:
        """Return the trusted hashes; read the list again if its size changed."""
        try:
            size = self._trust_path.stat().st_size
        except OSError:
            size = 0
        with self._mutex:
            if size != self._trust_read:
                text = ""
                with contextlib.suppress(FileNotFoundError), self._errors():
                    text = self._trust_path.read_text(encoding="ascii", errors="replace")
                self._trusted, self._trust_read = set(text.split("\n")), len(text)
            return self._trusted

    # quarantine --------------------------------------------------------------------------------------

    def quarantine(self, graph_key: str, target: str, cudnn: str, engine: int, knobs: Knobs, reason: str) -> None:
        """Record that a plan of a graph failed a check, so that it is not used with this cuDNN again."""
        name = hashlib.sha256(json.dumps([engine, sorted(knobs)]).encode()).hexdigest()
        case = {"graph": graph_key, "target": target, "cudnn": cudnn, "engine": engine}
        header = {**case, "knobs": [list(pair) for pair in sorted(knobs)], "reason": reason}
        place = self._place("quarantine", _case(graph_key, target, cudnn), name)
        with self._remembers():
            self._write(place, _pack(name, header, b""))

    def quarantined(self, graph_key: str, target: str, cudnn: str) -> list[tuple[int, Knobs, str]]:
        """Return (engine, knobs, reason) of every plan of a graph that failed a check."""
        result: list[tuple[int, Knobs, str]] = []
        for path in _files(self._place("quarantine", _case(graph_key, target, cudnn))):
            found = self._read(path)
            if found is not None:
                header = found[0]
                result.append((header["engine"], tuple((k, v) for k, v in header["knobs"]), header["reason"]))
        return sorted(result)

    # the whole ---------------------------------------------------------------------------------------

    def info(self) -> Info:
        """Return size and contents of the store."""
        plans, forms = self._plans(), self._forms()
        size = sum(path.stat().st_size for path in (*plans, *forms))
        blobs = 0
        for path in plans:
            found = self._read(path)
            blobs += found is not None and bool(found[1]) and self.trusts(found[1])
        trusted = sum(len(line) == 64 for line in self._hashes())
        return Info(self.folder, len(plans), len(forms), blobs, size, self.max_bytes, len(self._bad()), trusted)

    def clear(self) -> int:
        """Delete everything: plans, candidates, quarantine and trust. Return how many plans there were."""
        plans = self._plans()
        with self._errors():
            for path in (*plans, *self._forms(), *self._bad(), self._trust_path):
                path.unlink(missing_ok=True)
        return len(plans)

    def export(self, path: Path) -> int:
        """Write plans, candidates and quarantine into one zip file; return how many plans. Trust stays here."""
        count = 0
        try:
            with atomic_write.written(path.resolve(), durable=True) as whole, zipfile.ZipFile(whole, "w") as archive:
                for file in (*self._plans(), *self._forms(), *self._bad()):
                    if self._read(file) is not None:
                        name = file.relative_to(self.folder).as_posix()
                        archive.writestr(zipfile.ZipInfo(name), file.read_bytes())
                        count += name.startswith("plans/")
        except OSError as error:
            raise FusecError(f"{path}: cannot write: {error.strerror or error}") from error
        return count

    def import_(self, path: Path) -> int:
        """Add what `export` wrote, perhaps elsewhere; return how many plans.

        Entries that are here already stay, and no imported blob is trusted.
        Raises FusecError, and adds nothing, when the file is damaged.
        """
        taken: dict[str, bytes] = {}
        if path.exists() and not path.is_file():  # a pipe would wait for ever
            raise FusecError(f"{path}: is not a regular file")
        try:
            with zipfile.ZipFile(path) as archive:
                for member in archive.infolist():
                    name = member.filename
                    if not (_PLAN.fullmatch(name) or _BAD.fullmatch(name)):
                        raise FusecError(f"{path}: not an export of fusec's plan cache: it holds {name!r}")
                    if member.compress_type != zipfile.ZIP_STORED or member.file_size > MAX_MEMBER_BYTES:
                        raise FusecError(f"{path}: {name}: compressed, or larger than any plan")
                    taken[name] = archive.read(member)
                    header, _ = _unpack(taken[name], name.rpartition("/")[2])
                    _check(name, header)
        except (OSError, zipfile.BadZipFile, EOFError, NotImplementedError) as error:
            raise FusecError(f"{path}: not a readable export of the plan cache: {error}") from error
        except ValueError as error:
            raise FusecError(f"{path}: damaged: {error}") from error
        for name, data in taken.items():
            if not (self.folder / name).exists():
                self._write(self.folder / name, data)
        self._until_scan = 0
        self._bound()
        return sum(name.startswith("plans/") for name in taken)

    # files -------------------------------------------------------------------------------------------

    def _place(self, *parts: str) -> Path:
        return self.folder.joinpath(*parts)

    def _plans(self) -> list[Path]:
        return _files(self._place("plans"))

    def _forms(self) -> list[Path]:
        return _files(self._place("forms"))

    def _bad(self) -> list[Path]:
        folder = self._place("quarantine")
        return [file for case in sorted(folder.iterdir()) for file in _files(case)] if folder.is_dir() else []

    def _used(self, path: Path) -> tuple[dict[str, Any], bytes] | None:
        """Return what a file holds, and mark it as used now."""
        found = self._read(path)
        if found is not None:
            with contextlib.suppress(OSError):  # a read-only folder serves, it only forgets what was used last
                os.utime(path)
        return found

    def _read(self, path: Path) -> tuple[dict[str, Any], bytes] | None:
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise FusecError(f"cannot read {path} ({error}); set FUSEC_CACHE to another folder") from error
        try:
            header, blob = _unpack(data, path.name)
            kind = path.parent.name
            _check(f"{kind if kind in ('plans', 'forms') else f'quarantine/{kind}'}/{path.name}", header)
        except ValueError as error:
            self._drop(path, str(error))
            return None
        return header, blob

    def _drop(self, path: Path, reason: str) -> None:
        with contextlib.suppress(OSError):  # a folder that cannot be written serves what is whole in it
            path.unlink(missing_ok=True)
        warnings.warn(f"dropped the remembered plan {path} ({reason}); it will be made anew", stacklevel=4)

    def _write(self, path: Path, data: bytes) -> None:
        with self._errors():
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write.written(path, durable=False, collects=False) as file:  # see `_bound`
                file.write(data)
        with self._mutex:
            self._room -= len(data)

    def _bound(self) -> None:
        """Drop the entries unused for longest until the rest fits, and temporary files of dead writers."""
        with self._mutex:
            self._until_scan -= 1
            if self._until_scan >= 0 and self._room >= 0:
                return
            self._until_scan = SCAN_EVERY
        with self._errors(), self._lock("bound"):
            for place in (*map(self._place, ("plans", "forms")), *self._place("quarantine").glob("*/")):
                atomic_write.collect(place)
            found: list[tuple[float, int, Path]] = []
            for file in (*self._plans(), *self._forms()):
                with contextlib.suppress(FileNotFoundError):  # another process replaced or dropped it
                    state = file.stat()
                    found.append((state.st_mtime, state.st_size, file))
            total = sum(size for _, size, _ in found)
            for _, size, file in sorted(found):
                if total <= self.max_bytes:
                    break
                file.unlink(missing_ok=True)
                total -= size
        with self._mutex:
            self._room = self.max_bytes - total

    def _lock(self, name: str) -> FileLock:
        return FileLock(self.folder / f".{name}.lock", timeout=LOCK_S)

    @contextlib.contextmanager
    def _errors(self) -> Generator[None]:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            yield
        except FileNotFoundError:
            raise
        except (OSError, Timeout) as error:
            kind = ReadOnlyError if error.errno in READ_ONLY else FusecError
            raise kind(f"cannot use the plan cache {self.folder} ({error}); set FUSEC_CACHE") from error

    @contextlib.contextmanager
    def _remembers(self) -> Generator[None]:
        """Allow writes to fail if the folder is read-only: warn once and go on, because nothing depends on them."""
        try:
            yield
        except ReadOnlyError:
            if not self._said:
                self._said = True
                text = f"the plan cache {self.folder} is read-only: it serves what it holds, nothing new is remembered"
                warnings.warn(text, stacklevel=4)


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(file for file in folder.iterdir() if not file.name.startswith("."))


def _case(graph_key: str, target: str, cudnn: str) -> str:
    return hashlib.sha256(json.dumps([graph_key, target, cudnn]).encode()).hexdigest()


def _pack(name: str, header: Mapping[str, Any], blob: bytes) -> bytes:
    """Return magic, checksum, one line of JSON, blob. The checksum covers the name, so files cannot be swapped."""
    body = json.dumps(header, sort_keys=True).encode() + b"\n" + blob
    return _MAGIC + hashlib.sha256(name.encode() + body).hexdigest().encode() + b"\n" + body


def _unpack(data: bytes, name: str) -> tuple[dict[str, Any], bytes]:
    """Read what `_pack` returned. Raises ValueError for damaged data."""
    start = len(_MAGIC) + 65
    body = data[start:]
    checksum = hashlib.sha256(name.encode() + body).hexdigest().encode() + b"\n"
    if data[:start] != _MAGIC + checksum:
        raise ValueError(f"{name[:16]}…: its checksum does not fit")
    head, _, blob = body.partition(b"\n")
    header = read_json(head)
    if not isinstance(header, dict):
        raise ValueError(f"{name[:16]}…: no header")
    return header, blob


def _check(name: str, header: Mapping[str, Any]) -> None:
    """Raise ValueError unless a header fits its file's place, because a checksum does not prove good faith."""
    try:
        if name.startswith("plans/"):
            Choice.from_json(header["choice"])
            fits = name == f"plans/{PlanKey(**header['key']).digest}"
        elif name.startswith("forms/"):
            fits = name == f"forms/{PlanKey(**header['key']).digest}" and isinstance(header["form"], dict)
        else:
            case = _case(header["graph"], header["target"], header["cudnn"])
            knobs = [[int(k), int(v)] for k, v in header["knobs"]]
            plan = hashlib.sha256(json.dumps([int(header["engine"]), knobs]).encode()).hexdigest()
            fits = name == f"quarantine/{case}/{plan}" and isinstance(header["reason"], str)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{name}: {error}") from None
    if not fits:
        raise ValueError(f"{name}: holds another plan than its name says")
