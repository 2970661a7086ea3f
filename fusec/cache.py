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
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path

import platformdirs

MAX_ENTRIES = 100_000  # some 2 KB each; the oldest go first
_SCHEMA = "CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, text TEXT, checksum TEXT, written REAL)"


def folder() -> Path:
    """The cache folder, made if need be: FUSEC_CACHE, else the platform's cache folder for fusec."""
    path = Path(os.environ.get("FUSEC_CACHE") or platformdirs.user_cache_dir("fusec"))
    path.mkdir(parents=True, exist_ok=True)
    return path


class Store:
    """A mapping from key to text in `path`."""

    def __init__(self, path: Path | None = None):
        self.path = path or folder() / "answers.sqlite"

    def get(self, keys: Iterable[str]) -> dict[str, str]:
        """The texts of those keys that are there and whole."""
        found: dict[str, str] = {}
        with self._connection() as connection:
            for key in keys:
                row = connection.execute("SELECT text, checksum FROM answers WHERE key = ?", (key,)).fetchone()
                if row is not None and row[1] == _checksum(key, row[0]):
                    found[key] = row[0]
        return found

    def put(self, texts: Mapping[str, str]) -> None:
        """Write entries, replacing those of the same key; the oldest beyond MAX_ENTRIES are dropped."""
        now = time.time()
        rows = [(key, text, _checksum(key, text), now) for key, text in texts.items()]
        with self._connection() as connection, connection:
            connection.executemany("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?)", rows)
            connection.execute(
                "DELETE FROM answers WHERE key IN (SELECT key FROM answers ORDER BY written DESC LIMIT -1 OFFSET ?)",
                (MAX_ENTRIES,),
            )

    def __len__(self) -> int:
        with self._connection() as connection:
            return int(connection.execute("SELECT COUNT(*) FROM answers").fetchone()[0])

    @contextmanager
    def _connection(self) -> Generator[sqlite3.Connection]:
        connection = self._open()
        try:
            yield connection
        finally:
            connection.close()

    def _open(self) -> sqlite3.Connection:
        try:
            return self._connect()
        except sqlite3.OperationalError:
            raise  # locked or unwritable: not a damaged file
        except sqlite3.DatabaseError as error:
            aside = self.path.with_suffix(f".damaged-{os.getpid()}-{time.time_ns()}")
            warnings.warn(f"cache {self.path} is damaged ({error}); set aside as {aside.name}", stacklevel=4)
            self.path.replace(aside)
            for journal in ("-wal", "-shm"):
                Path(f"{self.path}{journal}").unlink(missing_ok=True)
            return self._connect()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=60)
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            with connection:
                connection.execute(_SCHEMA)
        except sqlite3.DatabaseError:
            connection.close()
            raise
        return connection


def _checksum(key: str, text: str) -> str:
    return hashlib.sha256(f"{key}\n{text}".encode()).hexdigest()
