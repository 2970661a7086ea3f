"""Test the versions of installed packages: their metadata is read once."""

from __future__ import annotations

import importlib.metadata

import pytest

from fusec.system.installed import installed_version


def test_metadata_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []

    def version(package: str) -> str:
        read.append(package)
        if package == "absent":
            raise importlib.metadata.PackageNotFoundError(package)
        return "1.2.3"

    installed_version.cache_clear()
    monkeypatch.setattr(importlib.metadata, "version", version)
    assert [installed_version(name) for name in ("there", "absent", "there", "absent")] == ["1.2.3", None] * 2
    assert read == ["there", "absent"]
    installed_version.cache_clear()
