"""Test arrays and streams shared with other libraries."""

from __future__ import annotations

from typing import Any, cast

import pytest

pytest.importorskip("cupy")

from fusec.gpu.launch.cupy_arrays import on_stream  # not where cupy is missing


@pytest.mark.parametrize("pointer", [0, 0x7F00_1234_5600])  # 0 is the default stream, torch's own at first
def test_a_stream_of_another_library_is_that_stream(pointer: int) -> None:
    """Without a word of what CuPy deprecated: warnings are errors here."""
    assert cast(Any, on_stream(pointer)).ptr == pointer
