"""Test several batch sizes of one model on a GPU: the results, and the cost of the next size."""

from __future__ import annotations

import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from frontends.onnx.models import info, model
from helpers import assert_close, cudnn_backend
from onnx import ModelProto, helper

import fusec

pytestmark = pytest.mark.gpu


def net() -> ModelProto:
    """Fusions that cuDNN has nothing precompiled for, of several channel counts, and a classifier."""
    rng = np.random.default_rng(0)
    nodes, held, last = [], {}, "x"
    for i, (channels, filters) in enumerate(((64, 64), (64, 128), (128, 128))):
        held[f"w{i}"] = rng.standard_normal((filters, channels, 3, 3)).astype(np.float32) * (channels * 9) ** -0.5
        held[f"b{i}"] = rng.standard_normal(filters).astype(np.float32)
        nodes.append(helper.make_node("Conv", [last, f"w{i}", f"b{i}"], [f"c{i}"], pads=[1, 1, 1, 1]))
        nodes.append(helper.make_node("Sigmoid", [f"c{i}"], [f"s{i}"]))
        nodes.append(helper.make_node("Mul", [f"c{i}", f"s{i}"], [f"m{i}"]))
        last = f"m{i}"
    held["fc"] = rng.standard_normal((128, 40)).astype(np.float32)
    nodes += [helper.make_node("GlobalAveragePool", [last], ["g"]), helper.make_node("Flatten", ["g"], ["f"])]
    nodes.append(helper.make_node("MatMul", ["f", "fc"], ["y"]))
    return model(nodes, [info("x", ["N", 64, 28, 28])], [info("y", ["N", 40])], held)


def check_made_and_right(exe: Any, simulated: Any, batch: int) -> tuple[Any, float, float]:
    """The program of a batch, which computes what the simulation does; seconds to make it, and us that it runs."""
    import cupy

    x = np.random.default_rng(batch).standard_normal((batch, 64, 28, 28)).astype(np.float32)
    start = time.perf_counter()
    program = exe.at({"x": x.shape})
    seconds = time.perf_counter() - start
    for _ in range(2):
        exe(cupy.asarray(x))
    assert_close(exe(cupy.asarray(x)).get(), simulated(x), 5e-3)
    return program, seconds, sorted(program.time_us(20)[0])[10]


@pytest.mark.parametrize("share_kernels", [False, True])
def test_every_size_is_right(share_kernels: bool, capsys: pytest.CaptureFixture[str]) -> None:
    exe = fusec.compile_dynamic(net(), precision="fp16", tune="none", share_kernels=share_kernels)
    simulated = fusec.compile_dynamic(net(), precision="fp16", simulate=True)
    lines: list[str] = []
    for batch in (8, 9, 16, 3):
        _, seconds, whole_us = check_made_and_right(exe, simulated, batch)
        lines.append(
            f"batch {batch}, share_kernels={share_kernels}: made in {seconds:.2f} s, runs in {whole_us:.1f} us"
        )
    with capsys.disabled():
        print("\n" + "\n".join(lines))


@pytest.mark.parametrize("tune", ["none", "quick"])
def test_sizes_share_plans_and_kernels(
    tune: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is asked and nothing timed for them; what they compute is right, also from plans for all sizes."""
    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path))
    exe = fusec.compile_dynamic(net(), precision="fp16", tune=tune)
    simulated = fusec.compile_dynamic(net(), precision="fp16", simulate=True)
    asked, lines = 0, list[str]()
    for batch in (8, 9, 16, 12, 24):
        program, seconds, whole_us = check_made_and_right(exe, simulated, batch)
        oracle, tuned = program.compiled.judge.oracle, program.backend.plans.ranked.values()
        if batch > 8:
            assert oracle.asked == asked
            assert all(result.revived for result in tuned if result.plans[0][0].library == "cudnn")
        asked = oracle.asked
        lines.append(f"batch {batch}, tune={tune}: made in {seconds:.3f} s, runs in {whole_us:.1f} us")
    with capsys.disabled():
        print("\n" + "\n".join(lines))


def test_padded_arrays_stay_on_the_device() -> None:
    import cupy

    exe = fusec.compile_dynamic(net(), precision="fp16", tune="none", buckets={"N": [4]})
    x = np.random.default_rng(1).standard_normal((3, 64, 28, 28)).astype(np.float32)
    got = exe(cupy.asarray(x))
    assert isinstance(got, cupy.ndarray)
    assert_close(got.get(), fusec.compile_dynamic(net(), precision="fp16", simulate=True)(x), 5e-3)
    assert exe.shapes == [{"x": (4, 64, 28, 28)}]


def test_kernels_for_all_sizes_are_stored_serialized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEC_CACHE", str(tmp_path))
    x = np.random.default_rng(1).standard_normal((8, 64, 28, 28)).astype(np.float32)
    results: list[np.ndarray] = []
    for again in (False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a plan that is not stored warns
            exe = fusec.compile_dynamic(net(), precision="fp16", tune="none", share_kernels=True)
            results.append(exe(x))
        tuned = cudnn_backend(exe.at({"x": x.shape})).plans.ranked.values()
        assert all(result.revived or not again for result in tuned)  # at first, those that cuDNN's answers brought
    assert_close(results[1], results[0], 1e-3)
