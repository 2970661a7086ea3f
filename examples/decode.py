"""Decode with a small Llama-like model and a key/value cache: greedy, sampled, and token by token.

The weights are drawn, so the tokens mean nothing. The model is written in both common forms of an export: as optimum
writes it (past keys joined with new ones), and as onnxruntime-genai does (GroupQueryAttention, and one buffer for past
and present). Without a GPU it runs in simulation. docs/decoders.md explains it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

import fusec
from fusec.frontends import Source
from fusec.reference import evaluate


@dataclass(frozen=True)
class Config:
    """Sizes of a Llama-like model, named as in Hugging Face's config.json."""

    vocab_size: int = 96
    hidden_size: int = 32
    intermediate_size: int = 64
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    max_position_embeddings: int = 128
    sliding_window: int = 0  # number of keys that a token sees, itself included; 0: all

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


class Writer:
    """Writes the nodes of an ONNX model, in element type `dtype`."""

    def __init__(self, config: Config, dtype: Any = np.float32, seed: int = 0):
        self.config, self.dtype = config, np.dtype(dtype)
        self.nodes: list[NodeProto] = []
        self.weights: list[TensorProto] = []
        self._rng = np.random.default_rng(seed)

    def op(self, kind: str, *operands: str, outputs: int = 1, domain: str = "", **attributes: Any) -> Any:
        """Add a node; return the name of its result, or a list of them."""
        names = [f"{kind}_{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(kind, operands, names, domain=domain, **attributes))
        return names[0] if outputs == 1 else names

    def constant(self, array: Any) -> str:
        self.weights.append(numpy_helper.from_array(np.asarray(array), f"w{len(self.weights)}"))
        return self.weights[-1].name

    def ints(self, *numbers: int) -> str:
        return self.constant(np.array(numbers, np.int64))

    def linear(self, x: str, rows: int, columns: int) -> str:
        drawn = self._rng.standard_normal((rows, columns)) / np.sqrt(rows)
        return self.op("MatMul", x, self.constant(drawn.astype(self.dtype)))

    def norm(self, x: str) -> str:
        scale = self.constant(self._rng.uniform(0.5, 1.5, self.config.hidden_size).astype(self.dtype))
        return self.op("SimplifiedLayerNormalization", x, scale, axis=-1, epsilon=1e-5)

    def angles(self) -> tuple[str, str]:
        """Return cos and sin of the rotary embedding, [positions, head_dim / 2] each."""
        half = self.config.head_dim // 2
        at = np.outer(np.arange(self.config.max_position_embeddings), 10000.0 ** (-np.arange(half) / half))
        return self.constant(np.cos(at).astype(self.dtype)), self.constant(np.sin(at).astype(self.dtype))

    def model(self, genai: bool) -> ModelProto:
        """Write the model: in the form of onnxruntime-genai, or in that of optimum."""
        c = self.config
        embeddings = self.constant(self._rng.standard_normal((c.vocab_size, c.hidden_size)).astype(self.dtype))
        x = self.op("Gather", embeddings, "input_ids")
        attend = GenaiAttention(self) if genai else OptimumAttention(self)
        for layer in range(c.num_hidden_layers):
            h = self.norm(x)
            width = c.num_key_value_heads * c.head_dim
            q, k, v = (self.linear(h, c.hidden_size, n) for n in (c.hidden_size, width, width))
            x = self.op("Add", x, self.linear(attend(layer, q, k, v), c.hidden_size, c.hidden_size))
            h = self.norm(x)
            gate, up = (self.linear(h, c.hidden_size, c.intermediate_size) for _ in range(2))
            silu = self.op("Mul", gate, self.op("Sigmoid", gate))
            x = self.op("Add", x, self.linear(self.op("Mul", silu, up), c.intermediate_size, c.hidden_size))
        logits = self.linear(self.norm(x), c.hidden_size, c.vocab_size)
        self.nodes.append(helper.make_node("Identity", [logits], ["logits"]))
        return self._finished(attend.inputs)

    def _finished(self, ids: Sequence[str]) -> ModelProto:
        c, float_type = self.config, helper.np_dtype_to_tensor_dtype(self.dtype)
        lengths = {"attention_mask": "total_length"}
        inputs = [
            helper.make_tensor_value_info(name, TensorProto.INT64, ["batch", lengths.get(name, "length")])
            for name in ("input_ids", *ids)
        ]
        outputs = [helper.make_tensor_value_info("logits", float_type, ["batch", "length", c.vocab_size])]
        for layer in range(c.num_hidden_layers):
            for which in ("key", "value"):
                for values, name, length in (
                    (inputs, "past_key_values", "past_length"),
                    (outputs, "present", "present_length"),
                ):
                    dims = ["batch", c.num_key_value_heads, length, c.head_dim]
                    values.append(helper.make_tensor_value_info(f"{name}.{layer}.{which}", float_type, dims))
        graph = helper.make_graph(self.nodes, "llama", inputs, outputs, self.weights)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=9)


