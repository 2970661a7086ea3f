"""Test on a GPU that a model's file is compiled from the cached program, and that the results are the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from helpers import assert_close, one_program
from program_cache.files import drawn, write_mlp

import fusec
from benchmarks.compile_time import models
from fusec.diagnostics.explain import explain
from fusec.program_cache.store import ProgramStore

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_second_compilation_runs_no_pass(tmp_path: Path, precision: str) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(models.encoder(2, hidden=256, heads=4, length=64), path)
    built, read = (one_program(fusec.compile(path, precision=precision)) for _ in range(2))
    assert built.spent is not None and read.spent is not None
    assert "passes and partitions" in built.spent.stages
    assert not {"the model is read", "passes and partitions", "plans are timed"} & read.spent.stages.keys()
    assert "the cached program is read" in read.spent.stages
    feeds = {v.name: np.random.default_rng(0).standard_normal(v.shape).astype(v.dtype) for v in read.inputs}
    for ours, theirs in zip(read.run(None, feeds), built.run(None, feeds), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    simulated = one_program(fusec.compile(path, precision=precision, target="h200", simulate=True))
    for ours, theirs in zip(read.run(None, feeds), simulated.run(None, feeds), strict=True):
        assert_close(ours, theirs, 2e-2 if precision == "fp16" else 1e-4)
    assert (
        explain(read.compiled.program, read.compiled.target).summary
        == explain(built.compiled.program, built.compiled.target).summary
    )


def test_another_checkpoint_runs_with_its_own_weights(tmp_path: Path) -> None:
    path, x = tmp_path / "model.onnx", np.random.default_rng(1).standard_normal((8, 160)).astype(np.float32)
    nets = [one_program(fusec.compile(write_mlp(path, drawn(seed)))) for seed in range(2)]
    assert ProgramStore().info()[0] == 1
    assert nets[1].spent is not None and "passes and partitions" not in nets[1].spent.stages
    (got,) = nets[1].run(None, {"x": x})
    assert_close(got, np.maximum(x.astype(np.float64) @ drawn(1) + 0.5, 0), 1e-5)
