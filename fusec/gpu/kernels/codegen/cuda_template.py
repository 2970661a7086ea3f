"""Read CUDA C from a `.cuh` file and fill its holes.

Editors colour such a file, and it reads like the kernel that it becomes. It holds fragments:

    FRAGMENT(zero) {
      float sums[VECTOR];
      for (u32 i = 0; i < COUNTu; ++i) sums[i] = START;
    }

A hole is an identifier in capitals. It stands for a number (`COUNTu` becomes `32u`), an expression or statements.
Lines that are only a comment stay in the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

Filling = int | str | Sequence[str]
NOT_HOLES = frozenset({"DEVICE", "DOOR", "ENTRY", "INFINITE", "RESIDENT", "TABLE"})  # names that the prelude defines
_FRAGMENT = re.compile(r"^FRAGMENT\((\w+)\) \{\n(.*?)^\}$", re.DOTALL | re.MULTILINE)
_HOLE = re.compile(r"\b([A-Z][A-Z0-9_]*[A-Z0-9])(u|ull)?\b")


@dataclass(frozen=True)
class CudaTemplate:
    """The fragments of a file, and the holes that are filled already."""

    fragments: Mapping[str, str]
    holes: Mapping[str, Filling]

    def bind(self, **holes: Filling) -> CudaTemplate:
        """Return the template with these holes filled in all fragments."""
        return replace(self, holes={**self.holes, **holes})

    def __call__(self, fragment: str, **holes: Filling) -> list[str]:
        """Return the lines of a fragment. Raise KeyError for a hole that has no filling."""
        fillings = {**self.holes, **holes}

        def fill(hole: re.Match[str]) -> str:
            if hole[1] in NOT_HOLES:
                return hole[0]
            filling = fillings[hole[1]]
            text = str(filling) if isinstance(filling, int | str) else "\n".join(filling)
            return text + (hole[2] or "")

        filled = _HOLE.sub(fill, self.fragments[fragment])
        return [line for line in filled.split("\n") if line.strip()]


@cache
def cuda_template(package: str | None, file: str) -> CudaTemplate:
    """Return the template of a file in a package, which a module calls `__package__`."""
    assert package is not None
    text = resources.files(package).joinpath(file).read_text(encoding="utf-8")
    code = re.sub(r"^ *//.*\n", "", text, flags=re.MULTILINE)
    return CudaTemplate(dict(_FRAGMENT.findall(code)), {})


def c_bool(condition: bool) -> str:
    """Return a condition as C has it."""
    return "true" if condition else "false"


def indented(lines: Sequence[str], depth: int = 1) -> str:
    """Join the lines of a body, each indented by the braces around it.

    Thus a generator does not indent, and a source and its name do not depend on how a generator does.
    """
    made: list[str] = []
    for line in "\n".join(lines).split("\n"):
        bare = line.strip()
        made.append("  " * (depth - bare.startswith("}")) + bare)
        depth += bare.count("{") - bare.count("}")
    return "\n".join(made)
