"""Test that executables and sessions say what to give to other processes in their place."""

from __future__ import annotations

import copy
import pickle  # noqa: TID251 - what is tested is what pickle says
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli.command import tiny
from segments.models import non_zero

import fusec

MAKE: dict[str, Callable[[str], Any]] = {
    "Executable": lambda path: fusec.compile(path, target="cpu", shapes={"N": 1}),
    "DynamicExecutable": lambda path: fusec.compile_dynamic(path, target="cpu"),
    "SegmentedExecutable": lambda path: fusec.compile(non_zero().proto, target="cpu"),
    "InferenceSession": lambda path: fusec.InferenceSession(path, target="cpu"),
}


@pytest.mark.parametrize("kind", MAKE)
def test_the_message_names_the_file_to_give(kind: str, tmp_path: Path) -> None:
    made = MAKE[kind](str(tiny(tmp_path)))
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match=rf"^{kind} holds .* give other processes the path of the model"):
            attempt(made)
