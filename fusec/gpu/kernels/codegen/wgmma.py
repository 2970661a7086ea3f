"""Generate products of a warpgroup (four warps), which only Hopper has."""

from __future__ import annotations

from functools import cache

ARCHITECTURE = "sm_90a"


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


def product(kind: str, columns: int, turned: bool = False) -> list[str]:
    """Generate the function ENTRY_<columns>: d[64][columns] (+)= a[64][16] b[16][columns].

    b is stored in shared memory as tiles of 8 x 8. They are `lead` bytes apart along the depth and `stride` bytes apart
    along the columns, and begin `offset` bytes after the pointer.

    turned: each tile is stored with its own rows; else transposed. The function's name then ends with `_turned`.
    """
    count, name = columns // 2, f"ENTRY_{columns}{'_turned' * turned}"
    sums, words = (", ".join(f"%{i}" for i in span) for span in (range(count), range(count, count + 4)))
    written = ", ".join(f'"+f"(d[{i // 4}][{i % 4}])' for i in range(count))
    given = ", ".join(f'"r"(a[{i}])' for i in range(4))
    emulated = f"group_product<{kind}, {columns // 8}, {str(turned).lower()}>"
    head = f"DEVICE void {name}(float (&d)[{columns // 8}][4], const u32 (&a)[4], const void* b, u32 offset, "
    return [
        f"{head}u32 lead, u32 stride, int onto) {{",
        "#ifdef FUSEC_EMULATED",
        f"  {emulated}(d, a, (const u8*)b + offset, lead, stride, onto);",
        "#else",
        f'  asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + 5}, 0; "',
        f'    "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} "',
        f'    "{{{sums}}}, {{{words}}}, %{count + 4}, p, 1, 1, {int(turned)}; }}"',
        f"    : {written}",
        f'    : {given}, "l"(group_tiles(b, lead, stride) + (offset >> 4)), "r"(onto));',
        "#endif",
        "}",
    ]


def byte_product(columns: int) -> list[str]:
    """Generate the function ENTRY_<columns>: d[64][columns] += a[64][32] b[32][columns], of 8-bit integers.

    Both operands are in shared memory, with 16 bytes of the depth of each row (or column) next to those of the
    following one. `a_lead` and `b_lead` are the bytes from 16 of the depth to the next 16.
    """
    count = columns // 2
    sums = ", ".join(f"%{i}" for i in range(count))
    written = ", ".join(f'"+r"(d[{i // 4}][{i % 4}])' for i in range(count))
    return [
        f"DEVICE void ENTRY_{columns}(i32 (&d)[{columns // 8}][4], const void* a, u32 a_lead, "
        "const void* b, u32 b_lead) {",
        "#ifdef FUSEC_EMULATED",
        f"  group_product<{columns // 8}>(d, a, a_lead, b, b_lead);",
        "#else",
        '  asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0; "',
        f'    "wgmma.mma_async.sync.aligned.m64n{columns}k32.s32.s8.s8 {{{sums}}}, %{count}, %{count + 1}, p; }}"',
        f"    : {written}",
        '    : "l"(group_tiles(a, a_lead, 128u)), "l"(group_tiles(b, b_lead, 128u)));',
        "#endif",
        "}",
    ]
