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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import cache, partial
from importlib import resources

from fusec.system.dataclass import dataclass

Filling = int | str | Sequence[str]
NOT_HOLES = ("DEVICE", "COUNTER_STRIDE", "ENTRY", "INFINITE", "RESIDENT", "TABLE")  # names that the prelude defines
_FRAGMENT = re.compile(r"^FRAGMENT\((\w+)\) \{\n(.*?)^\}$", re.DOTALL | re.MULTILINE)
_HOLE = re.compile(rf"\b(?!(?:{'|'.join(NOT_HOLES)})\b)([A-Z][A-Z0-9_]*[A-Z0-9])(?=(?:u|ull)?\b)")


@dataclass(frozen=True)
class CudaTemplate:
    """The fragments of a text, and the holes that are filled already.

    read: returns the text. It is called for the first fragment, because most processes use few kernels.
    """

    read: Callable[[], str]
    holes: Mapping[str, Filling] = field(default_factory=dict[str, Filling])

    @property
    def fragments(self) -> Mapping[str, Sequence[str]]:
        """Return, by name, texts and holes in turn."""
        return _parse(self.read)

    def bind(self, **holes: Filling) -> CudaTemplate:
        """Return the template with these holes filled in all fragments."""
        return replace(self, holes={**self.holes, **holes})

    def __call__(self, fragment: str, **holes: Filling) -> list[str]:
        """Return the lines of a fragment. Raise KeyError for a hole that has no filling."""
        fillings, filled = {**self.holes, **holes}, list(self.fragments[fragment])
        for place in range(1, len(filled), 2):
            filling = fillings[filled[place]]
            filled[place] = str(filling) if isinstance(filling, int | str) else "\n".join(filling)
        return [line for line in "".join(filled).split("\n") if line and not line.isspace()]


@cache
def cuda_template(package: str | None, file: str) -> CudaTemplate:
    """Return the template of a file in a package, which a module calls `__package__`."""
    return CudaTemplate(partial(cuda_file, package, file))


@cache
def _parse(read: Callable[[], str]) -> Mapping[str, Sequence[str]]:
    code = re.sub(r"^ *//.*\n", "", read(), flags=re.MULTILINE)
    return {name: _HOLE.split(body) for name, body in _FRAGMENT.findall(code)}


def cuda_file(package: str | None, file: str) -> str:
    """Return a file of CUDA C as it is."""
    assert package is not None
    return resources.files(package).joinpath(file).read_text(encoding="utf-8")


def c_bool(condition: bool) -> str:
    """Return a condition as a literal of C."""
    return "true" if condition else "false"


def indented(lines: Sequence[str]) -> str:
    """Join the lines of a body, each indented by the braces around it.

    So a generator need not indent its lines, and their indentation changes neither a source nor its name.
    """
    made, depth = list[str](), 1
    for line in "\n".join(lines).split("\n"):
        bare = line.strip()
        made.append("  " * (depth - bare.startswith("}")) + bare)
        if "{" in bare or "}" in bare:
            depth += bare.count("{") - bare.count("}")
    return "\n".join(made)
