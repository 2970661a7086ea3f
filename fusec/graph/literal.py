"""Hold the data of a constant, which is immutable and loaded when it is first needed."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from fusec.errors import VerifyError
from fusec.graph.string_array import as_strings
from fusec.graph.types import STRING_KINDS, DType, TensorType

T = TypeVar("T")
_reads = threading.local()  # `of`: the literals that this thread has read, while someone wants to know
LARGE_BYTES, EARLY_BYTES = 1 << 20, 1 << 30  # of a literal that is worth a thread, and of all that are loaded early


class Literal:
    """The data of a constant, loaded when it is needed. Literals are compared by identity.

    type: shape and element type; the memory order is dropped, because `array` is row-major.
    load: returns an array of that type; called once, by the first thread that needs the data.
    keep: False if `load` may be called for each use, so that the data takes memory only while something uses it.
    label: name of the constant in the model.
    key: equal for literals that were derived in the same way from the same data, so that they are recognised without
        being loaded; default: a unique key.
    sources: the literals that `load` reads.
    """

    __slots__ = ("__weakref__", "_array", "_digest", "_keep", "_load", "_lock", "_origins", "key", "label", "type")

    def __init__(
        self,
        type: TensorType,
        load: Callable[[], np.ndarray[Any, Any]],
        label: str = "",
        key: Hashable | None = None,
        *,
        keep: bool = True,
        sources: Iterable[Literal] = (),
    ):
        self.type = TensorType(type.shape, type.dtype)
        self.label = label
        # the sources themselves may be dropped with the data that they hold
        self._origins: frozenset[Literal] = frozenset().union(*(source.origins for source in sources))
        self.key: Hashable = object() if key is None else key
        self._load = load
        self._keep = keep
        self._lock = threading.Lock()
        self._array: np.ndarray[Any, Any] | None = None
        self._digest = ""

    @classmethod
    def of(cls, array: Any, label: str = "") -> Literal:
        """Make a literal from a copy of `array`."""
        copy = np.array(array, order="C", copy=True)
        copy.flags.writeable = False
        literal = cls(TensorType(copy.shape, DType.of(copy.dtype)), lambda: copy, label)
        literal._array = copy
        return literal

    @classmethod
    def of_host(cls, array: Any, label: str = "") -> Literal:
        """Make a literal from a copy of an array of numbers or strings. Raises VerifyError for other elements."""
        given = np.asarray(array)
        if given.dtype.kind not in STRING_KINDS:
            return cls.of(given, label)
        strings = np.array(as_strings(given))
        strings.flags.writeable = False
        return cls(TensorType(strings.shape, DType.STRING), lambda: strings, label)

    @property
    def array(self) -> np.ndarray[Any, Any]:
        """Return the data as a read-only NumPy array."""
        self._note_read()
        array = self._array
        if array is None:
            with self._lock:
                array = self._loaded() if self._array is None else self._array
                if self._keep:
                    self._array = array
        return array

    @property
    def load(self) -> Callable[[], np.ndarray[Any, Any]]:
        """Return what loads the data, which may know more of it than its array."""
        return self._load

    @property
    def origins(self) -> frozenset[Literal]:
        """Return the literals that the data comes from and that can be read again, such as weights in a file."""
        return self._origins if self._keep else frozenset({self})

    def operand(self) -> np.ndarray[Any, Any]:
        """Return the data for one computation, in any memory order. It is not cached unless it was loaded before.

        Of a chain of constants that are derived from each other, only the last one then takes memory for long.
        """
        self._note_read()
        array = self._array
        return self._operand() if array is None else array

    def _operand(self) -> np.ndarray[Any, Any]:
        return self._loaded()

    def _loaded(self) -> np.ndarray[Any, Any]:
        array = np.asarray(self._load())
        if array.shape != self.type.shape or array.dtype != self.type.dtype.numpy:
            raise VerifyError(
                f"constant {self.label!r} was declared {self.type} but its data is {array.dtype}{list(array.shape)}"
            )
        array = array.view()
        array.flags.writeable = False
        return array

    def rounded(self, dtype: np.dtype[Any]) -> np.ndarray[Any, Any] | None:
        """Return a new array of the data in another type, each number rounded once.

        None if the data is in memory already, or `load` has no method `read_as` that reads it in parts.
        """
        self._note_read()
        read = getattr(self._load, "read_as", None)
        return None if self._array is not None or read is None else read(dtype)

    def early(self) -> Callable[[], None] | None:
        """Return work that loads the data before it is needed; None if only its use can tell how to load it.

        Whoever needs the data before the work is done waits for it. It is held for one use.
        """
        return None

    def forget_early(self) -> None:
        """Drop data that was loaded early and not used."""

    @property
    def has_whole_numbers(self) -> bool:
        """Tell if all numbers are whole, which loads them."""
        return bool((self.array == np.rint(self.array)).all())

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the type and the data, in hexadecimal."""
        self._note_read()
        if not self._digest:
            sha = hashlib.sha256(str(self.type).encode())
            for part in self._parts():
                sha.update(part)
            self._digest = sha.hexdigest()
        return self._digest

    def _note_read(self) -> None:
        """Add this literal, and those that its data comes from, to what this thread has read, if that is collected."""
        read: set[Literal] | None = getattr(_reads, "of", None)
        if read is not None:
            read.add(self)
            read |= self.origins

    def _parts(self) -> Iterator[memoryview]:
        """Yield the bytes of the data in order; a part is valid until the next one.

        A loader with a method `parts` reads them into little memory, unless the array of the data stays in memory.
        """
        read = getattr(self._load, "parts", None)
        if self._array is None and not self._keep and read is not None:
            yield from read()
            return
        yield np.ascontiguousarray(self.array).view(np.uint8).reshape(-1).data


