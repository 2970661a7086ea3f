"""Test the operands and attributes of each op against the schemas of onnxruntime, and which ops have tests."""

from __future__ import annotations

import inspect
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from onnxruntime.capi import onnxruntime_pybind11_state  # type: ignore[attr-defined]  # an extension module

from fusec.frontends.onnx.other_domains import MICROSOFT, contrib_functions
from fusec.frontends.onnx.tables import function_of

HERE = Path(__file__).parent


@cache
def _schemas() -> dict[tuple[str, str], Any]:
    listed = onnxruntime_pybind11_state.get_all_operator_schema()
    return {(s.domain, s.name): s for s in listed if (s.domain, s.name) in contrib_functions()}


def _name(kind: Any) -> str:
    """Return the name of an enumerator, which onnx does not declare."""
    return kind.name


@pytest.mark.parametrize(("domain", "op"), contrib_functions(), ids=lambda v: str(v))
def test_schemas_are_those_of_onnxruntime(domain: str, op: str) -> None:
    theirs = _schemas()[domain, op]
    found = function_of(op, 1, domain)
    assert found is not None
    function, ours = found
    assert set(ours.attributes) == set(theirs.attributes)
    for name, attribute in theirs.attributes.items():
        assert _name(ours.attributes[name].type) == attribute.type.name, name
        assert ours.attributes[name].required == attribute.required, name
    parameters = list(inspect.signature(function).parameters.values())[1:]
    operands = [p for p in parameters if p.kind is not p.KEYWORD_ONLY]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in operands)
    assert variadic or len(operands) == len(theirs.inputs)
    for mine, declared in zip(operands, theirs.inputs, strict=False):
        optional = "None" in str(mine.annotation)
        if "Optional" in str(declared.option):
            assert optional, declared.name


def test_every_op_has_a_test() -> None:
    text = "".join(path.read_text() for path in HERE.glob("test_*.py"))
    assert not [op for _, op in contrib_functions() if f'"{op}"' not in text]


def test_an_attribute_that_the_op_has_not() -> None:
    schema = function_of("FusedMatMul", 1, MICROSOFT)
    assert schema is not None
    assert "beta" not in schema[1].attributes
