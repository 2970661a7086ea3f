"""Store finished chunks and open findings of all fuzzing runs in one folder, which processes can share.

SQLite's journal survives kill -9. A chunk whose process died is given to another process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from fusec.errors import FusecError
from fusec.system.dataclass import dataclass
from fusec.system.untrusted import read_json
from fusec.testing.finding_folder import copy

BUSY_S = 60.0  # time to wait for another process that writes
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS chunks"
    " (run TEXT, number INTEGER, owner INTEGER, examples INTEGER, done REAL, PRIMARY KEY (run, number))",
    "CREATE TABLE IF NOT EXISTS findings"
    " (signature TEXT PRIMARY KEY, folder TEXT, property TEXT, count INTEGER, found REAL)",
)
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Open:
    """A finding that is not fixed yet, with its folder in the database."""

    signature: str
    folder: Path
    property: str
    count: int

    def summary(self) -> dict[str, Any]:
        """Read the fields that a report shows: property, ops, how it failed."""
        data = read_json((self.folder / "finding.json").read_text(encoding="utf-8"))
        return {name: data[name] for name in ("property", "ops", "how", "doubt")}


class State:
    """Database in a folder. Its methods raise FusecError with the path when the database cannot be used."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.path = folder / "fuzz.sqlite"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FusecError(f"{folder}: cannot make the database folder ({error})") from error
        self._do(lambda db: [db.execute(table) for table in _SCHEMA])

    def forget(self) -> None:
        """Delete all chunks and findings."""
        self._do(lambda db: [db.execute(f"DELETE FROM {table}") for table in ("chunks", "findings")])
        shutil.rmtree(self.folder / "open", ignore_errors=True)

    # chunks ----------------------------------------------------------------------------------------

    def claim(self, run: str) -> int:
        """Reserve a chunk and return its number: one whose process died, else the next."""

        def take(db: sqlite3.Connection) -> int:
            undone = db.execute("SELECT number, owner FROM chunks WHERE run = ? AND done IS NULL", (run,)).fetchall()
            number = next((int(n) for n, owner in sorted(undone) if not _is_alive(int(owner))), None)
            if number is None:
                (last,) = db.execute("SELECT MAX(number) FROM chunks WHERE run = ?", (run,)).fetchone()
                number = 0 if last is None else int(last) + 1
            db.execute("INSERT OR REPLACE INTO chunks VALUES (?, ?, ?, NULL, NULL)", (run, number, os.getpid()))
            return number

        return self._do(take)

    def finish(self, run: str, number: int, examples: int) -> None:
        """Mark a chunk as done."""
        row = (examples, time.time(), run, number)
        self._do(lambda db: db.execute("UPDATE chunks SET examples = ?, done = ? WHERE run = ? AND number = ?", row))

    def release(self, run: str, number: int) -> None:
        """Give back a chunk that was not started."""
        query = "DELETE FROM chunks WHERE run = ? AND number = ? AND done IS NULL"
        self._do(lambda db: db.execute(query, (run, number)))

    def examples(self, run: str) -> int:
        """Count the examples of this and earlier runs."""
        query = "SELECT SUM(examples) FROM chunks WHERE run = ?"
        return int(self._do(lambda db: db.execute(query, (run,)).fetchone()[0]) or 0)

    # findings --------------------------------------------------------------------------------------

    def open_findings(self) -> list[Open]:
        """List the open findings, oldest first. One whose folder was removed is dropped."""
        query = "SELECT signature, folder, property, count FROM findings ORDER BY found, signature"
        rows = self._do(lambda db: db.execute(query).fetchall())
        listed = [
            Open(signature, self.folder / "open" / folder, property, count)
            for signature, folder, property, count in rows
        ]
        for finding in listed:
            if not (finding.folder / "finding.json").exists():
                self.drop(finding.signature)
        return [finding for finding in listed if (finding.folder / "finding.json").exists()]

    def add(self, signature: str, property: str, made: Path) -> Path:
        """Store a copy of a finding's folder until it is fixed, and return its path."""
        stored = copy(made, self.folder / "open")
        row = (signature, stored.name, property, time.time())
        self._do(lambda db: db.execute("INSERT OR REPLACE INTO findings VALUES (?, ?, ?, 1, ?)", row))
        return stored

    def rename(self, old: str, new: str) -> None:
        """Change the signature of a finding that now fails in another way."""
        if old != new:
            query = "UPDATE OR REPLACE findings SET signature = ? WHERE signature = ?"
            self._do(lambda db: db.execute(query, (new, old)))

    def drop(self, signature: str) -> None:
        """Delete a finding that is fixed, or whose folder is missing."""
        query = "SELECT folder FROM findings WHERE signature = ?"
        rows = self._do(lambda db: db.execute(query, (signature,)).fetchall())
        self._do(lambda db: db.execute("DELETE FROM findings WHERE signature = ?", (signature,)))
        for (folder,) in rows:
            shutil.rmtree(self.folder / "open" / folder, ignore_errors=True)

    def _do(self, action: Callable[[sqlite3.Connection], _Result]) -> _Result:
        try:
            with contextlib.closing(sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None)) as db:
                db.execute("BEGIN IMMEDIATE")  # locks reads too, so that two processes never claim the same chunk
                try:
                    result = action(db)
                except BaseException:
                    db.execute("ROLLBACK")
                    raise
                db.execute("COMMIT")
                return result
        except sqlite3.Error as error:
            raise FusecError(
                f"cannot use the database {self.path} ({error}); name another with --database, or remove it"
            ) from error


def _is_alive(pid: int) -> bool:
    if pid == os.getpid():
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
