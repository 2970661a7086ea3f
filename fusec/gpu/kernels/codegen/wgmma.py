"""Generate products of a warpgroup (four warps), which only Hopper has."""

from __future__ import annotations

from functools import cache

ARCHITECTURE = "sm_90a"
SWIZZLES = {128: 1, 64: 2, 32: 3}  # modes of a descriptor, by the bytes of a row


@cache
def offset(octets: int) -> int:
    """Return the padding, in octets, after each octet column of a row of `octets` octets in shared memory.

    With it, eight neighbouring octets of consecutive rows are in different banks.
    """

    def worst(step: int) -> int:
        places = [(p % octets * step + p // octets) % 8 for p in range(16 * octets)]
        windows = (places[i : i + 8] for i in range(0, 16 * octets, 8))
        return sum(8 - len(set(window)) for window in windows)

    return min(range(8), key=worst)


def product(kind: str, columns: int, by_rows: bool = False) -> list[str]:
    """Generate the function ENTRY_<columns>: d[64][columns] (+)= a[64][16] b[16][columns].

    b is stored in shared memory as tiles of 8 x 8. They are `lead` bytes apart along the depth and `stride` bytes apart
    along the columns, and begin `offset` bytes after the pointer.

    by_rows: each tile is stored with its own rows; else transposed. The function's name then ends with `_by_rows`.
    """
    count, name = columns // 2, f"ENTRY_{columns}{'_by_rows' * by_rows}"
    sums, words = (", ".join(f"%{i}" for i in span) for span in (range(count), range(count, count + 4)))
    written = _written(count)
    given = ", ".join(f'"r"(a[{i}])' for i in range(4))
    emulated = f"group_product<{kind}, {columns // 8}, {str(by_rows).lower()}>"
    head = f"DEVICE void {name}(float (&d)[{columns // 8}][4], const u32 (&a)[4], const void* b, u32 offset, "
    return [
        f"{head}u32 lead, u32 stride, int onto) {{",
        "#ifdef FUSEC_EMULATED",
        f"  {emulated}(d, a, (const u8*)b + offset, lead, stride, onto);",
        "#else",
        f'  asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + 5}, 0; "',
        f'    "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} "',
        f'    "{{{sums}}}, {{{words}}}, %{count + 4}, p, 1, 1, {int(by_rows)}; }}"',
        f"    : {written}",
        f'    : {given}, "l"(group_tiles(b, lead, stride) + (offset >> 4)), "r"(onto));',
        "#endif",
        "}",
    ]


def product_of_tiles(kind: str, columns: int, stride: int = 128) -> list[str]:
    """Generate the function ENTRY_<columns>_of_tiles: d[64][columns] (+)= a[64][16] b[16][columns].

    a and b are stored in shared memory as tiles of 8 x 8, a with its rows and b with its columns. The tiles of both
    are `lead` bytes apart along the depth. Tiles of a are `stride` bytes apart along its rows, and those of b 128 bytes
    along its columns. They begin `from` bytes after the pointers: with pointers that no loop changes, an address takes
    one instruction.
    """
    count = columns // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    head = f"DEVICE void ENTRY_{columns}_of_tiles(float (&d)[{columns // 8}][4], const void* a, u32 a_from, "
    places = "(const u8*)a + a_from, a_lead, (const u8*)b + b_from, b_lead"
    return [
        f"{head}u32 a_lead, const void* b, u32 b_from, u32 b_lead, int onto) {{",
        "#ifdef FUSEC_EMULATED",
        f"  group_product_of_tiles<{kind}, {columns // 8}, {stride}>(d, {places}, onto);",
        "#else",
        f'  asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + 2}, 0; "',
        f'    "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} "',
        f'    "{{{sums}}}, %{count}, %{count + 1}, p, 1, 1, 0, 0; }}"',
        f"    : {_written(count)}",
        f'    : "l"(group_tiles(a, a_lead, {stride}u) + (a_from >> 4)), '
        '"l"(group_tiles(b, b_lead, 128u) + (b_from >> 4)), "r"(onto));',
        "#endif",
        "}",
    ]


def product_of_bytes(columns: int) -> list[str]:
    """Generate the function ENTRY_<columns>_of_bytes: d[64][columns] (+)= a[64][32] b[columns][32], of 8-bit integers.

    a has rows of 128 bytes in shared memory whose octets are exchanged, and b is stored by octets (stage_ring.cuh).
    `step` is the number of the 32 bytes of each row and column that are multiplied.
    """
    count = columns // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    head = f"DEVICE void ENTRY_{columns}_of_bytes(i32 (&d)[{columns // 8}][4], const u8* a, const u8* b, "
    return [
        f"{head}u32 step, u32 onto) {{",
        "#ifdef FUSEC_EMULATED",
        f"  group_product_of_bytes<{columns // 8}>(d, a, b, step, onto);",
        "#else",
        f'  asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + 2}, 0; "',
        f'    "wgmma.mma_async.sync.aligned.m64n{columns}k32.s32.s8.s8 {{{sums}}}, %{count}, %{count + 1}, p; }}"',
        f"    : {_written(count, 'r')}",
        f'    : "l"(rows_of_bytes(a, step)), "l"(group_tiles(b + step * {32 * columns}u, {16 * columns}u, 128u)), '
        '"r"(onto));',
        "#endif",
        "}",
    ]


def product_of_rows(kind: str, columns: int, wide: int) -> list[str]:
    """Generate the function ENTRY_<columns>_of_rows: d[64][columns] (+)= a[64][depth] b[depth][columns].

    a, with its rows, and b, with its columns, are rows of `wide` bytes in shared memory, one after the other. They may
    begin at any row, because the hardware swizzles addresses (`swizzled` in prelude.cuh). Kernels store them in the
    same way, from a multiple of 1024 bytes on.

    kind: type of a and b; the depth is 32 for `i8`, whose sums are i32, and 16 for others.
    wide: 32, 64 or 128.
    """
    count, is_bytes = columns // 2, kind == "i8"
    sums = ", ".join(f"%{i}" for i in range(count))
    shape = f"m64n{columns}k32.s32.s8.s8" if is_bytes else f"m64n{columns}k16.f32.{kind}.{kind}"
    head = f"DEVICE void ENTRY_{columns}_of_rows({'i32' if is_bytes else 'float'} (&d)[{columns // 8}][4], "
    high = SWIZZLES[wide] << 30 | 8 * wide >> 4  # eight rows are contiguous
    return [
        f"{head}SwizzledRows<{wide}> a, SwizzledRows<{wide}> b, int onto) {{",
        "#ifdef FUSEC_EMULATED",
        f"  group_product_of_rows<{kind}, {columns // 8}>(d, a, b, onto);",
        "#else",
        f'  asm volatile("{{ .reg .pred p; .reg .b64 a, b; setp.ne.b32 p, %{count + 3}, 0; "',
        f'    "mov.b64 a, {{%{count}, %{count + 2}}}; mov.b64 b, {{%{count + 1}, %{count + 2}}}; "',
        f'    "wgmma.mma_async.sync.aligned.{shape} "',
        f'    "{{{sums}}}, a, b, p{"" if is_bytes else ", 1, 1, 0, 0"}; }}"',
        f"    : {_written(count, 'r' if is_bytes else 'f')}",
        f'    : "r"(a.first), "r"(b.first), "r"({high}u), "r"(onto));',
        "#endif",
        "}",
    ]


def _written(count: int, register: str = "f") -> str:
    """Return the operands of an instruction that adds to `count` sums of a thread."""
    return ", ".join(f'"+{register}"(d[{i // 4}][{i % 4}])' for i in range(count))
