"""Name the members of a `.fusec` file, and the versions that it depends on."""

from __future__ import annotations

from fusec import lockfile

FORMAT = 1
FORMAT_OF_SHAPES = 2  # with programs for several sets of input shapes
FORMAT_WITHOUT_SOURCES = 3  # as 1 or 2, without large weights that only the imported model has
SUFFIX = ".fusec"
WEIGHTS, SOURCE, SOURCE_WEIGHTS = "weights.safetensors", "source.txt", "source.safetensors"
LEFT_OUT = "source.json"  # only in FORMAT_WITHOUT_SOURCES: type and label of each weight that was left out, by digest


def versions() -> dict[str, str]:
    """Return the versions that plans depend on: cuDNN and its frontend, empty if not installed."""
    return {name: version for name, version in lockfile.versions().items() if name != "fusec"}


def folder_of(number: int) -> str:
    """Return the start of the names of the members for one set of input shapes."""
    return f"shapes/{number}/" if number else ""
