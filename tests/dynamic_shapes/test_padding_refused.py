"""Test refusals of padding: a row of the results would depend on padded rows, or on their number."""

from __future__ import annotations

import numpy as np
import pytest

from fusec.errors import ModelError
from fusec.frontends.padding_proof import crops
from fusec.reference import evaluate
from fusec.text import parse

# a model of N rows (M is N - 1, C a constant of N numbers), where the inputs have them, and what is said
REFUSED: dict[str, tuple[str, dict[str, list[int]], str]] = {
    "summed": ("(%x: f32[N,3]) { %y = reduce(%x) {kind='sum', axes=[0]}", {"x": [0]}, "it is reduced"),
    "normalised": (
        "(%x: f32[2,N,3], %s: f32[N,3]) { %y = layer_norm(%x, %s) {axis=1}",
        {"x": [1], "s": [0]},
        "rows meet other rows",
    ),
    "normalised by one number": (
        "(%x: f32[2,N,3], %s: f32[3]) { %y = rms_norm(%x, %s) {axis=1}",
        {"x": [1]},
        "it is normalised over",
    ),
    "the rows of a product's second operand": (
        "(%x: f32[2,3,4], %w: f32[2,N,5]) { %t = reduce(%w) {kind='sum', axes=[2]} %e = reshape(%t) {shape=[2,1,N]}"
        " %y = matmul(%e, %w)",
        {"w": [1]},
        "it is summed over",
    ),
    "the columns of its first": ("(%x: f32[3,N], %w: f32[N,5]) { %y = matmul(%x, %w)", {"x": [1], "w": [0]}, "summed"),
    "keys": (
        "(%q: f32[2,1,3,4], %k: f32[2,1,N,4], %v: f32[2,1,N,4]) { %y = attention(%q, %k, %v)",
        {"k": [2], "v": [2]},
        "neither the batch nor the queries",
    ),
    "keys with the queries": (
        "(%q: f32[2,1,N,4], %k: f32[2,1,N,4], %v: f32[2,1,N,4]) { %y = attention(%q, %k, %v)",
        {"q": [2], "k": [2], "v": [2]},
        "rows meet other rows",
    ),
    "steps of a sequence": (
        "(%x: f32[N,2,3], %r: f32[1,3,3], %h: f32[1,2,3]) { %y, %t = recurrent(%x, %r, %h) {cell='rnn'}",
        {"x": [0]},
        "it is not the batch dim",
    ),
    "rows in the opposite order": (
        "(%x: f32[N,3]) { %y = slice(%x) {starts=[M,0], sizes=[N,3], steps=[-1,1]}",
        {"x": [0]},
        "starts depends on it",
    ),
    "every row but the last": (
        "(%x: f32[N,3]) { %y = slice(%x) {starts=[0,0], sizes=[M,3], steps=[1,1]}",
        {"x": [0]},
        "it is sliced",
    ),
    "numbers that say how many rows there are": (
        "(%x: f32[N,3]) { %c = constant [SHARES] : f32[N,1] %y = mul(%x, %c)",
        {"x": [0]},
        "a number depends on it",
    ),
    "a number that says so": (
        "(%x: f32[N,3]) { %c = constant [N] : f32[1] %y = div(%x, %c)",
        {"x": [0]},
        "a number depends on it",
    ),
    "halves that are exchanged": (
        "(%x: f32[3,N], %c: f32[3,N], %s: f32[3,N]) { %y = rotary(%x, %c, %s)",
        {"x": [1], "c": [1], "s": [1]},
        "its halves are exchanged",
    ),
    "rows that are gathered, perhaps from the back": (
        "(%x: f32[N,3], %i: i64[2]) { %y = gather(%x, %i)",
        {"x": [0]},
        "rows are gathered",
    ),
    "a softmax along an axis from the back": (
        "(%x: f32[3,N]) { %y = softmax(%x) {axis=-1}",
        {"x": [1]},
        "softmax works along it",
    ),
    "places in rows that were joined": (
        "(%x: f32[2,N]) { %j = reshape(%x) {shape=[D]} %y = gen_index(%j) {axis=0}",
        {"x": [1]},
        "indices of a dim with several groups of rows are counted",
    ),
    "pads of the model's own": (
        "(%x: f32[N,3]) { %y = pad(%x) {pads=[0,0,1,0]}",
        {"x": [0]},
        "it is padded by the model itself",
    ),
    "batches that meet others": (
        "(%q: f32[N,1,3,4], %k: f32[N,1,3,4], %v: f32[N,1,3,4], %b: f32[1,1,3,3]) { %t = transpose(%k)"
        " {perm=[1,0,2,3]} %r = reshape(%t) {shape=[N,1,3,4]} %y = attention(%q, %r, %v, %b)",
        {"q": [0], "k": [0]},
        "rows meet other rows",
    ),
    "a step that mixes rows": (
        "(%h: f32[N,3], %x: f32[5,N,3]) { %y, %r = scan(%h, %x) {body=graph 'body' (%h: f32[N,3], %x: f32[N,3]) {"
        " %s = softmax(%h) {axis=0} %y = add(%s, %x) return %y, %s }, steps=5, states=1, sequences=1}",
        {"h": [0], "x": [1]},
        "softmax works along it",
    ),
    "steps of a loop": (
        "(%h: f32[3], %x: f32[N,3]) { %y = scan(%h, %x) {body=graph 'body' (%h: f32[3], %x: f32[3]) {"
        " %y = add(%h, %x) return %y }, steps=N, states=1, sequences=1}",
        {"x": [0]},
        "steps depends on it",
    ),
    "a state that meets other rows": (
        "(%h: f32[N,3], %w: f32[3,N]) { %y = scan(%h, %w) {body=graph 'body' (%h: f32[N,3], %w: f32[3,N]) {"
        " %t = transpose(%w) {perm=[1,0]} %m = matmul(%t, %w) %y = matmul(%m, %h) return %y }, steps=5, states=1}",
        {"h": [0], "w": [1]},
        "rows meet other rows",
    ),
    "rows that steps exchange": (
        "(%x: f32[N,3]) { %y = scan(%x) {body=graph 'b' (%h: f32[N,3])"
        " { %z = slice(%h) {starts=[M,0], sizes=[N,3], steps=[-1,1]} return %z }, steps=2, states=1}",
        {"x": [0]},
        "starts depends on it",
    ),
}
# and what may
PASSED: dict[str, tuple[str, dict[str, list[int]]]] = {
    "places in rows": ("(%x: f32[N,2]) { %y = gen_index(%x) {axis=0}", {"x": [0]}),
    "numbers with equal beginnings": ("(%x: f32[N,3]) { %c = constant [COUNT] : f32[N,1] %y = mul(%x, %c)", {"x": [0]}),
    "queries": (
        "(%q: f32[2,1,N,4], %k: f32[2,1,3,4], %v: f32[2,1,3,4]) { %y = attention(%q, %k, %v)",
        {"q": [2]},
    ),
    "a loop": (
        "(%h: f32[2,N], %x: f32[5,N,3], %w: f32[3,3]) { %c = constant [COUNT] : f32[N]"
        " %y, %q, %r, %t = scan(%h, %c, %x, %w) {body=graph 'body' (%h: f32[2,N], %c: f32[N], %x: f32[N,3],"
        " %w: f32[3,3]) { %m = matmul(%x, %w) %t = reduce(%m) {kind='sum', axes=[1], keepdims=false}"
        " %y = add(%h, %t) %q = mul(%c, %t) return %y, %q, %m, %h }, steps=5, states=2, sequences=1} %z = mul(%r, %x)",
        {"h": [1], "x": [1]},
    ),
    "rows of each step": (
        "(%x: f32[N,3], %s: f32[5,N,3]) { %y = scan(%x, %s) {body=graph 'b' (%h: f32[N,3], %r: f32[N,3])"
        " { %m = reduce(%r) {kind='max', axes=[1]} %z = sub(%h, %m) return %z }, steps=5, states=1, sequences=1}",
        {"x": [0], "s": [1]},
    ),
    "an index for each row": ("(%x: f32[5,3], %i: i64[N]) { %y = gather(%x, %i)", {"i": [0]}),
}


