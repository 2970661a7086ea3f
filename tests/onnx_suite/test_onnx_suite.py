"""onnx's backend test suite: nothing fails, and what is refused is what the record says."""

from __future__ import annotations

from typing import Any

import pytest
from onnx_suite.suite import RECORD, outcomes, record


@pytest.fixture(scope="module")
def found() -> Any:
    return outcomes()


def test_nothing_fails(found: Any) -> None:
    failed = [f"{name}: {outcome.failed}" for (_, name), outcome in found.items() if outcome.failed]
    assert not failed, "\n".join(failed)


def test_the_record_is_true(found: Any, request: pytest.FixtureRequest) -> None:
    text = record(found)
    if request.config.getoption("--accept"):
        RECORD.write_text(text)
    else:
        assert RECORD.read_text() == text, "run pytest --accept to write it anew"
