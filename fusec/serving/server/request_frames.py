"""Send requests from a front end to a worker: what many requests have in common, and then numbers for each.

Clients ask for the same model with tensors of the same shape again and again. So both sides prepare the common part
once, as text. A request adds its number, its rows, and the places of its inputs in the shared memory.
"""

from __future__ import annotations

import functools
import json
import struct
from array import array
from collections.abc import Iterator, Sequence

from fusec.serving.server.frames import LENGTHS
from fusec.system.dataclass import dataclass

ROWS = -1  # stands for the number of rows in a shape
_NUMBER = "q"


@dataclass(frozen=True)
class RequestForm:
    """The common part: the model, its inputs, and the names of the outputs.

    inputs: each as (name, datatype, shape, shared-memory object). Without an object ("") it is in the memory of the
        front end.
    """

    model: str
    inputs: tuple[tuple[str, str, tuple[int, ...], str], ...]
    outputs: tuple[str, ...]

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.model, self.inputs, self.outputs))

    def __hash__(self) -> int:
        return self._hash  # it is looked up for each request

    @functools.cached_property
    def uses_objects(self) -> bool:
        """Tell if an input is in a shared-memory object."""
        return any(item for *_, item in self.inputs)

    def text(self) -> bytes:
        """Return the form as bytes, which `form_of` reads."""
        return json.dumps([self.model, self.inputs, self.outputs], separators=(",", ":")).encode()


@functools.lru_cache(maxsize=1024)
def form_of(text: bytes) -> RequestForm:
    """Read a form that another process of this server wrote."""
    model, inputs, outputs = json.loads(text)
    given = tuple((name, kind, tuple(shape), item) for name, kind, shape, item in inputs)
    return RequestForm(model, given, tuple(outputs))


def forget_frame(item: str) -> bytes:
    """Return a message that no request will refer to a shared-memory object any more: a form without a model."""
    return request_frame(RequestForm("", (), (item,)).text(), ())


def request_frame(form: bytes, numbers: Sequence[int]) -> bytes:
    """Return a message about requests of one form. numbers: of each request, its id, its rows and its starts."""
    packed = array(_NUMBER, numbers).tobytes()
    return b"".join([LENGTHS.pack(len(form), len(packed)), form, packed])


def split_frames(held: bytearray) -> Iterator[tuple[RequestForm, Sequence[Sequence[int]]]]:
    """Yield the form and the numbers of the requests of each message that has arrived whole, and remove these bytes."""
    place = 0
    while len(held) - place >= LENGTHS.size:
        text, packed = LENGTHS.unpack_from(held, place)
        start = place + LENGTHS.size + text
        if len(held) < start + packed:
            break
        form = form_of(bytes(held[place + LENGTHS.size : start]))
        numbers = struct.iter_unpack(f"={2 + len(form.inputs)}{_NUMBER}", bytes(held[start : start + packed]))
        place = start + packed
        yield form, list(numbers)
    del held[:place]
