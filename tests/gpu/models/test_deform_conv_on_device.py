"""Test models with deformable convolutions on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
from frontends.onnx.test_sampling import DEFORMED, deformed, feeds_of
from onnx.reference import ReferenceEvaluator

import fusec

SEVERAL = [name for name in DEFORMED if name != "one pixel"]  # a single result may cancel
ERROR = {"fp32": 1e-5, "fp16": 1e-2, "bf16": 5e-2}  # relative, L2


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ERROR)
@pytest.mark.parametrize("name", SEVERAL)
def test_deform_conv_agrees_with_the_standard(name: str, precision: str) -> None:
    image, filters, how = DEFORMED[name]
    proto = deformed(image, filters, **how)
    feeds = feeds_of(proto)
    executable = fusec.compile(proto, precision=precision)
    assert "deform_conv" in str(executable.explain())
    (want,) = map(np.asarray, ReferenceEvaluator(proto).run(None, feeds))
    error = np.linalg.norm(executable.run(None, feeds)[0] - want) / np.linalg.norm(want)
    assert error < ERROR[precision]
