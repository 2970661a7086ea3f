"""Run onnx's backend test suite as users run models: compiled, in simulation and on the GPU.

The reference, which other tests judge compiled programs by, runs all of it in seconds. Compiling all takes minutes: the
default tests take a sample, `-m slow` takes all in simulation, `-m gpu` all on the GPU.
"""

from __future__ import annotations

import zlib
from typing import Any

import pytest
from conftest import SEED
from onnx_suite.suite import RECORD, cases, counts, outcomes, record, unlike_the_record

SAMPLE = 80  # cases for each one that is compiled; `make slow` compiles all; another FUSEC_TEST_SEED takes others
SHARDS = 64  # for pytest-xdist to spread
each_shard = pytest.mark.parametrize("shard", range(SHARDS))


@pytest.fixture(scope="module")
def found() -> Any:
    return outcomes(cases(), "reference")


@pytest.mark.slow
def test_the_reference_fails_nowhere(found: Any) -> None:
    failed = [f"{name}: {outcome.failed}" for (_, name), outcome in found.items() if outcome.failed]
    assert not failed, "\n".join(failed)


def test_the_record_is_true(found: Any, request: pytest.FixtureRequest) -> None:
    text = record(found)
    if request.config.getoption("--accept"):
        RECORD.write_text(text)
    else:
        assert RECORD.read_text() == text, "run pytest --accept to write it anew"


def test_most_of_it_passes() -> None:
    passed = counts(RECORD.read_text())
    assert passed["Node"][0] >= 1800
    assert sum(number for family, (number, _) in passed.items() if family != "Node") >= 130


def _check_compiles(shard: int, of: int, device: str) -> None:
    """The cases of a shard give what they should, or are refused as the record says."""
    chosen = [case for case in cases() if zlib.crc32(f"{SEED} {case[1]}".encode()) % of == shard]
    assert chosen
    wrong = unlike_the_record(outcomes(chosen, device), device)
    assert not wrong, "\n".join(wrong)


@pytest.mark.cudnn
def test_a_sample_is_right_in_simulation() -> None:
    _check_compiles(0, SAMPLE, "cpu")


@pytest.mark.slow
@pytest.mark.cudnn
@each_shard
def test_all_of_it_is_right_in_simulation(shard: int) -> None:
    _check_compiles(shard, SHARDS, "cpu")


@pytest.mark.gpu
@each_shard
def test_all_of_it_is_right_on_the_gpu(shard: int) -> None:
    _check_compiles(shard, SHARDS, "cuda")
