"""Ask the real cuDNN about a few patterns: what it takes, its words, and the nearest change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from fusec.atlas import ask as asking
from fusec.atlas.patterns import Pattern, patterns
from fusec.targets.target import load

pytestmark = pytest.mark.cudnn


def chosen(name: str, precision: str, family: str = "") -> Pattern:
    return next(p for p in patterns(name) if p.precision == precision and (not family or p.family == family))


@pytest.fixture(scope="module")
def answers() -> Mapping[str, Any]:
    asked = {
        "precompiled": chosen("conv+bias+relu", "fp16"),
        "runtime": chosen("matmul+bias+relu", "fp16"),
        "rows": chosen("conv+bias+add+relu", "fp16", "convolution, row-major"),
        "strict": chosen("matmul+bias+relu", "fp32"),
        "sign": chosen("conv+bias+sign", "fp16"),
    }
    told = asking.ask(load("h200"), list(asked.values()), {})
    assert told["target"] == "h200"
    assert told["cudnn"] > 90000
    return dict(zip(asked, told["answers"], strict=True))


@pytest.mark.slow
def test_engines_are_listed(answers: Mapping[str, Any]) -> None:
    assert answers["precompiled"]["precompiled"]
    assert not answers["runtime"]["precompiled"]
    assert answers["runtime"]["runtime"]
    assert all(answers[name]["built"] and answers[name]["plans"] for name in ("precompiled", "runtime"))


def test_a_refusal_is_in_cudnns_words_with_the_nearest_change(answers: Mapping[str, Any]) -> None:
    refused = answers["rows"]
    assert (refused["accepted"], refused["stage"]) == (False, "plan")
    assert refused["code"].startswith("CUDNN_STATUS_NOT_SUPPORTED")
    assert refused["nearest"]["change"] == "with channels last in memory"
    assert refused["nearest"]["runtime"]


def test_true_fp32_may_use_tensor_cores_only_for_the_nearest_change(answers: Mapping[str, Any]) -> None:
    assert answers["strict"]["stage"] == "lower"
    assert answers["strict"]["nearest"]["change"] == "with operands rounded to tf32"


def test_leaving_out_an_op_is_the_last_change(answers: Mapping[str, Any]) -> None:
    assert answers["sign"]["nearest"]["change"] == "without sign"


def test_a_plan_that_was_built_before_is_not_built_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """For a GPU of the same compute capability, whose verdicts are stored apart."""
    pattern = [chosen("matmul+bias+relu", "fp16")]
    proven: asking.Proven = {}
    assert asking.ask(load("h200"), pattern, proven)["answers"][0]["built"]
    assert len(proven) == 1
    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path))  # another run may have built it
    again = asking.ask(load("h100"), pattern, proven)["answers"][0]
    assert again["accepted"]
    assert not again["built"]
    assert asking.ask(load("h100"), pattern, {})["answers"][0]["built"]
