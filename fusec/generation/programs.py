"""Hold the programs of a decoder, which share one cache: one for a decode step, and one for each size of prompts."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

from fusec.errors import ExecutionError, FusecError
from fusec.generation.decoder_graph import LENGTHS, LOGITS, PROMPT, TOKENS, TOP_LOGITS
from fusec.runtime import Executable

LEAST_PROMPT = 16  # sizes of prompts are powers of two from here, so that few programs are compiled


class DecoderPrograms:
    """The programs of a decoder. Programs for prompts are compiled when a prompt needs them.

    decode: adds one token to each sequence.
    prompts: programs for prompts, by their size.
    batch, max_length, vocabulary, top_k: as the programs were compiled.
    """

    def __init__(
        self, decode: Executable, prompt_sizes: Sequence[int], compile_prompt: Callable[[int], Executable] | None = None
    ):
        """Take the program of a decode step. compile_prompt: compiles the program for a size of prompts."""
        shapes = {s.name: s.shape for s in (*decode.inputs, *decode.outputs)}
        self.decode, self.prompts = decode, dict[int, Executable]()
        self.cache = [s for s in decode.inputs if s.name not in (LENGTHS, TOKENS)]
        self.batch, self.vocabulary = shapes[LOGITS]
        self.max_length = max(s.shape[-2] for s in self.cache)
        self.top_k = shapes[TOP_LOGITS][1] if TOP_LOGITS in shapes else 0
        self.prompt_sizes = tuple(sorted(set(prompt_sizes)))
        self._compile = compile_prompt

    @classmethod
    def of(cls, executables: Sequence[Executable]) -> DecoderPrograms:
        """Return the programs of another generator, with one cache. Raises FusecError if they are not such programs."""
        decoders = [e for e in executables if LENGTHS in e.state and all(s.name in e.state for s in e.inputs)]
        prompts = {s.shape[1]: e for e in executables for s in e.inputs if s.name == PROMPT and LENGTHS in e.state}
        if len(decoders) != 1 or not prompts or len(prompts) + 1 != len(executables):
            raise FusecError(
                "a Generator takes a model, or the executables of another one: its `decode` and its `prompts`"
            )
        programs = cls(decoders[0], list(prompts))
        for size, executable in prompts.items():
            programs._add(size, executable)
        return programs

    def _add(self, size: int, executable: Executable) -> Executable:
        executable.share(self.decode)
        self.prompts[size] = executable
        return executable

    def prompt(self, length: int) -> tuple[int, Executable]:
        """Return the smallest size of prompts that holds `length` tokens, and its program."""
        size = next((s for s in self.prompt_sizes if s >= length), 0)
        if size in self.prompts:
            return size, self.prompts[size]
        if not size or self._compile is None:
            raise ExecutionError(f"a prompt of {length} tokens: the largest program takes {self.prompt_sizes[-1]}")
        return size, self._add(size, self._compile(size))


def checked_sizes(prompt_sizes: Sequence[int] | None, max_length: int) -> Sequence[int]:
    """Return the sizes of prompts; by default powers of two. Raises FusecError for sizes out of range."""
    if prompt_sizes is None:
        prompt_sizes = [min(LEAST_PROMPT, max_length)]
        while prompt_sizes[-1] < max_length:
            prompt_sizes.append(min(2 * prompt_sizes[-1], max_length))
    try:
        sizes = [operator.index(size) for size in prompt_sizes]
    except TypeError as error:
        raise FusecError(f"prompt_sizes are whole numbers, such as [64, 512], not {prompt_sizes!r}") from error
    if not sizes or min(sizes) < 2 or max(sizes) > max_length:
        raise FusecError(f"prompt sizes are from 2 to max_length, {max_length}, and not {sizes}")
    return sizes
