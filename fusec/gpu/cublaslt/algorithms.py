"""List cuBLASLt's algorithms for a product, and run one of them as a plan.

cuDNN's packages install the library. Without it `Blas.open` returns None.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from typing import Any

import numpy as np

from fusec.errors import ExecutionError
from fusec.gpu.cublaslt import bindings
from fusec.gpu.cublaslt.bindings import ALGORITHM_WORDS, RESULT, BlasError, Library, MatmulPreferenceAttribute
from fusec.gpu.cublaslt.descriptors import ALIGNMENT_BYTES, Descriptors
from fusec.gpu.cublaslt.match import Product, product_of
from fusec.ir import DType
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.plans.plan_record import BLAS, Choice, Knobs
from fusec.system.dataclass import dataclass
from fusec.system.installed import installed_version

PACKAGES = ("nvidia-cublas", "nvidia-cublas-cu12")
COUNT = 8  # algorithms to ask for; for eight measured shapes, the best of 32 was among the first seven
WORKSPACE_BYTES = 32 << 20  # NVIDIA's recommendation for Hopper, used on every GPU
_PREFERENCES = {
    MatmulPreferenceAttribute.MAX_WORKSPACE_BYTES: np.uint64(WORKSPACE_BYTES),
    # Parts of a split sum are stored in fp32, because results of 16 bits would round them.
    MatmulPreferenceAttribute.REDUCTION_SCHEME_MASK: np.uint32(2),
    MatmulPreferenceAttribute.MIN_ALIGNMENT_A_BYTES: np.uint32(ALIGNMENT_BYTES),
    MatmulPreferenceAttribute.MIN_ALIGNMENT_B_BYTES: np.uint32(ALIGNMENT_BYTES),
    MatmulPreferenceAttribute.MIN_ALIGNMENT_C_BYTES: np.uint32(ALIGNMENT_BYTES),
    MatmulPreferenceAttribute.MIN_ALIGNMENT_D_BYTES: np.uint32(ALIGNMENT_BYTES),
}
_MAGIC = b"fusec cuBLASLt algorithm 1\n"
_KNOBS = (  # types of cublasLtMatmulAlgoConfigAttributes_t, in order; their values name an algorithm
    np.int32,  # id
    np.uint32,  # tile
    np.int32,  # split-K: parts of a sum
    np.uint32,  # reduction scheme of split-K
    np.uint32,  # swizzling
    np.uint32,  # custom option
    np.uint32,  # stages
    np.uint16,  # inner shape
    np.uint16,  # cluster shape
)


@cache
def version() -> str:
    """Return the library's version, empty without one; it is loaded only if it was not installed as a package."""
    for package in PACKAGES:
        if (installed := installed_version(package)) is not None:
            return installed
    try:
        number = bindings.load().version
    except (ImportError, OSError, RuntimeError):
        return ""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def competitor() -> str:
    """Return the library's name and version for cache keys; empty if it is not available."""
    return f"cublaslt {version()}" if version() else ""


def is_algorithm(blob: bytes) -> bool:
    """Tell if a serialized plan is an algorithm of this library."""
    return blob.startswith(_MAGIC)


@dataclass(frozen=True)
class Algorithm:
    """Algorithm that cuBLASLt offers for a product."""

    knobs: Knobs
    workspace_bytes: int
    data: np.ndarray[Any, Any]  # cublasLtMatmulAlgo_t

    @property
    def blob(self) -> bytes:
        """Serialize the algorithm as plain numbers, valid for the version of the library that offered it."""
        return _MAGIC + np.array([self.workspace_bytes, *self.data.tolist()], "<u8").tobytes()

    @classmethod
    def of(cls, blob: bytes) -> Algorithm:
        """Read an algorithm from its blob, without the knobs. Raises ExecutionError for other data."""
        if len(blob) != len(_MAGIC) + 8 * (1 + ALGORITHM_WORDS) or not is_algorithm(blob):
            raise ExecutionError("not an algorithm of cuBLASLt")
        numbers = np.frombuffer(blob[len(_MAGIC) :], "<u8").astype(np.uint64)
        return cls((), int(numbers[0]), numbers[1:])


