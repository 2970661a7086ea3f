"""Test a decoder on a GPU: tokens without a cache, and logits of the same tokens read again."""

from __future__ import annotations

import numpy as np
import pytest

import fusec
from examples.decode import Config, Writer, without_cache

pytestmark = pytest.mark.gpu
PROMPTS = [[5, 17, 42, 9, 9], [61, 2]]


@pytest.mark.parametrize("form", ["genai", "optimum"])
@pytest.mark.parametrize(("precision", "bound"), [("fp32", 1e-4), ("fp16", 2e-2), ("bf16", 1e-1)])
def test_logits_are_those_of_all_tokens_read_again(form: str, precision: str, bound: float) -> None:
    model = Writer(Config(hidden_size=256, max_position_embeddings=512)).model(genai=form == "genai")
    generator = fusec.Generator(model, batch=2, max_length=512, precision=precision, tune="none", check=False)
    assert generator.decode.device != "simulated"
    assert generator.verify(steps=8) < bound
    again = generator(PROMPTS, 8)
    assert generator(PROMPTS, 8) == again
    if precision == "fp32":
        assert again == without_cache(model, PROMPTS, 8)


def test_sampling_on_a_gpu() -> None:
    model = Writer(Config()).model(genai=True)
    best = fusec.Generator(model, batch=2, max_length=32, tune="none")
    drawn = fusec.Generator(model, batch=2, max_length=32, tune="none", top_k=1)
    assert drawn(PROMPTS, 8, seed=3) == best(PROMPTS, 8)
    logits: list[np.ndarray] = []
    best(PROMPTS, 3, choose=lambda found: logits.append(found) or found.argmax(1))
    assert all(isinstance(found, np.ndarray) and found.shape == (2, 96) for found in logits)
