"""Test that the stand-in for libcuda is loaded only undamaged, from a folder that nobody else can write."""

from __future__ import annotations

import ctypes
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fusec.errors import TargetError
from fusec.gpu import doctor
from fusec.gpu.cudnn.without_driver import driver_stand_in, private_library

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder to another user")
LOAD = """
import ctypes
from fusec.gpu.cudnn.without_driver import driver_stand_in
print(driver_stand_in.load_driver(), ctypes.CDLL("libcuda.so.1").cuInit(0))
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The private folder of an empty cache."""
    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path))
    return tmp_path / f"native-{os.geteuid()}"


def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_stand_in, "compiler", lambda: None)


def load_elsewhere() -> str:
    """Return what a new process prints that loads the stand-in."""
    done = subprocess.run([sys.executable, "-c", LOAD], capture_output=True, text=True, check=False)
    return done.stdout.strip() or done.stderr


@pytest.mark.cudnn
def test_the_stand_in_is_stored_in_a_private_folder(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = driver_stand_in.stand_in()
    assert library.parent == own
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    no_compiler(monkeypatch)
    assert driver_stand_in.stand_in() == library  # not built again
    assert load_elsewhere() == "stand-in 100"


@pytest.mark.cudnn
def test_a_library_planted_in_the_cache_folder_is_not_loaded(own: Path) -> None:
    library = driver_stand_in.stand_in()
    planted = own.parent / f"{library.name[:24]}.so"  # where it lay in earlier versions
    planted.write_bytes(b"not a library")
    assert load_elsewhere() == "stand-in 100"


@pytest.mark.cudnn
@pytest.mark.parametrize("damage", [b"", b"\x7fELF"])
def test_a_damaged_stand_in_is_built_again(own: Path, damage: bytes) -> None:
    library = driver_stand_in.stand_in()
    library.write_bytes(damage)
    with pytest.raises(TargetError, match="SHA-256"):
        private_library.load(library)
    assert driver_stand_in.stand_in() == library
    assert ctypes.CDLL(str(library)).cuInit(0) == 100
    assert list(own.iterdir()) == [library]


def spoil_mode(own: Path) -> None:
    own.mkdir()
    own.chmod(0o770)


def spoil_link(own: Path) -> None:
    (own.parent / "elsewhere").mkdir(mode=0o700)
    own.symlink_to("elsewhere")


def spoil_kind(own: Path) -> None:
    own.write_text("no folder")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [(spoil_mode, "others can write it"), (spoil_link, "symbolic link"), (spoil_kind, "Not a directory")],
)
def test_a_folder_that_is_not_private_is_refused(
    own: Path, spoil: Callable[[Path], None], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(own)
    with pytest.raises(TargetError, match=f"{own}.*{reason}.*FUSEC_CACHE"):
        driver_stand_in.stand_in()
    monkeypatch.setattr(doctor.ctypes, "CDLL", _no_library)
    check = doctor._driver()
    assert not check.ok
    assert reason in str(check)


@needs_root
def test_a_folder_of_another_user_is_refused(own: Path) -> None:
    own.mkdir(mode=0o700)
    os.chown(own, 12345, 12345)
    with pytest.raises(TargetError, match="belongs to user 12345"):
        driver_stand_in.stand_in()


@pytest.mark.cudnn
def test_a_library_that_others_can_write_is_refused(own: Path) -> None:
    library = driver_stand_in.stand_in()
    library.chmod(0o777)
    with pytest.raises(TargetError, match="others can write it"):
        driver_stand_in.stand_in()


@pytest.mark.cudnn
def test_a_read_only_folder_with_an_undamaged_stand_in_is_enough(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = driver_stand_in.stand_in()
    own.chmod(0o500)
    own.parent.chmod(0o500)
    try:
        no_compiler(monkeypatch)
        assert driver_stand_in.stand_in() == library
        assert load_elsewhere() == "stand-in 100"
    finally:
        own.parent.chmod(0o700)
        own.chmod(0o700)


@pytest.mark.cudnn
def test_a_lax_umask_does_no_harm(own: Path) -> None:
    before = os.umask(0)
    try:
        assert driver_stand_in.stand_in() == driver_stand_in.stand_in()
    finally:
        os.umask(before)


@pytest.mark.cudnn
def test_roots_stand_in_serves_other_users(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an image that root built, with a cache that its user may read."""
    library = driver_stand_in.stand_in()
    baked = own.parent / "native-0"
    own.rename(baked)
    baked.chmod(0o755)
    no_compiler(monkeypatch)
    monkeypatch.setattr(private_library, "_ROOT", os.getuid())
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    assert driver_stand_in.stand_in() == baked / library.name


def test_a_folder_that_cannot_be_made_names_the_remedy(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, mode: int = 0, exist_ok: bool = False) -> None:
        raise OSError(30, "Read-only file system")

    driver_stand_in.cache_folder()
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(TargetError, match=r"cannot make the folder .*Read-only.*FUSEC_CACHE"):
        private_library.make_folder(own)


def _no_library(name: str, mode: int = 0) -> None:
    raise OSError(f"{name}: cannot open shared object file")