class Blas:
    """cuBLASLt on the current device, loaded when first needed.

    stream: returns the address of the stream that a plan runs on
    """

    def __init__(self, stream: Callable[[], int]):
        self.stream = stream
        self._found: dict[str, list[Algorithm]] = {}

    @classmethod
    def open(cls, stream: Callable[[], int]) -> Blas | None:
        """Return the library; None if it is not installed."""
        return cls(stream) if version() else None

    @cached_property
    def lt(self) -> Library:
        """Load the library's functions."""
        return bindings.load()

    @cached_property
    def handle(self) -> int:
        handle = self.lt.create("")
        # The driver may already be unloaded when Python exits.
        weakref.finalize(self, self.lt.call, "Destroy", handle).atexit = False
        return handle

    @cached_property
    def loads(self) -> bool:
        """Tell if the library loads; warn if it is installed and does not."""
        try:
            return bool(self.handle)
        except (BlasError, ImportError, OSError, RuntimeError) as error:  # cuda-pathfinder raises RuntimeError
            warnings.warn(f"cuBLASLt does not load, products are left to cuDNN: {error}", stacklevel=2)
        return False

    def offers(self, graph: CudnnGraph) -> list[Choice]:
        """List the algorithms for a graph as choices, in the library's order; none if the graph is no product."""
        product = product_of(graph)
        if product is None or not self.loads:
            return []
        if graph.key not in self._found:
            self._found[graph.key] = self._algorithms(product)
        return [Choice(BLAS, found.knobs, found.workspace_bytes) for found in self._found[graph.key]]

    def build(self, graph: CudnnGraph, choice: Choice) -> BlasPlan:
        """Build a plan from an offer. Raises ExecutionError if the library does not offer it."""
        self.offers(graph)
        product = product_of(graph)
        found = next((a for a in self._found.get(graph.key, ()) if a.knobs == choice.knobs), None)
        if product is None or found is None:
            raise ExecutionError(f"cuBLASLt does not offer the algorithm {dict(choice.knobs)} for\n{graph}")
        return BlasPlan(self, product, found)

    def revive(self, graph: CudnnGraph, blob: bytes) -> BlasPlan:
        """Read a plan from a serialized algorithm that is trusted. Raises ExecutionError if it does not fit."""
        product, algorithm = product_of(graph), Algorithm.of(blob)
        if product is None:
            raise ExecutionError(f"cuBLASLt does not run\n{graph}")
        if not self.loads:
            raise ExecutionError("cuBLASLt does not load")
        plan = BlasPlan(self, product, algorithm)
        plan.check()
        return plan

    def _algorithms(self, product: Product) -> list[Algorithm]:
        lt, described = self.lt, Descriptors(self.lt, product)
        results, count = np.zeros(COUNT, RESULT), np.zeros(1, np.int32)
        preference = lt.create("MatmulPreference")
        try:
            for name, value in _PREFERENCES.items():
                lt.set_attribute("MatmulPreference", preference, name, value)
            try:
                lt.call(
                    "MatmulAlgoGetHeuristic",
                    self.handle,
                    *described.all,
                    preference,
                    COUNT,
                    results.ctypes.data,
                    count.ctypes.data,
                )
            except BlasError:  # no algorithm fits
                return []
        finally:
            lt.call("MatmulPreferenceDestroy", preference)
        found: dict[Knobs, Algorithm] = {}
        for result in results[: int(count[0])]:
            if int(result["state"]) == 0:
                data = np.array(result["algorithm"])
                knobs = self._knobs(data)
                found.setdefault(knobs, Algorithm(knobs, int(result["workspace_bytes"]), data))
        return list(found.values())

    def _knobs(self, algorithm: np.ndarray[Any, Any]) -> Knobs:
        knobs: list[tuple[int, int]] = []
        for name, dtype in enumerate(_KNOBS):
            value, written = np.zeros(1, dtype), np.zeros(1, np.uint64)
            to = (value.ctypes.data, value.nbytes, written.ctypes.data)
            self.lt.call("MatmulAlgoConfigGetAttribute", algorithm.ctypes.data, name, *to)
            knobs.append((name, int(value[0])))
        return tuple(knobs)


class BlasPlan:
    """Algorithm for a product, run as a cuDNN plan is; it neither allocates nor waits."""

    def __init__(self, blas: Blas, product: Product, algorithm: Algorithm):
        self._blas, self._product, self._algorithm = blas, product, algorithm
        self._descriptors = Descriptors(blas.lt, product)
        self._scales = np.array([product.alpha, 0.0 if product.c is None else 1.0], product.scales_in.numpy)
        self.workspace_bytes = algorithm.workspace_bytes
        self.blob = algorithm.blob

    def check(self) -> None:
        """Raise ExecutionError unless the library accepts the algorithm for the product."""
        result = np.zeros(1, RESULT)
        where = (self._algorithm.data.ctypes.data, result.ctypes.data)
        try:
            self._blas.lt.call("MatmulAlgoCheck", self._blas.handle, *self._descriptors.all, *where)
        except BlasError as error:
            raise ExecutionError(f"cuBLASLt does not take the algorithm: {error}") from error
        if int(result[0]["workspace_bytes"]) > self.workspace_bytes:
            raise ExecutionError("cuBLASLt wants more workspace for the algorithm than it did")

    def addresses(self, buffers: Mapping[int, int]) -> dict[int, int]:
        """Return what `execute` takes: device addresses by uid."""
        return dict(buffers)

    def execute(self, addresses: Mapping[int, int], workspace: int, handle: Any) -> None:
        """Queue the product, with scratch memory at the address `workspace`."""
        product, described = self._product, self._descriptors
        described.set_addresses(addresses)
        a, b, d = (addresses[matrices.uid] for matrices in (product.a, product.b, product.d))
        if product.c is not None:
            c = addresses[product.c.uid]
        else:
            c = d if product.d.dtype is not DType.F8E4M3 else 0  # C in another type may not be D
        alpha, beta = (self._scales[place:].ctypes.data for place in range(2))
        operands = (alpha, a, described.a, b, described.b, beta, c, described.c, d, described.d)
        how = (self._algorithm.data.ctypes.data, workspace, self.workspace_bytes, self._blas.stream())
        try:
            self._blas.lt.call("Matmul", self._blas.handle, described.operation, *operands, *how)
        except BlasError as error:
            raise ExecutionError(f"cuBLASLt failed to run {product}: {error}") from error
