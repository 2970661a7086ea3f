"""Find the cache of a decoder model, and how the model extends it: by a larger tensor, or in one buffer."""

from __future__ import annotations

from collections.abc import Mapping

from fusec.errors import ModelError
from fusec.frontends import Declaration, Source
from fusec.ir import DType, quote
from fusec.system.dataclass import dataclass

IDS, MASK, POSITIONS = "input_ids", "attention_mask", "position_ids"
# how an input of the cache and the output that replaces it are named: beginnings of both
NAMES = (("past_key_values", "present"), ("past_key_values", "present_key_values"), ("past", "present"))
# ops that write new keys into a buffer of fixed size
WRITES_INTO_CACHE = frozenset(("GroupQueryAttention", "TensorScatter"))


@dataclass(frozen=True)
class CacheTensor:
    """Keys or values of one layer: the input that the model reads, and the output that replaces it.

    dims: sizes as declared; the first is the batch, the last but one the positions.
    """

    past: str
    present: str
    dtype: DType
    dims: tuple[int | str, ...]

    def shape(self, batch: int, positions: int) -> tuple[int, ...]:
        """Return the shape for a batch and a number of positions."""
        sizes = [batch, *(d if isinstance(d, int) else positions for d in self.dims[1:])]
        return tuple(sizes)


@dataclass(frozen=True)
class DecoderModel:
    """A decoder with a key/value cache, for any batch and length.

    inputs: the inputs that are no cache, by name.
    logits: name of the output that scores the next token.
    in_place: new keys are written into a buffer of fixed size, as by GroupQueryAttention. Otherwise they are joined
        with the past ones.
    """

    source: Source
    inputs: Mapping[str, Declaration]
    cache: tuple[CacheTensor, ...]
    logits: str
    in_place: bool

    @classmethod
    def of(cls, source: Source, pairs: Mapping[str, str] | None = None) -> DecoderModel:
        """Find the cache among the inputs and outputs of a model.

        pairs: the output that replaces each input of the cache; by default, names tell.
        Raises ModelError if there is no cache, or the model has inputs that fusec cannot give.
        """
        inputs = {d.name: d for d in source.interface[0]}
        outputs = {d.name: d for d in source.interface[1]}
        pairs = dict(pairs) if pairs is not None else _pairs(inputs, outputs)
        for past, present in pairs.items():
            if past not in inputs or present not in outputs:
                raise ModelError(f"{source.file}: no input {quote(past)} with an output {quote(present)} for the cache")
        if not pairs:
            raise ModelError(
                f"{source.file}: no input is a key/value cache: fusec looks for inputs past_key_values.* with outputs "
                f"present.*; `cache` gives other names. Inputs: {', '.join(map(quote, inputs))}"
            )
        cache = tuple(_tensor(source.file, inputs[past], present) for past, present in pairs.items())
        rest = {name: d for name, d in inputs.items() if name not in pairs}
        if IDS not in rest:
            raise ModelError(f"{source.file}: a decoder takes {quote(IDS)}; inputs: {', '.join(map(quote, inputs))}")
        for name in rest.keys() - {IDS, MASK, POSITIONS}:
            raise ModelError(
                f"{source.file}: fusec has no value for input {quote(name)}: it gives {IDS}, {MASK} and {POSITIONS}. "
                "If it never changes, give it in `constants`"
            )
        logits = [name for name in outputs if name not in pairs.values()]
        if not logits:
            raise ModelError(f"{source.file}: no output has the scores of the next token")
        in_place = source.onnx is not None and any(n.op_type in WRITES_INTO_CACHE for n in source.onnx.graph.node)
        if not in_place and POSITIONS not in rest:
            raise ModelError(
                f"{source.file}: has no input {quote(POSITIONS)}, so it would take positions from the size of the "
                "cache, which is constant: export it with position ids"
            )
        if MASK not in rest:
            raise ModelError(f"{source.file}: has no input {quote(MASK)}, which tells how much of the cache is used")
        return cls(source, rest, cache, "logits" if "logits" in logits else logits[0], in_place)


def _pairs(inputs: Mapping[str, Declaration], outputs: Mapping[str, Declaration]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in inputs:
        for before, after in NAMES:
            if name.startswith(before) and after + name.removeprefix(before) in outputs:
                found.setdefault(name, after + name.removeprefix(before))
    return found


def _tensor(file: str, past: Declaration, present: str) -> CacheTensor:
    dims = past.dims or ()
    symbolic = [place for place, d in enumerate(dims) if place and not isinstance(d, int)]
    if past.dtype is None or symbolic != [len(dims) - 2]:
        shown = ", ".join(str(d) or "?" for d in dims)
        raise ModelError(
            f"{file}: cache {quote(past.name)} is declared as [{shown}]: after the batch, only the last dim but one "
            "must be symbolic, the number of positions"
        )
    return CacheTensor(past.name, present, past.dtype, dims)
