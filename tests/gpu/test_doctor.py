"""Test that the doctor names each missing piece with its remedy, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fusec.errors import TargetError
from fusec.gpu import doctor
from fusec.gpu.cudnn.without_driver import deviceless, driver_stand_in
from fusec.gpu.doctor import Requirement, diagnose


def checks(*names: str) -> dict[str, Requirement]:
    wanted: list[Callable[[], Requirement]] = [getattr(doctor, f"_{name}") for name in names]
    return {check.name: check for check in (make() for make in wanted)}


@pytest.mark.cudnn
def test_a_complete_machine_has_nothing_missing() -> None:
    found = {check.name: check for check in diagnose()}
    assert [str(c) for c in found.values() if c.required and not c.ok] == []
    assert found["cudnn answers"].detail.startswith("cuDNN 9")
    assert {
        "python",
        "numpy",
        "cudnn frontend",
        "cudnn",
        "nvrtc",
        "C compiler",
        "libcuda",
        "GPU",
        "cupy",
        "cublasLt",
    } < set(found)
    assert all("\n" not in str(check) for check in found.values())


@pytest.mark.cudnn
def test_without_nvrtc_one_line_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise TargetError("libnvrtc-builtins.so.13 does not load")

    monkeypatch.setattr(deviceless, "load_nvrtc", fail)
    check = checks("nvrtc")["nvrtc"]
    assert str(check) == (
        "MISSING nvrtc: libnvrtc-builtins.so.13 does not load; "
        "remedy: pip install 'fusec[cu13]' (CUDA 12: 'fusec[cu12]')"
    )


def test_without_compiler_and_stand_in_both_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path))
    monkeypatch.setattr(driver_stand_in.shutil, "which", lambda name: None)
    monkeypatch.setattr(doctor.ctypes, "CDLL", _no_library)
    found = checks("c_compiler", "driver")
    assert not found["C compiler"].ok
    assert found["C compiler"].required
    assert found["C compiler"].remedy == "apt install gcc"
    assert not found["libcuda"].ok


def test_a_compiler_is_not_required_once_the_stand_in_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(driver_stand_in, "stand_in", lambda: tmp_path / "libcuda.so")
    monkeypatch.setattr(driver_stand_in.shutil, "which", lambda name: None)
    check = checks("c_compiler")["C compiler"]
    assert (check.ok, check.required) == (False, False)
    assert str(check).startswith("absent  C compiler")


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc/version").exists(), reason="needs a place that refuses")
def test_a_cache_folder_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEC_CACHE", "/proc/version/fusec")
    check = checks("cache_folder")["cache folder"]
    assert not check.ok
    assert "FUSEC_CACHE" in check.remedy


def test_cublaslt_may_be_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.algorithms, "version", lambda: "")
    (check,) = checks("cublaslt").values()
    assert not check.required
    assert str(check).startswith(
        "absent  cublasLt: not installed: products are left to cuDNN alone; remedy: pip install"
    )
    monkeypatch.setattr(doctor.algorithms, "version", lambda: "13.1.0.3")
    assert str(*checks("cublaslt").values()) == "ok      cublasLt: 13.1.0.3"


def test_a_missing_package_has_its_remedy() -> None:
    check = doctor._package("cudnn frontend", "no-such-package", "pip install it")
    assert str(check) == "MISSING cudnn frontend: no-such-package is not installed; remedy: pip install it"


def _no_library(name: str, mode: int = 0) -> None:
    raise OSError(f"{name}: cannot open shared object file")
