"""Test attention ops of onnxruntime against onnxruntime, over random shapes, masks, caches and attributes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from frontends.onnx.contrib.models import Array, Held, assert_floats, both, floats, imported, one

from examples.decode import Config, Writer
from fusec.errors import ModelError
from fusec.frontends import load
from fusec.reference import evaluate

RTOL = 2e-5


def _sizes(rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Draw batch, length, heads and width of a head."""
    return int(rng.integers(1, 4)), int(rng.integers(2, 7)), int(rng.integers(1, 5)), 8 * int(rng.integers(1, 4))


def _masks(rng: np.random.Generator, batch: int, queries: int, keys: int) -> dict[str, Array]:
    ends = rng.integers(1, keys + 1, batch).astype(np.int32)
    starts = rng.integers(0, ends).astype(np.int32)
    both, each = rng.integers(0, 2, (batch, keys)), rng.integers(0, 2, (batch, queries, keys))
    both[..., 0] = each[..., 0] = 1  # scores near -10,000 alone would have few digits
    return {
        "lengths": ends,
        "ends and starts": np.concatenate([ends, starts]),
        "keys": both.astype(np.int32),
        "keys of queries": each.astype(np.int32),
    }


# Attention -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("unidirectional", [0, 1])
def test_attention(seed: int, unidirectional: int) -> None:
    rng = np.random.default_rng(seed)
    b, s, h, d = _sizes(rng)
    features = 4 * int(rng.integers(1, 6))
    x, w, bias = floats(rng, b, s, features), floats(rng, features, 3 * h * d) / 4, floats(rng, 3 * h * d)
    given: dict[str, Any] = {"num_heads": h, "unidirectional": unidirectional}
    assert_floats("Attention", [x, Held(w), Held(bias)], rtol=RTOL, **given)
    assert_floats("Attention", [x, Held(w), Held(bias)], rtol=RTOL, scale=0.2, **given)
    for mask in _masks(rng, b, s, s).values():
        assert_floats("Attention", [x, Held(w), Held(bias), mask], rtol=RTOL, mask_filter_value=-1e4, **given)
    p = int(rng.integers(1, 5))
    past = floats(rng, 2, b, h, p, d)
    outputs = ("y0", "y1")
    assert_floats("Attention", [x, Held(w), Held(bias), None, past], outputs, RTOL, **given)
    mask = _masks(rng, b, s, s + p)["keys"]
    assert_floats("Attention", [x, Held(w), Held(bias), mask, past], outputs, RTOL, **given)
    added = floats(rng, int(rng.choice([1, b])), int(rng.choice([1, h])), s, s)
    assert_floats("Attention", [x, Held(w), Held(bias), None, None, added], outputs, RTOL, **given)


@pytest.mark.parametrize("seed", range(4))
def test_attention_whose_values_have_another_width(seed: int) -> None:
    rng = np.random.default_rng(seed)
    b, s, h, d = _sizes(rng)
    sizes = [h * d, h * d, h * d * 2]
    x, w, bias = floats(rng, b, s, 12), floats(rng, 12, sum(sizes)) / 4, floats(rng, sum(sizes))
    assert_floats("Attention", [x, Held(w), Held(bias)], rtol=RTOL, num_heads=h, qkv_hidden_sizes=sizes)


