"""Apply the same pointwise ops to many tensors in one launch.

A block finds its tensor by comparing its number, which is the same for all its threads. The code after that is shared;
it uses the pointers of that tensor. Too many pointers for one launch are split into several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusec.gpu.kernels.codegen.cuda_template import cuda_template
from fusec.gpu.kernels.codegen.gpu_figures import GpuFigures
from fusec.gpu.kernels.codegen.indexing import View
from fusec.gpu.kernels.codegen.kernel import BLOCK, MAX_VECTOR, VECTOR_BYTES, Arguments, Kernel, Launch, ceil_div
from fusec.gpu.kernels.codegen.pointwise_code import PointwiseCode, Space, can_generate
from fusec.ir import Node, TensorType, Value
from fusec.schedule.multi_tensor import Member, equal_members, scalar_in_source

MAX_POINTERS = 480  # of a launch, because its parameters have 4 KB
PER_THREAD = 16  # elements, so that finding the pointers costs little in comparison
_CUDA = cuda_template(__package__, "multi_tensor.cuh")


class _Local(Arguments):
    """Pointers of the current tensor: variables, not parameters."""

    def _pointer(self, value: Value | None, type: TensorType | None, c_type: str, prefix: str, written: bool) -> str:
        return super()._pointer(value, type, c_type, f"m{prefix}", written)


def multi_tensor(nodes: Sequence[Node], outputs: Sequence[Value], figures: GpuFigures) -> Kernel | None:
    """Return the kernel of equal pointwise ops over many tensors; None for other steps."""
    found = equal_members(nodes) if len(nodes) > 1 and all(map(can_generate, nodes)) else None
    if found is None:
        return None
    found = [member for member in found if member.size]
    if not found:
        return Kernel("lists of nothing", ())
    pointers = [{v for v in (*m.reads, *m.writes) if not scalar_in_source(v)} for m in found]
    shared = set[Value].intersection(*pointers)
    count = max(1, (MAX_POINTERS - len(shared)) // max(1, max(len(each - shared) for each in pointers)))
    launches = [_launch(found[i : i + count]) for i in range(0, len(found), count)]
    return Kernel(f"lists of {'+'.join(n.op.name for n in found[0].nodes)}", tuple(launches))


def _launch(found: Sequence[Member]) -> Launch:
    """Generate one launch for equal pointwise ops over several tensors; each block finds the tensor that it reads."""
    first = found[0]
    local = _Local()
    moved = [v.type.dtype.itemsize for v in (*first.reads, *first.writes) if v.type.size > 1 or first.size == 1]
    vector = min(MAX_VECTOR // 2, VECTOR_BYTES // min(moved))  # more would need too many registers
    whole, one = _generate(first, local, vector), _generate(first, local, 1)
    chunk = BLOCK * PER_THREAD
    arguments = Arguments()
    leaves: list[list[str]] = []
    ends: list[int] = []
    total = 0
    for member in found:
        same = dict(zip((*first.reads, *first.writes), (*member.reads, *member.writes), strict=True))
        leaf = [f"size = {member.size}u;", f"b -= {total}u;"]
        for (value, _, written), name in local.names.items():
            assert value is not None
            other = same[value]
            leaf.append(f"{name} = {arguments.write(other) if written else arguments.read(other)};")
        leaves.append(leaf)
        total += ceil_div(member.size, chunk)
        ends.append(total)
    lines = _CUDA(
        "visit_tensor",
        DECLARE_POINTERS=[f"{kind} {name};" for kind, name in zip(local.parameters, local.names.values(), strict=True)],
        SELECT_TENSOR=select_block(leaves, ends),
        TURNS=PER_THREAD // vector,
        CHUNK=chunk,
        BLOCK=BLOCK,
        VECTOR=vector,
        WHOLE_VECTOR=whole,
        ONE_ELEMENT=one,
    )
    return arguments.launch("lists", lines, total)


def _generate(member: Member, local: Arguments, vector: int) -> list[str]:
    """Generate the code for the elements from `at` on."""
    code = PointwiseCode(Space((max(2, member.size),), ("at",), 0, vector), local)
    views: Mapping[Value, View] = {v: _view(v, member) for v in (*member.reads, *member.writes)}
    for value in member.reads:
        code.get(value, views[value])
    code.compute(member.nodes)
    for value in member.writes:
        code.store(value, type=views[value])
    return code.lines()


def _view(value: Value, member: Member) -> View:
    """Return a contiguous view of a value; a value of one element is used for all elements."""
    if value.type.size == 1 and member.size != 1:
        return View((), (), value.type.dtype)
    return View((max(2, member.size),), (1,), value.type.dtype)


def select_block(leaves: Sequence[list[str]], ends: Sequence[int]) -> list[str]:
    """Generate a binary search for the current block.

    leaves: the statements of each tensor.
    ends: the first block after each tensor.
    """
    if len(leaves) == 1:
        return leaves[0]
    middle = len(leaves) // 2
    left, right = select_block(leaves[:middle], ends[:middle]), select_block(leaves[middle:], ends[middle:])
    return [f"if (blockIdx.x < {ends[middle - 1]}u) {{", *left, "} else {", *right, "}"]
