"""Test the plan cache: many processes, kill -9, damage, the size limit, quarantine, and local trust."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
import warnings
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fusec.errors import FusecError
from fusec.plans.cache_file import pack
from fusec.plans.plan_cache import PlanStore
from fusec.plans.plan_record import Choice, Entry, PlanKey

WRITER = """
import hashlib, random, sys
from pathlib import Path
from fusec.plans.plan_cache import PlanStore
from fusec.plans.plan_record import Choice, Entry, PlanKey
seed, count = int(sys.argv[2]), int(sys.argv[3])
store, draw = PlanStore(Path(sys.argv[1])), random.Random(seed)
for i in range(count):
    name = str(draw.randrange(12))
    key = PlanKey(name, "h200", "", "", "", "", "quick")
    entry = Entry(Choice(int(name), ((1, i),)), hashlib.sha256(name.encode()).digest() * 2000)
    store.put(key, entry)
    store.put_choice(key, {"parts": [name] * 100})
    assert store.choice(key) == {"parts": [name] * 100}
    store.quarantine(name, "h200", "9", seed, ((1, i % 3),), "wrong")
    found = store.get(key)
    assert found is not None and found.choice.engine == int(name) and found.blob == entry.blob, name
    print(i, flush=True)
"""


def writer(folder: Path, seed: int, count: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", WRITER, str(folder), str(seed), str(count)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def key(name: str) -> PlanKey:
    return PlanKey(name, "h200", "NVIDIA H200", "580", "91900", "1.28.0", "quick")


def entry(name: str, size: int = 1000) -> Entry:
    return Entry(Choice(7, ((2, 3),), 64, 1.5, 1e-4), hashlib.sha256(name.encode()).digest() * (size // 32))


@pytest.fixture
def store(tmp_path: Path) -> PlanStore:
    return PlanStore(tmp_path / "plans")


def plan_file(store: PlanStore, name: str) -> Path:
    return store.folder / "plans" / key(name).digest


def test_another_process_reads_written_entries(store: PlanStore) -> None:
    store.put(key("a"), entry("a"))
    store.put(key("b"), Entry(Choice(1, ())))
    again = PlanStore(store.folder)
    assert again.get(key("a")) == entry("a")
    assert again.get(key("b")) == Entry(Choice(1, ()))
    assert again.get(dataclasses.replace(key("a"), cudnn="92000")) is None
    store.put(key("a"), Entry(Choice(2, ())))
    assert again.get(key("a")) == Entry(Choice(2, ()))


def test_choices_are_cached_next_to_plans(store: PlanStore, tmp_path: Path) -> None:
    store.put_choice(key("a"), {"parts": [1, 2]})
    store.put(key("a"), entry("a"))
    assert PlanStore(store.folder).choice(key("a")) == {"parts": [1, 2]}
    assert store.choice(key("b")) is None
    assert (store.info().entries, store.info().choices) == (1, 1)
    store.export(tmp_path / "all.zip")
    elsewhere = PlanStore(tmp_path / "elsewhere")
    assert elsewhere.import_(tmp_path / "all.zip") == 1
    assert elsewhere.choice(key("a")) == {"parts": [1, 2]}
    (file,) = (store.folder / "choices").iterdir()
    file.write_bytes(file.read_bytes()[:-3])
    with pytest.warns(UserWarning, match="its checksum does not fit"):
        assert store.choice(key("a")) is None
    elsewhere.clear()
    assert elsewhere.info().choices == 0 and elsewhere.choice(key("a")) is None


def test_choices_of_earlier_versions_are_imported_and_cleared(store: PlanStore, tmp_path: Path) -> None:
    """They were in a folder `forms`, and called so in their headers."""
    digest = key("a").digest
    data = pack(digest, {"key": key("a").to_json(), "form": {"parts": [1]}})
    with zipfile.ZipFile(tmp_path / "old.zip", "w") as archive:
        archive.writestr(zipfile.ZipInfo(f"forms/{digest}"), data)
    assert store.import_(tmp_path / "old.zip") == 0
    assert store.choice(key("a")) == {"parts": [1]}
    (store.folder / "forms").mkdir()
    (store.folder / "forms" / digest).write_bytes(data)
    assert store.info().choices == 1
    store.clear()
    assert not [*(store.folder / "forms").iterdir()] and store.choice(key("a")) is None


def test_a_blob_that_does_not_serve_is_dropped_and_the_choice_stays(store: PlanStore) -> None:
    store.put(key("a"), entry("a"))
    with pytest.warns(UserWarning, match=r"dropped the serialized plan in .*\(version mismatch\); it is built anew"):
        store.drop_blob(key("a"), "version mismatch")
    assert store.get(key("a")) == Entry(entry("a").choice)
    store.drop_blob(key("a"), "again")  # nothing is left to drop
    store.drop_blob(key("b"), "never there")


def test_the_bound_counts_blobs_and_choices(tmp_path: Path) -> None:
    store = PlanStore(tmp_path, max_bytes=20_000)
    for name in "abcdefgh":
        store.put(key(name), entry(name, 8_000))
        os.utime(tmp_path / "plans" / key(name).digest, (ord(name), ord(name)))
    assert store.info().bytes <= 20_000 + 10_000, "as of the last look, and one more"
    assert store.get(key("a")) is None and store.get(key("h")) is not None
    for name in "klmnopqr":
        store.put_choice(key(name), {"parts": ["x" * 4_000]})
    assert store.info().bytes <= 20_000 + 5_000
    assert store.get(key("h")) is None, "choices push plans out, and the other way round"


def test_eight_processes_at_once(store: PlanStore) -> None:
    writers = [writer(store.folder, seed, 25) for seed in range(8)]
    errors = [process.communicate()[1] for process in writers]
    assert [process.returncode for process in writers] == [0] * 8, errors
    assert store.info().entries == 12
    assert len(store.quarantined("0", "h200", "9")) <= 24
    assert {engine for name in range(12) for engine, _, _ in store.quarantined(str(name), "h200", "9")} == set(range(8))


def test_many_threads_at_once(store: PlanStore) -> None:
    def work(number: int) -> bool:
        name = str(number % 5)
        store.put(key(name), entry(name))
        return store.get(key(name)) == entry(name)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(80)))
    assert store.info().entries == 5


def test_kill_in_the_middle_of_writes_leaves_whole_entries(store: PlanStore) -> None:
    draw = random.Random(0)
    for seed in range(4):
        process = writer(store.folder, seed, 100_000)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(draw.random() / 10)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = [store.get(PlanKey(str(n), "h200", "", "", "", "", "quick")) for n in range(12)]
    assert any(found)
    assert all(e.choice.engine == n and e.blob for n, e in enumerate(found) if e is not None)
    store.put(key("new"), entry("new"))
    assert store.get(key("new")) == entry("new")


def test_temporary_files_of_a_dead_writer_are_deleted(store: PlanStore) -> None:
    store.put(key("a"), entry("a"))
    left = store.folder / "plans" / f".fusec-{'0' * 32}.tmp"
    left.write_bytes(b"half")
    PlanStore(store.folder).put(key("b"), entry("b"))
    assert not left.exists()


def test_any_flipped_bit_or_cut_drops_the_entry_with_one_warning(store: PlanStore) -> None:
    store.put(key("a"), entry("a", 64))
    whole = plan_file(store, "a").read_bytes()
    damaged = [
        whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :] for place in range(len(whole))
    ]
    damaged += [whole[:size] for size in range(0, len(whole), 7)]
    for data in damaged:
        plan_file(store, "a").write_bytes(data)
        with pytest.warns(UserWarning, match="dropped the cached plan") as seen:
            assert store.get(key("a")) is None
        assert len(seen) == 1
        assert store.get(key("a")) is None  # and not a second warning
    store.put(key("a"), entry("a"))
    assert store.get(key("a")) == entry("a")


def test_an_entry_in_the_place_of_another_is_dropped(store: PlanStore) -> None:
    store.put(key("a"), entry("a"))
    store.put(key("b"), entry("b"))
    plan_file(store, "a").write_bytes(plan_file(store, "b").read_bytes())
    with pytest.warns(UserWarning, match="checksum"):
        assert store.get(key("a")) is None
    assert store.get(key("b")) == entry("b")


def test_damage_to_quarantine_and_trust_is_survived(store: PlanStore) -> None:
    store.put(key("a"), entry("a"))
    store.quarantine("g", "h200", "9", 4, ((1, 2),), "wrong numbers")
    (bad,) = (store.folder / "quarantine").glob("*/*")
    bad.write_bytes(bad.read_bytes()[:-1] + b"!")
    with pytest.warns(UserWarning, match="dropped"):
        assert store.quarantined("g", "h200", "9") == []
    trusted = store.folder / "trusted"
    trusted.write_bytes(trusted.read_bytes()[:-10])  # a torn line
    torn = PlanStore(store.folder)
    assert torn.get(key("a")) == Entry(entry("a").choice)  # the choice stays, the blob is not used
    torn.put(key("a"), entry("a"))
    assert torn.get(key("a")) == entry("a")
    trusted.write_bytes(b"\xff\xfe\0" * 40)
    assert PlanStore(store.folder).get(key("a")) == Entry(entry("a").choice)


def test_the_least_recently_used_go_first(store: PlanStore) -> None:
    one = len(plan_file_bytes(store))
    small = PlanStore(store.folder, max_bytes=3 * one + one // 2)
    for age, name in enumerate("abc"):
        small.put(key(name), entry(name))
        os.utime(plan_file(store, name), (1000 + age, 1000 + age))
    assert small.get(key("a")) is not None  # used: now b is the oldest
    small.put(key("d"), entry("d"))
    assert [small.get(key(name)) is not None for name in "abcd"] == [True, False, True, True]
    assert small.info().bytes <= small.max_bytes


def plan_file_bytes(store: PlanStore) -> bytes:
    store.put(key("a"), entry("a"))
    return plan_file(store, "a").read_bytes()


def test_quarantine_is_stored_by_graph_target_and_version(store: PlanStore) -> None:
    store.quarantine("g", "h200", "9", 4, ((3, 1), (1, 2)), "nan")
    store.quarantine("g", "h200", "9", 4, ((1, 2), (3, 1)), "nan, again")
    store.quarantine("g", "h200", "9", 0, (), "slow")
    assert store.quarantined("g", "h200", "9") == [(0, (), "slow"), (4, ((1, 2), (3, 1)), "nan, again")]
    for other in (("h", "h200", "9"), ("g", "l4", "9"), ("g", "h200", "10")):
        assert store.quarantined(*other) == []


def test_export_carries_choices_and_quarantine_but_no_trust(store: PlanStore, tmp_path: Path) -> None:
    store.put(key("a"), entry("a"))
    store.quarantine("g", "h200", "9", 4, (), "nan")
    assert store.export(tmp_path / "plans.zip") == 1
    other = PlanStore(tmp_path / "elsewhere")
    assert other.import_(tmp_path / "plans.zip") == 1
    assert other.quarantined("g", "h200", "9") == [(4, (), "nan")]
    assert other.get(key("a")) == Entry(entry("a").choice)
    blob = entry("a").blob
    assert blob is not None
    assert store.trusts(blob) and not other.trusts(blob)
    other.trust(blob)
    assert other.get(key("a")) == entry("a")


def test_an_import_leaves_what_is_here(store: PlanStore, tmp_path: Path) -> None:
    store.put(key("a"), entry("a"))
    store.export(tmp_path / "plans.zip")
    store.put(key("a"), Entry(Choice(9, ())))
    store.import_(tmp_path / "plans.zip")
    assert store.get(key("a")) == Entry(Choice(9, ()))


@pytest.mark.parametrize("kind", ["cut", "flipped", "foreign", "outside", "compressed", "text", "missing", "pipe"])
def test_a_bad_import_is_one_error_and_takes_nothing(store: PlanStore, tmp_path: Path, kind: str) -> None:
    store.put(key("a"), entry("a"))
    path = tmp_path / "plans.zip"
    store.export(path)
    data = path.read_bytes()
    match kind:
        case "cut":
            path.write_bytes(data[: len(data) // 2])
        case "flipped":
            path.write_bytes(data[:400] + bytes([data[400] ^ 4]) + data[401:])
        case "text":
            path.write_text("plans")
        case "missing":
            path.unlink()
        case "pipe":
            path.unlink()
            os.mkfifo(path)
        case _:
            name = {"foreign": "notes.txt", "outside": "../plans/x", "compressed": f"plans/{key('a').digest}"}[kind]
            with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr(name, plan_file(store, "a").read_bytes())
    other = PlanStore(tmp_path / "other")
    with pytest.raises(FusecError, match=r"plans\.zip"):
        other.import_(path)
    assert other.info().entries == 0


def test_info_and_clear(store: PlanStore) -> None:
    assert store.info().entries == 0
    store.put(key("a"), entry("a"))
    store.put(key("b"), Entry(Choice(1, ())))
    store.quarantine("g", "h200", "9", 4, (), "nan")
    info = store.info()
    assert (info.entries, info.blobs, info.quarantined, info.trusted) == (2, 1, 1, 1)
    assert info.bytes > 1000
    assert store.clear() == 2
    info = store.info()
    assert (info.entries, info.quarantined, info.trusted, info.bytes) == (0, 0, 0, 0)
    assert store.get(key("a")) is None


def test_a_folder_that_cannot_be_used_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FusecError, match="cannot use the plan cache"):
        PlanStore(tmp_path / "file" / "plans").put(key("a"), entry("a"))