def model(text: str, size: int) -> str:
    shares = ", ".join(str(i / size) for i in range(size))
    filled = text.replace("SHARES", shares).replace("COUNT", ", ".join(str(float(i)) for i in range(size)))
    filled = filled.replace("[N] :", f"[{float(size)}] :").replace("N", str(size)).replace("M", str(size - 1))
    lines = filled.replace("D", str(2 * size)).replace("'", '"').replace(" %", "\n%").replace(",\n%", ", %")
    return f'graph "g" {lines}\nreturn %y\n}}'


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused(what: str) -> None:
    text, axes, reason = REFUSED[what]
    with pytest.raises(ModelError, match=reason):
        crops(parse(model(text, 4)), parse(model(text, 6)), axes, 4, 6)


@pytest.mark.parametrize("what", PASSED)
def test_it_may_be_padded(what: str, rng: np.random.Generator) -> None:
    text, axes = PASSED[what]
    small, large = parse(model(text, 4)), parse(model(text, 6))
    (crop,) = crops(small, large, axes, 4, 6)
    feeds = {v.name: rng.integers(-3, 3, v.type.shape).astype(v.type.dtype.numpy) for v in small.inputs}
    wide = dict(feeds)
    for name, (axis,) in axes.items():
        wide[name] = np.concatenate([feeds[name]] * 2, axis).take(range(6), axis)
    np.testing.assert_array_equal(crop.apply(evaluate(large, wide)["y"]), evaluate(small, feeds)["y"])
