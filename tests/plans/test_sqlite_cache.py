"""Test the cache of answers: shared by processes, safe against kill -9 and damage."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fusec.errors import FusecError
from fusec.plans import sqlite_cache
from fusec.plans.cache_folder import cache_folder
from fusec.plans.sqlite_cache import Store

WRITER = """
import sys
from pathlib import Path
from fusec.plans.sqlite_cache import Store
store, name = Store(Path(sys.argv[1])), sys.argv[2]
for i in range(int(sys.argv[3])):
    store.put({f"{name}-{i}": "text " * 50})
    assert f"{name}-{i}" in store.get([f"{name}-{i}"])
    print(i, flush=True)
"""


def writer(path: Path, name: str, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(path), name, str(count)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "answers.sqlite")


def test_another_process_reads_written_entries(store: Store) -> None:
    store.put({"a": "one", "b": "two\n\0ü"})
    store.put({"a": "new"})
    assert Store(store.path).get(["a", "b", "c"]) == {"a": "new", "b": "two\n\0ü"}
    assert len(store) == 2


def test_the_folder_is_the_variable_or_the_platforms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path / "deep" / "one"))
    assert cache_folder() == tmp_path / "deep" / "one"
    assert cache_folder().is_dir()
    monkeypatch.delenv("FUSEC_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "fusec"


def test_a_folder_that_cannot_be_made_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(FusecError, match=r"cannot make the cache folder .* FUSEC_CACHE"):
        Store()


def test_an_entry_that_fails_its_checksum_is_absent(store: Store) -> None:
    store.put({"a": "one", "b": "two"})
    connection = sqlite3.connect(store.path)
    with connection:
        connection.execute("UPDATE answers SET text = 'forged' WHERE key = 'a'")
    connection.close()
    assert store.get(["a", "b"]) == {"b": "two"}


def test_the_oldest_entries_go_first(tmp_path: Path) -> None:
    small = Store(tmp_path / "answers.sqlite", max_entries=3)
    for i in range(5):
        small.put({str(i): "x"})
        time.sleep(0.002)
    assert sorted(small.get(map(str, range(5)))) == ["2", "3", "4"]


@pytest.mark.parametrize("content", [b"not a database at all, but long enough to be read as one" * 20, b"x", b""])
def test_a_damaged_file_is_set_aside_and_begun_anew(store: Store, content: bytes) -> None:
    store.path.write_bytes(content)
    with pytest.warns(UserWarning, match="damaged"):
        assert store.get(["a"]) == {}
    store.put({"a": "one"})
    assert store.get(["a"]) == {"a": "one"}
    (aside,) = store.path.parent.glob("*.damaged-*")
    assert aside.read_bytes() == content


def test_damage_in_the_middle_of_the_file_is_healed_too(store: Store) -> None:
    store.put({f"{i:04}": "text" * 100 for i in range(200)})
    connection = sqlite3.connect(store.path)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    whole = bytearray(store.path.read_bytes())
    middle = slice(4096, len(whole))  # the first page, with the schema, stays
    whole[middle] = os.urandom(len(whole) - 4096)
    store.path.write_bytes(whole)
    with pytest.warns(UserWarning, match="damaged"):
        store.put({"a": "one"})
    assert store.get(["a", "0001"]) == {"a": "one"}


def test_processes_write_at_once(tmp_path: Path) -> None:
    path = tmp_path / "answers.sqlite"
    running = [writer(path, str(i), 20) for i in range(4)]
    for process in running:
        assert process.communicate()[1] == ""
        assert process.returncode == 0
    assert len(Store(path)) == 80


def test_kill_9_leaves_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "answers.sqlite"
    process = writer(path, "a", 100_000)
    assert process.stdout is not None
    while int(process.stdout.readline()) < 20:
        pass
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    store = Store(path)
    assert len(store) >= 21
    assert store.get(["a-20"]) == {"a-20": "text " * 50}
    store.put({"b": "one"})
    assert store.get(["b"]) == {"b": "one"}


def test_a_locked_file_is_an_error_after_a_while_and_is_not_set_aside(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put({"a": "one"})
    monkeypatch.setattr(sqlite_cache, "BUSY_S", 0.1)
    other = sqlite3.connect(store.path)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(FusecError, match=r"cannot use the cache .*locked.*FUSEC_CACHE"):
        store.put({"b": "two"})
    other.rollback()
    other.close()
    assert store.get(["a"]) == {"a": "one"}
