"""Test that ops which must be fused are one step after tuning, on a stand-in and on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu.kernels.emulator import needs_compiler
from gpu.stand_in_gpu import Machine
from helpers import one_program
from lowering.lowers_judge import LowersJudge

import fusec
from fusec.errors import CheckError
from fusec.execution.compilation import Compiled
from fusec.passes.base import Options
from fusec.passes.partition import partition
from fusec.plans.plan_cache import PlanStore
from fusec.runtime import Executable
from fusec.targets.target import load
from fusec.text import parse

pytest.importorskip("cupy")
pytest.importorskip("cudnn")

PATTERN = "conv*+add+relu"
# the end of a residual block: few pixels, so that a kernel of fusec's may be faster than cuDNN
BLOCK = """graph "g" (%x: f16[1,CI,P,P]{0,2,3,1}, %z: f16[1,CO,P,P]{0,2,3,1}) {
  %w = constant weight("w") : f16[CO,CI,1,1]{0,2,3,1}
  %b = constant weight("b") : f16[1,CO,1,1]
  %c = conv(%x, %w) {strides=[1,1], pads=[0,0,0,0], dilations=[1,1]} : f16[1,CO,P,P]{0,2,3,1}
  %d = add(%c, %b) : f16[1,CO,P,P]{0,2,3,1}
  %e = add(%d, %z) : f16[1,CO,P,P]{0,2,3,1}
  %y = relu(%e) : f16[1,CO,P,P]{0,2,3,1}
  return %y
}"""


def block(channels: int, filters: int, pixels: int) -> Any:
    rng = np.random.default_rng(0)
    text = BLOCK.replace("CI", str(channels)).replace("CO", str(filters)).replace("P,P", f"{pixels},{pixels}")
    weights = {
        "w": (rng.standard_normal((filters, channels, 1, 1)) / np.sqrt(channels)).astype(np.float16),
        "b": rng.standard_normal((1, filters, 1, 1)).astype(np.float16),
    }
    return parse(text, weights)


@needs_compiler
def test_a_sequence_that_one_kernel_runs_is_fused(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fusec.gpu.backend import CudnnBackend  # needs cupy, as the next
    from fusec.gpu.launch import kernel_launcher

    monkeypatch.setattr(kernel_launcher, "driver", lambda: None)  # which starts kernels early, on a GPU that can
    graph, target, judge = block(32, 32, 4), load("h200"), LowersJudge()
    of = Compiled(graph, partition(graph, judge, target), target, Options(), judge)
    backend = CudnnBackend("quick", store=PlanStore(tmp_path))
    program = backend.tune_steps(of.program, True, 1.0)
    assert [step.kind.value for step in program.steps] == ["kernel"], "the stand-in's kernels take no time"
    net = Executable(Compiled(graph, program, target, Options(), judge), backend)
    net.assert_fused(PATTERN)
    with pytest.raises(
        CheckError, match=r"1 of 1 places .* not one cuDNN step:\n.* runs as kernel conv\+bias\+add\+relu"
    ):
        net.assert_fused(PATTERN, cudnn_only=True)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("channels", "filters", "pixels"), [(64, 256, 56), (128, 512, 28), (256, 1024, 14), (512, 2048, 7)]
)
def test_the_residual_blocks_of_resnet_are_fused_on_the_machine_they_are_for(
    channels: int, filters: int, pixels: int
) -> None:
    net = one_program(fusec.compile(block(channels, filters, pixels), precision="fp16", tune="quick"))
    feeds = {s.name: np.ones(s.shape, s.dtype) for s in net.inputs}
    net.run(None, feeds)
    print({step.signature: runner for step, runner in net.libraries().items()})
    net.assert_fused(PATTERN)
