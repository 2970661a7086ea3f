"""A quantised transformer has no more launches on a GPU than its fp16 form: no rounding, copy or cast stays alone."""

from __future__ import annotations

import pytest
from exported.packing import read
from quantization.test_exported_models import fed

import fusec
from fusec.gpu.autotune.step_fusion import fuse_steps
from fusec.runtime import Executable

pytestmark = pytest.mark.cudnn


@pytest.mark.parametrize("format", ["int8", "fp8"])
@pytest.mark.parametrize("name", ["bert-script"])
def test_every_rounding_is_in_a_step_that_computes_its_operand(name: str, format: str) -> None:
    model = read(name)
    feeds = fed(model)
    quantised = fusec.quantize(model, [feeds], format=format).model
    launches: list[int] = []
    for each in (model, quantised):
        shapes = {name: array.shape for name, array in feeds.items()}
        executable = fusec.compile(each, precision="fp16", target="h200", simulate=True, shapes=shapes)
        assert isinstance(executable, Executable)
        compiled = executable.compiled
        program = fuse_steps(compiled.program, compiled.figures, products=True)
        launches.append(program.launches)
        alone = [
            step.signature
            for step in program.steps
            if step.signature.startswith(("cast+mul+round", "cast+mul+clip", "round"))
        ]
        assert not alone
    assert launches[1] <= launches[0]
