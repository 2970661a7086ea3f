"""Test that torch's fused calls of transformer layers are compiled, with each kind of mask."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import pytest
from helpers import assert_close

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript")
pytestmark = [pytest.mark.cudnn, pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")]

import fusec  # noqa: E402 - not where torch is missing
from fusec import torch_backend  # noqa: E402 - as above

HIDDEN = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
CAUSAL = torch.nn.Transformer.generate_square_subsequent_mask(7)


def compiled_alone(net: Any, inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """Return the result of a net that fusec compiles whole, as one graph."""
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="fusec")
        report = torch_backend.explain(net, target="h200")(*inputs, **keywords)
    (graph,) = report.graphs
    assert graph.summary.startswith("compiled by fusec, ")
    assert not report.breaks
    return report.result


def check_agree(got: Any, want: Any) -> None:
    assert_close(got.double().numpy(), want.double().numpy(), 1e-5)


@pytest.mark.parametrize("layer", [{}, {"activation": "gelu", "norm_first": True}], ids=["post_norm", "pre_norm"])
@pytest.mark.parametrize(
    "masks", [{}, {"src_key_padding_mask": HIDDEN}, {"mask": CAUSAL}], ids=["none", "keys", "causal"]
)
@pytest.mark.filterwarnings("ignore:enable_nested_tensor", "ignore:The PyTorch API of nested tensors")
def test_a_transformer_encoder_is_one_compiled_graph(layer: dict[str, Any], masks: dict[str, Any]) -> None:
    net = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, **layer), 2).eval()
    for p in net.parameters():
        p.data += 0.1 * torch.randn_like(p)
    x = torch.randn(2, 7, 32)
    got = compiled_alone(net, (x,), masks)
    with torch.inference_mode():
        want = net(x, **masks)
    shown = ~masks.get("src_key_padding_mask", torch.zeros(2, 7, dtype=torch.bool))  # eager torch gives 0 elsewhere
    check_agree(got[shown], want[shown])


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"need_weights": False},
        {"average_attn_weights": False},
        {"key_padding_mask": HIDDEN},
        {"attn_mask": CAUSAL.isinf()},
        {"attn_mask": CAUSAL.isinf(), "key_padding_mask": HIDDEN},
    ],
    ids=lambda k: "+".join(k) or "none",
)
def test_multi_head_attention_is_compiled(keywords: dict[str, Any]) -> None:
    net, x = torch.nn.MultiheadAttention(32, 4, batch_first=True).eval(), torch.randn(2, 7, 32)
    got = compiled_alone(net, (x, x, x), keywords)
    with torch.inference_mode():
        want = net(x, x, x, **keywords)
    check_agree(got[0], want[0])
    assert (got[1] is None) == (want[1] is None)
    if want[1] is not None:
        check_agree(got[1], want[1])


SEEN = torch.tensor([[True, True, False, False, True]] * 3 + [[False] * 5])  # the last query sees no key


@pytest.mark.parametrize(
    "mask",
    [SEEN, torch.where(SEEN, 0.5, -torch.inf), SEEN[:, None, None, :1], torch.where(SEEN, 0.5, -1e30)],
    ids=["bools", "numbers", "broadcast", "finite"],
)
@pytest.mark.parametrize("heads", [2, 1], ids=["grouped", "shared"])
def test_a_query_that_sees_no_key_gets_what_torch_gives(mask: Any, heads: int) -> None:
    class Net(torch.nn.Module):
        def forward(self, q: Any, k: Any, mask: Any) -> Any:
            return torch.nn.functional.scaled_dot_product_attention(q, k, k, mask, scale=0.3, enable_gqa=True)

    inputs = (torch.randn(4, 2, 4, 8), torch.randn(4, heads, 5, 8), mask)
    check_agree(compiled_alone(Net(), inputs, {}), Net()(*inputs))


@pytest.mark.parametrize("shape", [(4, 8), (3, 4, 8), (2, 3, 2, 4, 8)], ids=lambda s: f"{len(s)} dims")
@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_other_ranks_is_compiled(shape: tuple[int, ...], causal: bool) -> None:
    """torch's exporter takes four dims alone."""

    class Net(torch.nn.Module):
        def forward(self, q: Any, k: Any) -> Any:
            return torch.nn.functional.scaled_dot_product_attention(q, k, k, is_causal=causal)

    inputs = torch.randn(shape), torch.randn(shape)
    check_agree(compiled_alone(Net(), inputs, {}), Net()(*inputs))


