"""Test ranges of sizes on the command line: files with several programs, and one program of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli.command import fusec, tiny

import fusec as library

pytestmark = pytest.mark.cudnn


def told(*args: object) -> Any:
    result = fusec(*args, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.slow
def test_a_file_for_a_range_and_its_programs(tmp_path: Path) -> None:
    model, path = tiny(tmp_path), tmp_path / "net.fusec"
    summary = told("compile", model, "--shape", "N=1..2..4", "-o", path)
    assert summary["shapes"] == [{"x": [n, 8, 8, 8]} for n in (2, 1, 4)]
    assert summary["inputs"][0]["shape"] == [2, 8, 8, 8]
    loaded: Any = library.load(path)
    assert loaded.inputs[0].shape == ("N", 8, 8, 8)
    for given, batch in (((), 2), (("--shape", "N=4"), 4), (("--shape", "x=1,8,8,8"), 1)):
        assert told("run", path, *given)["outputs"][0]["shape"] == [batch, 16, 8, 8]
    assert told("verify", path, "--shape", "N=1")["ok"]
    refused = fusec("run", path, "--shape", "N=3")
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "'N' is a dim, which has one size or a range" in fusec("run", path, "--shape", "N=1,4").stderr
    assert "has no program for {'x': (3, 8, 8, 8)}, only for x [2, 8, 8, 8]; x [1, 8, 8, 8]" in refused.stderr
    one = tmp_path / "one.fusec"
    told("compile", path, "--shape", "N=4", "-o", one)
    assert "--shape comes too late" in fusec("run", one, "--shape", "N=4").stderr


@pytest.mark.slow
def test_buckets_pad_in_the_file(tmp_path: Path) -> None:
    model, path = tiny(tmp_path), tmp_path / "net.fusec"
    result = fusec("compile", model, "--shape", "N=1..4", "--bucket", "N=2,4", "-o", path)
    assert result.exit_code == 0, result.stderr
    assert "  program for x [4, 8, 8, 8]\n  program for x [2, 8, 8, 8]\n" in result.stdout
    loaded: Any = library.load(path)
    whole: Any = library.compile_dynamic(str(model))
    for batch in range(1, 5):
        x = np.random.default_rng(batch).standard_normal((batch, 8, 8, 8)).astype(np.float32)
        np.testing.assert_allclose(loaded(x), whole(x), rtol=1e-5, atol=1e-5)
    assert [s["x"][0] for s in loaded.shapes] == [2, 4]


def test_other_commands_use_the_likely_sizes(tmp_path: Path) -> None:
    model = tiny(tmp_path)
    assert told("run", model, "--shape", "N=1..3")["outputs"][0]["shape"] == [3, 16, 8, 8]
    assert told("run", model, "--shape", "N=1..2..3")["outputs"][0]["shape"] == [2, 16, 8, 8]
    assert told("run", model, "--shape", "N=2")["outputs"][0]["shape"] == [2, 16, 8, 8]
    assert told("run", model, "--shape", "x=1..5,8,8,8")["outputs"][0]["shape"] == [5, 16, 8, 8]
    assert told("compile", model, "--shape", "N=1..3")["inputs"][0]["shape"] == [3, 8, 8, 8]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--shape", "N=1..a"), "sizes are whole numbers joined by commas, or ranges such as 1..32"),
        (("--shape", "N=4..1"), "its sizes must be 0 or more and must not fall"),
        (
            ("--shape", "N=1,4"),
            "--shape N=1,4: 'N' is a dim, which has one size or a range such as 1..32; a list is the",
        ),
        (("--shape", "N=1,2,4"), "--bucket takes the sizes to compile for"),
        (("--shape", "Q=1,4"), "there is no input 'Q'; inputs: x; dims: N"),
        (("--shape", "Q=4"), "there is no input 'Q'; inputs: x; dims: N"),
        (("--shape", "Q=1..4"), "there is no input or symbolic dim 'Q'; inputs: x; dims: N"),
        (("--bucket", "N=2"), "--bucket N=2: give the range of the dim, as in --shape N=1..32"),
        (("--shape", "N=1..4", "--bucket", "N=a"), "buckets are whole numbers joined by commas"),
        (("--shape", "N=1..4", "--bucket", "N=8"), "buckets of 'N' are [8], but its sizes are 1 to 4"),
        (("--shape", "N=1..4", "--locked", "fusec.lock"), "--locked needs one size for each dim"),
    ],
)
def test_wrong_ranges_end_with_one_message(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    result = fusec("compile", tiny(tmp_path), *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
