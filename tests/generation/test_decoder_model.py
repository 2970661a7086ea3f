"""Test which models are decoders with a cache, and what the messages say of others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from onnx import ModelProto, TensorProto, helper

import fusec
from examples.decode import Config, Writer
from fusec.errors import ModelError
from fusec.frontends import Source
from fusec.generation.decoder_graph import DecoderSizes, decoder_builder
from fusec.generation.decoder_model import DecoderModel
from fusec.ir import DType


def model(form: str = "optimum") -> ModelProto:
    return Writer(Config(num_hidden_layers=1)).model(genai=form == "genai")


def renamed(old: str, new: str) -> Callable[[ModelProto], None]:
    """Rename a value wherever it occurs."""

    def edit(found: ModelProto) -> None:
        for value in (*found.graph.input, *found.graph.output):
            value.name = value.name.replace(old, new)
        for node in found.graph.node:
            for names in (node.input, node.output):
                names[:] = [name.replace(old, new) for name in names]

    return edit


def made_constant(name: str) -> Callable[[ModelProto], None]:
    def edit(found: ModelProto) -> None:
        (value,) = [v for v in found.graph.input if v.name == name]
        found.graph.input.remove(value)
        found.graph.initializer.append(helper.make_tensor(name, TensorProto.INT64, [1, 1], [1]))

    return edit


def fixed_length(found: ModelProto) -> None:
    for value in found.graph.input:
        if value.name.startswith("past"):
            value.type.tensor_type.shape.dim[2].dim_value = 31


def scaled_cache(found: ModelProto) -> None:
    """Give back the double of the keys."""
    (node,) = [n for n in found.graph.node if n.output[0] == "present.0.key"]
    node.output[0] = "joined"
    found.graph.node.append(helper.make_node("Add", ["joined", "joined"], ["present.0.key"]))
    for other in found.graph.node:
        if other.output[0] != "present.0.key":
            other.input[:] = ["joined" if name == "present.0.key" else name for name in other.input]
    ordered = sorted(found.graph.node, key=lambda n: n.output[0] == "logits")
    del found.graph.node[:]
    found.graph.node.extend(ordered)


def last_logits(found: ModelProto) -> None:
    (node,) = [n for n in found.graph.node if n.output[0] == "logits"]
    node.output[0] = "all_logits"
    found.graph.initializer.append(helper.make_tensor("last", TensorProto.INT64, [1], [-1]))
    found.graph.node.append(helper.make_node("Gather", ["all_logits", "last"], ["logits"], axis=1))


REFUSED: dict[str, tuple[Callable[[ModelProto], None], str]] = {
    "no cache": (renamed("past_key_values", "memory"), "no input is a key/value cache"),
    "no ids": (renamed("input_ids", "tokens"), "a decoder takes %input_ids"),
    "another input": (renamed("attention_mask", "beam"), "fusec has no value for input %beam"),
    "no positions": (made_constant("position_ids"), "has no input %position_ids"),
    "no mask": (made_constant("attention_mask"), "has no input %attention_mask"),
    "a cache of one length": (fixed_length, "after the batch, only the last dim but one must be symbolic"),
    "another cache": (scaled_cache, "output %present.0.key is not input %past_key_values.0.key joined with new keys"),
    "logits of the last token": (last_logits, "fusec needs the scores after each token"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str) -> None:
    edit, message = REFUSED[what]
    found = model()
    edit(found)
    with pytest.raises(ModelError, match=message):
        fusec.Generator(found, max_length=32, target="cpu")([[1, 2, 3]], 2)


@pytest.mark.parametrize("form", ["optimum", "genai"])
def test_the_cache_of_both_forms(form: str) -> None:
    found = DecoderModel.of(Source(model(form)))
    assert [(c.past, c.present) for c in found.cache] == [
        (f"past_key_values.0.{which}", f"present.0.{which}") for which in ("key", "value")
    ]
    assert found.cache[0].shape(4, 100) == (4, 2, 100, 8)
    assert found.in_place == (form == "genai")
    assert found.logits == "logits"


def test_other_names_of_the_cache() -> None:
    found, same = model(), fusec.Generator(model(), max_length=32, target="cpu")
    renamed("past_key_values", "memory")(found)
    pairs = {f"memory.0.{which}": f"present.0.{which}" for which in ("key", "value")}
    other = fusec.Generator(found, max_length=32, target="cpu", cache=pairs)
    assert other([[1, 2, 3]], 6) == same([[1, 2, 3]], 6)
    with pytest.raises(ModelError, match="no input %memory with an output %present for the cache"):
        fusec.Generator(found, cache={"memory": "present"})


def test_a_constant_input() -> None:
    found = model("genai")
    found.graph.input.append(helper.make_tensor_value_info("branch", TensorProto.BOOL, []))
    with pytest.raises(ModelError, match="fusec has no value for input %branch"):
        fusec.Generator(found, max_length=32, target="cpu")
    assert fusec.Generator(found, max_length=32, target="cpu", constants={"branch": True}).max_length == 32


@pytest.mark.parametrize("form", ["optimum", "genai"])
def test_a_cache_in_fp32_is_stored_in_16_bits(form: str) -> None:
    """Otherwise each step would cast all of it."""
    decoder = DecoderModel.of(Source(model(form)))
    for precision, dtype in (("fp16", DType.F16), ("bf16", DType.BF16), ("tf32", DType.F32)):
        graph = decoder_builder(decoder, DecoderSizes(2, 32, 1), precision).graph()
        assert {v.type.dtype for v in graph.inputs if v.name.startswith("past")} == {dtype}
    made = fusec.Generator(model(form), batch=2, max_length=32, target="cpu", precision="fp16")
    shape = (2, 2, 32, 8)
    casts = [n for n in made.decode.compiled.program.graph.nodes if n.op.name == "cast"]
    assert not [n for n in casts if n.result.type.shape == shape]


@pytest.mark.parametrize("form", ["optimum", "genai"])
def test_prompts_need_scores_after_their_last_tokens_only(form: str) -> None:
    decoder, length = DecoderModel.of(Source(model(form))), 16
    graph = decoder_builder(decoder, DecoderSizes(2, 32, length)).graph()
    products = [n.result.type.shape for n in graph.nodes if n.op.name == "matmul" and n.result.type.rank == 3]
    c = Config()
    for_all = [s for s in products if s[1] == length]
    assert {s[2] for s in for_all} == {c.hidden_size, c.num_key_value_heads * c.head_dim}  # queries, keys and values
    assert len(for_all) == 3
    assert (2, 1, c.vocab_size) in products
