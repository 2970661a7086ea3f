"""Test `fusec cache`: info, clear, export, import."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.command import fusec

from fusec.plans.plan_cache import PlanStore
from fusec.plans.plan_record import Choice, Entry, PlanKey


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PlanStore:
    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path / "cache"))
    store = PlanStore()
    store.put(PlanKey("g", "h200", "", "", "", "", "quick"), Entry(Choice(4, ()), b"plan"))
    store.quarantine("g", "h200", "9", 5, (), "nan")
    return store


def test_info(store: PlanStore) -> None:
    data = json.loads(fusec("cache", "info", "--json").stdout)
    assert (data["entries"], data["blobs"], data["quarantined"], data["trusted"]) == (1, 1, 1, 1)
    assert data["folder"] == str(store.folder)
    assert "1 plans, 1 of them serialized" in fusec("cache", "info").stdout


def test_export_clear_import(store: PlanStore, tmp_path: Path) -> None:
    file = tmp_path / "plans.zip"
    assert json.loads(fusec("cache", "export", file, "--json").stdout) == {"exported": 1}
    assert json.loads(fusec("cache", "clear", "--json").stdout) == {"cleared": 1, "programs": 0}
    assert store.info().entries == 0
    assert json.loads(fusec("cache", "import", file, "--json").stdout) == {"imported": 1}
    info = store.info()
    assert (info.entries, info.blobs, info.quarantined) == (1, 0, 1)  # what comes from elsewhere is not trusted


def test_a_bad_import_is_one_error(store: PlanStore, tmp_path: Path) -> None:
    (tmp_path / "plans.zip").write_text("no zip")
    result = fusec("cache", "import", tmp_path / "plans.zip")
    assert result.exit_code == 2
    assert "plans.zip: not a readable export" in result.stderr


@pytest.mark.parametrize("group", ["cache", "lock"])
def test_a_group_without_a_command_is_one_error(group: str) -> None:
    result = fusec(group)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"fusec: error: Missing command (see fusec {group} --help)\n"
