"""Test `fusec lock`, `fusec lock diff` and `fusec compile --locked`, with the real cuDNN."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.command import SHAPE, fusec

from fusec import lockfile
from fusec.artifacts import fusec_file
from fusec.gpu.cudnn.without_driver.deviceless import cudnn_number
from fusec.plans import plan_cache
from fusec.plans.plan_cache import PlanStore

pytestmark = pytest.mark.cudnn


@pytest.fixture(scope="module")
def lock(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lock") / "fusec.lock"
    result = fusec("lock", model, *SHAPE, "--target", "h200", "--target", "a100", "-o", path)
    assert result.exit_code == 0, result.stderr
    assert "partitions locked in" in result.stdout
    return path


def test_the_lock_is_the_models_and_changes_nothing(lock: Path, model: Path) -> None:
    assert {entry.target for entry in lockfile.read(lock).entries} == {"h200", "a100"}
    for target in ("h200", "a100"):
        same = fusec("lock", "diff", lock, model, *SHAPE, "--target", target)
        assert (same.exit_code, same.stdout) == (0, "no difference\n")
    assert fusec("lock", "diff", lock, lock).exit_code == 0


def test_another_gpu_is_a_difference(lock: Path, model: Path) -> None:
    result = fusec("lock", "diff", lock, model, *SHAPE, "--target", "l4", "--json")
    assert result.exit_code == 1
    assert "nothing is locked for l4" in json.loads(result.stdout)["differences"]


def test_a_model_compiled_to_a_lock_has_its_plans(lock: Path, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "tiny.fusec"
    result = fusec("compile", model, *SHAPE, "--target", "h200", "--locked", lock, "-o", path)
    assert result.exit_code == 0, result.stderr
    loaded, wanted = fusec_file.load(path, "h200"), lockfile.read(lock)
    assert loaded.plans
    kept = lockfile.apply(wanted, loaded.compiled)
    assert kept.choices.keys() == loaded.plans.keys()
    for key, choice in kept.choices.items():
        assert [entry.choice.identity for entry in loaded.plans[key]] == [choice.identity]
        assert all(entry.blob for entry in loaded.plans[key])
    assert [e for e in wanted.entries if e.target == "h200"] == list(loaded.lock.entries)


def test_locked_fails_rather_than_choose_anew(lock: Path, model: Path, tmp_path: Path) -> None:
    missing = fusec("compile", model, *SHAPE, "--target", "l4", "--locked", lock)
    assert missing.exit_code == 1
    assert "on l4: has no entry" in missing.stderr
    other = tmp_path / "fusec.lock"
    text = lock.read_text()
    engine = next(e.choice.engine for e in lockfile.read(lock).entries if e.target == "h200" and e.choice)
    other.write_text(text.replace(f"engine = {engine}\n", "engine = 4711\n"))
    gone = fusec("compile", model, *SHAPE, "--target", "h200", "--locked", other)
    assert gone.exit_code == 1
    assert "engine 4711" in gone.stderr and "is no longer offered" in gone.stderr
    other.write_text(text.replace("engine = ", "engine ", 1))
    assert "at line" in fusec("compile", model, *SHAPE, "--locked", other).stderr


@pytest.mark.slow
def test_a_quarantined_plan_is_neither_taken_nor_let_pass(
    lock: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_cache, "cache_folder", lambda: tmp_path)
    path = tmp_path / "tiny.fusec"
    compile = ("compile", model, *SHAPE, "--target", "h200", "-o", path)
    assert fusec(*compile).exit_code == 0
    loaded = fusec_file.load(path, "h200")
    store, cudnn = PlanStore(), cudnn_number()
    for key, entries in loaded.plans.items():
        store.quarantine(key, "h200", cudnn, *entries[0].choice.identity, "wrong numbers")
    assert fusec(*compile).exit_code == 0
    later = fusec_file.load(path, "h200").plans
    for key, entries in loaded.plans.items():
        assert entries[0].choice.identity not in [entry.choice.identity for entry in later[key]]
    for key, choice in lockfile.apply(lockfile.read(lock), loaded.compiled).choices.items():
        store.quarantine(key, "h200", cudnn, *choice.identity, "wrong numbers")
    result = fusec(*compile, "--locked", lock)
    assert result.exit_code == 1
    assert "on h200 is in quarantine: wrong numbers" in result.stderr


def test_run_takes_the_plans_of_a_lock_or_fails(lock: Path, model: Path, tmp_path: Path) -> None:
    assert fusec("run", model, *SHAPE, "--target", "h200", "--locked", lock).exit_code == 0
    result = fusec("run", model, *SHAPE, "--target", "l4", "--locked", lock)
    assert result.exit_code == 1 and "on l4" in result.stderr
    result = fusec("run", tmp_path / "x.fusec", "--locked", lock)
    assert result.exit_code == 2 and "--locked comes too late" in result.stderr


def test_another_precision_is_one_line(lock: Path, model: Path, tmp_path: Path) -> None:
    """No step of fp16 is in a lock of fp32: a line for each would hide the reason."""
    for precision, told in (("fp16", "fp32 or tf32"), ("tf32", "fp32")):
        result = fusec("lock", "diff", lock, model, *SHAPE, "--target", "h200", "--precision", precision)
        assert result.exit_code == 1
        (line,) = result.stdout.splitlines()
        assert line.startswith(f"precision: the lock was written for {told}, the other side is {precision}; ")
        other = tmp_path / f"{precision}.lock"
        assert fusec("lock", model, *SHAPE, "--target", "h200", "--precision", precision, "-o", other).exit_code == 0
        assert fusec("lock", "diff", other, model, *SHAPE, "--precision", precision).stdout == "no difference\n"
        (line,) = fusec("lock", "diff", other, lock).stdout.splitlines()
        assert line.startswith("precision: ") and "fp32" in line
        locked = fusec("compile", model, *SHAPE, "--target", "h200", "--precision", precision, "--locked", lock)
        assert (locked.exit_code, locked.stdout) == (1, "")
        assert locked.stderr.startswith(f"fusec: {lock}: precision: the lock was written for {told}, ")
