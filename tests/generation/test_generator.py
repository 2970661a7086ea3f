"""Test that decoding over a cache gives the tokens of a model that reads the whole sequence again each time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from helpers import quick
from onnx import ModelProto

import fusec
from examples.decode import Config, Writer, without_cache
from fusec.errors import ExecutionError, FusecError, ModelError
from fusec.runtime import Executable
from fusec.schedule.program import Kind

PROMPTS = [[5, 17, 42, 9, 9], [61], [3, 1, 4, 1, 5, 9, 2, 6, 5]]
FORMS = ("genai", "optimum")


@cache
def model(form: str, dtype: str = "f4") -> ModelProto:
    return Writer(Config(), np.dtype(dtype)).model(genai=form == "genai")


def generator(form: str, **options: Any) -> fusec.Generator:
    given: dict[str, Any] = {"batch": 3, "max_length": 32, "target": "cpu", **options}
    return fusec.Generator(model(form), **given)


@cache
def by_onnxruntime(count: int) -> list[list[int]]:
    """Choose the best tokens with onnxruntime, without a cache."""
    session = onnxruntime.InferenceSession(model("optimum").SerializeToString())
    found: list[list[int]] = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(count):
            ids, at = np.array([tokens]), np.arange(len(tokens))[None]
            feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": at}
            feeds |= {i.name: np.zeros((1, 2, 0, 8), np.float32) for i in session.get_inputs() if "past" in i.name}
            (logits,) = session.run(["logits"], feeds)
            tokens.append(int(np.asarray(logits)[0, -1].argmax()))
        found.append(tokens[len(prompt) :])
    return found


@pytest.mark.parametrize("form", FORMS)
def test_the_tokens_of_a_model_without_a_cache(form: str) -> None:
    made = generator(form)
    assert made(PROMPTS, 12) == by_onnxruntime(12)
    assert made(PROMPTS, 12) == by_onnxruntime(12)  # the cache holds another generation by now
    assert made.decode.in_place_state >= {s.name for s in made.decode.inputs if s.name.startswith("past")}


@pytest.mark.parametrize("form", FORMS)
def test_the_reference_of_the_example(form: str) -> None:
    assert without_cache(model(form), PROMPTS[:1], 3) == [tokens[:3] for tokens in by_onnxruntime(12)[:1]]


@pytest.mark.cudnn
@pytest.mark.parametrize("form", quick(FORMS, ["genai"]))
def test_in_16_bits_attention_over_the_cache_is_one_cudnn_step(form: str) -> None:
    made = generator(form, precision="fp16", target="h200", simulate=True, batch=2, max_length=48)
    made.decode.assert_fused("attention", cudnn_only=True)
    explanation = made.decode.explain()
    assert sum("attention" in step.ops for step in explanation.steps) == Config().num_hidden_layers
    assert {s.dtype for s in made.decode.inputs if s.name.startswith("past")} == {np.dtype(np.float16)}
    assert [len(tokens) for tokens in made(PROMPTS[:2], 6)] == [6, 6]
    assert made.verify() < 1e-2
    if form == "genai":
        page = Path(__file__).parents[2] / "docs" / "decoders.md"
        assert "\n".join(str(made.explain()).splitlines()[:5]) in page.read_text()


@pytest.mark.cudnn
@pytest.mark.parametrize("form", FORMS)
def test_a_step_of_few_sequences_has_one_product_and_of_one_sequence_one_rotary_op_before_attention(form: str) -> None:
    one, two, many = (
        generator(form, precision="fp16", target="h200", simulate=True, batch=batch, max_length=32)
        for batch in (1, 2, 33)
    )
    layers = Config().num_hidden_layers
    kinds = [Counter(node.op.name for node in made.decode.compiled.graph.nodes) for made in (one, two, many)]
    assert [kind["rotary"] for kind in kinds] == [layers, 2 * layers, 2 * layers]
    products = [kind["matmul"] - kinds[0]["matmul"] for kind in kinds]
    assert products == [0, 0, 2 * layers], "queries, keys and values of few sequences are one product"
    slices = [step for step in one.decode.compiled.program.steps if step.signature == "slice"]
    assert slices and all(step.kind is Kind.VIEW for step in slices), "nothing is copied"
    assert one.verify() < 1e-2
    assert two.verify() < 1e-2


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_verify_compares_with_reading_again(form: str, precision: str) -> None:
    assert generator(form, precision=precision).verify() < {"fp32": 1e-5, "fp16": 1e-2, "bf16": 5e-2}[precision]


def test_a_window_of_keys_in_a_cache_that_grows_is_refused() -> None:
    """Such a model counts keys back from the end of the tensor, and fusec keeps a sequence at its beginning."""
    windowed = Writer(Config(sliding_window=6))
    grows = windowed.model(genai=False)
    with pytest.raises(ModelError, match="decoding over the cache and reading all tokens again give other logits"):
        fusec.Generator(grows, batch=2, max_length=32, target="cpu")
    unchecked = fusec.Generator(grows, batch=2, max_length=32, target="cpu", check=False)
    assert not unchecked.verify() < 0.1


def test_a_window_of_keys_in_one_buffer() -> None:
    made = fusec.Generator(Writer(Config(sliding_window=6)).model(genai=True), max_length=32, target="cpu")
    assert made.verify() < 1e-5
    assert made([PROMPTS[2]], 8) == without_cache(Writer(Config(sliding_window=6)).model(genai=False), PROMPTS[2:], 8)


def test_stop_tokens_end_sequences_one_by_one() -> None:
    whole = by_onnxruntime(12)
    stop = whole[0][3]
    expected = [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in whole]
    assert len({len(tokens) for tokens in expected}) > 1
    assert generator("genai", stop=stop)(PROMPTS, 12) == expected
    assert generator("genai", stop=[stop])(PROMPTS[:1]) == expected[:1]  # and the generation ends early


def test_streams_give_minus_one_after_the_end() -> None:
    stop = by_onnxruntime(12)[0][0]
    steps = [tokens.tolist() for tokens in generator("optimum", stop=stop).stream(PROMPTS[:2], 3)]
    assert [row[0] for row in steps] == [stop, -1, -1][: len(steps)]
    assert [row[1] for row in steps] == by_onnxruntime(12)[1][: len(steps)]


def test_a_program_for_each_size_of_prompts() -> None:
    made = generator("genai", prompt_sizes=[4, 9])
    made(PROMPTS[1:2], 1)
    assert list(made.prompts) == [4]
    assert made(PROMPTS, 4) == [tokens[:4] for tokens in by_onnxruntime(12)]
    assert sorted(made.prompts) == [4, 9]
    with pytest.raises(ExecutionError, match="a prompt of 10 tokens: the largest program takes 9"):
        made([[1] * 10], 1)


def test_a_sequence_fills_the_cache() -> None:
    short = generator("optimum", max_length=12, batch=1)
    assert short(PROMPTS[2:]) == [by_onnxruntime(12)[2][:3]]
    with pytest.raises(ExecutionError, match="4 new tokens after a prompt of 9: the cache has room for 12 tokens"):
        short(PROMPTS[2:], 4)


def test_sampling_draws_by_the_softmax_of_the_best(rng: np.random.Generator) -> None:
    made = generator("genai", top_k=3, batch=1, max_length=16)
    kept: list[Any] = []
    made([[5, 17]], 1, choose=lambda logits: kept.append(logits) or [0])
    best = np.argsort(-kept[0][0])[:3]
    weights = np.exp(kept[0][0][best] / 2.0)
    drawn = [made([[5, 17]], 1, temperature=2.0, seed=int(rng.integers(1 << 30)))[0][0] for _ in range(400)]
    counts = np.array([drawn.count(int(token)) for token in best])
    assert counts.sum() == 400
    np.testing.assert_allclose(counts / 400, weights / weights.sum(), atol=0.12)


def test_a_seed_gives_the_same_tokens() -> None:
    made = generator("genai", top_k=40)
    first = made(PROMPTS, 10, seed=7)
    assert made(PROMPTS, 10, seed=7) == first
    assert made(PROMPTS, 10, seed=8) != first


def test_a_temperature_needs_a_draw() -> None:
    with pytest.raises(ExecutionError, match=r"temperature=0\.5 .* give top_k=50, say, when you make it"):
        generator("genai")(PROMPTS, 2, temperature=0.5)
    with pytest.raises(ExecutionError, match=r"temperature=0\.5 .* `choose` chooses them"):
        generator("genai", top_k=3)(PROMPTS, 2, temperature=0.5, choose=lambda logits: logits.argmax(1))


def test_its_text_tells_the_sizes() -> None:
    made = generator("genai", top_k=3)
    assert repr(made).startswith("<fusec.Generator batch=3, max_length=32, top_k=3: decode step ")
    assert repr(made).endswith("launches), on cpu>") or repr(made).endswith("views), on cpu>")


def test_sampled_tokens_are_what_the_next_step_adds() -> None:
    """With one candidate, sampling is the greedy choice."""
    assert generator("optimum", top_k=1)(PROMPTS, 8, seed=0) == [tokens[:8] for tokens in by_onnxruntime(12)]


def test_the_host_chooses_by_logits() -> None:
    made = generator("genai")
    assert made(PROMPTS, 6, choose=lambda logits: logits.argmax(1)) == [t[:6] for t in by_onnxruntime(12)]
    with pytest.raises(ExecutionError, match=r"`choose` gave int64\[2\], not 3 tokens"):
        made(PROMPTS, 6, choose=lambda logits: logits.argmax(1)[:2])


def test_executables_of_another_generator(tmp_path: Path) -> None:
    made = generator("genai", prompt_sizes=[16])
    made(PROMPTS, 1)
    loaded: list[Executable] = []
    for number, each in enumerate([made.decode, *made.prompts.values()]):
        each.save(tmp_path / f"{number}.fusec")
        read = fusec.load(tmp_path / f"{number}.fusec")
        assert isinstance(read, Executable)
        loaded.append(read)
    again = fusec.Generator(loaded)
    assert (again.batch, again.max_length) == (3, 32)
    assert again(PROMPTS, 6) == [tokens[:6] for tokens in by_onnxruntime(12)]
    with pytest.raises(FusecError, match="takes a model, or the executables of another one"):
        fusec.Generator(loaded[:1])


def test_a_newer_generation_takes_the_cache() -> None:
    made = generator("genai")
    older, newer = made.stream(PROMPTS, 3), made.stream(PROMPTS, 3)
    next(older)
    next(newer)
    with pytest.raises(ExecutionError, match="another generation has begun"):
        next(older)
    assert next(newer).tolist() == [tokens[1] for tokens in by_onnxruntime(12)]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "0 prompts for a generator of 3"),
        ([[1]] * 4, "4 prompts for a generator of 3"),
        ([[1], []], "prompt 1 has no tokens"),
        ([[0.5]], r"prompt 0 is float64\[1\], not a list of tokens"),
        ([1, 2, 3, 4], r"one for each sequence: write \[\[5, 7\]\] for one prompt"),
        ([[1, 96]], r"prompt 0 has a token outside 0\.\.95"),
    ],
)
def test_prompts_that_do_not_fit(prompts: Sequence[Any], message: str) -> None:
    with pytest.raises(ExecutionError, match=message):
        generator("genai")(prompts, 1)


@pytest.mark.parametrize("prompts", [None, 5, [[[1, 2], [3]]], "text"])
def test_prompts_that_are_no_rows_of_tokens(prompts: Any) -> None:
    with pytest.raises(ExecutionError, match=r"prompts are lists of tokens, one for each sequence"):
        generator("genai")(prompts, 1)


def test_prompts_from_an_iterator() -> None:
    assert generator("genai")(iter(PROMPTS), 3) == [tokens[:3] for tokens in by_onnxruntime(12)]


@pytest.mark.parametrize(
    ("count", "message"),
    [(-1, "not -1"), (2.5, "not 2.5"), ("3", "not '3'"), (True, "not True")],
)
def test_a_count_of_new_tokens_that_is_none(count: Any, message: str) -> None:
    with pytest.raises(ExecutionError, match=f"max_new_tokens is a whole number of at least 0, {message}"):
        generator("genai")(PROMPTS, count)


def test_a_prompt_that_is_longer_than_the_cache() -> None:
    with pytest.raises(ExecutionError, match="a prompt of 33 tokens: the cache has room for 32, max_length"):
        generator("genai")([[1] * 33])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch is a whole number of at least 1, not 0"),
        ({"batch": 1.5}, "batch is a whole number of at least 1, not 1.5"),
        ({"batch": "2"}, "batch is a whole number of at least 1, not '2'"),
        ({"top_k": -1}, "top_k is a whole number of at least 0, not -1"),
        ({"top_k": 2.5}, "top_k is a whole number of at least 0, not 2.5"),
        ({"max_length": 1}, "max_length is a whole number of at least 2, not 1"),
        ({"stop": None}, "stop is the id of a token, or several ids, .* not None"),
        ({"stop": "</s>"}, "stop is the id of a token"),
        ({"stop": 2.0}, "stop is the id of a token"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(FusecError, match=message):
        generator("genai", **options)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([1, 8], "prompt sizes are from 2 to max_length, 32"),
        ([64], "prompt sizes are from 2 to max_length, 32"),
        ([], "prompt sizes are from 2 to max_length, 32"),
        (8, "prompt_sizes are whole numbers"),
        ([3.5], "prompt_sizes are whole numbers"),
    ],
)
def test_prompt_sizes_out_of_range(sizes: Any, message: str) -> None:
    with pytest.raises(FusecError, match=message):
        generator("genai", prompt_sizes=sizes)


def test_a_cache_for_more_positions_than_the_model_has() -> None:
    made = generator("optimum", max_length=200, prompt_sizes=[16, 200])  # the model has angles for 128 positions
    made([[1, 2, 3]], 1)
    with pytest.raises(ModelError, match=r"prompts of 200 tokens: .* give a smaller max_length"):
        made([[1] * 20], 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0}, "temperature is 0, but must be positive"),
        ({"temperature": float("nan")}, "temperature is nan, but must be positive"),
        ({"temperature": None}, "temperature is None, but must be positive"),
        ({"seed": -1}, "seed is a whole number of at least 0"),
        ({"seed": "a"}, "seed is a whole number of at least 0"),
    ],
)
def test_options_of_a_draw_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ExecutionError, match=message):
        generator("genai", top_k=4)(PROMPTS, 1, **options)


def test_a_tiny_temperature_takes_the_best_token() -> None:
    assert generator("genai", top_k=4)(PROMPTS, 4, temperature=1e-320) == [t[:4] for t in by_onnxruntime(12)]


@pytest.mark.parametrize("token", [-1, 96])
def test_chosen_tokens_outside_the_vocabulary(token: int) -> None:
    with pytest.raises(ExecutionError, match=r"`choose` gave a token outside 0\.\.95: \[0, 0, "):
        generator("genai")(PROMPTS, 2, choose=lambda _: np.array([0, 0, token]))


def test_verify_compares_at_least_one_step() -> None:
    with pytest.raises(FusecError, match="steps is a whole number of at least 1, not 0"):
        generator("genai").verify(steps=0)


def test_the_explanation_tells_the_cache() -> None:
    made = generator("genai", batch=2, max_length=20)
    made([[1, 2]], 1)
    told = made.explain()
    assert told.cache_bytes == 2 * 2 * (2 * 2 * 20 * 8) * 4
    first, decode, prompt, *_ = str(told).splitlines()
    assert first == "cache: 4 tensors of float32[2, 2, 20, 8], 10.0 KiB on the device; written in place"
    assert decode.startswith("decode step: ")
    assert prompt.startswith("prompts of up to 16 tokens: ")
    data = told.to_json()
    assert data["cache"]["bytes"] == told.cache_bytes
    assert list(data["programs"]) == ["decode step", "prompts of up to 16 tokens"]
