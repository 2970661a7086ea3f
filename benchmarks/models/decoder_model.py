"""Define a Llama-like decoder with drawn weights, as an ONNX file and as a torch module with a static cache.

The ONNX file has the form of onnxruntime-genai's model builder, and its weights lie next to it as external data. The
torch module joins the products that read the same operand, as fast implementations do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from onnx import TensorProto, helper
from torch.nn import functional

from examples.decode import Config, Writer

Array = np.ndarray[Any, Any]
EPSILON = 1e-5  # of the norms, as in examples/decode.py
EXTERNAL_BYTES = 1 << 12  # arrays from here lie in the file of weights
BLOCK = 32  # weights of 4 bits that share a scale
WEIGHTS = "weights.bin"


class FileWriter(Writer):
    """Writes a decoder whose large weights are external data, and keeps them for torch.

    bits: bits of the weights of products: 16, or 4 (MatMulNBits).
    matrices: weights of the products in the order of the model, [columns, rows] each, in fp16.
    scales: weights of the norms in that order.
    read_bytes: bytes of the weights that a decode step reads.
    """

    def __init__(self, config: Config, folder: Path, bits: int, device: str):
        super().__init__(config, np.float16)
        self.matrices: list[torch.Tensor] = []
        self.scales: list[torch.Tensor] = []
        self.read_bytes = 0
        self._bits, self._device = bits, device
        self._drawn = torch.Generator(device).manual_seed(0)
        self._path = folder / "model.onnx"
        self._file = (folder / WEIGHTS).open("wb")
        self.embeddings = torch.empty(0)

    def write(self) -> Path:
        """Write the model, and return its path."""
        with self._file:
            model = self.model(genai=True)
        self._path.write_bytes(model.SerializeToString())
        return self._path

    def constant(self, array: Any) -> str:
        array = np.asarray(array)
        if not self.weights:  # the first constant of the model
            self.embeddings = torch.from_numpy(array).to(self._device)
        if array.nbytes < EXTERNAL_BYTES:
            return super().constant(array)
        name, kind = f"w{len(self.weights)}", helper.np_dtype_to_tensor_dtype(array.dtype)
        tensor = TensorProto(name=name, data_type=kind, dims=array.shape, data_location=TensorProto.EXTERNAL)
        place = {"location": WEIGHTS, "offset": self._file.tell(), "length": array.nbytes}
        for key, value in place.items():
            tensor.external_data.add(key=key, value=str(value))
        np.ascontiguousarray(array).tofile(self._file)
        self._file.flush()
        self.weights.append(tensor)
        return name

    def linear(self, x: str, rows: int, columns: int) -> str:
        if self._bits == 16:
            drawn = torch.randn(columns, rows, generator=self._drawn, device=self._device) / math.sqrt(rows)
            matrix = drawn.half()
            self.matrices.append(matrix)
            self.read_bytes += matrix.nbytes
            return self.op("MatMul", x, self.constant(matrix.t().contiguous().cpu().numpy()))
        shape = (columns, rows // BLOCK, BLOCK // 2)
        packed = torch.randint(256, shape, generator=self._drawn, device=self._device, dtype=torch.uint8)
        deviation = 4.6  # of whole numbers from -8 to 7
        scales = torch.empty(shape[:2], device=self._device).uniform_(0.5, 1.5, generator=self._drawn)
        scales = (scales / (deviation * math.sqrt(rows))).half()
        codes = torch.stack([packed & 15, packed >> 4], -1).flatten(2)
        self.matrices.append(((codes.float() - 8) * scales.float()[..., None]).flatten(1).half())
        self.read_bytes += packed.nbytes + scales.nbytes
        names = [self.constant(each.cpu().numpy()) for each in (packed, scales)]
        sizes = {"K": rows, "N": columns, "bits": self._bits, "block_size": BLOCK}
        return self.op("MatMulNBits", x, *names, domain="com.microsoft", **sizes)

    def norm(self, x: str) -> str:
        scale = self._rng.uniform(0.5, 1.5, self.config.hidden_size).astype(self.dtype)
        self.scales.append(torch.from_numpy(scale).to(self._device))
        self.read_bytes += scale.nbytes
        return self.op("SimplifiedLayerNormalization", x, self.constant(scale), axis=-1, epsilon=EPSILON)


class Decoder(torch.nn.Module):
    """The decoder in torch, with a static cache: `step` adds the token in `tokens` at `position`.

    attention: how one query of several heads reads the cache; see `attend`.
    layer, last: what computes each layer and the logits, `layer` and `last_products` or a compiled form of these.
    """

    def __init__(self, config: Config, weights: FileWriter, batch: int, dtype: torch.dtype = torch.float16):
        super().__init__()
        self.config, self.attention = config, "grouped"
        self.layer: Callable[..., torch.Tensor] = layer
        self.last: Callable[..., torch.Tensor] = last_products
        device = weights.embeddings.device

        def held(*parts: torch.Tensor) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.cat(parts).to(dtype), requires_grad=False)

        layers = [weights.matrices[7 * i : 7 * i + 7] for i in range(config.num_hidden_layers)]
        self.embeddings, self.head = held(weights.embeddings), held(weights.matrices[-1])
        self.qkv = torch.nn.ParameterList(held(q, k, v) for q, k, v, *_ in layers)
        self.out = torch.nn.ParameterList(held(layer[3]) for layer in layers)
        self.gate_up = torch.nn.ParameterList(held(gate, up) for *_, gate, up, _ in layers)
        self.down = torch.nn.ParameterList(held(layer[6]) for layer in layers)
        self.norms = torch.nn.ParameterList(held(scale) for scale in weights.scales)
        half, capacity = config.head_dim // 2, config.max_position_embeddings
        angles = np.outer(np.arange(capacity), 10000.0 ** (-np.arange(half) / half))
        for name, function in (("cos", np.cos), ("sin", np.sin)):
            rounded = function(angles).astype(np.float16)  # as in the ONNX file
            self.register_buffer(name, torch.from_numpy(np.tile(rounded, 2)).to(device, dtype))
        shape = (batch, config.num_key_value_heads, capacity, config.head_dim)
        for i in range(config.num_hidden_layers):
            self.register_buffer(f"keys{i}", torch.zeros(shape, device=device, dtype=dtype))
            self.register_buffer(f"values{i}", torch.zeros(shape, device=device, dtype=dtype))
        self.register_buffer("places", torch.arange(capacity, device=device))
        self.register_buffer("tokens", torch.zeros(batch, 1, device=device, dtype=torch.int64))
        self.register_buffer("position", torch.zeros(1, device=device, dtype=torch.int64))

    def start(self, tokens: torch.Tensor, position: int) -> None:
        """Set the token that the next step adds to each sequence, and its position."""
        self.tokens.copy_(tokens.reshape(-1, 1))
        self.position.fill_(position)

    def step(self) -> torch.Tensor:
        """Add one token, and return the logits f32[B, V] after it. The best token is the next to be added."""
        mask = self.places[None] <= self.position[:, None]
        logits = self._logits(self.tokens, self.position, mask)[:, 0]
        self.tokens.copy_(logits.argmax(-1, keepdim=True))
        self.position.add_(1)
        return logits

    def prompt(self, ids: torch.Tensor) -> torch.Tensor:
        """Read prompts i64[B, S] into the cache, and return the logits f32[B, V] after them."""
        return self._logits(ids, self.places[: ids.shape[1]], None)[:, 0]

    def _logits(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor | None, rows: int = 1
    ) -> torch.Tensor:
        """Return the logits after the last tokens, as many as `rows`. Without a mask, queries see earlier keys."""
        x = functional.embedding(ids, self.embeddings)
        cos, sin = self.cos[positions], self.sin[positions]
        for i in range(self.config.num_hidden_layers):
            weights = (
                self.norms[2 * i],
                self.qkv[i],
                self.out[i],
                self.norms[2 * i + 1],
                self.gate_up[i],
                self.down[i],
            )
            cache = getattr(self, f"keys{i}"), getattr(self, f"values{i}")
            x = self.layer(x, weights, cache, (positions, cos, sin, mask), self.attention)
        return self.last(x[:, -rows:], self.norms[-1], self.head)

    def all_logits(self, ids: torch.Tensor, rows: int) -> torch.Tensor:
        """Return the logits f32[B, rows, V] after each of the last tokens, by reading all of them in one call."""
        return self._logits(ids, self.places[: ids.shape[1]], None, rows)


def layer(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    cache: Sequence[torch.Tensor],
    places: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None],
    form: str,
) -> torch.Tensor:
    """Compute a layer of x[B, S, width]. It has no number, so that one compiled form computes all layers.

    weights: norm, products to queries, keys and values, product from heads, norm, and the two products after it.
    cache: keys and values, [B, heads, capacity, features] each; those of x are written into it.
    places: positions of x, their cosines and sines, and the mask of `attend`; without one, queries see earlier keys.
    """
    norm, qkv, out, second_norm, gate_up, down = weights
    keys, values = cache
    positions, cos, sin, mask = places
    (batch, length, hidden), (heads, size) = x.shape, (keys.shape[1], keys.shape[3])
    h = functional.rms_norm(x, (hidden,), norm, EPSILON)
    parts = functional.linear(h, qkv).split([hidden, heads * size, heads * size], -1)
    q, k, v = (part.view(batch, length, -1, size).transpose(1, 2) for part in parts)
    q, k = rotated(q, cos, sin), rotated(k, cos, sin)
    keys.index_copy_(2, positions, k)
    values.index_copy_(2, positions, v)
    if mask is None:
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    else:
        y = attend(form, q, keys, values, mask)
    x = x + functional.linear(y.transpose(1, 2).reshape(batch, length, hidden), out)
    h = functional.rms_norm(x, (hidden,), second_norm, EPSILON)
    gate, up = functional.linear(h, gate_up).chunk(2, -1)
    return x + functional.linear(functional.silu(gate) * up, down)


def last_products(x: torch.Tensor, norm: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """Return the logits in fp32."""
    return functional.linear(functional.rms_norm(x, (x.shape[-1],), norm, EPSILON), head).float()


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary position embeddings to x[B, heads, S, features]; cos and sin are [S, features]."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


FORMS = ("gqa", "grouped", "products")


def attend(form: str, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Attend from one query of H heads, [B, H, 1, D], to a cache of G heads, [B, G, C, D]; mask[1, C].

    form: `gqa` lets torch's attention repeat the heads of the cache. `grouped` gives it the H / G queries of a head as
    rows. `products` is written out.
    """
    batch, heads, _, size = q.shape
    groups = keys.shape[1]
    if form == "gqa":
        return functional.scaled_dot_product_attention(q, keys, values, mask, enable_gqa=True)
    q = q.reshape(batch, groups, heads // groups, size)
    if form == "grouped":
        mask = mask.expand(heads // groups, -1)
        y = functional.scaled_dot_product_attention(q, keys, values, mask)
    else:
        scores = (q @ keys.transpose(2, 3)).float() * size**-0.5
        y = scores.masked_fill(~mask, -torch.inf).softmax(-1).to(q.dtype) @ values
    return y.reshape(batch, heads, 1, size)
