"""Command line tests are about described GPUs, also on a machine that has one."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli.command import tiny

from fusec.gpu import device


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEC_DEVICE", "none")
    device._first_gpu.cache_clear()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("model"))
