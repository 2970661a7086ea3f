"""Test constants as plain data: an entry holds small ones, and says how large ones come from the model's file."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from fusec import passes
from fusec.frontends.onnx.model_file.stored_data import StoredData
from fusec.ir import DType, Literal, TensorType
from fusec.ops import Transpose
from fusec.passes.layout.precision import Narrow
from fusec.passes.rewriting.computations import UnrecordedError
from fusec.passes.rewriting.derived_constants import Derived, product
from fusec.program_cache.constants import STORED_BYTES, ConstantsWriter, read_constants
from fusec.system.byte_ranges import MemoryRanges, Place

assert passes.PIPELINE, "imports the passes, which record their computations"
NUMBERS = np.random.default_rng(0).standard_normal((400, 120)).astype(np.float32)
FILE = MemoryRanges(bytes(64) + NUMBERS.tobytes())
TYPE = TensorType((400, 120), DType.F32)


def weight() -> Literal:
    return Literal(TYPE, StoredData(FILE, Place(64, NUMBERS.nbytes), TYPE), "w", keep=False)


def again(*literals: Literal) -> list[Literal]:
    writer = ConstantsWriter()
    numbers = [writer.number(each) for each in literals]
    values = {each.digest: each for each in writer.values}
    found = read_constants(writer.data, values, {"": FILE}.__getitem__)
    return [found[number] for number in numbers]


def test_a_weight_is_a_place_in_the_file() -> None:
    writer = ConstantsWriter()
    writer.number(weight())
    assert writer.data == [{"label": "w", "type": "f32[400,120]", "file": "", "offset": 64, "length": NUMBERS.nbytes}]
    assert not writer.values
    (read,) = again(weight())
    assert (read.label, read.type) == ("w", TYPE)
    np.testing.assert_array_equal(read.array, NUMBERS)


def test_a_chain_of_computations_is_read_again() -> None:
    w = weight()
    scaled = Derived(TYPE, [w], partial(product, factor=np.full((400, 1), 0.5)), "w", "w.folded")
    narrow = Narrow(scaled, DType.F16, "w")
    turned = Derived(
        TensorType((120, 400), DType.F16),
        [narrow],
        _of("OneResult")(Transpose((1, 0)), 0, "w"),
        "w",
        "w.folded.1",
    )
    read_w, read_turned = again(w, turned)
    assert read_turned.label == "w.folded.1"
    assert isinstance(read_turned, Derived)
    assert read_turned.base == "w"
    (inner,) = read_turned.computation[1]
    assert isinstance(inner, Narrow)
    assert isinstance(inner.wide, Derived)
    assert inner.wide.computation[1][0] is read_w, "a weight that several constants are computed from is one"
    np.testing.assert_array_equal(read_turned.array, (NUMBERS * np.float32(0.5)).astype(np.float16).T)


def test_equal_computations_have_equal_keys_again() -> None:
    w = weight()
    one, other = (Derived(TYPE, [w], partial(product, factor=np.ones((400, 1))), "w") for _ in range(2))
    assert one.key == other.key
    read = again(one, other)
    assert read[0].key == read[1].key


def test_small_constants_are_stored_with_their_numbers() -> None:
    bias = Literal.of(np.arange(5, dtype=np.float16), "b")
    (read,) = again(bias)
    np.testing.assert_array_equal(read.array, bias.array)
    assert read.label == "b"
    table = np.zeros(STORED_BYTES // 4, np.float32)
    (read,) = again(Literal(TensorType(table.shape, DType.F32), lambda: table, "t"))
    assert read.type.nbytes == STORED_BYTES


@pytest.mark.parametrize("compute", [lambda array: array * 2, partial(product, np.ones(1))])
def test_a_large_constant_that_nothing_describes_is_refused(compute: Any) -> None:
    large = TensorType((STORED_BYTES,), DType.F32)
    wide = Literal(large, lambda: np.zeros(STORED_BYTES, np.float32))
    with pytest.raises(UnrecordedError, match="is not in a file of the model"):
        ConstantsWriter().number(wide)
    with pytest.raises(UnrecordedError):
        ConstantsWriter().number(Derived(TYPE, [weight()], compute, "w"))


def test_a_computation_whose_operands_were_dropped_is_refused() -> None:
    type = TensorType((3 * STORED_BYTES,), DType.F32)
    w = Literal(type, lambda: np.ones(type.shape, np.float32))
    derived = Derived(type, [w], partial(product, factor=np.ones(1)), "w")
    assert derived.array.size == type.size
    with pytest.raises(UnrecordedError):
        ConstantsWriter().number(derived)


@pytest.mark.parametrize(
    "change",
    [
        {"of": [1]},
        {"of": ["0"]},
        {"function": "unknown"},
        {"type": "f99[2]"},
    ],
)
def test_data_that_was_changed_is_refused(change: dict[str, Any]) -> None:
    writer = ConstantsWriter()
    writer.number(Derived(TYPE, [weight()], partial(product, factor=np.ones((400, 1))), "w"))
    data = [writer.data[0], {**writer.data[1], **change}]
    with pytest.raises((ValueError, KeyError, TypeError)):
        read_constants(data, {}, {"": FILE}.__getitem__)


def _of(name: str) -> Any:
    from fusec.passes.rewriting import computations

    return computations._BY_NAME[name]
