"""Test quantised layers and a quantised CNN on a GPU, against onnxruntime's integer kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gpu.plan_check import random_buffers
from helpers import one_program, relative_l2
from lowering.bodies import BODIES, load
from onnx.reference import ReferenceEvaluator
from onnxruntime.quantization import QuantFormat, QuantType
from quantized.models import (
    IMAGE,
    DynamicLayers,
    Layer,
    Layers,
    dynamic_convolution,
    dynamic_products,
    quantised_cnn,
    random_convolution,
    random_product,
    run_onnxruntime,
)

import fusec
from fusec.compiler import compile_model, faster_form
from fusec.diagnostics.verify import TIES
from fusec.lower_cudnn import lower
from fusec.lowering.simulator import simulate
from fusec.passes.partition.equivalent_spellings import faster_spellings
from fusec.runtime import Executable
from fusec.schedule.program import Kind

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

LAYERS = 12


@pytest.mark.parametrize("draw", [random_convolution, random_product])
def test_layers_equal_onnxruntime_within_one_step(
    draw: Callable[[np.random.Generator], Layer], rng: np.random.Generator
) -> None:
    other = count = 0
    for _ in range(LAYERS):
        layer = draw(rng)
        net = fusec.compile(layer.model, precision="fp16", tune="none")
        assert net.device != "simulated"
        steps = np.rint((net.run(None, layer.feeds)[0] - run_onnxruntime(layer.model, layer.feeds)) / layer.step)
        assert np.abs(steps).max(initial=0) <= 1
        other, count = other + np.count_nonzero(steps), count + steps.size
    assert other <= 1 + count * TIES


@pytest.mark.parametrize("form", QuantFormat)
@pytest.mark.parametrize("rounding", ["source", "fused"])
def test_a_quantised_cnn_computes_what_onnxruntime_does(
    rounding: str, form: QuantFormat, tmp_path: Path, rng: np.random.Generator
) -> None:
    path = quantised_cnn(tmp_path, symmetric=True, per_channel=True, form=form)
    net = fusec.compile(path, precision="fp16", rounding=rounding)
    x = rng.standard_normal(IMAGE).astype(np.float32)
    assert relative_l2(np.asarray(net(x)), run_onnxruntime(str(path), {"x": x})) < 0.03
    assert net.verify().ok, str(net.verify())


@pytest.mark.parametrize("kind", [QuantType.QInt8, QuantType.QUInt8])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("draw", [dynamic_products, dynamic_convolution])
def test_a_dynamically_quantised_model_computes_its_definition(
    draw: Callable[[Path, QuantType, bool], DynamicLayers], per_channel: bool, kind: QuantType, tmp_path: Path
) -> None:
    layers = draw(tmp_path, kind, per_channel)
    net = fusec.compile(layers.model, precision="fp16")
    (want,) = ReferenceEvaluator(layers.model).run(None, layers.feeds)
    assert relative_l2(np.asarray(net.run(None, layers.feeds)[0]), want) < 0.01
    assert net.verify().ok, str(net.verify())


@pytest.mark.parametrize("title", [title for title in BODIES if title.startswith(("integer conv", "integer matmul"))])
def test_plans_of_a_product_in_halves_give_its_integers(title: str, rng: np.random.Generator) -> None:
    """cuDNN casts the image to fp16 before a convolution, which no other step asks of it."""
    from fusec.gpu.backend import CudnnBackend

    ((_, halves),) = faster_spellings(load(BODIES[title]))
    graph, wrong = lower(halves).graph, list[str]()
    host = random_buffers(graph, rng)
    poisoned = {uid: buffer.copy() for uid, buffer in host.items()}
    simulate(graph, host)
    runners = list(CudnnBackend("none").plan_runners(graph, 4))
    assert runners
    for choice, run in runners:
        device = {uid: buffer.copy() for uid, buffer in poisoned.items()}
        run(device)
        for tensor in graph.outputs:
            steps = np.abs(device[tensor.uid].astype(np.int64) - host[tensor.uid].astype(np.int64))
            if steps.max() > 1 or np.count_nonzero(steps) > 1 + steps.size * TIES:
                wrong.append(
                    f"{choice.name} {choice.knobs}: {np.count_nonzero(steps)} of {steps.size}, by {steps.max()}"
                )
    assert not wrong, "\n".join(wrong)


def test_a_first_convolution_over_images_in_rows_is_timed_as_a_kernel(rng: np.random.Generator) -> None:
    """It rounds to int8."""
    g, x = Layers(), rng.standard_normal((32, 3, 224, 224)).astype(np.float32)
    w, b = (g.constant(rng.standard_normal(shape).astype(np.float32) / 12) for shape in ((64, 3, 7, 7), (64,)))
    y = g.op("Relu", g.op("Conv", "x", w, b, kernel_shape=[7, 7], strides=[2, 2], pads=[3] * 4))
    y = g.rounded(y, np.array(0.03, np.float32), np.array(0, np.int8))
    q = g.weights(
        rng.integers(-64, 64, (64, 64, 3, 3)).astype(np.int8), np.full(64, 0.01, np.float32), np.zeros(64, np.int8)
    )
    g.op("Conv", y, q, kernel_shape=[3, 3], pads=[1] * 4, name="y")
    net = one_program(fusec.compile(g.model({"x": x.shape}, "y"), precision="fp16"))
    assert net.verify().ok, str(net.verify())
    first = next(step for step in net.compiled.program.steps if any(n.op.name == "conv" for n in step.nodes))
    assert first.kind is Kind.KERNEL, "cuDNN was faster than few_channels: print the step times"


def test_the_faster_of_both_whole_forms_runs(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both forms are timed on the GPU, whichever wins; its results are those of the model within the rounding."""
    timed: list[float | None] = []

    def noted(executable: Executable) -> float | None:
        timed.append(faster_form.whole_us(executable))
        return timed[-1]

    monkeypatch.setattr(compile_model, "whole_us", noted)
    path = quantised_cnn(tmp_path, symmetric=True, per_channel=True)
    net = fusec.compile(path, precision="fp16", rounding="fastest")
    assert isinstance(net, Executable) and len(timed) == 2 and all(us is not None and us > 0 for us in timed)
    assert faster_form.multiplies_bytes(net.compiled) == (timed[0] <= timed[1])  # type: ignore[operator]  # see above
    x = rng.standard_normal(IMAGE).astype(np.float32)
    assert relative_l2(np.asarray(net(x)), run_onnxruntime(str(path), {"x": x})) < 0.05
