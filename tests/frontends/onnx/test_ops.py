"""Test each op of the front end against onnxruntime, at the first and the last opset of each table entry."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from functools import cache

import numpy as np
import onnx
import pytest
from frontends.onnx.cases import CASES as PLAIN
from frontends.onnx.cases import Case
from frontends.onnx.models import RUNTIME_OPSET, info, model, run
from frontends.onnx.more_cases import MORE
from frontends.onnx.test_control import TESTED_IN_MODELS
from helpers import assert_close
from onnx import defs, helper
from onnx.reference import ReferenceEvaluator
from onnx_suite.suite import suite_ops
from onnxruntime.capi import onnxruntime_pybind11_state  # type: ignore[attr-defined]  # an extension module

from fusec.frontends import load
from fusec.frontends.onnx.model_file.structure import RANDOM
from fusec.frontends.onnx.ops.convolution import ConvAttributes, conv
from fusec.frontends.onnx.tables import OLDEST_OPSET, REVIEWED_OPSET, TABLE
from fusec.ir import DType
from fusec.reference import evaluate

CASES = [*PLAIN, *MORE]
_LACKING = (
    onnxruntime_pybind11_state.NotImplemented,
    onnxruntime_pybind11_state.Fail,
)


def _span(op: str, since: int) -> tuple[int, int]:
    """Return the first and the last opset whose nodes of this op the entry imports."""
    later = [v for name, v in TABLE if name == op and v > since]
    last = min([v - 1 for v in later] + [REVIEWED_OPSET, onnx.defs.onnx_opset_version()])
    removed = [s.since_version for s in _history(op) if s.deprecated and s.since_version > since]
    return max(OLDEST_OPSET, since), min([last, *(v - 1 for v in removed)])


def _history(op: str) -> list[defs.OpSchema]:
    return _schemas().get(op, [])


@cache
def _schemas() -> dict[str, list[defs.OpSchema]]:
    """Return all versions of each op. Cached, because onnx makes all schemas again in each call."""
    found: dict[str, list[defs.OpSchema]] = {}
    for schema in defs.get_all_schemas_with_history():
        if schema.domain == "":
            found.setdefault(schema.name, []).append(schema)
    return found


def _runs() -> Iterator[tuple[Case, int]]:
    for case in CASES:
        first, last = _span(case.op, case.since)
        first = max(first, case.oldest)
        yield from ((case, opset) for opset in sorted({first, last}))


RUNS = list(_runs())


@pytest.mark.parametrize(("case", "opset"), RUNS, ids=[f"{c.id}@{o}#{i}" for i, (c, o) in enumerate(RUNS)])
def test_op_matches_onnxruntime(case: Case, opset: int, rng: np.random.Generator) -> None:
    inputs, held, names = {}, {}, []
    for index, operand in enumerate(case.operands):
        names.append("" if operand is None else f"x{index}")
        if callable(operand):
            inputs[names[-1]] = np.asarray(operand(rng))
        elif operand is not None:
            held[names[-1]] = operand
    results = [f"y{i}" for i in range(case.outputs)]
    node = helper.make_node(case.op, names, results, **case.attributes)
    infos = [info(n, a.shape, helper.np_dtype_to_tensor_dtype(a.dtype)) for n, a in inputs.items()]
    proto = model([node], infos, results, held, opset)
    graph = load(proto)
    got = evaluate(graph, inputs)
    for value, name in zip(graph.outputs, graph.output_names, strict=True):
        assert value.type.shape == got[name].shape
        assert value.type.dtype is DType.of(got[name].dtype)
    for name, want in zip(results, _expected(proto, case, opset, inputs), strict=True):
        assert got[name].dtype == want.dtype
        if want.size and want.dtype.kind == "f":
            assert_close(got[name], want, case.rtol)
        else:
            np.testing.assert_array_equal(got[name], want)


def _expected(proto: onnx.ModelProto, case: Case, opset: int, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
    """Compute results with onnxruntime, else onnx's evaluator, else the oldest version that onnxruntime has."""
    version = defs.get_schema(case.op, opset, "").since_version
    older = onnx.ModelProto.FromString(proto.SerializeToString())
    older.opset_import[0].version = min(opset, RUNTIME_OPSET)
    if version <= RUNTIME_OPSET:
        try:
            return run(older, inputs)
        except _LACKING:
            pass
    try:
        return [np.asarray(a) for a in ReferenceEvaluator(proto).run(None, inputs)]
    except NotImplementedError:
        older.opset_import[0].version = max(OLDEST_OPSET, case.since, case.oldest)
        return run(older, inputs)


def test_every_entry_has_a_case() -> None:
    """A case is here, in onnx's own suite, or among the tests of control flow or random numbers."""
    covered = {(case.op, case.since) for case in CASES}
    assert covered <= set(TABLE)
    for op, opset in suite_ops():
        versions = [since for name, since in TABLE if name == op and since <= opset]
        covered |= {(op, max(versions))} if versions else set()
    drawing = {(op, since) for op, since in TABLE if op in RANDOM - {"Dropout"}}  # test_random.py
    in_models = {(op, since) for op, since in TABLE if op in TESTED_IN_MODELS}
    assert set(TABLE) - covered - drawing - in_models == set()


@pytest.mark.parametrize(("op", "since"), TABLE, ids=lambda v: str(v))
def test_attributes_match_the_schemas(op: str, since: int) -> None:
    """The keyword arguments of an entry are the attributes of the op's versions it covers, with their defaults.

    A function with `**attributes` takes those of Conv.
    """
    first, last = _span(op, since)
    schemas = {s.since_version: s for s in (defs.get_schema(op, v, "") for v in range(first, last + 1))}
    assert since in {s.since_version for s in _history(op)}
    parameters = inspect.signature(TABLE[op, since]).parameters
    passed_on = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = inspect.signature(conv).parameters if passed_on else parameters
    keywords = {n: p.default for n, p in named.items() if p.kind is p.KEYWORD_ONLY}
    assert not passed_on or set(keywords) == set(ConvAttributes.__annotations__)
    assert set(keywords) == {name for s in schemas.values() for name in s.attributes}
    positional = [p for p in parameters.values() if p.kind not in (p.KEYWORD_ONLY, p.VAR_KEYWORD)][1:]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in positional)
    for schema in schemas.values():
        assert variadic or schema.max_input <= len(positional)
        for name, attribute in schema.attributes.items():
            if attribute.required and all(
                s.attributes[name].required for s in schemas.values() if name in s.attributes
            ):
                required = op == "Constant" or keywords[name] is inspect.Parameter.empty
                assert required, name
            elif attribute.default_value.type:
                value = helper.get_attribute_value(attribute.default_value)
                if isinstance(value, list):
                    value = tuple(v.decode() if isinstance(v, bytes) else v for v in value)
                value = value.decode() if isinstance(value, bytes) else value
                known = keywords[name] == value if isinstance(value, str | tuple) else None
                assert known or keywords[name] == pytest.approx(value), name


def test_versions_after_the_reviewed_one_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusec.frontends.onnx import tables

    tables.function_of.cache_clear()
    monkeypatch.setattr(tables, "REVIEWED_OPSET", 12)
    assert tables.function_of("Relu", 14) is None
    assert tables.function_of("Elu", 14) is not None  # unchanged since version 6
    tables.function_of.cache_clear()
