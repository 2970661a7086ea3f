"""Describe kernels as data: source, launches, and the values they read and write. No CUDA is needed to make one.

Sources name arguments by position and contain shapes as numbers, never names of the model. Thus equal computations have
equal source. Counts that grow with the batch are passed at launch (`by_value`), so another batch needs no other kernel.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from functools import cache

from fusec.gpu.kernels.codegen.cuda_template import cuda_file, indented
from fusec.ir import HALVES, DType, TensorType, Value
from fusec.system.dataclass import dataclass

BLOCK = 256
VECTOR_BYTES = 16  # of one load or store; the memory plan aligns every value to it
MAX_VECTOR = 8  # elements
CLUSTERS = "sm_90"  # the first architecture that has thread block clusters
COUNTER_STRIDE = 32  # 32-bit numbers from one barrier counter to the next, so that no two share a cache line

C_TYPES: Mapping[DType, str] = {
    DType.F64: "double",
    DType.F32: "float",
    DType.F16: "f16",
    DType.BF16: "bf16",
    DType.I64: "i64",
    DType.I32: "i32",
    DType.I16: "i16",
    DType.I8: "i8",
    DType.U64: "u64",
    DType.U32: "u32",
    DType.U16: "u16",
    DType.U8: "u8",
    DType.BOOL: "bool",
    **{dtype: dtype.value for dtype in DType if dtype.is_narrow},  # in narrow_types.cuh
}
# Pointers to narrow numbers, and conversions, in a source. A regular expression would take several times as long.
_NARROW = tuple(
    use for t in DType if t.is_narrow for use in (f"{t.value}* __restrict__", f"<{t.value},", f"<{t.value}>")
)


def computed_in(dtype: DType) -> DType:
    """Return the type that elements of a dtype are computed in: f32 for short floats, 8 bits for short integers."""
    if dtype in HALVES or (dtype.is_narrow and not dtype.is_narrow_int):
        return DType.F32
    return dtype if not dtype.is_narrow else DType.I8 if dtype in (DType.I4, DType.I2) else DType.U8


def compute_type(dtype: DType) -> str:
    """Return the C type that elements of a dtype are computed in."""
    return C_TYPES[computed_in(dtype)]


@dataclass(frozen=True)
class Argument:
    """The memory of a value, or other memory of a launch.

    value: None for scratch memory and for barrier counters.
    type: the memory order that is wanted, which for a constant may differ from the program's. Scratch memory has
        none. Barrier counters have one; they are zero at first, and each launch leaves them as it found them.
    """

    value: Value | None
    type: TensorType | None


@dataclass(frozen=True)
class Launch:
    """One launch of `grid` blocks of `block` threads.

    parameters: the C types of the arguments.
    resident_bytes: dynamic shared memory of a block.
    cooperative: blocks wait for each other, so all must run at the same time (a cooperative launch).
    numbers: C type and value of what is passed by value after the arguments.
    architecture: `sm_90` for the first architecture that has the instructions; `sm_90a` for the only one; empty
        for any.
    cluster: blocks of a thread block cluster. They run at the same time and access each other's shared memory.
    dependent: it may begin before the launch before it has ended, and waits for that by itself. A cooperative launch
        begins later.
    """

    entry: str
    source: str
    grid: int
    block: int
    parameters: tuple[str, ...]
    arguments: tuple[Argument, ...]
    resident_bytes: int = 0
    cooperative: bool = False
    numbers: tuple[tuple[str, int], ...] = ()
    architecture: str = ""
    cluster: int = 1
    dependent: bool = False

    @property
    def key(self) -> str:
        """A text that is equal for equal launches."""
        return ":".join([self.entry, str(self.grid), *(str(value) for _, value in self.numbers)])

    def runs_on(self, sm: int) -> bool:
        """Tell if a GPU of a compute capability, such as 90, has the instructions."""
        wanted = int(self.architecture.strip("sm_a") or 0)
        return sm == wanted if self.architecture.endswith("a") else sm >= wanted


def by_value(value: int, long: bool = False) -> str:
    """Return the placeholder of a number that is passed at launch, of 32 bits or 64 (`long`).

    It keeps counts that depend on the batch out of the source.
    """
    return f"@{value}{'ull' if long else 'u'}@"


_NUMBER = re.compile(r"@(\d+)(u|ull)@")


@dataclass(frozen=True)
class Kernel:
    """The launches that run a step, in order; none if there is nothing to write.

    name: what it computes, such as `max_pool`.
    scratch_bytes: memory that nothing else uses while the kernel runs.
    others: variants, which compute the same with other launches. Measured times decide among them.
    """

    name: str
    launches: tuple[Launch, ...]
    scratch_bytes: int = 0
    others: tuple[Kernel, ...] = ()

    @property
    def key(self) -> str:
        """A text that is equal for equal kernels."""
        return " ".join(launch.key for launch in self.launches) or "nothing"

    @property
    def written(self) -> tuple[Value, ...]:
        """The values that the kernel writes."""
        named = (pair for launch in self.launches for pair in zip(launch.parameters, launch.arguments, strict=True))
        found = (a.value for c_type, a in named if a.value is not None and not c_type.startswith("const "))
        return tuple(dict.fromkeys(found))


def with_variants(kernels: Iterable[Kernel]) -> Kernel | None:
    """Return the first kernel with the others as its variants; None if there is none."""
    found = list(kernels)
    return replace(found[0], others=tuple(found[1:])) if found else None


def variants_of(kernel: Kernel) -> tuple[Kernel, ...]:
    """Return the variants of a kernel, itself first."""
    return (replace(kernel, others=()), *kernel.others)


@dataclass
class Arguments:
    """The arguments of a launch, collected while its source is generated."""

    names: dict[tuple[Value | None, TensorType | None, bool], str] = field(
        default_factory=dict[tuple[Value | None, TensorType | None, bool], str]
    )
    parameters: list[str] = field(default_factory=list[str])
    arguments: list[Argument] = field(default_factory=list[Argument])

    def read(self, value: Value, type: TensorType | None = None) -> str:
        """Return the name of the pointer that a value is read through.

        type: the memory order that a constant is wanted in; default: as it is stored.
        """
        type = type or value.type
        return self._pointer(value, type, f"const {C_TYPES[type.dtype]}*", "a", False)

    def write(self, value: Value) -> str:
        """Return the name of the pointer that a value is written through."""
        return self._pointer(value, value.type, f"{C_TYPES[value.type.dtype]}*", "r", True)

    def scratch(self, c_type: str = "float") -> str:
        """Return the name of the pointer to the scratch memory."""
        return self._pointer(None, None, f"{c_type}*", "s", True)

    def barrier_counters(self, count: int) -> str:
        """Return the name of the pointer to `count` barrier counters, for `wait_for_blocks` of prelude.cuh."""
        return self._pointer(None, TensorType((count * COUNTER_STRIDE,), DType.U32), "u32*", "d", True)

    def _pointer(self, value: Value | None, type: TensorType | None, c_type: str, prefix: str, written: bool) -> str:
        key = (value, type, written)
        if key not in self.names:
            self.names[key] = f"{prefix}{len(self.arguments)}"
            self.parameters.append(c_type)
            self.arguments.append(Argument(value, type))
        return self.names[key]

    def begin(self) -> list[str]:
        """Return the statements of a dependent launch that wait for earlier ones, and let the next one begin.

        Pointers to computed values are new from there on, so that the compiler moves no load through them to an earlier
        place. All of them have to be named before.
        """
        pointers = [
            name
            for (value, _, written), name in self.names.items()
            if value is not None and value.literal is None and not written
        ]
        renewed = (f"{name} = from_here({name});" for name in pointers)
        return ["wait_for_launches();", "next_may_begin();", *renewed]

    def early_launch(
        self,
        name: str,
        lines: Sequence[str],
        grid: int,
        block: int = BLOCK,
        *,
        preamble: Sequence[str] = (),
        resident: int = 0,
    ) -> Launch:
        """Return a dependent launch, whose first statement waits for earlier ones; see `launch`.

        It does not let the next one begin, whose blocks might take the place of its own. Pointers are
        defined after the wait, so that the compiler moves no load through them to an earlier place.
        """
        given = {f"{name}_given": name for name in self.names.values()}
        pointers = zip(self.parameters, given.items(), strict=True)
        begin = [f"{c_type} __restrict__ const {now} = from_here({old});" for c_type, (old, now) in pointers]
        names = dict(zip(self.names, given, strict=True))
        body = ["wait_for_launches();", *begin, *lines]
        early = replace(self, names=names).launch(name, body, grid, block, preamble=preamble, resident=resident)
        return replace(early, dependent=True)

    def launch(
        self,
        name: str,
        lines: Sequence[str],
        grid: int,
        block: int = BLOCK,
        *,
        preamble: Sequence[str] = (),
        resident: int = 0,
        cluster: int = 1,
    ) -> Launch:
        """Return the launch of a kernel with this body.

        lines: the body; ENTRY in it stands for the kernel's name, in the preamble, too.
        preamble: lines before the kernel.
        resident: blocks that a multiprocessor must have room for, which bounds the registers of a thread.
        cluster: blocks of a thread block cluster.
        """
        numbers: list[tuple[str, int]] = []

        def named(found: re.Match[str]) -> str:
            numbers.append(("u32" if found[2] == "u" else "u64", int(found[1])))
            return f"bound{len(numbers) - 1}"

        body = _NUMBER.sub(named, indented(lines))
        pointers = zip(self.parameters, self.names.values(), strict=True)
        given = [f"{c_type} __restrict__ {pointer}" for c_type, pointer in pointers]
        declared = ", ".join([*given, *(f"const {c_type} bound{i}" for i, (c_type, _) in enumerate(numbers))])
        before = "".join(f"{line}\n" for line in preamble)
        if any(use in declared or use in body for use in _NARROW):
            before = narrow_types() + before
        bounds = f"__launch_bounds__({block}, {resident})" if resident else f"__launch_bounds__({block})"
        bounds += f" __cluster_dims__({cluster})" if cluster > 1 else ""
        text = f'{before}extern "C" __global__ void {bounds} ENTRY({declared}) {{\n{body}\n}}\n'
        entry = f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        source = text.replace("ENTRY", entry)
        of = tuple(self.parameters), tuple(self.arguments)
        return Launch(entry, source, grid, block, *of, numbers=tuple(numbers), cluster=cluster)


@cache
def prelude() -> str:
    """Return the CUDA C that every source begins with."""
    return cuda_file(__package__, "prelude.cuh")


@cache
def narrow_types() -> str:
    """Return the CUDA C of floats of 8 bits and fewer, and of integers below 8 bits, for after the prelude."""
    return cuda_file(__package__, "narrow_types.cuh")


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()
