"""Test the folder of cached programs: it is bounded, and what cannot be written is left out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from program_cache.files import Builder, drawn, write_mlp

from fusec import frontends
from fusec.execution.compilation import Compiled
from fusec.execution.compile_options import CompileOptions
from fusec.program_cache.model_files import ModelFiles
from fusec.program_cache.store import ProgramStore
from fusec.system.byte_ranges import FileRanges


@pytest.fixture
def made(tmp_path: Path) -> tuple[Compiled, ModelFiles]:
    source = frontends.Source(write_mlp(tmp_path / "model.onnx", drawn()))
    return Builder(CompileOptions())(source.load()), ModelFiles(FileRanges(tmp_path / "model.onnx"), tmp_path)


def test_the_entries_that_were_unused_for_longest_are_deleted(
    tmp_path: Path, made: tuple[Compiled, ModelFiles]
) -> None:
    compiled, model = made
    store = ProgramStore(tmp_path / "programs")
    store.put("a", "here", compiled, model, ())
    (count, size) = store.info()
    assert count == 1
    store = ProgramStore(tmp_path / "programs", max_bytes=2 * size + size // 2)
    store.put("b", "here", compiled, model, ())
    for age, name in enumerate("ba"):
        os.utime(store.folder / name, (age, age))
    assert store.get("b", model) is not None, "marks it as used now"
    store.put("c", "here", compiled, model, ())
    assert sorted(each.name for each in store.folder.iterdir() if not each.name.startswith(".")) == ["b", "c"]
    assert store.clear() == 2
    assert store.info() == (0, 0)
    assert store.get("b", model) is None


def test_an_entry_under_another_name_is_not_used(tmp_path: Path, made: tuple[Compiled, ModelFiles]) -> None:
    compiled, model = made
    store = ProgramStore(tmp_path / "programs")
    store.put("a", "here", compiled, model, ())
    (store.folder / "a").rename(store.folder / "b")
    with pytest.warns(UserWarning, match="is of another program"):
        assert store.get("b", model) is None


def test_a_folder_that_cannot_be_written_costs_only_time(tmp_path: Path, made: tuple[Compiled, ModelFiles]) -> None:
    compiled, model = made
    (tmp_path / "programs").write_text("a file")
    store = ProgramStore(tmp_path / "programs")
    store.put("a", "here", compiled, model, ())
    assert store.get("a", model) is None
