"""Cache choices on disk, a file for each: plans of graphs, choices for steps and kernels, and plans in quarantine.

Several processes share the folder. Readers see each file complete or not at all, also after kill -9.
A file with a wrong checksum is deleted, with a warning. Entries of a read-only folder, or on a full disk, can still be
read.
"""

from __future__ import annotations

import contextlib
import os
import threading
import warnings
import zipfile
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from fusec.errors import FusecError, writing
from fusec.plans.cache_file import (
    CHOICES,
    OLD_CHOICES,
    PLANS,
    QUARANTINE,
    case_digest,
    files_in,
    from_old,
    is_name,
    pack,
    plan_digest,
    unpack,
)
from fusec.plans.cache_folder import UnwritableError, cache_folder, folder_errors, keep_newest, lock_folder
from fusec.plans.plan_record import Choice, Entry, Knobs, PlanKey
from fusec.plans.trusted_plans import TrustedPlans
from fusec.system import atomic_write
from fusec.system.dataclass import dataclass

MAX_BYTES = 512 << 20  # a serialized plan takes 3 to 200 KB
MAX_MEMBER_BYTES = 64 << 20  # of one file in an export
SCAN_EVERY = 32  # writes between two measurements of the folder, to which other processes write, too


@dataclass(frozen=True)
class Info:
    """Size and contents of the cache.

    entries: plans of graphs.
    choices: choices for steps and kernels.
    blobs: entries with a serialized plan that this machine trusts.
    """

    folder: Path
    entries: int
    choices: int
    blobs: int
    bytes: int
    max_bytes: int
    quarantined: int
    trusted: int


