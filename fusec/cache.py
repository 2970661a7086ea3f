"""Remembered answers on disk: text by key in one SQLite file that many processes may share.

SQLite's journal survives kill -9; every entry carries a checksum, and one that fails it counts as absent.
A file that SQLite cannot read is set aside and begun anew: nothing in it is more than an answer to a
question that can be asked again.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import platformdirs
from filelock import FileLock

from fusec.errors import FusecError

MAX_ENTRIES = 100_000  # some 2 KB each; the oldest go first
BUSY_S = 60.0  # how long to wait for another process that writes
_SCHEMA = "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, text TEXT, checksum TEXT, written REAL)"
_Result = TypeVar("_Result")


def folder() -> Path:
    """The cache folder, made if need be: FUSEC_CACHE, else the platform's cache folder for fusec."""
    path = Path(os.environ.get("FUSEC_CACHE") or platformdirs.user_cache_dir("fusec"))
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FusecError(f"cannot make the cache folder {path} ({error}); set FUSEC_CACHE to another") from error
    return path


class Store:
    """A mapping from key to text in `path`. FusecError if the file cannot be used at all."""

    def __init__(self, path: Path | None = None, max_entries: int = MAX_ENTRIES):
        self.path = path or folder() / "answers.sqlite"
        self.max_entries = max_entries

    def get(self, keys: Iterable[str]) -> dict[str, str]:
        """The texts of those keys that are there and whole."""
        wanted = list(keys)

        def read(connection: sqlite3.Connection) -> dict[str, str]:
            found: dict[str, str] = {}
            for key in wanted:
                row = connection.execute("SELECT text, checksum FROM answers WHERE key = ?", (key,)).fetchone()
                if row is not None and row[1] == _checksum(key, str(row[0])):
                    found[key] = row[0]
            return found

        return self._do(read)

    def put(self, texts: Mapping[str, str]) -> None:
        """Write entries, replacing those of the same key; the oldest beyond `max_entries` are dropped."""
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

        self._do(write)

    def __len__(self) -> int:
        return self._do(lambda connection: int(connection.execute("SELECT COUNT(*) FROM answers").fetchone()[0]))

    def _do(self, action: Callable[[sqlite3.Connection], _Result]) -> _Result:
        """`action` as one transaction; a damaged file is set aside and the action done on a new one."""
        try:
            try:
                return self._transaction(action)
            except sqlite3.DatabaseError as error:
                # locked, full, unwritable: not a damaged file; but one cut short may read as an empty database
                if isinstance(error, sqlite3.OperationalError) and "no such table" not in str(error):
                    raise
                self._set_aside(error)
                return self._transaction(action)
        except (sqlite3.Error, OSError) as error:
            raise FusecError(
                f"cannot use the cache {self.path} ({error}); set FUSEC_CACHE to another folder"
            ) from error

    def _transaction(self, action: Callable[[sqlite3.Connection], _Result]) -> _Result:
        if not self.path.exists():
            with self._lock():
                self._begin()
        return self._connected(action)

    def _begin(self) -> None:
        """Make the file if it is not there, whole from the first moment: others never see it half made."""
        if self.path.exists():
            return
        made = self.path.with_suffix(f".new-{os.getpid()}")
        connection = sqlite3.connect(made)
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(_SCHEMA)
        connection.close()
        made.replace(self.path)

    def _connected(self, action: Callable[[sqlite3.Connection], _Result]) -> _Result:
        connection = sqlite3.connect(self.path, timeout=BUSY_S)
        try:
            connection.execute("PRAGMA synchronous=NORMAL")
            with connection:
                return action(connection)
        finally:
            connection.close()

    def _set_aside(self, error: sqlite3.DatabaseError) -> None:
        with self._lock():
            try:
                if self._connected(_is_whole):
                    return  # another process was here first
            except sqlite3.OperationalError:
                raise
            except sqlite3.DatabaseError:
                pass  # damaged indeed
            aside = self.path.with_suffix(f".damaged-{os.getpid()}-{time.time_ns()}")
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
