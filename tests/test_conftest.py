"""Test that tests are skipped with a reason where cuDNN or a GPU is missing, and never where cuDNN is required."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import conftest
import numpy as np
import pytest


class Item:
    """A stand-in for a collected test, with what the collection hook uses."""

    def __init__(self, *markers: str):
        self.markers = markers
        self.skips: list[str] = []

    def get_closest_marker(self, name: str) -> bool:
        return name in self.markers

    def add_marker(self, mark: Any) -> None:
        self.skips.append(mark.kwargs["reason"])


@pytest.fixture
def bare_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("FUSEC_REQUIRE_CUDNN", raising=False)


@pytest.mark.usefixtures("bare_machine")
def test_missing_packages_skip_the_tests_that_need_them():
    items: Any = [Item(), Item("cudnn"), Item("gpu")]
    conftest.pytest_collection_modifyitems(items)
    assert [i.skips for i in items] == [[], ["nvidia-cudnn-frontend is not installed"], ["cupy is not installed"]]


@pytest.mark.usefixtures("bare_machine")
def test_nothing_is_skipped_where_cudnn_is_required(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FUSEC_REQUIRE_CUDNN", "1")
    item: Any = Item("cudnn")
    conftest.pytest_collection_modifyitems([item])
    assert item.skips == []


@pytest.mark.parametrize("missing", ["libcudnn.so", "libnvrtc.so", "libnvrtc-builtins.so"])
def test_a_missing_library_is_named(missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "cu13" / "lib").mkdir(parents=True)
    for library in {"libcudnn.so", "libnvrtc.so", "libnvrtc-builtins.so"} - {missing}:
        (tmp_path / "cu13" / "lib" / f"{library}.9").touch()
    spec = importlib.util.spec_from_loader("nvidia", None, is_package=True)
    assert spec is not None
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    assert conftest._cudnn_missing() == f"{missing} is not installed"


def test_cache_is_not_the_users(fusec_cache: Path):
    assert os.environ["FUSEC_CACHE"] == str(fusec_cache)


@pytest.mark.parametrize("case", ["a", "b"])
def test_rng_repeats_for_one_test_and_differs_between_tests(
    case: str, rng: np.random.Generator, request: pytest.FixtureRequest
):
    other = request.node.nodeid.replace("[a]", "[b]") if case == "a" else request.node.nodeid.replace("[b]", "[a]")
    draw = rng.integers(1 << 60)
    assert draw == conftest.seeded(request.node.nodeid)[1].integers(1 << 60)
    assert draw != conftest.seeded(other)[1].integers(1 << 60)
