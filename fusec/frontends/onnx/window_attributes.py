"""Attributes of sliding windows, shared by convolutions and pools: one entry per dim, pads made explicit."""

from __future__ import annotations

from collections.abc import Sequence

from fusec.ir import Value
from fusec.ops.spec import require


def spatial_dims(x: Value) -> int:
    """How many spatial dims x[N, C, …] has."""
    require(3 <= x.type.rank <= 5, f"takes 1 to 3 spatial dims, x has shape {list(x.type.shape)}")
    return x.type.rank - 2


def per_dim(name: str, given: Sequence[int], count: int, default: int) -> tuple[int, ...]:
    """The attribute with `count` entries; the default if it was left out."""
    require(len(given) in (0, count), f"{name} needs {count} entries, not {len(given)}")
    return tuple(given) or (default,) * count


def explicit_pads(
    auto_pad: str,
    pads: Sequence[int],
    spatial: Sequence[int],
    window: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> tuple[int, ...]:
    """All the starts, then all the ends. SAME_*: as many windows as strides fit the input, rounded up."""
    n = len(spatial)
    check_auto_pad(auto_pad)
    if auto_pad == "NOTSET":
        return per_dim("pads", pads, 2 * n, 0)
    require(not any(pads), f"both auto_pad={auto_pad} and pads {list(pads)}")
    if auto_pad == "VALID":
        return (0,) * (2 * n)
    require(all(s >= 1 for s in strides), f"strides must be positive: {list(strides)}")
    totals = [
        max(0, (-(-i // s) - 1) * s + d * (k - 1) + 1 - i)
        for i, k, s, d in zip(spatial, window, strides, dilations, strict=True)
    ]
    return distribute(totals, upper=auto_pad == "SAME_UPPER")


def check_auto_pad(auto_pad: str) -> None:
    require(auto_pad in ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"), f"knows no auto_pad {auto_pad!r}")


def distribute(totals: Sequence[int], *, upper: bool) -> tuple[int, ...]:
    """Padding halved between start and end; of an odd total the end gets one more if `upper`, else the start."""
    starts = [t // 2 if upper else t - t // 2 for t in totals]
    return (*starts, *(t - s for t, s in zip(totals, starts, strict=True)))
