"""Run a decoder token by token over a cache that stays on the device: `fusec.Generator`."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, cast

import numpy as np

from fusec.compiler.gpu_executable import tune_whole
from fusec.driver import compile
from fusec.errors import ExecutionError, ModelError
from fusec.execution.compile_options import Progress
from fusec.execution.shape_family import ShapeFamily
from fusec.frontends import Source
from fusec.generation.arguments import checked_count, checked_number, padded, rows_of, stop_tokens
from fusec.generation.decoder_graph import (
    LENGTHS,
    LOGITS,
    NEXT,
    PROMPT,
    TOP_LOGITS,
    TOP_TOKENS,
    DecoderSizes,
    decoder_builder,
)
from fusec.generation.decoder_model import DecoderModel
from fusec.generation.explanation import CacheTensorSize, GeneratorExplanation
from fusec.generation.programs import DecoderPrograms, checked_sizes
from fusec.generation.sampling import sampler
from fusec.ir import HostArray
from fusec.runtime import Executable
from fusec.system.dataclass import dataclass

if TYPE_CHECKING:
    from onnx import ModelProto

_LARGEST_DIFFERENCE = {"fp16": 0.1, "bf16": 0.1}  # of logits, by rounding; 1e-2 in other precisions


@dataclass(frozen=True)
class _Choice:
    """The outputs from which the host chooses tokens, and the function that does it."""

    outputs: tuple[str, ...]
    select: Callable[..., Any]


@dataclass(frozen=True)
class _Start:
    """The program that reads prompts, with its inputs, and the lengths of the prompts."""

    program: Executable
    feeds: Mapping[str, HostArray]
    lengths: HostArray

    def program_of(self, step: int, decode: Executable) -> tuple[Executable, Mapping[str, HostArray]]:
        """Return the program that gives the tokens of a step, with its inputs. The first one reads the prompts."""
        if step:
            return decode, {}
        decode.bind(lengths=self.lengths)
        return self.program, self.feeds


class StreamOptions(TypedDict, total=False):
    """Keywords of `Generator.stream`, which says what they mean."""

    temperature: float
    seed: int | None
    choose: Callable[[HostArray], Any] | None


class Generator:
    """A decoder with a key/value cache, ready to generate tokens for a batch of prompts.

    One program reads the prompts and fills the cache; another one adds a token to each sequence. The cache, the lengths
    of the sequences and the next tokens stay on the device. With `top_k=0` a decode step takes no input, and only the
    chosen tokens are copied to the host.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | bytes | ModelProto | Source | Sequence[Executable],
        *,
        batch: int = 1,
        max_length: int = 512,
        stop: int | Collection[int] = (),
        top_k: int = 0,
        prompt_sizes: Sequence[int] | None = None,
        cache: Mapping[str, str] | None = None,
        constants: Mapping[str, Any] | None = None,
        check: bool = True,
        target: str = "auto",
        precision: str = "fp32",
        tune: str = "quick",
        simulate: bool = False,
        progress: Progress | None = None,
    ):
        """Compile the decode step. Programs for prompts are compiled when a prompt needs them.

        model: an ONNX model with past and present keys and values, as optimum, torch and onnxruntime-genai export it,
            with symbolic batch and lengths. Or the executables of another generator, `[decode, *prompts.values()]`,
            also loaded from their files. Then only `stop` counts, because they are compiled.
        batch: number of sequences that run together. Fewer prompts are filled up.
        max_length: most tokens of a sequence, prompt included. The cache has room for as many.
        stop: tokens that end a sequence.
        top_k: 0 takes the best token, on the device. Otherwise the host draws one of the best `top_k`.
        prompt_sizes: sizes of the programs for prompts; by default powers of two from 16 to `max_length`.
        cache: the output that replaces each input of the cache; by default `present.*` replaces `past_key_values.*`.
        constants: values of other inputs, by name.
        check: call `verify` now for a model that joins new keys with past ones. fusec writes them into one buffer,
            which gives other results if the model counts keys back from the last one.
        target, precision, tune, simulate, progress: as for `fusec.compile`. With fp16 and bf16 a cache in fp32 is
            stored in 16 bits.

        Raises ModelError if the model has no such cache, has inputs that fusec has no value for, or fails the check.
        """
        self.stop = stop_tokens(stop)
        self._turn = 0
        if isinstance(model, Sequence) and not isinstance(model, str | bytes):
            self._programs = DecoderPrograms.of(model)
            return
        for name, number, least in (("batch", batch, 1), ("max_length", max_length, 2), ("top_k", top_k, 0)):
            checked_number(name, number, least)
        sizes = checked_sizes(prompt_sizes, max_length)
        source = model if isinstance(model, Source) else Source(model)
        decoder = DecoderModel.of(source.with_constants(constants or {}), cache)
        family = ShapeFamily()  # so that the programs share weights

        def compiled(added: int) -> Executable:
            builder = decoder_builder(decoder, DecoderSizes(batch, max_length, added, top_k), precision)
            make = partial(compile, builder, target=target, precision=precision, tune=tune)
            try:
                return cast("Executable", make(simulate=simulate, progress=progress, family=family))
            except ExecutionError as error:  # of a constant, because the positions of a prompt are known
                raise ModelError(
                    f"{source.file}: a program for prompts of {added} tokens: {error}. "
                    "If the model has fewer positions, give a smaller max_length"
                ) from error

        decode = compiled(1)
        tune_whole(decode, {LENGTHS: np.full(batch, max_length // 2)})
        self._programs = DecoderPrograms(decode, sizes, compiled)
        if check and not decoder.in_place:
            difference = self.verify()
            if not difference <= _LARGEST_DIFFERENCE.get(precision, 1e-2):
                raise ModelError(
                    f"{source.file}: decoding over the cache and reading all tokens again give other logits (relative "
                    f"difference {difference:.1g}): the model uses places of keys, as for a window of the last keys. "
                    "Export it with GroupQueryAttention (onnxruntime-genai)"
                )

    def __repr__(self) -> str:
        sizes = f"batch={self.batch}, max_length={self.max_length}, top_k={self._programs.top_k}"
        return f"<fusec.Generator {sizes}: decode step {self.decode.compiled.program.counts}, on {self.decode.device}>"

    @property
    def batch(self) -> int:
        """Return the number of sequences that run together."""
        return self._programs.batch

    @property
    def max_length(self) -> int:
        """Return the number of tokens that the cache has room for, in each sequence."""
        return self._programs.max_length

    @property
    def decode(self) -> Executable:
        """Return the program that adds a token to each sequence."""
        return self._programs.decode

    @property
    def prompts(self) -> dict[int, Executable]:
        """Return the programs for prompts that were compiled, by the size of prompts."""
        return dict(self._programs.prompts)

    def __call__(
        self,
        prompts: Iterable[Sequence[int] | HostArray],
        max_new_tokens: int | None = None,
        **options: Unpack[StreamOptions],
    ) -> list[list[int]]:
        """Return the new tokens of each prompt, up to and including a stop token. See `stream` for the arguments."""
        given = rows_of(prompts)
        found: list[list[int]] = [[] for _ in given]
        for tokens in self.stream(given, max_new_tokens, **options):
            for sequence, token in zip(found, tokens.tolist(), strict=True):
                if token >= 0:
                    sequence.append(token)
        return found

    def stream(
        self,
        prompts: Iterable[Sequence[int] | HostArray],
        max_new_tokens: int | None = None,
        *,
        temperature: float = 1.0,
        seed: int | None = None,
        choose: Callable[[HostArray], Any] | None = None,
    ) -> Iterator[HostArray]:
        """Yield the next token of each prompt, i64[number of prompts], as they are chosen; -1 after a stop token.

        prompts: token ids, one sequence for each prompt; at most `batch` of them, of any lengths.
        max_new_tokens: most tokens for each prompt; by default as many as the cache has room for.
        temperature, seed: how to draw among the best `top_k`. Only a generator with `top_k` takes a temperature.
        choose: chooses tokens in place of fusec: it gets the logits f32[B, V] on the host, and returns B tokens.

        Raises ExecutionError for prompts that do not fit.
        """
        rows = rows_of(prompts)
        given, lengths = padded(rows, self.batch, self._programs.vocabulary)
        longest = int(lengths.max())
        count = checked_count(max_new_tokens, longest, self.max_length)
        if temperature != 1 and (choose is not None or not self._programs.top_k):
            raise ExecutionError(
                f"temperature={temperature} is of a draw among the best top_k tokens, and this generator draws none: "
                + ("`choose` chooses them" if choose is not None else "give top_k=50, say, when you make it")
            )
        choice = None
        if choose is not None:
            choice = _Choice((LOGITS,), choose)
        elif self._programs.top_k:
            choice = _Choice((TOP_LOGITS, TOP_TOKENS), sampler(temperature, seed))
        size, program = self._programs.prompt(longest)
        ids = np.zeros((self.batch, size), np.int64)
        ids[:, :longest] = given
        start = _Start(program, {PROMPT: ids}, lengths)
        steps = self._steps_ahead(start, count) if choice is None else self._steps(start, choice, count)
        return self._shown(steps, len(rows))

    def _shown(self, steps: Iterator[HostArray], sequences: int) -> Iterator[HostArray]:
        """Yield the tokens of the prompts, -1 after a stop token, until all have one."""
        self._turn += 1
        turn, going = self._turn, np.ones(sequences, bool)
        while going.any():
            if turn != self._turn:
                raise ExecutionError("another generation has begun, which uses the cache")
            tokens = next(steps, None)
            if tokens is None:
                return
            shown = np.where(going, tokens[:sequences], -1)
            going &= ~np.isin(shown, list(self.stop))
            yield shown

    def _steps_ahead(self, start: _Start, count: int) -> Iterator[HostArray]:
        """Yield the best tokens of each step. On a GPU the next step is queued before, so that the GPU never waits.

        After a stop token, one more step has run for nothing.
        """
        backend, ahead = self.decode.backend, 0 if self.decode.device == "simulated" else 1
        waiting: deque[Callable[[], HostArray]] = deque()
        for step in range(count):
            program, feeds = start.program_of(step, self.decode)
            tokens = backend.xp.empty(self.batch, np.int64)
            program.run([NEXT], feeds, {NEXT: tokens})
            waiting.append(backend.read_later(tokens))
            if len(waiting) > ahead:
                yield waiting.popleft()()
        yield from (read() for read in waiting)

    def _steps(self, start: _Start, choice: _Choice, count: int) -> Iterator[HostArray]:
        """Yield the tokens that the host chooses in each step."""
        for step in range(count):
            yield self._chosen(*start.program_of(step, self.decode), choice)

    def _chosen(self, program: Executable, feeds: Mapping[str, HostArray], choice: _Choice) -> HostArray:
        """Run a program, and return the next token of each sequence, which the next decode step adds."""
        tokens = np.asarray(choice.select(*program.run(choice.outputs, feeds)))
        if tokens.shape != (self.batch,) or tokens.dtype.kind not in "iu":
            raise ExecutionError(f"`choose` gave {tokens.dtype}{list(tokens.shape)}, not {self.batch} tokens")
        if tokens.min() < 0 or tokens.max() >= self._programs.vocabulary:
            raise ExecutionError(f"`choose` gave a token outside 0..{self._programs.vocabulary - 1}: {tokens.tolist()}")
        self.decode.bind(tokens=tokens.astype(np.int64)[:, None])
        return tokens

    def verify(self, steps: int = 4, seed: int = 0) -> float:
        """Compare decoding over the cache with reading all tokens again, for random tokens.

        Returns the largest difference of logits, relative to the largest logit. It is about the rounding of the type,
        unless the model uses the cache in another way than fusec assumes: if it limits attention to the last keys of
        a tensor that grows, for example.
        """
        checked_number("steps", steps, 1)
        size = self._programs.prompt_sizes[0]
        begin = max(1, size - steps)
        tokens = np.setdiff1d(np.arange(self._programs.vocabulary), list(self.stop))
        ids = np.random.default_rng(seed).choice(tokens, (self.batch, size))

        def logits(length: int, count: int) -> list[HostArray]:
            """Return the logits after `length` tokens, and after each of the next ones."""
            found: list[HostArray] = []

            def record(scores: HostArray) -> HostArray:
                found.append(scores)
                return ids[:, length + len(found) - 1]

            self(ids[:, :length], count, choose=record)
            return found

        cached = logits(begin, size - begin)
        again = [logits(length, 1)[0] for length in range(begin, size)]
        return float(np.abs(np.subtract(cached, again)).max() / max(np.abs(again).max(), np.finfo(np.float32).tiny))

    def explain(self) -> GeneratorExplanation:
        """Explain what the cache is, how large it is, and which steps each program runs."""
        programs = {"decode step": self.decode}
        programs |= {f"prompts of up to {size} tokens": each for size, each in sorted(self.prompts.items())}
        in_place = self.decode.in_place_state
        cache = [
            CacheTensorSize(s.name, s.shape, str(s.dtype), math.prod(s.shape) * s.dtype.itemsize, s.name in in_place)
            for s in self._programs.cache
        ]
        return GeneratorExplanation(tuple(cache), {name: each.explain() for name, each in programs.items()})
