"""Test cuDNN without a driver: the stand-in, NVRTC, and one clear message for each missing piece."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from fusec.errors import TargetError
from fusec.gpu.cudnn.without_driver import deviceless, driver_stand_in

BUILD = "from fusec.gpu.cudnn.without_driver.driver_stand_in import stand_in; print(stand_in())"


@pytest.mark.cudnn
def test_the_stand_in_reports_no_device_and_accepts_what_is_never_launched(tmp_path: Path) -> None:
    library = ctypes.CDLL(str(driver_stand_in.stand_in()))
    assert library.cuInit(0) == 100
    assert library.cuDeviceGetCount(None) == 100
    handle = ctypes.c_void_p()
    assert library.cuLibraryLoadData(ctypes.byref(handle)) == 0
    assert handle.value
    version = ctypes.c_int()
    assert library.cuDriverGetVersion(ctypes.byref(version)) == 0
    assert version.value == 13000


@pytest.mark.cudnn
def test_processes_that_build_the_stand_in_at_the_same_time_end_with_one(tmp_path: Path) -> None:
    # only these processes have this folder: a worker that a thread of an earlier test starts would build there, too
    environment = {**os.environ, "FUSEC_CACHE": str(tmp_path)}
    started = [
        subprocess.Popen([sys.executable, "-c", BUILD], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(3)
    ]
    built = {process.communicate()[0].strip() for process in started}
    assert all(process.returncode == 0 for process in started)
    assert [str(path) for path in tmp_path.glob("*/*")] == list(built)  # and no scratch is left
    assert ctypes.CDLL(built.pop()).cuInit(0) == 100


def test_without_a_compiler_the_remedy_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path))
    monkeypatch.setattr(driver_stand_in.shutil, "which", lambda name: None)
    with pytest.raises(TargetError, match=r"no C compiler .*\(apt install gcc\)"):
        driver_stand_in.stand_in()


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path))
    broken = tmp_path / "cc"
    broken.write_text("#!/bin/sh\necho 'cannot find crti.o' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(driver_stand_in, "compiler", lambda: str(broken))
    with pytest.raises(TargetError, match=r"cannot find crti\.o"):
        driver_stand_in.stand_in()
    assert list(tmp_path.glob("native-*/*")) == []


@pytest.mark.cudnn
@pytest.mark.parametrize("sm", [75, 80, 89, 90, 100])
def test_nvrtc_compiles_for_every_target(sm: int) -> None:
    assert "." in deviceless.check_nvrtc(deviceless.load_nvrtc(), sm)


@pytest.mark.cudnn
def test_an_nvrtc_that_cannot_compile_is_an_error() -> None:
    with pytest.raises(TargetError, match="does not compile for sm_3"):
        deviceless.check_nvrtc(deviceless.load_nvrtc(), 3)


@pytest.mark.parametrize("missing", ["libnvrtc-builtins", "libnvrtc.so"])
def test_a_missing_nvrtc_is_an_error_with_its_remedy(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = deviceless.find_library
    monkeypatch.setattr(deviceless, "find_library", lambda p: None if p.startswith(missing) else found(p))
    monkeypatch.setattr(deviceless, "cudnn_wheel", lambda: (99, "9.19"))
    with pytest.raises(TargetError, match=r"libnvrtc.*99 does not load.*pip install 'fusec\[cu13\]'"):
        deviceless.load_nvrtc()


def test_nvrtc_is_of_the_cuda_major_cudnn_was_made_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for major, layout in ((12, "cuda_nvrtc"), (13, "cu13")):
        folder = tmp_path / layout / "lib"
        folder.mkdir(parents=True)
        for name in (f"libnvrtc.so.{major}", f"libnvrtc-builtins.so.{major}.4"):
            (folder / name).touch()
    monkeypatch.setattr(deviceless, "library_folders", lambda: sorted(tmp_path.glob("*/lib")))
    for major in (12, 13):
        monkeypatch.setattr(deviceless, "cudnn_wheel", lambda major=major: (major, "9.19"))
        names = [Path(path).name for path in deviceless.nvrtc_libraries()]
        assert names == [f"libnvrtc-builtins.so.{major}.4", f"libnvrtc.so.{major}"]


def test_the_newest_library_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("libx.so.9", "libx.so.13", "libx.so.13.1"):
        (tmp_path / name).touch()
    monkeypatch.setattr(deviceless, "library_folders", lambda: [tmp_path])
    newest = deviceless.find_library("libx.so.*")
    assert newest is not None
    assert newest.name == "libx.so.13.1"
    assert deviceless.find_library("liby.so.*") is None


def test_cudnn_of_the_library_path_comes_before_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libcudnn.so.9").write_text("not a library")
    monkeypatch.setenv("LD_LIBRARY_PATH", f":{tmp_path}")
    assert deviceless.cudnn_library() == tmp_path / "libcudnn.so.9"
    assert deviceless.cudnn_wheel() is None
    assert deviceless.cudnn_version() == ""  # it does not load


@pytest.mark.cudnn
def test_cudnns_number_is_what_cudnn_says() -> None:
    program = (
        "from fusec.gpu.cudnn.without_driver.deviceless import bring_up, cudnn_number; "
        "number = cudnn_number(); bring_up(90); import cudnn; print(number == str(cudnn.backend_version()))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


@pytest.mark.cudnn
def test_cudnn_outside_of_the_interpreters_site_packages(tmp_path: Path) -> None:
    """As with `pip install --user`, or a virtual environment that sees the system's packages."""
    wheels = Path(str(deviceless.cudnn_library())).parents[3]
    venv.create(tmp_path / "venv", symlinks=True)
    python = tmp_path / "venv" / "bin" / "python"
    environment = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
    environment |= {"PYTHONPATH": os.pathsep.join((str(Path.cwd()), str(wheels)))}
    ask = "print(cudnn.backend_version())"
    for first, works in (("import cudnn; ", False), (f"from {deviceless.__name__} import load_cudnn; ", True)):
        program = f"{first}{'load_cudnn(); import cudnn; ' if works else ''}{ask}"
        done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False, env=environment)
        assert (done.returncode == 0) is works, done.stderr
    assert done.stdout.strip() == deviceless.cudnn_number()
    prove = "from fusec.gpu.cudnn.legality.oracle import Oracle; from fusec.targets.target import load\n"
    prove += "with Oracle(load('h200'), workers=1) as oracle: print(oracle.prove())"
    done = subprocess.run([python, "-c", prove], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
