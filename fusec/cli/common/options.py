"""Define the options that several commands share, and read their texts."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from fusec.errors import FusecError

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="An ONNX file, a graph in fusec's text form, or a .fusec file.")
]
Models = Annotated[
    list[str],
    typer.Argument(
        metavar="MODEL...", help="ONNX files, graphs in fusec's text form, .fusec files, or folders of them."
    ),
]
Target = Annotated[
    str, typer.Option("--target", help="A GPU of `fusec targets`; auto: this machine's, or an H200; cpu: NumPy.")
]
Precision = Annotated[str, typer.Option(help="fp32, tf32, fp16 or bf16; sums are always fp32.")]
Shapes = Annotated[
    list[str] | None,
    typer.Option(
        "--shape",
        metavar="NAME=SIZES",
        help="Shape of an input, or size or range of a symbolic dim: x=1,3,224,224, batch=8, batch=1..8..32.",
    ),
]
Constants = Annotated[
    list[str] | None,
    typer.Option("--constant", metavar="NAME=VALUE", help="Value of an input: axis=1, k=1,2,3 or x=file.npy."),
]
CustomOps = Annotated[
    list[str] | None,
    typer.Option(
        "--custom-op",
        metavar="OP=FILE.py:FUNCTION",
        help="Let a Python function compute an op: my.domain::Op=ops.py:f; may be repeated.",
    ),
]
Disable = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="Leave out this pass or rewrite rule; may be repeated.")
]
Rounding = Annotated[
    str,
    typer.Option(
        help="fused: inside a step 16-bit values stay in fp32; source: rounded as in the model; "
        "fastest: a GPU chooses by time if a quantised model rounds its activations."
    ),
]
Locked = Annotated[
    Path | None, typer.Option(metavar="LOCK", help="Run the plans of this lock file; fail if one does not fit.")
]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="Give the same bits in every call: no sums in an order that varies.")
]
Heuristics = Annotated[
    str, typer.Option(metavar="MODES", help="Modes of cuDNN's heuristics that list plans: A, B, fallback, by commas.")
]
Engines = Annotated[
    str, typer.Option(metavar="NUMBERS", help="Engines of cuDNN to insist on, 45,1, or to leave out, -0,-11.")
]
WorkspaceLimit = Annotated[
    str | None,
    typer.Option("--workspace-limit", metavar="SIZE", help="Most scratch memory of a plan, in bytes: 0, 64M or 1G."),
]
ChannelsLast = Annotated[
    bool,
    typer.Option(
        "--channels-last", help="Inputs and outputs of rank 4 and 5 are channels last in memory; shapes stay N, C, …."
    ),
]
Tune = Annotated[
    str, typer.Option(help="On a GPU: none takes cuDNN's first plan, quick times the likely ones, full all.")
]
Budget = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="Stop asking cuDNN after this time, say 20s, and timing plans after as much."),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the random numbers.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, all else on stderr.")]

_RANGE = re.compile(r"\d+(\.\.\d+){1,2}")
_BYTES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def seconds_of(text: str, option: str) -> float:
    """Return `90`, `60s`, `10m` or `1h30m` in seconds."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if not parts or "".join(a + b for a, b in parts) != text or not any(float(a) for a, _ in parts):
        raise FusecError(f"{option} {text}: a time is written 60s, 10m or 1h30m")
    return sum(float(number) * _UNITS[unit or "s"] for number, unit in parts)


def budget_of(text: str | None) -> float:
    """Return the seconds of --budget; infinite if it is not given."""
    return math.inf if text is None else seconds_of(text, "--budget")


def workspace_limit_of(text: str | None) -> int | None:
    """Return the bytes of --workspace-limit; None if it is not given."""
    found = None if text is None else re.fullmatch(r"(\d+)([KMG]?)", text)
    if text is not None and found is None:
        raise FusecError(f"--workspace-limit {text}: a size is a number of bytes, or as in 512K, 64M or 1G")
    return None if found is None else int(found[1]) * _BYTES[found[2]]


def shapes_of(texts: Sequence[str]) -> dict[str, tuple[int | str, ...]]:
    """Read `x=1,3,224,224` as name and sizes; `x=` is a scalar. A range such as `1..32` stays text."""
    shapes: dict[str, tuple[int | str, ...]] = {}
    for name, text in pairs_of("--shape", "NAME=1,3,224,224", texts):
        try:
            sizes = text.split(",") if text else ()
            shapes[name] = tuple(size if _RANGE.fullmatch(size) else int(size) for size in sizes)
        except ValueError:
            raise FusecError(
                f"--shape {name}={text}: sizes are whole numbers joined by commas, or ranges such as 1..32"
            ) from None
    return shapes


def require_ranges(shapes: Mapping[str, Sequence[int | str]], dims: Collection[str]) -> None:
    """Raise FusecError if a list is given for a symbolic dim, because it may mean a range or these sizes alone.

    dims: the names of the symbolic dims that are not names of inputs.
    """
    for name in (name for name, sizes in shapes.items() if name in dims and len(sizes) > 1):
        text = ",".join(map(str, shapes[name]))
        raise FusecError(
            f"--shape {name}={text}: {name!r} is a dim, which has one size or a range such as 1..32; a list is the "
            "shape of an input, and --bucket takes the sizes to compile for"
        )


def buckets_of(texts: Sequence[str]) -> dict[str, list[int]]:
    """Read `batch=1,8,32` as the name of a dim and its buckets."""
    try:
        named = pairs_of("--bucket", "NAME=1,8,32", texts)
        return {name: [int(size) for size in text.split(",")] for name, text in named}
    except ValueError:
        raise FusecError(f"--bucket {' '.join(texts)}: buckets are whole numbers joined by commas") from None


def number_of(text: str) -> bool | int | float:
    """Read `true`, `false`, a whole number or a float. Raises ValueError for any other text."""
    if text in ("true", "false"):
        return text == "true"
    try:
        return int(text)
    except ValueError:
        return float(text)


def pairs_of(option: str, form: str, texts: Sequence[str]) -> list[tuple[str, str]]:
    """Split the texts of an option at `=`. `form` shows in messages how to write one."""
    pairs: dict[str, str] = {}
    for text in texts:
        # at the last `=`, because names of tensors may contain one and sizes do not
        name, sign, value = text.rpartition("=")
        if not sign or not name:
            raise FusecError(f"{option} {text}: has no name or no '=': write {option} {form}")
        if name in pairs:
            raise FusecError(f"{option} is given twice for {name!r}")
        pairs[name] = value
    return list(pairs.items())
