"""Test a whole training step on a stand-in GPU: kernels over lists of parameters, in place, captured and replayed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu.kernels.cases import FIGURES
from gpu.kernels.emulator import needs_compiler
from gpu.stand_in_gpu import Machine
from helpers import assert_close, one_program
from test_training_models import SIZES, first

import fusec
from examples.training_models import training_step
from fusec import driver, training
from fusec.builder import Builder
from fusec.gpu.cudnn.legality.oracle import Oracle
from fusec.gpu.kernels import find
from fusec.lower_cudnn import lower
from fusec.passes.training import split_batchnorm_stats
from fusec.runtime import Executable
from fusec.schedule.program import Kind

pytest.importorskip("cupy")
pytest.importorskip("cudnn")
pytestmark = [pytest.mark.cudnn, needs_compiler]


def network(optimiser: str, heads: int = 2, size: int = 16, rate: float = 0.1) -> Builder:
    """One attention over images' rows, with biases, in fp16 under fp32 master weights. rate: of SGD, of AdamW a tenth
    of it; large nets that are as large as these weights make them diverge from rounding alone if it is not small."""
    rng = np.random.default_rng(5)
    b = Builder("f16")
    x, labels = b.input("x", (4, 8, size)), b.input("labels", (4,), "i64")
    trained: list[Any] = []

    def parameter(name: str, *shape: int) -> Any:
        trained.append(b.parameter(name, (rng.standard_normal(shape) / 4).astype(np.float32)))
        return trained[-1].astype("f16")

    packed = x @ parameter("qkv", 3 * size, size).T + parameter("qkv.bias", 3 * size)
    q, k, v = (t.reshape(4, 8, heads, -1).transpose(0, 2, 1, 3) for t in b.split(packed, 3, -1))
    mixed = b.attention(q, k, v).transpose(0, 2, 1, 3).reshape(4, 8 * size)
    logits = mixed @ parameter("head", 10, 8 * size).T + parameter("head.bias", 10)
    loss = b.cross_entropy(logits.astype("f32"), labels)
    gradients, keep = training.scaled_backward(loss, trained, start=256.0)
    if optimiser == "sgd":
        training.sgd(b, trained, gradients, rate, 0.9, keep=keep)
    else:
        training.adamw(b, trained, gradients, rate / 10, keep=keep)
    b.output(loss=loss)
    return b


@pytest.mark.parametrize("optimiser", ["sgd", "adamw"])
def test_steps_are_those_of_numpy(
    optimiser: str, machine: Machine, tmp_path: Path, rng: np.random.Generator, asked_once: Oracle
) -> None:
    from fusec.gpu.backend import CudnnBackend
    from fusec.plans.plan_cache import PlanStore

    b = network(optimiser)
    state = {name: b.updates.get(name, "") for name in b.parameters}
    compiled = driver.build(b.graph(), target="h200", state=state, oracle=asked_once)
    kernels = [step for step in compiled.program.steps if step.kind is Kind.KERNEL]
    assert any(step.signature.startswith("4 x cast") for step in kernels)
    found = [find(step.nodes, step.outputs, FIGURES) for step in kernels]
    assert sum(kernel is not None and kernel.name.startswith("lists") for kernel in found) >= 2
    here = Executable(compiled, CudnnBackend("none", store=PlanStore(tmp_path)))
    here.bind(**{name: array for name, array in b.parameters.items() if array is not None})
    there = one_program(fusec.compile(b, target="cpu"))
    assert here.in_place >= 4
    for _ in range(4):
        x, labels = rng.standard_normal((4, 8, 16)).astype(np.float16), rng.integers(0, 10, 4)
        assert_close(here.step(x, labels), there.step(x, labels), 2e-3)
    assert machine.captured == 1
    # keys' biases change no weight: what their gradient is, is rounding alone
    for name in set(here.state) - {n for n in here.state if n.startswith("qkv.bias")}:
        assert_close(here.value(name), there.value(name), 2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_models_in_the_forms_a_gpu_chooses(
    name: str, machine: Machine, tmp_path: Path, rng: np.random.Generator, asked_once: Oracle
) -> None:
    """Kernels joined with their neighbours, plans timed: nothing is left to run op by op, and losses are NumPy's."""
    from fusec.gpu.backend import CudnnBackend
    from fusec.plans.plan_cache import PlanStore

    b = training_step(name, 2, 32, first=first(training_step(name, 2, 32, **SIZES[name])), **SIZES[name])
    state = {parameter: b.updates.get(parameter, "") for parameter in b.parameters}
    compiled = driver.build(b.graph(), target="h200", state=state, oracle=asked_once)
    backend = CudnnBackend("quick", store=PlanStore(tmp_path))
    program = backend.tune_steps(compiled.program, compiled.options.tensor_cores, compiled.target.launch_us)
    here = Executable(replace(compiled, program=program), backend)
    here.bind(**{name: array for name, array in b.parameters.items() if array is not None})
    there = one_program(fusec.compile(b, target="cpu"))
    for _ in range(3):
        x, labels = rng.standard_normal((2, 3, 32, 32)).astype(np.float16), rng.integers(0, 1000, 2)
        assert_close(here.step(x, labels), there.step(x, labels), 3e-3)
    kernels = {step for step in program.steps if step.kind is Kind.KERNEL}
    assert kernels == here.kernels


