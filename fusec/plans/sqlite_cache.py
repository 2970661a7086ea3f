"""Cache answers on disk, text by key, in one SQLite file that many processes can share.

SQLite's journal survives kill -9. An entry with a wrong checksum counts as absent.
A file that SQLite cannot read is renamed and replaced by a new one, because cuDNN can answer again.
Entries of a read-only folder, or on a full disk, can still be read.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

from filelock import FileLock

from fusec.errors import FusecError
from fusec.plans.cache_folder import UNWRITABLE, UnwritableError, cache_folder
from fusec.system import atomic_write

MAX_ENTRIES = 100_000  # of about 2 KB each; beyond them the oldest are deleted
NEEDED_BYTES = 1 << 20  # that SQLite may need for its journal and shared memory
BUSY_S = 60.0  # how long to wait for another process that writes
_SCHEMA = "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, text TEXT, checksum TEXT, written REAL)"
_Result = TypeVar("_Result")


class Store:
    """A mapping from key to text in a file. Raises FusecError if the file cannot be used."""

    def __init__(self, path: Path | None = None, max_entries: int = MAX_ENTRIES):
        self.path = path or cache_folder() / "answers.sqlite"
        self.max_entries = max_entries
        self._warned = False  # that the folder cannot be written

    def get(self, keys: Iterable[str]) -> dict[str, str]:
        """Return the texts of those keys that have an undamaged entry."""
        wanted = list(keys)

        def read(connection: sqlite3.Connection) -> dict[str, str]:
            found: dict[str, str] = {}
            connection.execute("BEGIN")  # otherwise SQLite locks the file for each key
            for key in wanted:
                row = connection.execute("SELECT text, checksum FROM answers WHERE key = ?", (key,)).fetchone()
                if row is not None and row[1] == _checksum(key, str(row[0])):
                    found[key] = row[0]
            return found

        try:
            return self._do(read)
        except UnwritableError:
            return self._read_only(read) or {}

    def put(self, texts: Mapping[str, str]) -> None:
        """Write entries in place of those of the same key; the oldest beyond `max_entries` are deleted."""
        now = time.time()
        rows = [(key, text, _checksum(key, text), now) for key, text in texts.items()]

        def write(connection: sqlite3.Connection) -> None:
            connection.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?)", rows)
            (count,) = connection.execute("SELECT COUNT(*) FROM answers").fetchone()
            if count > self.max_entries:
                connection.execute(
                    "DELETE FROM answers WHERE key IN (SELECT key FROM answers ORDER BY written LIMIT ?)",
                    (count - self.max_entries,),
                )

        try:
            self._do(write)
        except UnwritableError as error:
            if not self._warned:
                self._warned = True
                text = f"the cache {self.path} {error.why}: it serves its entries, and nothing new is cached"
                warnings.warn(text, stacklevel=4)

    def __len__(self) -> int:
        def count(connection: sqlite3.Connection) -> int:
            return int(connection.execute("SELECT COUNT(*) FROM answers").fetchone()[0])

        try:
            return self._do(count)
        except UnwritableError:
            return self._read_only(count) or 0

    def _read_only(self, action: Callable[[sqlite3.Connection], _Result]) -> _Result | None:
        """Run `action` on a file that cannot be written, nor its journal; return None if nothing can be read."""
        # `immutable` is second: it opens the file without a journal, but does not see entries that a journal holds.
        for mode in ("mode=ro", "mode=ro&immutable=1"):
            with contextlib.suppress(sqlite3.Error):
                uri = f"file:{quote(str(self.path.absolute()))}?{mode}"
                with contextlib.closing(sqlite3.connect(uri, timeout=BUSY_S, uri=True)) as connection:
                    return action(connection)
        return None

    def _do(self, action: Callable[[sqlite3.Connection], _Result]) -> _Result:
        """Run `action` as one transaction; rename a damaged file, and run the action on a new one."""
        try:
            try:
                return self._transaction(action)
            except sqlite3.DatabaseError as error:
                # A locked, full or unwritable file is not damaged. A truncated one may read as an empty database.
                if isinstance(error, sqlite3.OperationalError) and "no such table" not in str(error):
                    raise
                self._set_aside(error)
                return self._transaction(action)
        except (sqlite3.Error, OSError) as error:
            text = f"cannot use the cache {self.path} ({error}); set FUSEC_CACHE to another folder"
            why = self._unwritable(error)
            raise (UnwritableError(text, why) if why else FusecError(text)) from error

    def _unwritable(self, error: Exception) -> str | None:
        """Say why the cache cannot be written; None if the error means something else."""
        if isinstance(error, OSError):
            return UNWRITABLE.get(error.errno or 0)
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF  # the primary code, without the details
        # SQLite reports a journal that it cannot create as CANTOPEN, like many other errors.
        if code == sqlite3.SQLITE_READONLY or (
            code == sqlite3.SQLITE_CANTOPEN and not os.access(self.path.parent, os.W_OK)
        ):
            return UNWRITABLE[errno.EROFS]
        # It reports a shared-memory file without room as IOERR, like errors of the disk.
        full = code == sqlite3.SQLITE_IOERR and shutil.disk_usage(self.path.parent).free < NEEDED_BYTES
        return UNWRITABLE[errno.ENOSPC] if full or code == sqlite3.SQLITE_FULL else None

    def _transaction(self, action: Callable[[sqlite3.Connection], _Result]) -> _Result:
        if not self.path.exists():
            with self._lock():
                self._begin()
        return self._connected(action)

    def _begin(self) -> None:
        """Make the file if it is missing. Other processes never see an incomplete one."""
        if self.path.exists():
            return
        with atomic_write.folder(self.path.parent) as scratch:  # SQLite makes a journal next to its file
            made = scratch / self.path.name
            with contextlib.closing(sqlite3.connect(made)) as connection:
                connection.execute("PRAGMA journal_mode=WAL")
                connection.execute(_SCHEMA)
            made.replace(self.path)

    def _connected(self, action: Callable[[sqlite3.Connection], _Result]) -> _Result:
        with contextlib.closing(sqlite3.connect(self.path, timeout=BUSY_S)) as connection:
            connection.execute("PRAGMA synchronous=NORMAL")
            with connection:
                return action(connection)

    def _set_aside(self, error: sqlite3.DatabaseError) -> None:
        with self._lock():
            try:
                if self._connected(_is_whole):
                    return  # another process has replaced the file already
            except sqlite3.OperationalError:
                raise
            except sqlite3.DatabaseError:
                pass  # it is damaged
            aside = self.path.with_suffix(f".damaged-{os.urandom(8).hex()}")
            warnings.warn(f"the cache {self.path} is damaged ({error}); set aside as {aside.name}", stacklevel=5)
            self.path.replace(aside)
            for journal in ("-wal", "-shm"):
                Path(f"{self.path}{journal}").unlink(missing_ok=True)
            self._begin()

    def _lock(self) -> FileLock:
        return FileLock(f"{self.path}.lock", timeout=BUSY_S)


def _is_whole(connection: sqlite3.Connection) -> bool:
    tables = connection.execute("SELECT name FROM sqlite_master WHERE name = 'answers'").fetchall()
    return bool(tables) and connection.execute("PRAGMA quick_check").fetchall() == [("ok",)]


def _checksum(key: str, text: str) -> str:
    return hashlib.sha256(f"{key}\n{text}".encode()).hexdigest()
