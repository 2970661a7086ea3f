"""Test every gradient rule against finite differences in float64, over all attributes the ops take."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from unittest import SkipTest
from unittest.mock import patch

import pytest
from helpers import HEALTH_CHECKS
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fusec import gradients
from fusec.builder import Tensor
from fusec.gradients import RULES, STOPS
from fusec.gradients.core import BackwardStep, Gradients
from fusec.ir import Graph
from fusec.ops import BY_NAME
from fusec.testing import single_ops
from fusec.testing.case import Case, MismatchError
from fusec.testing.properties.finite_differences import gradients as gradients_agree

EXAMPLES = 12
QUICK = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=HEALTH_CHECKS, database=None)


def test_every_op_has_a_rule_or_a_reason() -> None:
    assert set(RULES) | set(STOPS) == set(BY_NAME)
    assert not set(RULES) & set(STOPS)
    assert all(STOPS.values())


@pytest.mark.parametrize("name", sorted(RULES))
def test_rules_agree_with_finite_differences(name: str) -> None:
    checked = []

    @QUICK
    @given(single_ops(name), st.integers(0, 1000))
    def check(graph: Graph, seed: int) -> None:
        try:
            gradients_agree(graph, Case(seed))
        except SkipTest:
            return
        checked.append(name)

    check()
    assert checked or name in ("top_k",), "no graph had floats to differentiate"


@contextmanager
def scaled(name: str, place: int) -> Generator[None]:
    """Make a rule one of whose gradients is a thousandth too large."""
    right = RULES[name]

    def wrong(step: BackwardStep) -> Gradients:
        given = right(step)
        parts = [given] if given is None or isinstance(given, Tensor) else list(given)
        found = parts[place]
        if found is not None:
            parts[place] = found * 1.001
        return parts

    with patch.object(gradients, "RULES", {**RULES, name: wrong}):
        yield


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *(("conv", 0), ("conv", 1), ("matmul", 0), ("matmul", 1), ("batch_norm_train", 0), ("batch_norm_train", 1)),
        *(("layer_norm", 1), ("layer_norm", 0), ("max_pool", 0), ("avg_pool", 0), ("softmax", 0), ("div", 1)),
        *(("gather", 0), ("reduce", 0), ("resize", 0), ("gelu", 0), ("slice", 0)),
    ],
)
def test_an_error_of_one_thousandth_is_found(name: str, place: int) -> None:
    @settings(QUICK, max_examples=80, phases=[Phase.generate])
    @given(single_ops(name), st.integers(0, 1000))
    def check(graph: Graph, seed: int) -> None:
        try:
            gradients_agree(graph, Case(seed))
        except SkipTest:
            return

    with scaled(name, place), pytest.raises(MismatchError, match="the gradient of"):
        check()
