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

from fusec import torch_backend  # noqa: E402 - not where torch is missing

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


def agree(got: Any, want: Any) -> None:
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
    agree(got[shown], want[shown])


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
    agree(got[0], want[0])
    assert (got[1] is None) == (want[1] is None)
    if want[1] is not None:
        agree(got[1], want[1])