@contextmanager
def noted_reads() -> Generator[set[Literal]]:
    """Collect the literals whose data this thread reads during the block, and the origins of that data.

    Data that other threads load meanwhile, as `load_early` lets them, does not count.
    """
    outer: set[Literal] | None = getattr(_reads, "of", None)
    _reads.of = found = set[Literal]()
    try:
        yield found
    finally:
        _reads.of = outer
        if outer is not None:
            outer |= found


class MissingLiteral(Literal):
    """A constant whose data is not here, but its digest is known. error: raised when the data is needed."""

    __slots__ = ()

    def __init__(self, type: TensorType, label: str, digest: str, error: Exception):
        def fail() -> np.ndarray[Any, Any]:
            raise error

        super().__init__(type, fail, label)
        self._digest = digest


def load_all(literals: Iterable[Literal]) -> list[np.ndarray[Any, Any]]:
    """Load literals on all cores, large ones first. Threads help because NumPy, which derives weights, frees the GIL.

    Hold the arrays until they are used, because some literals keep none.
    """
    return _on_all_cores(lambda literal: literal.array, literals)


def load_early(literals: Iterable[Literal]) -> None:
    """Begin to load literals in threads before they are needed, large ones first: see `Literal.early`.

    Beyond EARLY_BYTES none is loaded, because the data waits in memory while plans and kernels are timed.
    """
    work: list[Callable[[], None]] = []
    room = EARLY_BYTES
    for literal in _largest_first(literals):
        room -= literal.type.nbytes
        if room < 0 or literal.type.nbytes < LARGE_BYTES:
            break
        if (load := literal.early()) is not None:
            work.append(load)

    def run() -> None:
        with ThreadPoolExecutor(max(1, min(len(work), len(os.sched_getaffinity(0))))) as pool:
            list(pool.map(lambda load: load(), work))

    if work:
        threading.Thread(target=run, name="fusec-early-weights", daemon=True).start()


def operand_all(literals: Iterable[Literal]) -> dict[Literal, np.ndarray[Any, Any]]:
    """Return the data of literals for one use, each in any memory order; see `load_all`. It is not cached."""
    wanted = _largest_first(literals)
    return dict(zip(wanted, _on_all_cores(lambda literal: literal.operand(), wanted), strict=True))


def digest_all(literals: Iterable[Literal]) -> None:
    """Compute the digests of literals on all cores. Threads help because hashlib frees the GIL."""
    _on_all_cores(lambda literal: literal.digest, literals)


def _largest_first(literals: Iterable[Literal]) -> list[Literal]:
    return sorted(dict.fromkeys(literals), key=lambda literal: -literal.type.nbytes)


def _on_all_cores(act: Callable[[Literal], T], literals: Iterable[Literal]) -> list[T]:
    wanted = _largest_first(literals)
    with ThreadPoolExecutor(max(1, min(len(wanted), len(os.sched_getaffinity(0))))) as pool:
        return list(pool.map(act, wanted))


def is_scale(number: np.generic) -> bool:
    """Tell if kernels load a constant rather than contain it in their source: an fp32 number that bf16 does not hold.

    Such numbers are mostly scales of quantisation. Each layer has another one, and would need a source of its own.
    """
    return number.dtype == np.float32 and bool(np.float32(number).view(np.uint32) & 0xFFFF)
