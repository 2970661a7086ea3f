"""Test the nine light models the whole way for an H200, without one: shipped outputs, random weights, what fused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from helpers import assert_close, quick
from test_models import LARGE

import fusec
from examples.models import LIGHT, light, random_inputs, randomised, reference_inputs, reference_outputs
from fusec import driver
from fusec.diagnostics.verify import verify
from fusec.gpu.cudnn.legality.oracle import Oracle
from fusec.runtime import Executable, SimulatorBackend
from fusec.schedule.program import Kind

pytestmark = pytest.mark.cudnn


@pytest.fixture
def simulated(asked_once: Oracle) -> Callable[..., Executable]:
    """For an H200, and never on one."""

    def made(model: Any, precision: str = "fp32", oracle: Oracle | None = asked_once) -> Executable:
        return Executable(driver.build(model, target="h200", precision=precision, oracle=oracle), SimulatorBackend())

    return made


@pytest.mark.parametrize("name", quick(LIGHT, set(LIGHT) - LARGE - {"light_densenet121", "light_inception_v2"}))
def test_shipped_outputs(name: str, simulated: Callable[..., Executable]) -> None:
    """Shipped weights repeat one number per tensor: logits near 1e10 then turn on the last bit of a sum,
    which is how a sum whose order depended on the channel was found."""
    shipped = simulated(light(name)).run(None, reference_inputs(name))
    for got, want in zip(shipped, reference_outputs(name).values(), strict=True):
        assert_close(got, want, 1e-3)


# Large weights take longer to draw, copy and multiply than everything that is tested of them.
@pytest.mark.parametrize("name", quick(LIGHT, set(LIGHT) - LARGE - {"light_densenet121"}))
def test_outputs_of_random_weights(name: str, simulated: Callable[..., Executable]) -> None:
    model = randomised(onnx.load(light(name)), seed=11)
    inputs = random_inputs(model, seed=12)
    executable = simulated(model)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    for got, want in zip(executable.run(None, inputs), session.run(None, inputs), strict=True):
        assert_close(got, want, 1e-4)
    memory = executable.memory
    assert memory.live_bytes <= memory.nbytes <= 1.1 * memory.live_bytes
    program = executable.compiled.program
    assert not any(node.op.name == "batch_norm" for node in program.graph.nodes)
    for step in program.steps:
        if "conv" in step.signature:
            assert step.kind is Kind.CUDNN
            assert step.verdict is not None
            assert step.verdict.precompiled


@pytest.mark.parametrize(("name", "precision"), [("resnet50", "fp32"), ("shufflenet", "fp16"), ("squeezenet", "bf16")])
def test_every_step_is_verified(name: str, precision: str, simulated: Callable[..., Executable]) -> None:
    report = verify(simulated(randomised(onnx.load(light(name)), seed=13), precision).compiled)
    assert report.ok, str(report)


def test_what_fuses_in_resnet50(simulated: Callable[..., Executable]) -> None:
    executable = simulated(light("resnet50"))
    program = executable.compiled.program
    convolutions = [s for s in program.steps if "conv" in s.signature]
    assert len(convolutions) == 53
    assert program.launches <= 57
    residual = [n for n in program.graph.nodes if n.op.name == "add" and all(v.literal is None for v in n.operands)]
    assert len(residual) == 16
    assert all("conv" in program.step_of[n].signature for n in residual)
    executable.assert_fused("conv*+add+relu")
    executable.assert_fused("conv+bias+relu")
    with pytest.raises(fusec.CheckError):
        executable.assert_fused("conv*+relu+max_pool")


def test_compiling_twice_gives_the_same_program(simulated: Callable[..., Executable]) -> None:
    programs = {str(simulated(light("shufflenet"), oracle=None).compiled.program) for _ in range(2)}
    assert len(programs) == 1


def test_float_inputs_of_another_scale(simulated: Callable[..., Executable]) -> None:
    """A net that is right on unit inputs and wrong on others would hide a rounding or a bound."""
    model = randomised(onnx.load(light("squeezenet")), seed=14)
    inputs = {name: 40 * array for name, array in random_inputs(model, seed=15).items()}
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (want,) = session.run(None, inputs)
    (got,) = simulated(model).run(None, inputs)
    assert np.isfinite(got).all()
    assert_close(got, want, 1e-3)
