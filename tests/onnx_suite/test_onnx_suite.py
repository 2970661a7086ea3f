"""onnx's backend test suite: nothing fails, and what is refused is what the record says; a sample is compiled, too."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import SEED
from onnx import TensorProto, numpy_helper
from onnx.backend.test.runner import Runner
from onnx_suite.suite import RECORD, counts, outcomes, passing, record

from fusec.onnx_backend import prepare
from fusec.reference import evaluate
from fusec.testing.case import Case
from fusec.testing.prepared import Prepared

SAMPLE = 20  # one case of so many is compiled; another FUSEC_TEST_SEED takes others


@pytest.fixture(scope="module")
def found() -> Any:
    return outcomes()


def test_nothing_fails(found: Any) -> None:
    failed = [f"{name}: {outcome.failed}" for (_, name), outcome in found.items() if outcome.failed]
    assert not failed, "\n".join(failed)


def test_the_record_is_true(found: Any, request: pytest.FixtureRequest) -> None:
    text = record(found)
    if request.config.getoption("--accept"):
        RECORD.write_text(text)
    else:
        assert RECORD.read_text() == text, "run pytest --accept to write it anew"


def test_most_of_it_passes() -> None:
    passed = counts(RECORD.read_text())
    assert passed["Node"][0] >= 1800
    assert sum(number for family, (number, _) in passed.items() if family != "Node") >= 130


def _array(item: Any) -> Any:
    return numpy_helper.to_array(item) if isinstance(item, TensorProto) else item


def _sampled(of: int) -> Iterator[Any]:
    return (c for c in passing() if zlib.crc32(f"{SEED} {c.name}".encode()) % of == 0)


def _compiles(case: Any) -> None:
    """Through the passes and the partitioner, every partition lowered; the optimised graph gives what it should."""
    rep = prepare(case.model)
    for data in case.data_sets:
        inputs, wanted = ([_array(a) for a in side] for side in data)
        given = rep.named(inputs)
        graph, lengths = rep.compiled(given)
        feeds = {v.name: given[v.name] for v in graph.inputs}
        shared = Prepared(graph, Case(judge="lowers", feeds=feeds))
        assert len(shared.compiled.lowered) == len(shared.compiled.program.steps)
        typed = all(v.type.dtype.numpy == feeds[v.name].dtype for v in shared.optimised.inputs)
        if lengths or not typed:
            continue  # fp32 was asked for, and the case has another type
        with np.errstate(all="ignore"):
            got = evaluate(shared.optimised, feeds)
        outputs = [got[n].astype(w.dtype) for n, w in zip(shared.optimised.output_names, wanted, strict=True)]
        narrow = any(v.type.dtype.epsilon > 1e-4 for v in graph.values())
        Runner.assert_similar_outputs(wanted, outputs, 2e-2 if narrow else 1e-3, 1e-2 if narrow else 1e-5)


def test_a_sample_compiles() -> None:
    sample = list(_sampled(SAMPLE))
    assert len(sample) > 40
    for case in sample:
        try:
            _compiles(case)
        except Exception as error:
            raise AssertionError(f"{case.name}: {type(error).__name__}: {error}") from error


@pytest.mark.slow
def test_all_of_it_compiles() -> None:
    for case in _sampled(1):
        try:
            _compiles(case)
        except Exception as error:
            raise AssertionError(f"{case.name}: {type(error).__name__}: {error}") from error
