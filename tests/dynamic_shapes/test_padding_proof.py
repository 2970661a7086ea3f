"""Test the proof for padding: where it allows padding, rows do not depend on what the padded rows hold."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import event, given, settings
from hypothesis import strategies as st
from ops.cases import CASES, Case

from fusec.errors import ModelError, VerifyError
from fusec.frontends.padding_proof import Crop, crops
from fusec.ir import DType, Graph, TensorType
from fusec.ops import Reshape, Transpose
from fusec.ops.recurrent import Recurrent
from fusec.reference import evaluate


def graph_of(op: Any, arrays: Sequence[np.ndarray]) -> Graph:
    graph = Graph("g")
    for i, array in enumerate(arrays):
        graph.add_input(f"x{i}", TensorType(array.shape, DType.of(array.dtype)))
    results = graph.insert(op, graph.inputs).results
    graph.set_outputs(results, [f"y{i}" for i in range(len(results))])
    return graph


def grown(array: np.ndarray, axis: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """More rows, drawn from those there are, in another order."""
    return np.concatenate([array, np.take(array, rng.integers(0, array.shape[axis], size), axis)], axis)


def passed(case: Case, rng: np.random.Generator) -> bool:
    """Tell if the rules let some dim of the case pass; assert that the rows are right."""
    arrays = case.arrays(rng)
    ranks = [a.ndim for a in arrays]
    small = graph_of(case.op, arrays)
    want = evaluate(small, {f"x{i}": a for i, a in enumerate(arrays)})
    any_passed = False
    for axis in range(max(ranks, default=0)):
        for which in ("left", "right", "first", "second"):
            places = {
                i: axis if which != "right" else axis - max(ranks) + r
                for i, r in enumerate(ranks)
                if {"first": i == 0, "second": i == 1}.get(which, True)
            }
            if isinstance(case.op, Recurrent) and (axis, which) == (0, "left"):  # the batch, at another axis of each
                _, lengths = case.op.places([DType.of(a.dtype) for a in arrays])
                places = {0: 1, **dict.fromkeys(range(2, 2 + case.op.states), 1)}
                places |= {} if lengths is None else {lengths: 0}
            places = {i: a for i, a in places.items() if 0 <= a < ranks[i] and arrays[i].shape[a] > 1}
            sizes = {arrays[i].shape[a] for i, a in places.items()}
            if len(sizes) != 1:
                continue
            (size,) = sizes
            large = [grown(a, places[i], 3, rng) if i in places else a for i, a in enumerate(arrays)]
            try:
                wide = graph_of(case.op, large)
                found = crops(small, wide, {f"x{i}": [a] for i, a in places.items()}, size, size + 3)
            except (VerifyError, ModelError):
                continue
            got = evaluate(wide, {f"x{i}": a for i, a in enumerate(large)})
            for name, crop in zip(small.output_names, found, strict=True):
                np.testing.assert_allclose(crop.apply(got[name]), want[name], rtol=1e-5, atol=1e-6)
            any_passed = True
    return any_passed


def test_rows_that_are_let_pass_depend_on_no_others(rng: np.random.Generator) -> None:
    """Of every op; those that pass nothing are named: a rule that refuses everything would be sound, too."""
    names = {name for name, cases in CASES.items() for case in cases if passed(case, rng)}
    # these have no rule; the others name sizes, or pad all dims, and are padded whole in test_dynamic
    unruled = {
        *("batch_norm_backward", "batch_norm_train", "layer_norm_backward", "conv_wgrad", "max_pool_backward"),
        "max_pool_train",
        *("random_bits", "scatter", "channel_sums", "batch_norm_by_sums", "grid_sample", "roi_align"),
        "deform_conv",
    }
    unruled |= {"roi_pool", "non_max_suppression", "all_finite", "attention_train", "attention_backward"}
    assert set(CASES) - names - unruled == {"dilate", "expand", "pad", "reshape", "resize", "scan", "slice"}
    assert not names & unruled


factors = st.lists(st.integers(2, 4), min_size=1, max_size=3)


@st.composite
def grouping(draw: st.DrawFn, count: int) -> tuple[int, ...]:
    """Return the number of neighbouring factors of each dim."""
    parts: list[int] = []
    while sum(parts) < count:
        parts.append(draw(st.integers(1, count - sum(parts))))
    return tuple(parts)


def shape_of(values: Sequence[int], groups: Sequence[int]) -> tuple[int, ...]:
    ends = np.cumsum([0, *groups])
    return tuple(int(np.prod(values[a:b])) for a, b in pairwise(ends))


@settings(max_examples=200, deadline=None)
@given(st.data(), factors, factors, st.integers(1, 4))
def test_a_dim_is_followed_through_joins_and_cuts(
    data: st.DataObject, outer: list[int], inner: list[int], n: int
) -> None:
    m = n + 2
    values = {size: [*outer, size, *inner] for size in (n, m)}
    place = len(outer)
    graphs = {size: Graph("g") for size in (n, m)}
    first = (*(1 for _ in outer), 1, *(1 for _ in inner))
    held = {s: g.add_input("x", TensorType(shape_of(values[s], first), DType.I64)) for s, g in graphs.items()}
    for _ in range(data.draw(st.integers(1, 3))):
        groups = data.draw(grouping(len(values[n])))
        order = data.draw(st.permutations(range(len(groups))))
        ends = np.cumsum([0, *groups])
        for s, g in graphs.items():
            joined = g.add(Reshape(shape_of(values[s], groups)), held[s])
            held[s] = g.add(Transpose(tuple(order)), joined)
            values[s] = [v for at in order for v in values[s][ends[at] : ends[at + 1]]]
    for s, g in graphs.items():
        g.set_outputs([held[s]], ["y"])
    small, large = graphs[n], graphs[m]
    try:
        (crop,) = crops(small, large, {"x": [place]}, n, m)
    except ModelError:
        event("refused")
        return
    event("followed")
    whole = np.arange(np.prod(values[m])).reshape(large.inputs[0].type.shape)
    part = whole[(slice(None),) * place + (slice(n),)]
    got = crop.apply(evaluate(large, {"x": whole})["y"])
    np.testing.assert_array_equal(got, evaluate(small, {"x": part})["y"])


def test_a_cut_of_joined_rows() -> None:
    """Rows of a dim that is joined with one outside and one inside."""
    array = np.arange(2 * 4 * 3 * 5).reshape(2 * 4 * 3, 5)
    want = array.reshape(2, 4, 3, 5)[:, :3].reshape(18, 5)
    np.testing.assert_array_equal(Crop(((0, 2, 4, 3),)).apply(array), want)
    again = Crop(((0, 2, 4, 3),)).then(Crop(((1, 1, 5, 2),)))
    np.testing.assert_array_equal(again.apply(array), want[:, :2])
