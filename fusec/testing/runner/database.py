"""What was fuzzed before: chunks done, findings still open. One folder, shared by any number of processes.

SQLite's journal survives kill -9; a chunk whose process died undone is handed out again.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fusec.errors import FusecError
from fusec.plans import sqlite_cache
from fusec.system.untrusted import read_json
from fusec.testing.finding_folder import copy

BUSY_S = 60.0  # how long to wait for another process that writes
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS chunks"
    " (run TEXT, number INTEGER, owner INTEGER, examples INTEGER, done REAL, PRIMARY KEY (run, number))",
    "CREATE TABLE IF NOT EXISTS findings"
    " (signature TEXT PRIMARY KEY, folder TEXT, property TEXT, count INTEGER, found REAL)",
)
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Open:
    """A finding not yet known to be fixed: a folder in the database's own keeping."""

    signature: str
    folder: Path
    property: str
    count: int

    def summary(self) -> dict[str, Any]:
        """What a report says of it: property, ops, how it failed."""
        data = read_json((self.folder / "finding.json").read_text(encoding="utf-8"))
        return {name: data[name] for name in ("property", "ops", "how", "doubt")}


def default_folder() -> Path:
    """The database of those who name none, in fusec's cache folder."""
    return sqlite_cache.folder() / "fuzz"


class State:
    """The database in `folder`. FusecError naming it if it cannot be used."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.path = folder / "fuzz.sqlite"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FusecError(f"{folder}: cannot make the database folder ({error})") from error
        self._do(lambda db: [db.execute(table) for table in _SCHEMA])

    def forget(self) -> None:
        """Begin anew: no chunk is done, no finding open."""
        self._do(lambda db: [db.execute(f"DELETE FROM {table}") for table in ("chunks", "findings")])
        shutil.rmtree(self.folder / "open", ignore_errors=True)

    # chunks ----------------------------------------------------------------------------------------

    def claim(self, run: str) -> int:
        """The number of a chunk to do: one whose owner died over it, else the next."""

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
        """A chunk is done."""
        row = (examples, time.time(), run, number)
        self._do(lambda db: db.execute("UPDATE chunks SET examples = ?, done = ? WHERE run = ? AND number = ?", row))

    def release(self, run: str, number: int) -> None:
        """A chunk was not begun after all."""
        query = "DELETE FROM chunks WHERE run = ? AND number = ? AND done IS NULL"
        self._do(lambda db: db.execute(query, (run, number)))

    def examples(self, run: str) -> int:
        """How many examples were run, this time and before."""
        query = "SELECT SUM(examples) FROM chunks WHERE run = ?"
        return int(self._do(lambda db: db.execute(query, (run,)).fetchone()[0]) or 0)

    # findings --------------------------------------------------------------------------------------

    def open_findings(self) -> list[Open]:
        """The findings to try again, oldest first; one whose folder was removed is forgotten."""
        query = "SELECT signature, folder, property, count FROM findings ORDER BY found, signature"
        rows = self._do(lambda db: db.execute(query).fetchall())
        held = [
            Open(signature, self.folder / "open" / folder, property, count)
            for signature, folder, property, count in rows
        ]
        for finding in held:
            if not (finding.folder / "finding.json").exists():
                self.drop(finding.signature)
        return [finding for finding in held if (finding.folder / "finding.json").exists()]

    def add(self, signature: str, property: str, made: Path) -> Path:
        """Keep a copy of a finding's folder until it is fixed."""
        kept = copy(made, self.folder / "open")
        row = (signature, kept.name, property, time.time())
        self._do(lambda db: db.execute("INSERT OR REPLACE INTO findings VALUES (?, ?, ?, 1, ?)", row))
        return kept

    def rename(self, old: str, new: str) -> None:
        """A finding fails in other words now."""
        if old != new:
            query = "UPDATE OR REPLACE findings SET signature = ? WHERE signature = ?"
            self._do(lambda db: db.execute(query, (new, old)))

    def drop(self, signature: str) -> None:
        """A finding is fixed, or gone."""
        query = "SELECT folder FROM findings WHERE signature = ?"
        rows = self._do(lambda db: db.execute(query, (signature,)).fetchall())
        self._do(lambda db: db.execute("DELETE FROM findings WHERE signature = ?", (signature,)))
        for (folder,) in rows:
            shutil.rmtree(self.folder / "open" / folder, ignore_errors=True)

    def _do(self, action: Callable[[sqlite3.Connection], _Result]) -> _Result:
        try:
            with contextlib.closing(sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None)) as db:
                db.execute("BEGIN IMMEDIATE")  # reading and writing are one: two processes never claim one chunk
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
