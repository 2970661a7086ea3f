"""Test `fusec fuzz` and `fusec fuzz replay`: what they print, write and exit with."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from cli.command import Result, fusec

from fusec.cli import fuzz as cli_fuzz
from fusec.cli.common import options
from fusec.errors import FusecError
from fusec.testing.runner.report import Found

PLANTED = Path(__file__).parent.parent / "testing" / "planted.py"


@pytest.fixture
def fuzz(tmp_path: Path) -> Any:
    def call(*args: object) -> Result:
        folders = ("--database", tmp_path / "database", "--findings", tmp_path / "findings")
        return fusec("fuzz", "--workers", 1, *folders, *args)

    return call


def test_all_well_is_0_and_shows_the_coverage(fuzz: Any) -> None:
    result = fuzz("--property", f"{PLANTED}:holds", "--examples", 20)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("20 examples (")
    assert "\ncoverage: holes\n" in result.stdout
    assert "\nplanted.py:holds " in result.stdout
    assert result.stdout.endswith("0 findings, 0 doubts\n")


def test_a_finding_is_1_and_is_replayed_until_fixed(fuzz: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = fuzz("--property", f"{PLANTED}:no_relu_and_mul", "--examples", 100, "--json", "--max-findings", 1)
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["ok"] is False
    (found,) = report["findings"]
    assert found["ops"] == {"mul": 1, "relu": 1}
    assert f"fusec fuzz replay {tmp_path / 'findings'}" in result.stderr

    replay = fusec("fuzz", "replay", tmp_path / "findings")
    assert replay.exit_code == 1
    assert "still fails: output" in replay.stdout
    assert replay.stderr == "fusec: 1 of 1 findings still fail\n"
    (tmp_path / "fixed").touch()
    monkeypatch.setenv("FUSEC_FIXED", str(tmp_path / "fixed"))
    replay = fusec("fuzz", "replay", found["folder"], "--json")
    assert replay.exit_code == 0
    assert json.loads(replay.stdout)["findings"][0]["fails"] is False
    (Path(found["folder"]) / "graph.txt").write_text("graph")
    replay = fusec("fuzz", "replay", tmp_path / "findings")
    assert replay.exit_code == 1
    assert "still fails: cannot be run" in replay.stdout


def test_graphs_are_drawn_by_the_strategy_of_that_name(fuzz: Any, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "from fusec.testing import single_ops\n\ndef convolutions():\n    return single_ops('conv')\n", encoding="utf-8"
    )
    result = fuzz("--property", f"{PLANTED}:holds", "--graphs", f"{own}:convolutions", "--examples", 10, "--json")
    report = json.loads(result.stdout)
    assert report["examples"] == 10
    assert report["coverage"]["ops"]["conv"] >= 10
    unknown = fuzz("--property", f"{PLANTED}:holds", "--graphs", "fusec.testing.strategies:none", "--examples", 10)
    assert unknown.exit_code == 2
    assert "fusec.testing.strategies has no 'none'" in unknown.stderr


@pytest.mark.slow
def test_a_run_that_checked_nothing_is_1(fuzz: Any) -> None:
    result = fuzz("--property", f"{PLANTED}:holds", "--time", "0.01s")  # no worker starts so fast
    assert result.exit_code == 1
    assert result.stdout.startswith("0 examples (")
    assert result.stderr.endswith("fusec: no graph was checked within this time: give more --time\n")


def test_time_and_seed(fuzz: Any) -> None:
    for seconds in (6, 30):  # workers of a busy machine start slowly
        result = fuzz("--property", f"{PLANTED}:holds", "--time", f"{seconds}s", "--seed", 5, "--json", "--fresh")
        report = json.loads(result.stdout)
        assert report["seed"] == 5
        assert seconds - 0.1 < report["seconds"] < seconds + 34
        if report["examples"]:
            return
    pytest.fail("nothing was checked within 30 s")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--time", "soon"), "--time soon: a time is written 60s, 10m or 1h30m"),
        (("--time", "0s"), "a time is written"),
        (("--examples", "0"), "Invalid value for '--examples'"),
        (("--property", "none"), "no property is named 'none'"),
        (("--property", "none.py:f"), "none.py: No such file"),
        (("--device",), "needs a GPU of the model h200; this machine has no GPU"),
        (("--target", "b17"), "b17"),
        (("replay", "none"), "none: no such folder"),
        (("replay",), "Missing argument 'DIR'"),
    ],
)
def test_errors_are_2(fuzz: Any, args: tuple[str, ...], words: str) -> None:
    result = fusec("fuzz", *args) if args[0] == "replay" else fuzz(*args)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stdout == ""


def test_the_manual_names_every_option_and_key(fuzz: Any) -> None:
    manual = (Path(cli_fuzz.__file__).parents[2] / "docs" / "cli.md").read_text()
    section = manual.partition("## `fusec fuzz`")[2].partition("## `fusec targets`")[0]
    assert "## `fusec fuzz replay DIR`" in section
    options = re.findall(r"(?m)^  (--[a-z][a-z-]*)", fusec("fuzz", "--help").stdout)
    assert len(options) > 10
    for option in set(options) - {"--help", "--json"}:  # as at every command
        assert f"`{option}" in section, option
    report = json.loads(fuzz("--property", f"{PLANTED}:holds", "--examples", 1, "--json").stdout)
    for key in (*report, *next(iter(report["properties"].values())), *(f.name for f in fields(Found))):
        assert f"`{key}`" in section or key == "doubt", key


def test_times() -> None:
    assert {options.seconds_of(text, "--time") for text in ("90", "90s", "1m30s")} == {90}
    assert options.seconds_of("1.5h", "--time") == 5400
    for bad in ("", "1d", "-3s", "m"):
        with pytest.raises(FusecError):
            options.seconds_of(bad, "--time")
