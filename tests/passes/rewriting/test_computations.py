"""Test computations of constants as plain data: what is written is read again, and nothing else is called."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import numpy as np
import pytest

from fusec import passes
from fusec.errors import ModelError
from fusec.ops import Transpose, pw
from fusec.passes.rewriting import computations
from fusec.passes.rewriting.computations import UnrecordedError, computation_data, computation_of, recorded
from fusec.passes.rewriting.derived_constants import product

assert passes.PIPELINE, "imports the passes, which record their computations"


def again(compute: Any) -> Any:
    return computation_of(json.loads(json.dumps(computation_data(compute))))


def named(name: str) -> Any:
    return computations._BY_NAME[name]


def test_a_function_with_an_array_is_read_as_it_was_written() -> None:
    factor = np.array([[0.1], [-0.0], [np.inf]])
    read = again(partial(product, factor=factor))
    w = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    assert read.func is product
    np.testing.assert_array_equal(read(w), product(w, factor))
    assert read.keywords["factor"].tobytes() == factor.tobytes()


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("concatenated", {"axis": 1}),
        ("in_a_row", {"sizes": (2, 3)}),
        ("repeated", {"shape": (1, 2), "whole": (3, 2)}),
        ("with_infinity", {"lowest": -65504.0}),
        ("result", {"op": Transpose((1, 0)), "index": 0}),
        ("in_float64", {"op": pw("clip", min=-0.0, max=6.0)}),
        ("arranged", {"views": (Transpose((1, 0)),), "offset": 8, "name": "i4"}),
        ("columns", {}),
    ],
)
def test_arguments_are_read_as_they_were_written(name: str, given: dict[str, Any]) -> None:
    compute = partial(named(name), **given) if given else named(name)
    read = again(compute)
    assert (repr(read.keywords), read.func) == (repr(given), named(name)) if given else read is named(name)


def test_a_computation_that_is_an_object_is_read_as_it_was_written() -> None:
    made = named("OneResult")(Transpose((1, 0)), 0, "w")
    read = again(made)
    assert (read.op, read.index, read.name) == (made.op, made.index, made.name)
    np.testing.assert_array_equal(read(np.eye(2, 3)), np.eye(3, 2))


@pytest.mark.parametrize(
    ("compute", "reason"),
    [
        (np.negative, "negative is not recorded"),
        (lambda array: array, "is not recorded"),
        (partial(product, np.ones(1)), "has arguments without names"),
        (partial(product, factor={1}), "an argument is a set"),
    ],
)
def test_other_computations_have_no_form_as_data(compute: Any, reason: str) -> None:
    with pytest.raises(UnrecordedError, match=reason):
        computation_data(compute)


@pytest.mark.parametrize(
    "data",
    [
        {"function": "system", "given": {}},
        {"function": "product", "given": {"factor": {"array": ["O", [1], ""]}}},
        {"function": "product", "given": {"factor": {"array": ["<f8", [2], "AAAA"]}}},
        {"function": "result", "given": {"op": {"op": "nothing"}, "index": 0}},
        {"function": "product", "given": {"factor": {"call": "os.system"}}},
    ],
)
def test_other_data_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises((ValueError, ModelError)):
        computation_of(data)


def test_names_are_unique() -> None:
    def _product() -> None: ...

    with pytest.raises(AssertionError, match="two computations are named product"):
        recorded(_product)
