"""Name the members of a `.fusec` file, and the versions that it depends on."""

from __future__ import annotations

from collections.abc import Iterable

from fusec import lockfile
from fusec.gpu.launch.cubins import KEY_PREFIX

FORMAT = 1
FORMAT_OF_SHAPES = 2  # with programs for several sets of input shapes
FORMAT_WITHOUT_SOURCES = 3  # as 1 or 2, without large weights that only the imported model has
SUFFIX = ".fusec"
WEIGHTS, SOURCE, SOURCE_WEIGHTS = "weights.safetensors", "source.txt", "source.safetensors"
REMARKS = "remarks.json"  # only if the imported model has some: `Graph.remarks`
LEFT_OUT = "source.json"  # only in FORMAT_WITHOUT_SOURCES: type and label of each weight that was left out, by digest


def versions() -> dict[str, str]:
    """Return the versions that plans depend on: cuDNN and its frontend, empty if not installed."""
    return {name: version for name, version in lockfile.versions().items() if name != "fusec"}


def folder_of(number: int) -> str:
    """Return the start of the names of the members for one set of input shapes."""
    return f"shapes/{number}/" if number else ""


def kernel_member(target: str, key: str) -> str:
    """Return the name of the member with a compiled kernel, by the key of its source."""
    return _kernel_folder(target) + key.removeprefix(KEY_PREFIX)


def kernel_keys(target: str, members: Iterable[str]) -> dict[str, str]:
    """Return the names of the members with compiled kernels of a target, by the key of their source."""
    folder = _kernel_folder(target)
    return {KEY_PREFIX + name.removeprefix(folder): name for name in members if name.startswith(folder)}


def _kernel_folder(target: str) -> str:
    return f"{target}/kernels/"