class PlanStore:
    """Cache of plans and measurements by key, which many threads and processes can share.

    folder: default: `plans` in the cache folder.
    max_bytes: limit for all entries, blobs included. Beyond it, the entries that were unused for longest are deleted.
    Raises FusecError if the folder cannot be used.
    """

    def __init__(self, folder: Path | None = None, max_bytes: int = MAX_BYTES):
        self.folder = folder or cache_folder() / "plans"
        self.max_bytes = max_bytes
        self._trusted = TrustedPlans(self.folder)
        self._until_scan = 0
        self._room = 0  # bytes that may be written before the next scan
        self._warned = False  # that the folder cannot be written
        self._mutex = threading.Lock()

    # entries -----------------------------------------------------------------------------------------

    def get(self, key: PlanKey) -> Entry | None:
        """Return the entry of a key, or None. Its blob is left out unless this machine trusts it."""
        found = self._used(self.folder / PLANS / key.digest)
        if found is None:
            return None
        header, blob = found
        choice = Choice.from_json(header["choice"])
        return Entry(choice, blob if blob and self.trusts(blob) else None)

    def put(self, key: PlanKey, entry: Entry) -> None:
        """Write an entry that was built on this machine, in place of any other of its key; its blob is trusted."""
        self.put_all({key: entry})

    def put_all(self, entries: Mapping[PlanKey, Entry]) -> None:
        """Write entries as `put` does."""
        with self._warns_if_unwritable():
            self.trust(*(entry.blob for entry in entries.values() if entry.blob))
            for key, entry in entries.items():
                header = {"key": key.to_json(), "choice": entry.choice.to_json()}
                self._write(self.folder / PLANS / key.digest, pack(key.digest, header, entry.blob or b""))
                self._bound()

    def drop_blob(self, key: PlanKey, reason: str) -> None:
        """Delete the serialized plan of a key, which failed, but not its choice; warn with the reason."""
        path = self.folder / PLANS / key.digest
        found = self._read(path)
        if found is not None and found[1]:
            with self._warns_if_unwritable():
                self._write(path, pack(key.digest, found[0]))
            warnings.warn(f"dropped the serialized plan in {path} ({reason}); it is built anew", stacklevel=4)

    # choices for steps and kernels -------------------------------------------------------------------

    def choice(self, key: PlanKey) -> dict[str, Any] | None:
        """Return the data that `put_choice` stored for a key, or None."""
        found = self._used(self.folder / CHOICES / key.digest)
        return None if found is None else found[0]["choice"]

    def put_choice(self, key: PlanKey, data: Mapping[str, Any]) -> None:
        """Store the choice for a step or kernel, as plain data, in place of any other of its key."""
        header = {"key": key.to_json(), "choice": dict(data)}
        with self._warns_if_unwritable():
            self._write(self.folder / CHOICES / key.digest, pack(key.digest, header))
            self._bound()

    # trust -------------------------------------------------------------------------------------------

    def trusts(self, blob: bytes) -> bool:
        """Tell if this machine built a serialized plan, or its user trusts it."""
        return blob in self._trusted

    def trust(self, *blobs: bytes) -> None:
        """Trust serialized plans from now on."""
        self._trusted.add(*blobs)

    # quarantine --------------------------------------------------------------------------------------

    def quarantine(self, graph_key: str, target: str, cudnn: str, engine: int, knobs: Knobs, reason: str) -> None:
        """Record that a plan of a graph failed a check, so that it is not used with this cuDNN again."""
        name = plan_digest(engine, knobs)
        case = {"graph": graph_key, "target": target, "cudnn": cudnn, "engine": engine}
        header = {**case, "knobs": [list(pair) for pair in sorted(knobs)], "reason": reason}
        place = self.folder / QUARANTINE / case_digest(graph_key, target, cudnn) / name
        with self._warns_if_unwritable():
            self._write(place, pack(name, header))

    def quarantined(self, graph_key: str, target: str, cudnn: str) -> list[tuple[int, Knobs, str]]:
        """Return (engine, knobs, reason) of every plan of a graph that failed a check."""
        result: list[tuple[int, Knobs, str]] = []
        for path in files_in(self.folder / QUARANTINE / case_digest(graph_key, target, cudnn)):
            found = self._read(path)
            if found is not None:
                header = found[0]
                result.append((header["engine"], tuple((k, v) for k, v in header["knobs"]), header["reason"]))
        return sorted(result)

    # the whole cache ---------------------------------------------------------------------------------

    def info(self) -> Info:
        """Return size and contents of the cache."""
        plans, choices = self._files(PLANS), self._files(CHOICES)
        size = sum(path.stat().st_size for path in (*plans, *choices))
        blobs = 0
        for path in plans:
            found = self._read(path)
            blobs += found is not None and bool(found[1]) and self.trusts(found[1])
        quarantined, trusted = len(self._quarantined()), len(self._trusted)
        return Info(self.folder, len(plans), len(choices), blobs, size, self.max_bytes, quarantined, trusted)

    def clear(self) -> int:
        """Delete everything: plans, choices, quarantine and trusted hashes. Return the number of plans."""
        plans = self._files(PLANS)
        choices = (*self._files(CHOICES), *self._files(OLD_CHOICES))
        with folder_errors(self.folder):
            for path in (*plans, *choices, *self._quarantined(), self._trusted.path):
                path.unlink(missing_ok=True)
        return len(plans)

    def export(self, path: Path) -> int:
        """Write plans, choices and quarantine, without trusted hashes, into a zip file.

        Returns the number of plans.
        """
        count = 0
        with (
            writing(path),
            atomic_write.written(path.resolve(), durable=True) as whole,
            zipfile.ZipFile(whole, "w") as archive,
        ):
            for file in (*self._files(PLANS), *self._files(CHOICES), *self._quarantined()):
                if self._read(file) is not None:
                    name = file.relative_to(self.folder).as_posix()
                    archive.writestr(zipfile.ZipInfo(name), file.read_bytes())
                    count += name.startswith(f"{PLANS}/")
        return count

    def import_(self, path: Path) -> int:
        """Add the entries of a file that `export` wrote on any machine, and return the number of its plans.

        Entries of the cache are not replaced, and no imported blob is trusted.
        Raises FusecError, and adds nothing, if the file is damaged.
        """
        taken: dict[str, bytes] = {}
        if path.exists() and not path.is_file():  # a pipe would wait for ever
            raise FusecError(f"{path}: is not a regular file")
        try:
            with zipfile.ZipFile(path) as archive:
                for member in archive.infolist():
                    name = member.filename
                    if not is_name(name):
                        raise FusecError(f"{path}: not an export of fusec's plan cache: it holds {name!r}")
                    if member.compress_type != zipfile.ZIP_STORED or member.file_size > MAX_MEMBER_BYTES:
                        raise FusecError(f"{path}: {name}: compressed, or larger than any plan")
                    data = archive.read(member)
                    unpack(name, data)
                    name, data = from_old(name, data)
                    taken[name] = data
        except (OSError, zipfile.BadZipFile, EOFError, NotImplementedError) as error:
            raise FusecError(f"{path}: not a readable export of the plan cache: {error}") from error
        except ValueError as error:
            raise FusecError(f"{path}: damaged: {error}") from error
        for name, data in taken.items():
            if not (self.folder / name).exists():
                self._write(self.folder / name, data)
        self._until_scan = 0
        self._bound()
        return sum(name.startswith(f"{PLANS}/") for name in taken)

    # files -------------------------------------------------------------------------------------------

    def _files(self, folder: str) -> list[Path]:
        return files_in(self.folder / folder)

    def _quarantined(self) -> list[Path]:
        folder = self.folder / QUARANTINE
        return [file for case in sorted(folder.iterdir()) for file in files_in(case)] if folder.is_dir() else []

    def _used(self, path: Path) -> tuple[dict[str, Any], bytes] | None:
        """Return header and blob of a file, and mark it as used now."""
        found = self._read(path)
        if found is not None:
            with contextlib.suppress(OSError):  # a read-only folder does not record the time of use
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
            return unpack(path.relative_to(self.folder).as_posix(), data)
        except ValueError as error:
            self._drop(path, str(error))
            return None

    def _drop(self, path: Path, reason: str) -> None:
        with contextlib.suppress(OSError):  # a read-only folder serves its undamaged files
            path.unlink(missing_ok=True)
        warnings.warn(f"dropped the cached plan {path} ({reason}); it will be built anew", stacklevel=4)

    def _write(self, path: Path, data: bytes) -> None:
        with folder_errors(self.folder):
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write.written(path, durable=False, collects=False) as file:  # see `_bound`
                file.write(data)
        with self._mutex:
            self._room -= len(data)

    def _bound(self) -> None:
        """Delete the entries that were unused for longest until the rest fits, and temporary files of dead writers."""
        with self._mutex:
            self._until_scan -= 1
            if self._until_scan >= 0 and self._room >= 0:
                return
            self._until_scan = SCAN_EVERY
        with folder_errors(self.folder), lock_folder(self.folder, "bound"):
            for place in (self.folder / PLANS, self.folder / CHOICES, *(self.folder / QUARANTINE).glob("*/")):
                atomic_write.collect(place)
            entries = (*self._files(PLANS), *self._files(CHOICES), *self._files(OLD_CHOICES))
            total = keep_newest(entries, self.max_bytes)
        with self._mutex:
            self._room = self.max_bytes - total

    @contextlib.contextmanager
    def _warns_if_unwritable(self) -> Generator[None]:
        """Warn once if the folder cannot be written, and continue, because nothing depends on the writes."""
        try:
            yield
        except UnwritableError as error:
            if not self._warned:
                self._warned = True
                text = f"the plan cache {self.folder} {error.why}: it serves its entries, and nothing new is cached"
                warnings.warn(text, stacklevel=4)