class GenaiAttention:
    """Attention as onnxruntime-genai's model builder writes it: one op, which writes into the cache."""

    inputs = ("attention_mask",)

    def __init__(self, w: Writer):
        self.w = w
        total = w.op("ReduceSum", "attention_mask", w.ints(1), keepdims=1)
        self.seqlens = w.op("Cast", w.op("Sub", total, w.ints(1)), to=TensorProto.INT32)
        shape = w.op("Gather", w.op("Shape", "attention_mask"), w.constant(np.array(1, np.int64)))
        self.total = w.op("Cast", shape, to=TensorProto.INT32)
        self.angles = w.angles()

    def __call__(self, layer: int, q: str, k: str, v: str) -> str:
        c, past = self.w.config, f"past_key_values.{layer}."
        y = f"attention_{layer}"
        node = helper.make_node(
            "GroupQueryAttention",
            [q, k, v, f"{past}key", f"{past}value", self.seqlens, self.total, *self.angles],
            [y, f"present.{layer}.key", f"present.{layer}.value"],
            domain="com.microsoft",
            num_heads=c.num_attention_heads,
            kv_num_heads=c.num_key_value_heads,
            do_rotary=1,
            local_window_size=c.sliding_window or -1,
        )
        self.w.nodes.append(node)
        return y


