"""Test the report of graphs under torch.compile, and the warnings of graph breaks."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")
pytestmark = [pytest.mark.cudnn, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")]

from fusec import torch_backend  # noqa: E402 - not where torch is missing


def branches(x: Any) -> Any:
    y = torch.relu(x) * 2
    if y.sum() > 0:
        y = y + 1
    return y.exp()


def test_a_report_lists_graphs_and_where_they_break() -> None:
    x = torch.rand(3, 4) + 0.1
    with torch.no_grad(), pytest.warns(UserWarning, match="a branch depends on the value of a tensor; what follows"):
        report = torch_backend.explain(branches, target="l4")(x)
    torch.testing.assert_close(report.result, branches(x))
    first, second = report.graphs
    assert (first.ops, second.ops) == (4, 2)
    assert report.in_torch == ()
    (broken,) = report.breaks
    assert broken.code == "if y.sum() > 0:"
    assert str(report).splitlines() == [
        "2 graphs, 1 graph break",
        f"graph 0 (inference, 4 ops): {first.summary}",
        f"  then a graph breaks at test_graph_report.py:{broken.line}, `if y.sum() > 0:`: "
        "a branch depends on the value of a tensor",
        f"graph 1 (inference, 2 ops): {second.summary}",
    ]
    assert first.summary.startswith("compiled by fusec, ")
    assert "launch" in first.summary


def test_a_report_says_what_torch_runs() -> None:
    def f(x: Any) -> Any:
        return torch.linalg.svdvals(x).exp()

    x = torch.randn(4, 4)
    with torch.no_grad(), pytest.warns(UserWarning, match="a graph runs in torch itself"):
        report = torch_backend.explain(f)(x)
    (reason,) = report.in_torch
    assert "svd" in reason
    assert f"graph 0 (inference, 2 ops): in torch itself: {reason}" in str(report)


def test_a_report_counts_functions_without_a_graph() -> None:
    def loop(x: Any) -> Any:
        for _ in range(2):
            print(x)
        return x.exp()

    report = torch_backend.explain(loop)(torch.ones(2))
    assert report.skipped == 1
    assert str(report) == ("0 graphs, 0 graph breaks\ndynamo captured nothing of 1 function: Python and torch ran it")
