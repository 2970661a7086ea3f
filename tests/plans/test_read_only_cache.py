"""Test a warm cache on a read-only file system: it serves its entries, with one warning."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sqlite3
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli.command import tiny

from fusec.errors import FusecError
from fusec.plans import sqlite_cache
from fusec.plans.plan_cache import PlanStore
from fusec.plans.plan_record import Choice, Entry, PlanKey
from fusec.plans.sqlite_cache import Store

ENTRY = Entry(Choice(7, ((2, 3),), 64, 1.5, 1e-4), b"a plan" * 100)


def key(name: str) -> PlanKey:
    return PlanKey(name, "h200", "", "", "", "", "quick")


@pytest.fixture
def warm(tmp_path: Path) -> Path:
    """A cache folder with an answer and a plan."""
    folder = tmp_path / "warm"
    folder.mkdir()
    Store(folder / "answers.sqlite").put({"a": "yes"})
    plans = PlanStore(folder / "plans")
    plans.put(key("a"), ENTRY)
    plans.put_choice(key("a"), {"parts": [1]})
    return folder


@pytest.fixture
def mounted(warm: Path) -> Iterator[Path]:
    """The folder once more, as a mount that is read-only for root, too."""
    place = warm.with_name("read-only")
    place.mkdir()
    steps = (["--bind", warm, place], ["-o", "remount,bind,ro", place])
    for step in steps:
        done = subprocess.run(["mount", *map(str, step)], capture_output=True, text=True, check=False)
        if done.returncode:
            subprocess.run(["umount", str(place)], capture_output=True, check=False)
            pytest.skip(f"no mount here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def check_serves(folder: Path, why: str = "is read-only") -> None:
    """Reads hit and miss without a warning; writes are lost, with one warning for each cache."""
    answers, plans = Store(folder / "answers.sqlite"), PlanStore(folder / "plans")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert answers.get(["a", "b"]) == {"a": "yes"}
        assert len(answers) == 1
        assert plans.get(key("a")) == ENTRY
        assert plans.choice(key("a")) == {"parts": [1]}
        assert plans.get(key("b")) is None
        assert plans.info().entries == 1
    with pytest.warns(UserWarning, match=rf"answers\.sqlite {why}: it serves its entries"):
        answers.put({"b": "no"})
    with pytest.warns(UserWarning, match=f"the plan cache .* {why}: it serves its entries"):
        plans.put(key("b"), ENTRY)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answers.put({"c": "no"})
        plans.put_choice(key("b"), {})
        plans.quarantine("g", "h200", "9", 1, (), "wrong")
    assert answers.get(["a", "b"]) == {"a": "yes"}
    if why == "is read-only":  # on a full disk, room may have been freed meanwhile
        with pytest.raises(FusecError, match="cannot use the plan cache"):
            plans.trust(b"what a user trusts must not be forgotten")
        with pytest.raises(FusecError, match="cannot use the plan cache"):
            plans.clear()


def test_a_full_disk_serves(warm: Path) -> None:
    place = warm.with_name("full")
    place.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(place)]
    done = subprocess.run(mounting, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no mount here: {done.stderr.strip()}")
    try:
        shutil.copytree(warm, place, dirs_exist_ok=True)
        with (place / "large").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        check_serves(place, "is on a full disk")
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_read_only_mount_serves(mounted: Path) -> None:
    check_serves(mounted)
    assert sorted(path.name for path in mounted.iterdir()) == ["answers.sqlite", "answers.sqlite.lock", "plans"]


def test_a_read_only_mount_serves_what_a_killed_writer_left_in_the_journal(warm: Path, mounted: Path) -> None:
    program = (
        "import os, sqlite3, sys; from pathlib import Path; from fusec.plans.sqlite_cache import Store\n"
        "open_too = sqlite3.connect(sys.argv[1]); open_too.execute('SELECT * FROM answers').fetchall()\n"
        "Store(Path(sys.argv[1])).put({'b': 'no'}); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", program, str(warm / "answers.sqlite")], check=False)
    assert (warm / "answers.sqlite-wal").stat().st_size
    assert Store(mounted / "answers.sqlite").get(["a", "b"]) == {"a": "yes", "b": "no"}


def test_a_cold_read_only_mount_holds_nothing(mounted: Path, warm: Path) -> None:
    (warm / "answers.sqlite").unlink()
    store = Store(mounted / "answers.sqlite")
    assert (store.get(["a"]), len(store)) == ({}, 0)


def test_a_damaged_file_on_a_read_only_mount_holds_nothing(mounted: Path, warm: Path) -> None:
    (warm / "answers.sqlite").write_bytes(b"no database" * 1000)
    assert Store(mounted / "answers.sqlite").get(["a"]) == {}


def test_a_compilation_takes_its_answers_from_a_read_only_mount(warm: Path, mounted: Path) -> None:
    """Otherwise stderr has a warning about an answer that is not cached."""
    model = tiny(warm.parent)
    command = [
        sys.executable,
        "-m",
        "fusec",
        "compile",
        str(model),
        "--shape",
        "x=1,8,8,8",
        "--target",
        "h200",
        "--json",
    ]
    for place in (warm, mounted):
        environment = {**os.environ, "FUSEC_CACHE": str(place), "FUSEC_DEVICE": "none"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert (done.returncode, done.stderr) == (0, "")


def test_where_nothing_opens_for_writing_reads_are_served(warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behaves like a read-only file system, on machines where none can be mounted."""
    connect, open_ = sqlite3.connect, os.open

    def no_connect(database: Any, **options: Any) -> sqlite3.Connection:
        if options.get("uri"):
            return connect(database, **options)
        connect(":memory:").close()
        return connect(f"file:{database}?mode=ro", uri=True)  # writes fail with SQLITE_READONLY

    def no_open(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return open_(path, flags, *rest, **options)

    def no_unlink(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(sqlite_cache.sqlite3, "connect", no_connect)
    monkeypatch.setattr(os, "open", no_open)
    monkeypatch.setattr(Path, "unlink", no_unlink)
    check_serves(warm)
