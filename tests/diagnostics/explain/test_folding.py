"""Test that equal layers are shown once, and a table fits its width."""

from __future__ import annotations

import numpy as np
import pytest
from passes.partition.judges import AcceptAll

from fusec.diagnostics.explain import Explanation, explain
from fusec.diagnostics.explain.folding import Fold, folds, name_range
from fusec.ir import Graph
from fusec.passes.partition import partition
from fusec.plans.verdict import Legal, Plan, Verdict
from fusec.targets.target import load
from fusec.text import parse


class Offers(AcceptAll):
    """Accepts what cuDNN has an operation for, as one plan that was built."""

    def verdict(self, body: Graph) -> Verdict:
        accepted = super().verdict(body)
        return Legal((Plan(3, (), True, built=True),)) if isinstance(accepted, Legal) else accepted


def transformer(layers: int) -> Explanation:
    """Layers of attention and two products, with node names as exporters write them."""
    lines = ['graph "net" (%x0: f16[1,16,8], %w: f16[8,8]) {']
    for i in range(layers):
        at = f"/layers.{i}"
        lines += [
            f'  %q{i} = matmul(%x{i}, %w) : f16[1,16,8] loc("{at}/attn/q_proj/MatMul")',
            f'  %s{i} = softmax(%q{i}) {{axis=2}} loc("{at}/attn/Softmax")',
            f'  %o{i} = matmul(%s{i}, %w) loc("{at}/attn/o_proj/MatMul")',
            f'  %a{i} = add(%o{i}, %x{i}) loc("{at}/Add")',
            f'  %g{i} = gelu(%a{i}) loc("{at}/mlp/Gelu")',
            f'  %x{i + 1} = mul(%g{i}, %a{i}) loc("{at}/mlp/Mul")',
        ]
    program = partition(
        parse("\n".join([*lines, f"  %y = softmax(%x{layers}) {{axis=2}}", "  return %y\n}"])), Offers(), load("h200")
    )
    return explain(program, load("h200"), cores=False)


def test_a_deep_net_is_one_layer_and_its_number() -> None:
    deep = transformer(32)
    assert deep.totals["steps"] >= 32 * 3
    folded = deep.text().splitlines()
    assert len(folded) < 30, "the 32 layers are one"
    assert any(line.startswith("32× ┌ ") for line in folded)
    assert "/layers.{0..31}/attn/Softmax" in deep.text(width=160)
    assert str(deep) == deep.text()
    every = deep.text(width=160, fold=False)
    assert all(f"/layers.{i}/attn/Softmax" in every for i in range(32))
    assert "×" not in every.splitlines()[2]
    assert len(deep.to_json()["steps"]) == deep.totals["steps"], "JSON is never folded"


def test_a_net_without_equal_layers_has_no_column_for_them() -> None:
    assert transformer(1).text().startswith("#  runs as")


@pytest.mark.parametrize("width", [60, 80, 100, 118, 200])
def test_each_line_fits_the_width(width: int) -> None:
    text = transformer(3).text(width)
    assert max(map(len, text.splitlines())) <= width
    assert "kernel" in text and "model nodes" in text


def test_an_overview_counts_the_steps_of_each_kind() -> None:
    deep = transformer(32)
    overview = deep.overview()
    assert deep.summary.split(":")[1] in overview
    counts = [int(line.split()[0]) for line in overview.splitlines() if line[:5].strip().isdigit()]
    assert sum(counts) == deep.totals["steps"]
    assert len(overview.splitlines()) < 20


def unfolded(found: list[Fold]) -> list[int]:
    """Return the numbers of the elements that folds stand for, in order."""
    return [fold.start + place for fold in found for place in range(fold.length * fold.times)]


def test_folds_lose_nothing_and_join_equal_runs_alone() -> None:
    rng = np.random.default_rng(3)
    for trial in range(300):
        layer = [int(k) for k in rng.integers(0, 4, rng.integers(1, 6))]
        head, tail = ([int(k) for k in rng.integers(0, 4, rng.integers(0, 8))] for _ in range(2))
        keys = head + layer * int(rng.integers(1, 8)) + tail
        found = folds(keys)
        assert unfolded(found) == list(range(len(keys))), (trial, keys)
        for fold in found:
            runs = {
                tuple(keys[fold.start + i * fold.length : fold.start + (i + 1) * fold.length])
                for i in range(fold.times)
            }
            assert len(runs) == 1, (trial, keys, fold)


def test_the_shortest_layer_is_taken() -> None:
    assert folds("xabcabcabcabcy") == [Fold(0, 1, 1), Fold(1, 3, 4), Fold(13, 1, 1)]
    assert folds("aab") == [Fold(0, 1, 1), Fold(1, 1, 1), Fold(2, 1, 1)], "one saved line is not worth it"
    assert folds("") == []
    long = "".join(chr(200 + i) for i in range(300))
    assert len(folds(long * 2)) == 600, "longer than is searched for"


def test_a_long_program_is_folded_fast() -> None:
    rng = np.random.default_rng(4)
    keys = [int(k) for k in rng.integers(0, 3, 4000)]
    assert unfolded(folds(keys)) == list(range(4000))


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (["n1", "n1"], "n1"),
        (["layer.0.mlp", "layer.1.mlp", "layer.2.mlp"], "layer.{0..2}.mlp"),
        (["l0/Add_3", "l1/Add_7"], "l{0..1}/Add_{3..7}"),
        (["a", "b"], "a … b"),
        (["x1", "x"], "x1 … x"),
    ],
)
def test_names_that_differ_are_a_range(names: list[str], told: str) -> None:
    assert name_range(names) == told
