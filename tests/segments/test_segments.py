"""Models that are cut at host steps, compared with onnxruntime, in simulation and op by op."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from frontends.onnx.models import run
from helpers import assert_close
from segments.models import CASES

import fusec
from fusec.segments.executable import SegmentedExecutable


def compiled(proto: Any, **options: Any) -> SegmentedExecutable:
    executable = fusec.compile(proto, **options)
    assert isinstance(executable, SegmentedExecutable)
    return executable


def agrees(executable: Any, proto: Any, feeds: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = run(proto, dict(feeds))
    got = executable.run(None, dict(feeds))
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert_close(one, other, 1e-5)


@pytest.mark.parametrize("name", CASES)
def test_every_case_agrees_with_onnxruntime(name: str) -> None:
    case = CASES[name]()
    executable = compiled(case.proto, target="cpu")
    for feeds in (*case.feeds, case.feeds[0]):
        agrees(executable, case.proto, feeds)
        steps = tuple(step.op for segment in executable.explain().segments for step in segment.steps)
        assert not case.steps or steps == case.steps
