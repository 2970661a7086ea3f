"""Test that the patterns are graphs: each parses, has its own name, and computes what its words say."""

from __future__ import annotations

import numpy as np

from fusec.atlas.pattern_text import text_of
from fusec.atlas.patterns import patterns
from fusec.ir import Graph
from fusec.reference import evaluate
from fusec.text import parse


def named(graph: Graph, *arrays: np.ndarray) -> dict[str, np.ndarray]:
    """Return the arrays by the names of the inputs."""
    return {value.name: array for value, array in zip(graph.inputs, arrays, strict=True)}


def test_some_two_hundred_graphs() -> None:
    found = patterns()
    assert len(found) > 200
    assert len({(p.name, p.family, p.precision) for p in found}) == len(found)
    assert len({(p.text, p.precision) for p in found}) == len(found)
    for pattern in found:
        graph = parse(pattern.text)
        graph.verify()
        assert len(graph.outputs) >= 1


def test_a_glob_chooses() -> None:
    assert {p.name for p in patterns("conv+bias+relu*")} >= {"conv+bias+relu", "conv+bias+relu6"}
    assert patterns("nothing") == ()


def test_words_become_ops_in_order(rng: np.random.Generator) -> None:
    """Operands of a bias, a gate and a residual have one number for each channel, channel of an image, and element."""
    graph = parse(text_of("image bias gate add relu", "f32", channels_last=False))
    x, bias, gate, z = (rng.standard_normal(v.type.shape).astype("f") for v in graph.inputs)
    assert (bias.shape, gate.shape, z.shape) == ((1, 64, 1, 1), (8, 64, 1, 1), x.shape)
    (y,) = evaluate(graph, named(graph, x, bias, gate, z)).values()
    np.testing.assert_allclose(y, np.maximum((x + bias) * gate + z, 0), rtol=1e-6)


def test_rows_have_a_number_for_each_column(rng: np.random.Generator) -> None:
    graph = parse(text_of("rows bias times row_max", "f32"))
    x, bias = (rng.standard_normal(v.type.shape).astype("f") for v in graph.inputs)
    assert bias.shape == (1024,)
    (y,) = evaluate(graph, named(graph, x, bias)).values()
    np.testing.assert_allclose(y, ((x + bias) * 0.5).max(axis=-1, keepdims=True), rtol=1e-6)


def test_integers_are_summed_in_32_bits() -> None:
    graph = parse(text_of("conv to_fp32 scale bias relu", "i8"))
    assert [n.results[0].type.dtype.value for n in graph.nodes] == ["i32", "f32", "f32", "f32", "f32"]
    assert graph.inputs[1].type.order == (0, 2, 3, 1)
