"""Test a decoder on a stand-in GPU: a decode step is captured once, and replayed over the same memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gpu.kernels.emulator import needs_compiler
from gpu.stand_in_gpu import Machine

import fusec
from examples.decode import Config, Writer, without_cache
from fusec import driver
from fusec.frontends import Source
from fusec.generation.decoder_graph import DecoderSizes, decoder_builder
from fusec.generation.decoder_model import DecoderModel
from fusec.gpu.cudnn.legality.oracle import Oracle
from fusec.plans.plan_cache import PlanStore
from fusec.runtime import Executable

pytest.importorskip("cupy")
pytest.importorskip("cudnn")
pytestmark = [pytest.mark.cudnn, needs_compiler]


@pytest.mark.parametrize("form", ["genai", "optimum"])
def test_decode_steps_are_one_capture(form: str, machine: Machine, tmp_path: Path, asked_once: Oracle) -> None:
    from fusec.gpu.backend import CudnnBackend

    config = Config(num_hidden_layers=1)
    model = Writer(config, np.float16).model(genai=form == "genai")
    decoder = DecoderModel.of(Source(model))
    programs: list[Executable] = []
    for added in (1, 8):
        b = decoder_builder(decoder, DecoderSizes(2, 24, added), "fp16")
        state = {name: b.updates.get(name, "") for name in b.parameters}
        compiled = driver.build(b.graph(), target="h200", precision="fp16", state=state, oracle=asked_once)
        programs.append(Executable(compiled, CudnnBackend("none", store=PlanStore(tmp_path))))
    generator = fusec.Generator(programs)
    prompts = [[5, 17, 42, 9, 9], [61, 2]]
    expected = without_cache(Writer(config, np.float16).model(genai=False), prompts, 7)
    assert generator(prompts, 7) == expected
    assert machine.captured == 1  # a prompt's program is captured by its second call
    assert generator(prompts[::-1], 7) == expected[::-1]
    assert machine.captured == 2
    before, counts = machine.replayed, list[int]()
    for _ in generator.stream(prompts, 4):
        counts.append(machine.replayed - before)
    assert counts == [2, 3, 4, 4]  # a decode step is queued before the tokens of the step before it are read
    cache = {name for name in generator.decode.state if name.startswith("past")}
    assert cache <= generator.decode.in_place_state