@pytest.mark.cudnn
def test_a_gradient_of_attention_in_a_fixed_order_has_plans(asked_once: Oracle) -> None:
    b = network("sgd", heads=2, size=128)
    state = {name: b.updates.get(name, "") for name in b.parameters}
    for disable, ordered in ((["unordered_sums"], True), ([], False)):
        compiled = driver.build(b.graph(), target="h200", state=state, oracle=asked_once, disable=disable)
        (step,) = (s for s in compiled.program.steps if s.signature == "attention_backward")
        assert step.kind is Kind.CUDNN
        assert ("use_deterministic_algorithm" in str(lower(step.body).graph)) is ordered


def normed() -> Builder:
    """A convolution with a batch norm whose running statistics are state, after another convolution."""
    rng = np.random.default_rng(6)
    b, trained = Builder("f16"), list[Any]()

    def parameter(name: str, array: np.ndarray) -> Any:
        trained.append(b.parameter(name, array.astype(np.float32)))
        return trained[-1]

    x, labels = b.input("x", (4, 32, 6, 6)), b.input("labels", (4,), "i64")
    y = b.conv(x, parameter("v", rng.standard_normal((64, 32, 1, 1)) / 6).astype("f16"))
    y = b.conv(y, parameter("w", rng.standard_normal((64, 64, 3, 3)) / 24).astype("f16"), padding=1)
    scale, bias = parameter("scale", np.ones(64)), parameter("bias", np.zeros(64))
    z, mean, variance = b.batch_norm_train(y, scale, bias)
    for name, now in (("mean", mean), ("variance", variance)):
        running = b.parameter(name, np.zeros(64, np.float32))
        b.update(running, running * 0.9 + now * 0.1)
    head = parameter("head", rng.standard_normal((64, 10)) / 8).astype("f16")
    loss = b.cross_entropy((z.relu().mean((2, 3)) @ head).astype("f32"), labels)
    gradients, keep = training.scaled_backward(loss, trained, start=256.0)
    training.sgd(b, trained, gradients, 0.05, 0.9, keep=keep)
    b.output(loss=loss)
    return b


@pytest.mark.parametrize("tune", ["none", "quick"])
def test_statistics_come_with_the_convolution(
    tune: str,
    machine: Machine,
    tmp_path: Path,
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    asked_once: Oracle,
) -> None:
    from fusec.gpu.backend import CudnnBackend
    from fusec.plans.plan_cache import PlanStore

    monkeypatch.setattr(split_batchnorm_stats, "resident_bytes", lambda target: 0)
    b = normed()
    state = {name: b.updates.get(name, "") for name in b.parameters}
    compiled = driver.build(b.graph(), target="h200", state=state, oracle=asked_once)
    assert any(step.signature == "conv+channel_sums" for step in compiled.program.steps)
    here = Executable(compiled, CudnnBackend(tune, store=PlanStore(tmp_path)))
    if tune == "none":
        assert any(step.signature.startswith("batch_norm_by_sums") for step in here.compiled.program.steps)
    here.bind(**{name: array for name, array in b.parameters.items() if array is not None})
    there = one_program(fusec.compile(b, target="cpu", disable=["split_batchnorm_stats"]))
    for _ in range(3):
        x, labels = rng.standard_normal((4, 32, 6, 6)).astype(np.float16), rng.integers(0, 10, 4)
        assert_close(here.step(x, labels), there.step(x, labels), 2e-3)
    for name in here.state:
        assert_close(here.value(name), there.value(name), 2e-2)
