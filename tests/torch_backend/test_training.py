"""Test training under torch.compile: outputs, gradients and buffers are those of eager torch."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from helpers import assert_close

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")
pytestmark = [pytest.mark.cudnn, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")]

from fusec import torch_backend  # noqa: E402 - not where torch is missing
from fusec.torch_backend.dynamo import GraphCompiler  # noqa: E402 - as above


class Convolutions(torch.nn.Module):
    """A strided and a grouped convolution, batch statistics and max pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Conv2d(3, 8, 3, 2, 1, bias=False), torch.nn.BatchNorm2d(8)
        self.pool, self.second = torch.nn.MaxPool2d(3, 2, 1), torch.nn.Conv2d(8, 12, 3, padding=2, dilation=2, groups=4)
        self.head = torch.nn.Linear(12, 5)

    def forward(self, x: Any) -> Any:
        x = self.pool(torch.relu(self.norm(self.first(x))))
        return self.head(torch.nn.functional.gelu(self.second(x)).mean((2, 3)))


class Tokens(torch.nn.Module):
    """An embedding, a layer with attention, and a loss of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(11, 16)
        self.layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = torch.nn.Linear(16, 11)

    def forward(self, x: Any) -> Any:
        return torch.nn.functional.cross_entropy(self.head(self.layer(self.table(x))).flatten(0, 1), x.flatten())


def trained(net: Any, x: Any, run: Callable[..., Any]) -> list[Any]:
    """Return the results of two steps of gradient descent, with the gradients and the state after each."""
    seen: list[Any] = []
    for _ in range(2):
        net.zero_grad()
        y = run(x)
        (y**3).sum().backward()
        seen += [y, *[p.grad.clone() for p in net.parameters()], *[b.clone() for b in net.buffers()]]
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.01 * p.grad
    return seen


@pytest.mark.parametrize(
    ("make", "inputs"),
    [(Convolutions, lambda: torch.randn(4, 3, 16, 15)), (Tokens, lambda: torch.randint(0, 11, (2, 7)))],
    ids=["convolutions", "transformer"],
)
def test_gradients_are_those_of_torch(make: Callable[[], Any], inputs: Callable[[], Any]) -> None:
    net, x = make(), inputs()
    twin = copy.deepcopy(net)
    compiler = GraphCompiler({"target": "h200"})
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="fusec")
        got = trained(net, x, torch.compile(net, backend=compiler))
    for a, b in zip(got, trained(twin, x, twin), strict=True):
        assert a.dtype == b.dtype
        assert_close(a.detach().double().numpy(), b.detach().double().numpy(), 2e-5)
    assert [graph.role for graph in compiler.graphs] == ["forward", "backward"]
    assert all(graph.summary.startswith("compiled by fusec, ") for graph in compiler.graphs)


def test_sizes_that_vary_are_compiled() -> None:
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, 2, 1), torch.nn.ReLU(), torch.nn.Flatten(2))
    twin, compiler = copy.deepcopy(net), GraphCompiler({"target": "h200"})
    fast = torch.compile(net, backend=compiler, dynamic=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="fusec")
        for batch in (3, 2):
            x = torch.randn(batch, 3, 9, 8)
            for a, b in zip(trained(net, x, fast), trained(twin, x, twin), strict=True):
                assert_close(a.detach().double().numpy(), b.detach().double().numpy(), 2e-5)
    assert {graph.role for graph in compiler.graphs} == {"forward", "backward"}
    assert all(graph.summary.startswith("compiled by fusec, ") for graph in compiler.graphs)


def test_dropout_has_one_mask_in_both_directions_and_another_in_each_step() -> None:
    weight = torch.nn.Parameter(torch.ones(500))
    compiler = GraphCompiler({"target": "h200"})
    fast = torch.compile(lambda x: torch.nn.functional.dropout(x * weight, 0.5, True), backend=compiler)
    masks: list[Any] = []
    for _ in range(2):
        weight.grad = None
        y = fast(torch.ones(500))
        y.sum().backward()
        assert torch.equal(weight.grad, y.detach())
        assert 0.4 < (y != 0).double().mean() < 0.6
        masks.append(y.detach())
    assert not torch.equal(*masks)
    assert all(graph.summary.startswith("compiled by fusec, ") for graph in compiler.graphs)


def test_what_cannot_be_trained_runs_in_torch_with_the_reason() -> None:
    net = torch.nn.ConvTranspose2d(3, 4, 3, stride=2)
    twin = copy.deepcopy(net)
    x = torch.randn(2, 3, 5, 6)
    with pytest.warns(
        UserWarning, match="fusec: a graph runs in torch itself: torch cannot write .*convolution_backward"
    ):
        got = trained(net, x, torch.compile(net, backend=torch_backend.backend))
    for a, b in zip(got, trained(twin, x, twin), strict=True):
        assert_close(a.detach().double().numpy(), b.detach().double().numpy(), 2e-5)


def test_memory_read_by_strides_is_left_to_torch() -> None:
    weight = torch.nn.Parameter(torch.randn(4, 4))

    def f(x: Any) -> Any:
        return torch.as_strided(x * weight, (3, 4), (4, 1)).exp()

    x = torch.randn(4, 4)
    with pytest.warns(UserWarning, match="fusec: training runs in torch itself: the graph reads memory by strides"):
        got = torch.compile(f, backend=torch_backend.backend)(x)
    got.sum().backward()
    grad, weight.grad = weight.grad, None
    f(x).sum().backward()
    assert torch.equal(grad, weight.grad)
