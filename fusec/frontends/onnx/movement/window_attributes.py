"""Read the window attributes of convolutions and pools: one entry per dim, and explicit pads."""

from __future__ import annotations

from collections.abc import Sequence

from fusec.ir import Value
from fusec.ops.spec import require
from fusec.system.dataclass import dataclass


@dataclass(frozen=True)
class WindowAttributes:
    """Window attributes of a pool, as the model gives them. Empty ones have their defaults."""

    kernel_shape: Sequence[int]
    strides: Sequence[int]
    dilations: Sequence[int]
    pads: Sequence[int]
    auto_pad: str

    def resolved(self, x: Value) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return window, strides, pads and dilations for the image x, as the IR's pools take them."""
        n = spatial_dims(x)
        window = tuple(self.kernel_shape)
        require(len(window) == n, f"kernel_shape needs {n} entries, not {len(window)}")
        strides, dilations = per_dim("strides", self.strides, n, 1), per_dim("dilations", self.dilations, n, 1)
        pads = explicit_pads(self.auto_pad, self.pads, x.type.shape[2:], window, strides, dilations)
        return window, strides, pads, dilations


def spatial_dims(x: Value) -> int:
    """Count the spatial dims of x[N, C, …]."""
    require(3 <= x.type.rank <= 5, f"takes 1 to 3 spatial dims, x has shape {list(x.type.shape)}")
    return x.type.rank - 2


def per_dim(name: str, given: Sequence[int], count: int, default: int) -> tuple[int, ...]:
    """Return an attribute with `count` entries; `default` for each if the model leaves it out."""
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
    """Return the pads: all starts, then all ends. With SAME_*, the output has ceil(input / stride) elements."""
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
    """Halve padding between start and end. For an odd total, the end gets one more if `upper`, else the start."""
    starts = [t // 2 if upper else t - t // 2 for t in totals]
    return (*starts, *(t - s for t, s in zip(totals, starts, strict=True)))
