"""Build the two graphs of a decoder around its cache: for a prompt, and for one more token of each sequence.

Both have the same state, which stays on the device: the cache, the number of tokens in it, and the next token. The mask
and the positions that the model takes as inputs are computed from the number of tokens. So a decode step needs no
input, and has the same addresses every time: it can be one CUDA graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from fusec.builder import Builder, Tensor
from fusec.errors import ModelError
from fusec.generation.decoder_model import IDS, MASK, POSITIONS, CacheTensor, DecoderModel
from fusec.generation.last_rows import has_rows, ops_of_last_rows
from fusec.ir import DType, Graph, Node, Value, quote
from fusec.ops import Concat, Scatter, TopK
from fusec.system.dataclass import dataclass

LENGTHS, TOKENS, PROMPT = "lengths", "tokens", "prompt"  # state and input
NEXT, LOGITS, TOP_LOGITS, TOP_TOKENS = "next", "logits", "top_logits", "top_tokens"  # outputs
NARROW = {"fp16": DType.F16, "bf16": DType.BF16}


@dataclass(frozen=True)
class DecoderSizes:
    """Sizes of a program: sequences, positions of the cache, and tokens that a call adds to each sequence.

    top_k: number of best tokens that the program returns for sampling; 0: it takes the best.
    """

    batch: int
    capacity: int
    added: int
    top_k: int = 0


def decoder_builder(model: DecoderModel, sizes: DecoderSizes, precision: str = "fp32") -> Builder:
    """Return a builder with the program of a prompt, or of one token if `sizes.added` is 1.

    State: `lengths` i64[B], the number of tokens in the cache; a prompt's call gets the length of each prompt. `tokens`
    i64[B, 1], the tokens that the next decode step adds. The cache, under the names of the model's inputs.
    Input of a prompt's program: `prompt` i64[B, S], in which each prompt begins at 0.
    Outputs: `logits` f32[B, V] after the last token; `next` i64[B], or `top_logits` and `top_tokens` [B, k].
    """
    return _Wiring(model, sizes, NARROW.get(precision)).builder()


class _Wiring:
    """Copies the model's graph, with the cache and the other inputs replaced."""

    def __init__(self, model: DecoderModel, sizes: DecoderSizes, narrow: DType | None):
        self.model, self.sizes, self.narrow = model, sizes, narrow
        self.decodes = sizes.added == 1
        self.given = model.source.load(self._shapes())
        self.by_name = {v.name: v for v in self.given.inputs}
        self.outputs = dict(zip(self.given.output_names, self.given.outputs, strict=True))
        self.graph = Graph(self.given.name)
        self.b = Builder.on(self.graph)
        self.lengths = self.b.parameter(LENGTHS, shape=(sizes.batch,), dtype="i64")
        self.caches = {c: self._cache(c) for c in model.cache}
        self.copied: dict[Value, Tensor] = {}
        self.last: dict[Value, Tensor] = {}  # the last row of each sequence of a value

    @property
    def total(self) -> int:
        """Return the number of positions that a call attends to: for a prompt, its own."""
        return self.sizes.capacity if self.decodes else self.sizes.added

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        sizes, model = self.sizes, self.model
        lengths = {IDS: sizes.added, MASK: self.total, POSITIONS: sizes.added}
        # joined with the new keys, the past ones fill the cache: so keys are at the same places as in the cache
        past = sizes.capacity if model.in_place else self.total - sizes.added
        shapes = {name: (sizes.batch, lengths[name]) for name in model.inputs}
        return shapes | {c.past: c.shape(sizes.batch, past) for c in model.cache}

    def _cache(self, tensor: CacheTensor) -> Tensor:
        dtype = self.narrow if self.narrow is not None and tensor.dtype is DType.F32 else tensor.dtype
        shape = tensor.shape(self.sizes.batch, self.sizes.capacity)
        return self.b.parameter(tensor.past, shape=shape, dtype=dtype)

    def builder(self) -> Builder:
        """Copy the graph, and add what chooses the next token."""
        with self.b.with_origin("mask and positions"):
            tokens = self._inputs()
        logits = self.outputs[self.model.logits]
        rows = (self.sizes.batch, self.sizes.added)
        if not has_rows(logits, rows):
            raise ModelError(
                f"{self.model.source.file}: output {quote(self.model.logits)} is {logits.type} for {rows[1]} tokens of "
                f"{rows[0]} sequences: fusec needs the scores after each token"
            )
        at_last = set[Node]() if self.decodes else ops_of_last_rows(self.given, logits, rows)
        joins = self._joins() if self.decodes and not self.model.in_place else {}
        for node in self.given.nodes:
            if node in joins:
                self._write_then_read(node, joins[node])
                continue
            of = self._last_row if node in at_last else self.copied.__getitem__
            self._copy(node, of, self.last if node in at_last else self.copied)
        with self.b.with_origin("write into the cache"):
            for tensor in self.model.cache:
                self._update(tensor)
        with self.b.with_origin("next token"):
            scores = self._last_row(logits).reshape(self.sizes.batch, logits.type.shape[2]).astype("f32")
            self._choose(scores, tokens)
            if self.decodes:
                self.b.update(self.lengths, self.lengths + 1)
        return self.b

    def _inputs(self) -> Tensor:
        """Compute the model's inputs, and return the state that holds the next token."""
        b, sizes = self.b, self.sizes
        tokens = b.parameter(TOKENS, shape=(sizes.batch, 1), dtype="i64")
        ids = tokens if self.decodes else b.input(PROMPT, (sizes.batch, sizes.added), "i64")
        at = self.lengths.reshape(sizes.batch, 1)  # the position of the new token, or the end of the prompt
        keys = b.constant(np.arange(self.total)[None])
        positions = at if self.decodes else b.constant(np.arange(sizes.added)[None]).expand(sizes.batch, sizes.added)
        given = {IDS: ids, MASK: keys <= at if self.decodes else keys < at, POSITIONS: positions}
        for name in self.model.inputs:
            value = self.by_name[name]
            self.copied[value] = given[name].astype(value.type.dtype)
        for tensor, cache in self.caches.items():
            past = self.by_name[tensor.past]
            if self.model.in_place:
                self.copied[past] = cache.astype(past.type.dtype)
            elif not self.decodes:
                self.copied[past] = b.constant(np.zeros(past.type.shape, past.type.dtype.numpy))
        return tokens

    def _copy(self, node: Node, of: Callable[[Value], Tensor], into: dict[Value, Tensor]) -> None:
        operands = [of(v).value for v in node.operands]
        names = [v.name for v in node.results]
        twin = self.graph.insert(node.op, operands, names=names, origin=node.origin)
        into.update({v: Tensor(self.b, w) for v, w in zip(node.results, twin.results, strict=True)})

    def _last_row(self, value: Value) -> Tensor:
        """Return the last row of each sequence, [B, 1, features]; a value without rows as it is."""
        rows = (self.sizes.batch, self.sizes.added)
        if self.decodes or not has_rows(value, rows):
            return self.copied[value]
        if value not in self.last:
            flat = self.copied[value].reshape(math.prod(rows), value.type.shape[2])
            with self.b.with_origin("last token of each prompt"):
                at = self.lengths - 1 + np.arange(rows[0]) * rows[1]
                self.last[value] = self.b.take(flat, at).reshape(rows[0], 1, value.type.shape[2])
        return self.last[value]

    def _joins(self) -> Mapping[Node, CacheTensor]:
        """Return the concats that join past keys with new ones."""
        found: dict[Node, CacheTensor] = {}
        for tensor in self.model.cache:
            present, past = self.outputs[tensor.present], self.by_name[tensor.past]
            node = present.node
            joins = node is not None and isinstance(node.op, Concat) and len(node.operands) == 2
            if node is None or not joins or node.operands[0] is not past or past.users != [node]:
                raise ModelError(
                    f"{self.model.source.file}: output {quote(tensor.present)} is not input {quote(tensor.past)} "
                    f"joined with new keys or values, but {node if node is not None else present!r}"
                )
            found[node] = tensor
        return found

    def _write_then_read(self, node: Node, tensor: CacheTensor) -> None:
        """Write the new keys into the cache in place of joining them with the past ones."""
        with self.b.with_origin("write into the cache"):
            written = self._written(tensor, self.copied[node.operands[1]], self.lengths)
        self.copied[node.result] = written.astype(node.result.type.dtype)

    def _update(self, tensor: CacheTensor) -> None:
        present, cache = self.copied[self.outputs[tensor.present]], self.caches[tensor]
        if not self.decodes and not self.model.in_place:
            present = self._written(tensor, present, None)
        if present.shape != cache.shape:
            raise ModelError(
                f"{self.model.source.file}: output {quote(tensor.present)} is {present.value.type} for a cache of "
                f"{cache.value.type}"
            )
        self.b.update(cache, present.astype(cache.dtype))

    def _written(self, tensor: CacheTensor, new: Tensor, starts: Tensor | None) -> Tensor:
        """Write new keys or values into the cache at the start of each sequence (None: 0); whole rows at a time."""
        cache, rows = self.caches[tensor], new.shape[:-1]
        places = np.ravel_multi_index(tuple(np.indices(rows)), cache.shape[:-1]).reshape(self.sizes.batch, -1)
        at = self.b.constant(places)
        if starts is not None:
            at = at + starts.reshape(self.sizes.batch, 1)
        flat, given = (x.reshape(-1, cache.shape[-1]) for x in (cache, new.astype(cache.dtype)))
        return self.b.apply(Scatter("none"), flat, at.reshape(places.size), given).reshape(cache.shape)

    def _choose(self, scores: Tensor, tokens: Tensor) -> None:
        """Add the outputs: the best token, which is also the next to be added, or the best few."""
        b, (batch, count) = self.b, scores.shape
        b.output({LOGITS: scores})
        if self.sizes.top_k:
            values, indices = b.results(TopK(min(self.sizes.top_k, count), 1), scores)
            b.output({TOP_LOGITS: values, TOP_TOKENS: indices})
            return
        best = scores >= scores.max(1, keepdims=True)
        numbers = b.constant(np.arange(count, dtype=np.int32)[None])
        chosen = b.where(best, numbers, b.constant(np.array(count - 1, np.int32))).min(1).astype("i64")
        b.output({NEXT: chosen})
        b.update(tokens, chosen.reshape(batch, 1))
