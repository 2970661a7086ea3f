"""What a kernel is, as data: source, launch and the values it reads and writes; nothing of CUDA is needed to make one.

Sources know arguments by position and shapes as numbers, never names of the model: equal work has equal text. How much
there is of it is no part of the text (`by_value`): another batch needs no other kernel.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources

from fusec.ir import DType, TensorType, Value

BLOCK = 256
VECTOR_BYTES = 16  # of one load or store; the memory plan places every value at a multiple of it
MAX_VECTOR = 8  # elements
CLUSTERS = "sm_90"  # the first architecture that has them
DOOR = 32  # numbers of 32 bits: none shares a line of the cache with another

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
}
HALVES = (DType.F16, DType.BF16)


def compute_type(dtype: DType) -> str:
    """The C type an element is computed in."""
    return "float" if dtype in HALVES else C_TYPES[dtype]


@dataclass(frozen=True)
class Argument:
    """A value's memory; a constant may be wanted in another memory order than the program keeps it in. `value` is
    None for scratch memory, and for doors (of a type): memory that was zero at first and is left as it was found."""

    value: Value | None
    type: TensorType | None


@dataclass(frozen=True)
class Launch:
    """One launch of `grid` blocks of `block` threads, with `resident_bytes` of shared memory beside what the source
    declares. `parameters` are the C types of the arguments. `meets`: blocks wait for each other, so all of them must be
    on the GPU at once. `numbers`: what it is given behind the arguments, by value, with their C types. `architecture`:
    the only one that has its instructions (`sm_90a`), or the first (`sm_90`), if not all of a generation and later
    do. `cluster`: so many blocks side by side are on the GPU at once, wait for each other and see each other's resident
    memory. `early`: it may begin before the launch in front has ended, for which it waits by itself."""

    entry: str
    source: str
    grid: int
    block: int
    parameters: tuple[str, ...]
    arguments: tuple[Argument, ...]
    resident_bytes: int = 0
    meets: bool = False
    numbers: tuple[tuple[str, int], ...] = ()
    architecture: str = ""
    cluster: int = 1
    early: bool = False

    @property
    def key(self) -> str:
        """Equal for equal work."""
        return ":".join([self.entry, str(self.grid), *(str(value) for _, value in self.numbers)])


def by_value(value: int, long: bool = False) -> str:
    """A number of 32 bits, or 64, that is given to a kernel when it is launched: in how many parts the work falls."""
    return f"@{value}{'ull' if long else 'u'}@"


_NUMBER = re.compile(r"@(\d+)(u|ull)@")


@dataclass(frozen=True)
class Kernel:
    """What runs a step: launches in order (none if there is nothing to write), over `scratch_bytes` of memory that
    nothing else uses meanwhile. `name` says what it does: `max_pool`. `others` do the same work shared out otherwise
    among threads: where times are measured, one of them may be faster."""

    name: str
    launches: tuple[Launch, ...]
    scratch_bytes: int = 0
    others: tuple[Kernel, ...] = ()

    @property
    def key(self) -> str:
        """Equal for equal work."""
        return " ".join(launch.key for launch in self.launches) or "nothing"

    @property
    def written(self) -> tuple[Value, ...]:
        """The values that it writes."""
        named = (pair for launch in self.launches for pair in zip(launch.parameters, launch.arguments, strict=True))
        found = (a.value for c_type, a in named if a.value is not None and not c_type.startswith("const "))
        return tuple(dict.fromkeys(found))


@dataclass
class Arguments:
    """The arguments of a launch as they come to be used in its source."""

    names: dict[tuple[Value | None, TensorType | None, bool], str] = field(
        default_factory=dict[tuple[Value | None, TensorType | None, bool], str]
    )
    parameters: list[str] = field(default_factory=list[str])
    arguments: list[Argument] = field(default_factory=list[Argument])

    def read(self, value: Value, type: TensorType | None = None) -> str:
        """The name of the pointer a value is read through; constants in the order of `type`."""
        type = type or value.type
        return self._pointer(value, type, f"const {C_TYPES[type.dtype]}*", "a", False)

    def write(self, value: Value) -> str:
        """The name of the pointer a value is written through."""
        return self._pointer(value, value.type, f"{C_TYPES[value.type.dtype]}*", "r", True)

    def scratch(self, c_type: str = "float") -> str:
        """The name of the pointer to the scratch memory."""
        return self._pointer(None, None, f"{c_type}*", "s", True)

    def doors(self, count: int) -> str:
        """The name of the pointer to so many doors (`meet`), DOOR numbers apart."""
        return self._pointer(None, TensorType((count * DOOR,), DType.U32), "u32*", "d", True)

    def _pointer(self, value: Value | None, type: TensorType | None, c_type: str, prefix: str, written: bool) -> str:
        key = (value, type, written)
        if key not in self.names:
            self.names[key] = f"{prefix}{len(self.arguments)}"
            self.parameters.append(c_type)
            self.arguments.append(Argument(value, type))
        return self.names[key]

    def launch(
        self,
        name: str,
        lines: Sequence[str],
        grid: int,
        block: int = BLOCK,
        preamble: Sequence[str] = (),
        resident: int = 0,
        cluster: int = 1,
    ) -> Launch:
        """The launch of a kernel with this body; ENTRY stands for its name, in what comes before it, too. resident:
        blocks that a multiprocessor is to have room for at least, which bounds the registers of a thread. cluster:
        of `Launch`."""
        numbers: list[tuple[str, int]] = []

        def named(found: re.Match[str]) -> str:
            numbers.append(("u32" if found[2] == "u" else "u64", int(found[1])))
            return f"bound{len(numbers) - 1}"

        body = _NUMBER.sub(named, "\n".join(f"  {line}" for line in lines))
        pointers = zip(self.parameters, self.names.values(), strict=True)
        given = [f"{c_type} __restrict__ {pointer}" for c_type, pointer in pointers]
        declared = ", ".join([*given, *(f"const {c_type} bound{i}" for i, (c_type, _) in enumerate(numbers))])
        before = "".join(f"{line}\n" for line in preamble)
        bounds = f"__launch_bounds__({block}, {resident})" if resident else f"__launch_bounds__({block})"
        bounds += f" __cluster_dims__({cluster})" if cluster > 1 else ""
        text = f'{before}extern "C" __global__ void {bounds} ENTRY({declared}) {{\n{body}\n}}\n'
        entry = f"{name}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        source = text.replace("ENTRY", entry)
        of = tuple(self.parameters), tuple(self.arguments)
        return Launch(entry, source, grid, block, *of, numbers=tuple(numbers), cluster=cluster)


def prelude() -> str:
    """What stands before every source."""
    return resources.files("fusec.gpu.kernels.codegen").joinpath("prelude.cuh").read_text(encoding="utf-8")


def ceil_div(a: int, b: int) -> int:
    """a/b rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()
