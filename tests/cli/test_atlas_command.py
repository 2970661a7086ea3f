"""Test `fusec atlas` and `fusec lock diff --cudnn`, with the cuDNN that is installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli.command import SHAPE, fusec

pytestmark = pytest.mark.cudnn

ASK = ("atlas", "--pattern", "conv+bias+relu", "--target", "h200")


def test_a_table_is_written_and_extended(tmp_path: Path) -> None:
    first = fusec(*ASK, "-o", tmp_path)
    assert (first.exit_code, first.stderr) == (0, "")
    data = json.loads((tmp_path / "atlas.json").read_text())
    (version,) = data["releases"]
    assert f"cuDNN {version}" in first.stdout
    assert data["answers"][data["cells"][version]["h200"][0]]["precompiled"]
    data["releases"] = {"9.1.0.0": data["releases"][version]}
    for key in ("cells", "offered"):
        data[key] = {"9.1.0.0": data[key][version]}
    (tmp_path / "atlas.json").write_text(json.dumps(data))
    again = fusec(*ASK, "-o", tmp_path, "--json")
    assert json.loads(again.stdout)["releases"] == ["9.1.0.0", version]
    assert '"9.1.0.0"' in (tmp_path / "atlas.html").read_text()


def test_wrong_requests_are_refused(tmp_path: Path) -> None:
    for more, reason in (
        (("--cudnn", "8.9"), "a release is written 9.28"),
        (("--target", "v100"), "v100"),
        (("--pattern", "nothing"), "no pattern has such a name"),
        (("-o", tmp_path / "missing"), "there is no folder"),
    ):
        result = fusec("atlas", "-o", tmp_path, *more)
        assert result.exit_code == 2, reason
        assert reason in result.stderr
    fusec(*ASK, "-o", tmp_path)
    other = fusec("atlas", "--pattern", "conv", "--target", "h200", "-o", tmp_path)
    assert other.exit_code == 2
    assert "has other patterns" in other.stderr


def test_a_lock_is_compared_with_another_release(model: Path, tmp_path: Path) -> None:
    """The installed one runs in a process of its own as well."""
    lock = tmp_path / "fusec.lock"
    fusec("lock", model, *SHAPE, "--target", "h200", "-o", lock)
    same = ("lock", "diff", lock, model, *SHAPE, "--target", "h200", "--cudnn", "installed")
    assert (fusec(*same).exit_code, fusec(*same).stdout) == (0, "no difference\n")
    lock.write_text(lock.read_text().replace('cudnn = "9.', 'cudnn = "8.'))
    other = fusec(*same, "--json")
    assert other.exit_code == 1
    (line,) = json.loads(other.stdout)["differences"]
    assert line.startswith("cudnn: 8.")


def test_a_release_that_fails_is_reported(model: Path, tmp_path: Path) -> None:
    lock = tmp_path / "fusec.lock"
    fusec("lock", model, *SHAPE, "--target", "h200", "-o", lock)
    two = fusec("lock", "diff", lock, lock, "--cudnn", "installed")
    assert (two.exit_code, "not with a lock" in two.stderr) == (2, True)
    missing = fusec("lock", "diff", lock, tmp_path / "no.onnx", "--cudnn", "installed")
    assert missing.exit_code == 2
    assert "no.onnx" in missing.stderr