class OptimumAttention:
    """Attention as optimum and torch write it: past keys joined with new ones, products, and a mask made of ops."""

    inputs = ("attention_mask", "position_ids")

    def __init__(self, w: Writer):
        self.w = w
        c, cos, sin = w.config, *w.angles()
        at = w.op("Unsqueeze", "position_ids", w.ints(1))
        self.cos, self.sin = (
            w.op("Concat", half, half, axis=-1) for half in (w.op("Gather", x, at) for x in (cos, sin))
        )
        zero, one = (w.constant(np.array(n, np.int64)) for n in (0, 1))
        new = w.op("Gather", w.op("Shape", "input_ids"), one)
        past = w.op("Gather", w.op("Shape", "past_key_values.0.key"), w.constant(np.array(2, np.int64)))
        total = w.op("Add", past, new)
        queries = w.op("Unsqueeze", w.op("Range", past, total, one), w.ints(1))
        keys = w.op("Range", zero, total, one)
        unseen = w.op("Greater", keys, queries)  # [length, total_length]
        if c.sliding_window:
            first = w.op("Sub", queries, w.constant(np.array(c.sliding_window - 1, np.int64)))
            unseen = w.op("Or", unseen, w.op("Less", keys, first))
        padding = w.op("Equal", w.op("Unsqueeze", "attention_mask", w.ints(1, 2)), zero)
        hidden = w.constant(np.array(np.finfo(w.dtype).min, w.dtype))
        self.bias = w.op("Where", w.op("Or", unseen, padding), hidden, w.constant(np.zeros((), w.dtype)))
        self.scale = w.constant(np.array(c.head_dim**-0.5, w.dtype))

    def __call__(self, layer: int, q: str, k: str, v: str) -> str:
        w, c = self.w, self.w.config
        repeats = c.num_attention_heads // c.num_key_value_heads
        q, k, v = (w.op("Reshape", x, w.ints(0, 0, -1, c.head_dim)) for x in (q, k, v))
        q, k, v = (w.op("Transpose", x, perm=[0, 2, 1, 3]) for x in (q, k, v))
        q, k = self._rotated(q), self._rotated(k)
        seen: list[str] = []
        for which, new in (("key", k), ("value", v)):
            present = f"present.{layer}.{which}"
            w.nodes.append(helper.make_node("Concat", [f"past_key_values.{layer}.{which}", new], [present], axis=2))
            wide = w.op("Unsqueeze", present, w.ints(2))
            wide = w.op("Expand", wide, w.ints(1, 1, repeats, 1, 1))
            seen.append(w.op("Reshape", wide, w.ints(0, c.num_attention_heads, -1, c.head_dim)))
        scores = w.op("Mul", w.op("MatMul", q, w.op("Transpose", seen[0], perm=[0, 1, 3, 2])), self.scale)
        weights = w.op("Softmax", w.op("Add", scores, self.bias), axis=-1)
        y = w.op("Transpose", w.op("MatMul", weights, seen[1]), perm=[0, 2, 1, 3])
        return w.op("Reshape", y, w.ints(0, 0, c.hidden_size))

    def _rotated(self, x: str) -> str:
        w, half = self.w, self.w.config.head_dim // 2
        first, second = w.op("Split", x, w.ints(half, half), axis=-1, outputs=2)
        rotated = w.op("Concat", w.op("Neg", second), first, axis=-1)
        return w.op("Add", w.op("Mul", x, self.cos), w.op("Mul", rotated, self.sin))


def without_cache(model: ModelProto, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Choose the best tokens by reading the whole sequence again for each of them, in NumPy, with an empty past."""
    source = Source(model)
    past = {d.name: d for d in source.interface[0] if d.name.startswith("past_key_values")}
    found: list[list[int]] = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(count):
            ids, at = np.array([tokens]), np.arange(len(tokens))[None]
            feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids), "position_ids": at}
            feeds = {d.name: feeds[d.name] for d in source.interface[0] if d.name in feeds}
            for name, declared in past.items():
                assert declared.dims is not None
                assert declared.dtype is not None
                shape = [1, declared.dims[1], 0, declared.dims[3]]
                feeds[name] = np.zeros([int(d) for d in shape], declared.dtype.numpy)
            graph = source.load({name: array.shape for name, array in feeds.items()})
            tokens.append(int(evaluate(graph, feeds)["logits"][0, -1].argmax()))
        found.append(tokens[len(prompt) :])
    return found


def main() -> None:
    prompts = [[5, 17, 42], [61, 3, 8, 29, 77, 12]]
    for form in ("optimum", "genai"):
        model = Writer(Config(), np.float32).model(genai=form == "genai")
        generator = fusec.Generator(model, batch=2, max_length=48, precision="fp16", stop=0)
        print(f"the model in {form}'s form, on {generator.decode.device}:")
        for sequence in generator(prompts, max_new_tokens=12):
            print("  greedy", sequence)
        print(f"  decoding and reading the whole sequence again differ by {generator.verify():.0e}")
        cache, decode, prompt, *_ = str(generator.explain()).splitlines()
        print(f"  {cache}\n  {decode}\n  {prompt}")

    exact = fusec.Generator(model, batch=2, max_length=48, target="cpu")
    tokens = exact(prompts, max_new_tokens=12)
    print("in fp32, the same tokens as without a cache:", tokens == without_cache(model, prompts, 12))

    sampler = fusec.Generator(model, max_length=48, top_k=8, target="cpu")
    print("sampled, as they come:", end="")
    for (token,) in sampler.stream([[5, 17, 42]], max_new_tokens=12, temperature=0.8, seed=1):
        print(f" {token}", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