@pytest.mark.parametrize("seed", range(8))
def test_q_attention(seed: int) -> None:
    rng = np.random.default_rng(seed)
    b, s, h, d = _sizes(rng)
    x = rng.integers(0, 256, (b, s, 12)).astype(np.uint8)
    w = rng.integers(-64, 64, (12, 3 * h * d)).astype(np.int8)  # 7 bits: see _weights in test_quantized
    bias = floats(rng, 3 * h * d)
    scales = [np.array(0.02, np.float32), np.array(0.01, np.float32)]
    zeros = [np.array(120, np.uint8), np.array(3, np.int8)]
    mask = _masks(rng, b, s, s)["lengths"]
    operands = [x, Held(w), Held(bias), *map(Held, scales), mask, *map(Held, zeros)]
    assert_floats("QAttention", operands, rtol=RTOL, num_heads=h, unidirectional=seed % 2)
    assert_floats("QAttention", operands[:5], rtol=RTOL, num_heads=h)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"do_rotary": 1}, "do_rotary=1 is not supported"),
        ({"past_present_share_buffer": 1}, "past_present_share_buffer=1 is not supported"),
        ({"num_heads": 5}, "16 features do not divide into 5 heads"),
        ({"qkv_hidden_sizes": [16, 16, 8]}, "parts of"),
    ],
)
def test_attention_that_is_refused(given: dict[str, Any], message: str) -> None:
    rng = np.random.default_rng(0)
    operands = [floats(rng, 2, 3, 8), Held(floats(rng, 8, 48)), Held(floats(rng, 48))]
    attributes: dict[str, Any] = {"num_heads": 2, **given}
    with pytest.raises(ModelError, match=rf"node 'n' \(Attention\): .*{message}"):
        imported("Attention", operands, **attributes)


def test_a_mask_of_another_shape() -> None:
    rng = np.random.default_rng(0)
    operands = [floats(rng, 2, 3, 8), Held(floats(rng, 8, 48)), Held(floats(rng, 48)), np.ones((2, 5), np.int32)]
    with pytest.raises(ModelError, match=r"a mask of shape \[2, 5\] for scores \[2, 3, 3\]: known are"):
        imported("Attention", operands, num_heads=2)


# MultiHeadAttention --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_multi_head_attention(seed: int) -> None:
    rng = np.random.default_rng(seed)
    b, s, h, d = _sizes(rng)
    t, e = int(rng.integers(1, 8)), 8 * int(rng.integers(1, 4))
    q, k, v = floats(rng, b, s, h * d), floats(rng, b, t, h * d), floats(rng, b, t, h * e)
    given: dict[str, Any] = {"num_heads": h}
    assert_floats("MultiHeadAttention", [q, k, v], rtol=RTOL, **given)
    bias = floats(rng, 2 * h * d + h * e)
    assert_floats("MultiHeadAttention", [q, k, v, bias], rtol=RTOL, scale=0.3, **given)
    added = floats(rng, int(rng.choice([1, b])), int(rng.choice([1, h])), s, t)
    for mask in _masks(rng, b, s, t).values():
        if len(mask) == 2 * b and mask.ndim == 1:
            continue  # which only the op Attention takes
        assert_floats("MultiHeadAttention", [q, k, v, None, mask, added], rtol=RTOL, **given)
    own = floats(rng, b, s, h * d), floats(rng, b, s, h * d)
    assert_floats("MultiHeadAttention", [q, *own], rtol=RTOL, unidirectional=1, **given)
    p = int(rng.integers(1, 5))
    past, bias = [floats(rng, b, h, p, d), floats(rng, b, h, p, d)], floats(rng, 3 * h * d)
    outputs = ("y0", "y1", "y2")
    assert_floats("MultiHeadAttention", [q, *own, None, None, None, *past], outputs, RTOL, **given)
    assert_floats("MultiHeadAttention", [q, *own, bias, None, None, *past], outputs, RTOL, unidirectional=1, **given)


@pytest.mark.parametrize("seed", range(6))
def test_multi_head_attention_of_packed_operands(seed: int) -> None:
    rng = np.random.default_rng(seed)
    b, s, h, d = _sizes(rng)
    t = int(rng.integers(1, 8))
    q, k, v = floats(rng, b, s, h * d), floats(rng, b, h, t, d), floats(rng, b, h, t, d)
    assert_floats("MultiHeadAttention", [q, k, v], rtol=RTOL, num_heads=h)  # keys of a cache, as they are
    bias = floats(rng, 3 * h * d)
    assert_floats("MultiHeadAttention", [q, k, v, bias], rtol=RTOL, num_heads=h)


