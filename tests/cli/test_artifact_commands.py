"""Test `fusec compile -o model.fusec`, and what the other commands make of such a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from cli.command import SHAPE, fusec

from fusec import lockfile
from fusec.artifacts import container, fusec_file
from fusec.plans.plan_cache import PlanStore

pytestmark = pytest.mark.cudnn


@pytest.fixture(scope="module")
def saved(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "tiny.fusec"
    result = fusec("compile", model, *SHAPE, "--target", "h200", "--target", "a100", "-o", path)
    assert result.exit_code == 0, result.stderr
    return path


@pytest.mark.slow
def test_it_holds_plans_for_all_targets_built_here(saved: Path) -> None:
    assert fusec_file.targets(saved) == ("h200", "a100")
    for target in ("h200", "a100"):
        loaded = fusec_file.load(saved, target)
        keys = {lowered.graph.key for lowered in loaded.compiled.lowered if lowered is not None}
        assert loaded.plans.keys() == keys
        assert loaded.kernels and all(entry.blob for entry in loaded.kernels.values())
        assert all(e.blob for entries in loaded.plans.values() for e in entries)
        assert all(len(loaded.plans[key]) > 1 for key in keys)
        assert loaded.notes == ()


@pytest.mark.slow
def test_two_processes_write_the_same_but_for_addresses_within_plans(saved: Path, model: Path, tmp_path: Path) -> None:
    """Each process has its memory elsewhere. docs/artifacts.md says what differs."""
    again = tmp_path / "again.fusec"
    command = ["compile", str(model), *SHAPE, "--target", "h200", "--target", "a100", "-o", str(again)]
    environment = {**os.environ, "FUSEC_DEVICE": "none"}
    subprocess.run([sys.executable, "-m", "fusec", *command], check=True, capture_output=True, env=environment)
    with zipfile.ZipFile(saved) as one, zipfile.ZipFile(again) as other:
        assert one.namelist() == other.namelist()
        sizes = [[info.file_size for info in archive.infolist()] for archive in (one, other)]
        assert sizes[0] == sizes[1]
        differ = {name for name in one.namelist() if one.read(name) != other.read(name)} - {container.MANIFEST}
        assert all(name.split("/")[1:2] == ["plans"] for name in differ), differ
        manifests = [json.loads(archive.read(container.MANIFEST)) for archive in (one, other)]
    for name in differ:
        assert manifests[0]["members"].pop(name) != manifests[1]["members"].pop(name)
    assert manifests[0] == manifests[1]


@pytest.mark.slow
def test_elsewhere_no_plan_of_it_is_trusted(saved: Path, tmp_path: Path) -> None:
    loaded = fusec_file.load(saved, "h200", PlanStore(tmp_path))
    assert not any(entry.blob for entries in loaded.plans.values() for entry in entries)


def test_the_user_may_trust_it(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path))
    assert any("not built here" in note for note in fusec_file.load(saved, "h200").notes)
    assert json.loads(fusec("cache", "trust", saved, "--json").stdout)["trusted"] > 1
    loaded = fusec_file.load(saved, "h200")
    assert loaded.notes == ()
    assert all(entry.blob for entries in loaded.plans.values() for entry in entries)


def test_it_runs_and_gives_the_same_bits(saved: Path, model: Path, tmp_path: Path) -> None:
    for source, name in ((model, "a.npz"), (saved, "b.npz")):
        shape = SHAPE if source is model else ()
        result = fusec("run", source, *shape, "--target", "a100", "-o", tmp_path / name)
        assert result.exit_code == 0, result.stderr
    with np.load(tmp_path / "a.npz") as a, np.load(tmp_path / "b.npz") as b:
        assert a.files == b.files
        assert all(a[n].tobytes() == b[n].tobytes() for n in a.files)


def test_it_can_be_explained_verified_timed_and_taken_apart(saved: Path, model: Path, tmp_path: Path) -> None:
    explained = [json.loads(fusec("explain", *args, "--json").stdout) for args in ((saved,), (model, *SHAPE))]
    assert explained[0]["targets"] == explained[1]["targets"]
    assert fusec("verify", saved).exit_code == 0
    assert json.loads(fusec("bench", saved, "--runs", 1, "--json").stdout)["steps"]
    assert "step 2 (" in fusec("repro", saved, "--partition", 2, "-o", tmp_path / "repro").stdout


@pytest.mark.slow
def test_options_it_was_not_compiled_with_are_refused(saved: Path, model: Path, tmp_path: Path) -> None:
    for command in ("run", "bench", "explain", "verify", "compile", "lock"):
        for given, words in (
            (("--precision", "fp16"), "was compiled in fp32"),
            (SHAPE, "--shape comes too late"),
            (("--disable", "cse"), "--disable comes too late"),
            (("--deterministic",), "--deterministic comes too late"),
        ):
            result = fusec(command, saved, *given, *(("-o", tmp_path / "x.lock") if command == "lock" else ()))
            assert (result.exit_code, result.stdout) == (2, ""), command
            assert words in result.stderr
    half = tmp_path / "half.fusec"
    assert fusec("compile", model, *SHAPE, "--precision", "fp16", "--target", "h200", "-o", half).exit_code == 0
    for command in ("compile", "explain"):
        assert json.loads(fusec(command, half, "--json").stdout)["precision"] == "fp16"


def test_its_lock_is_the_one_it_holds(saved: Path, tmp_path: Path) -> None:
    assert fusec("lock", saved, "--target", "a100", "-o", tmp_path / "a.lock").exit_code == 0
    held = fusec_file.load(saved, "a100").lock
    assert lockfile.read(tmp_path / "a.lock").entries == tuple(e for e in held.entries if e.target == "a100")


def test_mistakes_are_one_error(model: Path, saved: Path, tmp_path: Path) -> None:
    several = fusec("compile", model, *SHAPE, "--target", "h200", "--target", "l4")
    assert (several.exit_code, several.stdout) == (2, "")
    assert "several targets need -o FILE.fusec" in several.stderr
    other = fusec("run", saved, "--target", "l4")
    assert other.exit_code == 2
    assert "compiled for h200, a100, not for l4" in other.stderr
    cut = tmp_path / "cut.fusec"
    cut.write_bytes(saved.read_bytes()[:-100])
    assert "cut.fusec: not a readable" in fusec("run", cut).stderr