CLASSES = torch.tensor([[0, 1, 3], [2, 2, 1]])
PROBABLE = torch.nn.functional.one_hot(CLASSES, 4).movedim(-1, 1) * 0.7 + 0.1


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("target", [CLASSES, PROBABLE], ids=["classes", "probabilities"])
@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 2.0, 0.5, 3.0])], ids=["plain", "weighted"])
def test_a_loss_smooths_its_labels(target: Any, weight: Any, reduction: str) -> None:
    """torch's exporter leaves `label_smoothing` out."""
    ignored = {} if target.is_floating_point() else {"ignore_index": 1}
    keywords: dict[str, Any] = {**ignored, "reduction": reduction, "label_smoothing": 0.2}

    class Net(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.nn.functional.cross_entropy(x, target, weight, **keywords)

    x = torch.randn(2, 4, 3)
    check_agree(compiled_alone(Net(), (x,), {}), Net()(x))


LARGE = torch.tensor([-torch.inf, -200.0, -100.0, -1.0, 0.0, 25.0, 100.0])


@pytest.mark.parametrize(
    "function",
    [torch.nn.functional.logsigmoid, lambda x: torch.logaddexp(x, -x), lambda x: torch.logaddexp(x, x)],
    ids=["logsigmoid", "logaddexp", "of equals"],
)
def test_logarithms_neither_underflow_nor_overflow(function: Any) -> None:
    class Net(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return function(x)

    got, want = compiled_alone(Net(), (LARGE,), {}), function(LARGE)
    assert torch.equal(got.isinf(), want.isinf())
    check_agree(got[want.isfinite()], want[want.isfinite()])


class Scattered(torch.nn.Module):
    """Scatters by any reduction, all rows to the first."""

    def __init__(self, reduction: str):
        super().__init__()
        self.reduction = reduction

    def forward(self, x: Any) -> Any:
        return x.scatter_reduce(2, torch.zeros(x.shape, dtype=torch.int64), x, self.reduction)


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (torch.nn.AvgPool2d(2, divisor_override=3), "`divisor_override` of an average pool is not supported"),
        (Scattered("mean"), "the mean of what is scattered is not supported"),
    ],
    ids=["divisor", "mean"],
)
def test_what_the_exporter_leaves_out_is_refused(net: Any, message: str) -> None:
    x = torch.randn(1, 2, 4, 4)
    with pytest.raises(fusec.ModelError, match=message):
        fusec.from_torch(torch.export.export(net, (x,)), target="h200")
    with pytest.warns(UserWarning, match=message):
        check_agree(torch.compile(net, backend="fusec")(x), net(x))


@pytest.mark.parametrize("reduction", ["sum", "amax"])
def test_other_reductions_of_scattered_rows_are_compiled(reduction: str) -> None:
    net, x = Scattered(reduction), torch.randn(1, 2, 4, 4)
    check_agree(compiled_alone(net, (x,), {}), net(x))


SMALL = torch.cat([10.0 ** -torch.arange(1.0, 9.0), torch.tensor([0.0, 0.249, 0.251, 0.7])])
PRECISE = {
    "log1p": (torch.log1p, torch.cat([SMALL, -SMALL, torch.tensor([-1.0, -2.0, 3e9, torch.inf, torch.nan])])),
    "expm1": (torch.expm1, torch.cat([SMALL, -SMALL, torch.tensor([-torch.inf, 80.0, torch.inf, torch.nan])])),
    "xlog1py": (lambda x: torch.special.xlog1py(x.abs(), x), torch.cat([SMALL, -SMALL, torch.tensor([torch.nan])])),
    "logcumsumexp": (
        lambda x: torch.logcumsumexp(x, 0),
        torch.tensor([-torch.inf, -300.0, -299.0, -torch.inf, 0.0, 1e-3, 200.0, 199.0, -5.0]),
    ),
    "cumprod": (lambda x: torch.cumprod(x, 0), torch.linspace(0.5, 1.5, 37)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_no_digit_is_lost(dtype: Any) -> None:
    """torch's exporter writes log(1 + x) and exp(x) - 1, and sums exponentials that overflow."""

    class Net(torch.nn.Module):
        def forward(self, *given: Any) -> Any:
            return tuple(function(x) for x, (function, _) in zip(given, PRECISE.values(), strict=True))

    given = tuple(numbers.to(dtype) for _, numbers in PRECISE.values())
    for name, got, want in zip(
        PRECISE, compiled_alone(Net(), given, {}), Net()(*(x.double() for x in given)), strict=True
    ):
        assert got.dtype is dtype, name
        finite = want.isfinite() & (want.abs() < torch.finfo(dtype).max)
        assert torch.equal(got[~finite].isnan(), want[~finite].isnan()), name
        rounding = 4 * torch.finfo(dtype).eps * want[finite].abs() + torch.finfo(dtype).smallest_normal
        assert ((got[finite].double() - want[finite]).abs() <= rounding).all(), (name, got[finite], want[finite])


def test_running_products_of_integers_are_integers() -> None:
    class Net(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.cumprod(x, 1), torch.log1p(x)

    x = torch.arange(1, 11, dtype=torch.int32).reshape(2, 5)
    got, want = compiled_alone(Net(), (x,), {}), Net()(x)
    assert torch.equal(got[0], want[0]) and got[0].dtype is want[0].dtype
    check_agree(got[1], want[1])


def test_checks_of_bools_are_read() -> None:
    """torch writes such calls for `(x == x).all()` within conditions, as detectors of transformers do."""

    class Net(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            aten = torch.ops.aten
            return x + aten._is_all_true(x > 0).float(), x + aten._is_any_true(x > 0).float()

    x = torch.tensor([[1.0, -2.0], [3.0, 4.0]])
    program = torch.export.export(Net(), (x,))
    with torch.inference_mode():
        for got, want in zip(fusec.from_torch(program)(x), Net()(x), strict=True):
            check_agree(torch.as_tensor(got), want)


def test_a_running_product_along_a_symbolic_dim_is_refused() -> None:
    class Net(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.cumprod(x, 1)

    program = torch.export.export(Net(), (torch.rand(2, 5),), dynamic_shapes={"x": {1: torch.export.Dim("n")}})
    with pytest.raises(fusec.ModelError, match="along a symbolic dim is not supported"):
        fusec.from_torch(program)


class _Rotated(torch.nn.Module):
    """A rotary embedding as products of complex numbers, whose angles get dims for the batch and the heads."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(5.0), torch.tensor([1.0, 0.1]))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x: Any) -> Any:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        turned = torch.view_as_real(pairs * self.turns[None, :, None]).flatten(3)
        return turned.unsqueeze(-1) + x.unsqueeze(-1)  # real tensors are unsqueezed, too


def test_complex_angles_are_unsqueezed() -> None:
    x = torch.randn(2, 5, 3, 4)
    check_agree(compiled_alone(_Rotated().eval(), (x,), {}), _Rotated()(x))