@pytest.mark.parametrize("seed", range(6))
def test_packed_operands_are_those_apart(seed: int) -> None:
    """onnxruntime takes packed operands on GPUs only: they are compared with the same numbers apart."""
    rng = np.random.default_rng(seed)
    b, s, h, d = _sizes(rng)
    q, k, v = (floats(rng, b, s, h, d) for _ in range(3))
    flat = [x.reshape(b, s, h * d) for x in (q, k, v)]
    _, (want,) = both("MultiHeadAttention", flat, num_heads=h)
    packed = np.stack([q, k, v], axis=3)
    got = evaluate(imported("MultiHeadAttention", [packed], num_heads=h), {"x0": packed})["y0"]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    pair = np.stack([k, v], axis=3)
    got = evaluate(imported("MultiHeadAttention", [flat[0], pair], num_heads=h), {"x0": flat[0], "x1": pair})["y0"]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


# RotaryEmbedding -----------------------------------------------------------------------------------------------


def _angles(rng: np.random.Generator, positions: int, half: int) -> list[Array]:
    at = rng.uniform(-3, 3, (positions, half))
    return [np.cos(at).astype(np.float32), np.sin(at).astype(np.float32)]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("interleaved", [0, 1])
def test_rotary_embedding(seed: int, interleaved: int) -> None:
    rng = np.random.default_rng(seed)
    b, s, h, d = _sizes(rng)
    caches = _angles(rng, 20, d // 2)
    each = rng.integers(0, 20, (b, s)).astype(np.int64)
    offset = np.array([3], np.int64)
    for ids in (each, offset):
        for x in (floats(rng, b, s, h * d), floats(rng, b, h, s, d)):
            assert_floats("RotaryEmbedding", [x, ids, *caches], interleaved=interleaved)
    part = _angles(rng, 20, d // 4)
    given: dict[str, Any] = {"rotary_embedding_dim": d // 2, "num_heads": h, "interleaved": interleaved}
    assert_floats("RotaryEmbedding", [floats(rng, b, s, h * d), each, *map(Held, part)], **given)


def test_rotary_embedding_that_is_refused() -> None:
    operands = [np.ones((2, 3, 16), np.float32), np.zeros(1, np.int64), *_angles(np.random.default_rng(0), 8, 4)]
    with pytest.raises(ModelError, match="is_packed_batching=1 is not supported"):
        imported("RotaryEmbedding", operands, is_packed_batching=1)
    with pytest.raises(ModelError, match="rotary_embedding_dim needs num_heads"):
        imported("RotaryEmbedding", operands, rotary_embedding_dim=8)


# GroupQueryAttention -------------------------------------------------------------------------------------------


def _decoder(rng: np.random.Generator) -> tuple[int, int, int, int]:
    """Draw batch, groups, heads and width of a head."""
    groups = int(rng.integers(1, 4))
    return int(rng.integers(1, 4)), groups, groups * int(rng.integers(1, 4)), 16


def _i32(*numbers: int) -> Array:
    return np.array(numbers, np.int32)


@pytest.mark.parametrize("seed", range(12))
def test_prompt(seed: int) -> None:
    rng = np.random.default_rng(seed)
    b, g, h, d = _decoder(rng)
    s = int(rng.integers(1, 9))
    q, k, v = floats(rng, b, s, h * d), floats(rng, b, s, g * d), floats(rng, b, s, g * d)
    lengths, total = _i32(*[s - 1] * b), Held(np.array(s, np.int32))
    given = {"num_heads": h, "kv_num_heads": g}
    outputs = ("y0", "y1", "y2")
    assert_floats("GroupQueryAttention", [q, k, v, None, None, lengths, total], outputs, RTOL, **given)
    packed = np.concatenate([q, k, v], axis=2)
    operands: list[Any] = [packed, None, None, None, None, lengths, total]
    assert_floats("GroupQueryAttention", operands, outputs, RTOL, scale=0.3, **given)
    rotary = [Held(x) for x in _angles(rng, 16, d // 2)]
    more = {"do_rotary": 1, "rotary_interleaved": seed % 2, **given}
    assert_floats("GroupQueryAttention", [*operands, *rotary], outputs, RTOL, **more)
    for extra in ({"local_window_size": 2}, {"softcap": 1.5}, {"smooth_softmax": 1}):
        assert_floats("GroupQueryAttention", operands, outputs, RTOL, **extra, **given)
    sink = Held(floats(rng, h))
    assert_floats("GroupQueryAttention", [*operands, *[None] * 4, sink], outputs, RTOL, softcap=2.0, **given)
    added = floats(rng, int(rng.choice([1, b])), int(rng.choice([1, h])), s, s)
    assert_floats("GroupQueryAttention", [*operands, None, None, None, added], outputs, RTOL, **given)


@pytest.mark.parametrize("new", [1, 5])
def test_halves(new: int) -> None:
    rng = np.random.default_rng(new)
    q, k, v = (floats(rng, 2, new, n * 16).astype(np.float16) for n in (4, 2, 2))
    past: list[Any] = [floats(rng, 2, 2, 6, 16).astype(np.float16) for _ in range(2)] if new == 1 else [None, None]
    total = new + (6 if new == 1 else 0)
    rotary = [Held(x.astype(np.float16)) for x in _angles(rng, 16, 8)]
    operands = [q, k, v, *past, _i32(total - 1, total - 1), Held(np.array(total, np.int32)), *rotary]
    given = {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1}
    assert_floats("GroupQueryAttention", operands, ("y0", "y1", "y2"), 4e-3, **given)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("new", [1, 3])
def test_decoding_with_a_cache(seed: int, new: int) -> None:
    """Sequences of different lengths; the cache has room for all, or grows by the new tokens."""
    rng = np.random.default_rng(seed)
    b, g, h, d = _decoder(rng)
    b = 1 if new > 1 else b  # onnxruntime's rule
    before = rng.integers(1, 7, b)
    total = int(before.max()) + new
    room = total + int(rng.integers(0, 4)) if seed % 2 else int(before.max())
    q, k, v = floats(rng, b, new, h * d), floats(rng, b, new, g * d), floats(rng, b, new, g * d)
    past = [floats(rng, b, g, room, d) for _ in range(2)]
    lengths = (before + new - 1).astype(np.int32)
    operands = [q, k, v, *past, lengths, Held(np.array(total, np.int32))]
    rotary = [Held(x) for x in _angles(rng, 24, d // 2)]
    given = {"num_heads": h, "kv_num_heads": g}
    cases: list[tuple[list[Any], dict[str, Any]]] = [
        (operands, {}),
        ([*operands, *rotary], {"do_rotary": 1, "rotary_interleaved": seed % 2}),
        (operands, {"local_window_size": 3}),
        (operands, {"softcap": 1.5, "scale": 0.4}),
        ([*operands, *[None] * 4, Held(floats(rng, h))], {}),
        ([*operands, None, None, None, floats(rng, 1, 1, new, total)], {}),
    ]
    for given_operands, more in cases:
        results = both("GroupQueryAttention", given_operands, ("y0", "y1", "y2"), **given, **more)
        (y, *caches), (want_y, *want) = results
        np.testing.assert_allclose(y, want_y, rtol=1e-4, atol=1e-5)
        for ours, theirs in zip(caches, want, strict=True):
            assert ours.shape == (b, g, max(room, total), d)
            for i, length in enumerate(before + new):  # after it is what nobody reads
                np.testing.assert_allclose(ours[i, :, :length], theirs[i, :, :length], rtol=1e-4, atol=1e-5)


def _normed(x: Array, weight: Array, epsilon: float) -> Array:
    """The RMS norm of each head of x[B, S, heads * D]."""
    heads = x.astype(np.float64).reshape(*x.shape[:2], -1, len(weight))
    y = heads / np.sqrt((heads**2).mean(-1, keepdims=True) + epsilon) * weight
    return y.reshape(x.shape).astype(np.float32)


def test_norms_of_queries_and_keys() -> None:
    """onnxruntime has these norms on GPUs only: operands that are normed before it are compared."""
    rng = np.random.default_rng(3)
    b, g, h, d, s = 2, 2, 4, 16, 5
    q, k, v = floats(rng, b, s, h * d), floats(rng, b, s, g * d), floats(rng, b, s, g * d)
    norms, outputs = [floats(rng, d), floats(rng, d)], ("y0", "y1", "y2")
    rest = [None, None, _i32(4, 4), Held(np.array(5, np.int32)), *map(Held, _angles(rng, 8, d // 2))]
    given: dict[str, Any] = {"num_heads": h, "kv_num_heads": g, "do_rotary": 1}
    before = [_normed(x, w, 1e-3) for x, w in zip((q, k), norms, strict=True)]
    _, wanted = both("GroupQueryAttention", [*before, v, *rest], outputs, **given)
    proto, feeds = one(
        "GroupQueryAttention", [q, k, v, *rest, *[None] * 5, *map(Held, norms)], outputs, qk_norm_epsilon=1e-3, **given
    )
    got = evaluate(load(proto), feeds)
    for name, want in zip(outputs, wanted, strict=True):
        np.testing.assert_allclose(got[name], want, rtol=1e-4, atol=1e-5)


def test_a_length_that_is_not_known_is_at_most_the_cache() -> None:
    rng = np.random.default_rng(4)
    q, k, v = (floats(rng, 1, 1, n * 16) for n in (4, 2, 2))
    past = [floats(rng, 1, 2, 8, 16) for _ in range(2)]
    operands = [q, k, v, *past, _i32(5), np.array(6, np.int32)]
    with pytest.warns(UserWarning, match="the cache has room for all tokens"):
        (ours, _, _), (want, _, _) = both(
            "GroupQueryAttention", operands, ("y0", "y1", "y2"), num_heads=4, kv_num_heads=2
        )
    np.testing.assert_allclose(ours, want, rtol=1e-4, atol=1e-5)
    with pytest.raises(ModelError, match="total_sequence_length must be known at import"):
        imported("GroupQueryAttention", [q, k, v, None, None, *operands[5:]], num_heads=4, kv_num_heads=2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"causal": 0}, "causal=0 is not supported"),
        ({"k_quant_type": "PER_TENSOR"}, "a quantised cache is not supported"),
        ({"qk_output": 1}, "fusec does not store the scores"),
        ({"sliding_window_cache": 1}, "a cache that wraps around"),
        ({"do_rotary": 1}, "do_rotary=1 needs cos_cache and sin_cache"),
        ({"kv_num_heads": 3}, "4 heads of q do not divide among 3"),
    ],
)
def test_grouped_attention_that_is_refused(given: dict[str, Any], message: str) -> None:
    x = np.ones((1, 2, 64), np.float32)
    operands = [x, x, x, None, None, _i32(1), Held(np.array(2, np.int32))]
    attributes: dict[str, Any] = {"num_heads": 4, "kv_num_heads": 2, **given}
    with pytest.raises(ModelError, match=rf"node 'n' \(GroupQueryAttention\): .*{message}"):
        imported("GroupQueryAttention", operands, **attributes)


def test_new_keys_are_written_by_rows() -> None:
    """There is one index for each head and token, and not for each feature."""
    c = Config(num_hidden_layers=1)
    cache = (3, c.num_key_value_heads, 32, c.head_dim)
    shapes = {"input_ids": (3, 2), "attention_mask": (3, 32)}
    shapes |= {f"past_key_values.0.{which}": cache for which in ("key", "value")}
    graph = load(Writer(c).model(genai=True), shapes)
    scatters = [n for n in graph.nodes if n.op.name == "scatter"]
    assert [n.operands[1].type.shape for n in scatters] == [(3 * c.num_key_value_heads * 2,)] * 2
