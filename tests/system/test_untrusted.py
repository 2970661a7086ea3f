"""Test that JSON that is nested too deep for Python gives a clear error in every kind of file."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest

from fusec.artifacts import container, safetensors
from fusec.errors import FusecError, ModelError
from fusec.lockfile import toml_text
from fusec.plans.plan_cache import PlanStore
from fusec.plans.plan_record import PlanKey
from fusec.system.untrusted import read_json
from fusec.testing import finding_folder

DEEP = b"[" * 100_000
KEY = PlanKey("graph", "h200", "NVIDIA H200", "580", "91900", "1.28.0", "quick")


def entry() -> bytes:
    """A file of the plan store whose header is too deep, with the checksum that fits."""
    body = DEEP + b"\n"
    return b"fusec plan 1\n" + hashlib.sha256(KEY.digest.encode() + body).hexdigest().encode() + b"\n" + body


def test_deep_json_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="nested too deep"):
        read_json(DEEP)
    assert read_json(b'{"a": [1]}') == {"a": [1]}


def test_safetensors() -> None:
    with pytest.raises(ModelError, match="nested too deep"):
        safetensors.read(memoryview(len(DEEP).to_bytes(8, "little") + DEEP))


@pytest.mark.parametrize("member", ["manifest.json", "a.json"])
def test_members_of_a_file(member: str, tmp_path: Path) -> None:
    path = tmp_path / "a.fusec"
    with container.written(path) as file:
        file.add("a.json", DEEP)
        if member == "manifest.json":
            file.add(member, DEEP)
        else:
            file.finish({})
    with pytest.raises(ModelError, match="nested too deep"):
        container.Reader(path).json("a.json")


def test_an_entry_of_the_plan_store(tmp_path: Path) -> None:
    store = PlanStore(tmp_path)
    (tmp_path / "plans").mkdir()
    (tmp_path / "plans" / KEY.digest).write_bytes(entry())
    with pytest.warns(UserWarning, match="nested too deep"):
        assert store.get(KEY) is None


def test_an_import_into_the_plan_store(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr(f"plans/{KEY.digest}", entry())
    with pytest.raises(FusecError, match="nested too deep"):
        PlanStore(tmp_path / "store").import_(tmp_path / "a.zip")


def test_a_finding(tmp_path: Path) -> None:
    (tmp_path / "finding.json").write_bytes(DEEP)
    with pytest.raises(FusecError, match="nested too deep"):
        finding_folder.load(tmp_path)


def test_a_lock() -> None:
    with pytest.raises(ModelError, match="recursion"):
        toml_text.parse("a = " + DEEP.decode())
