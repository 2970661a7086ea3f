"""Test cuDNN's verdicts on quantised steps for each GPU that multiplies 8-bit integers; no GPU is needed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers import quick
from lowering.bodies import BODIES, NHWC, load

from fusec.gpu.cudnn.legality.oracle import Oracle
from fusec.lower_cudnn import lower
from fusec.plans.sqlite_cache import Store
from fusec.plans.verdict import Legal, Refused
from fusec.targets.target import load as load_target

pytestmark = pytest.mark.cudnn

CONVOLUTION = BODIES["integer conv, scale, bias, integer residual, relu, rounded"]
PRODUCT = BODIES["integer matmul, rounded with a zero point and limits, and as it was before"]
DEPTHWISE = f"""graph "b" (%x: i8[2,16,9,7]{NHWC}) {{
  %w = constant weight("w") : i8[16,1,3,3]{NHWC}
  %s = constant weight("s") : f32[1,16,1,1]
  %c = conv(%x, %w) {{strides=[1,1], pads=[1,1,1,1], dilations=[1,1], groups=16}} : i32[2,16,9,7]{NHWC}
  %f = cast(%c) {{to=f32}} : f32[2,16,9,7]{NHWC}
  %d = mul(%f, %s) : f32[2,16,9,7]{NHWC}
  return %d
}}"""


@pytest.fixture(scope="module", params=quick(["a100", "l4", "h200", "b200"], ["h200"]))
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    store = Store(tmp_path_factory.mktemp("oracle") / "answers.sqlite")
    with Oracle(load_target(request.param), store=store, workers=1) as oracle:
        yield oracle


def test_integer_products_with_scale_bias_residual_and_rounding_are_one_step(oracle: Oracle) -> None:
    verdicts = oracle.judge([lower(load(text)).graph for text in (CONVOLUTION, PRODUCT)])
    for verdict in verdicts:
        assert isinstance(verdict, Legal) and len(verdict.plans) > 1, verdict
        built = [plan.engine for plan in verdict.plans if plan.built]
        assert len(built) == 1 and built != [2], "one plan proves the others, and engine 2 is slow to compile"


def test_a_depthwise_convolution_of_integers_takes_no_epilogue(oracle: Oracle) -> None:
    """fusec's own kernel runs it. When cuDNN takes it one day, the choice is to be made anew."""
    (verdict,) = oracle.judge([lower(load(DEPTHWISE), for_cudnn=False).graph])
    assert isinstance(verdict, Refused)
