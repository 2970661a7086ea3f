"""Explain a generator: its cache, and what each of its programs runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fusec.diagnostics.explain import Explanation
from fusec.diagnostics.text_table import bytes_text
from fusec.system.dataclass import dataclass
from fusec.system.printable import printable


@dataclass(frozen=True)
class CacheTensorSize:
    """A tensor of the cache. in_place: a decode step writes new rows into it, and copies nothing else of it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    in_place: bool


@dataclass(frozen=True)
class GeneratorExplanation:
    """The cache of a generator, and the steps of its programs, by what they are for."""

    cache: tuple[CacheTensorSize, ...]
    programs: Mapping[str, Explanation]

    @property
    def cache_bytes(self) -> int:
        """Return the size of the cache, which stays on the device."""
        return sum(each.nbytes for each in self.cache)

    def to_json(self) -> dict[str, Any]:
        """Return plain data, ready for json.dumps."""
        cache = {"bytes": self.cache_bytes, "tensors": [asdict(each) for each in self.cache]}
        return {"cache": cache, "programs": {name: each.to_json() for name, each in self.programs.items()}}

    def __str__(self) -> str:
        copied = [each.name for each in self.cache if not each.in_place]
        kinds = dict.fromkeys(f"{each.dtype}{list(each.shape)}" for each in self.cache)
        lines = [
            f"cache: {len(self.cache)} tensors of {', '.join(kinds)}, {bytes_text(self.cache_bytes)} on the device; "
            + (f"copied by each decode step: {printable(', '.join(copied))}" if copied else "written in place")
        ]
        for name, each in self.programs.items():
            totals = each.totals
            read = bytes_text(totals["read_bytes"])
            lines.append(f"{name}: {totals['launches']} launches, {totals['cudnn']} of them cuDNN, {read} read")
        return "\n".join([*lines, *(f"\n{name}\n{each}" for name, each in self.programs.items())])
