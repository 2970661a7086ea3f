"""Print the table of kernel families of docs/kernels.md: what each costs in lines, and what it is worth to models.

`pytest tests/test_docs.py --accept` writes the table from benchmarks/results/leave_one_out.json and the source files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.result_files import RESULTS, ROOT
from benchmarks.kernels.leave_one_out import ALONE, named
from benchmarks.pages.results_of_costs import machine_of, table
from fusec.gpu.kernels import FAMILIES

RESULT = RESULTS / "leave_one_out.json"
KERNELS = ROOT / "fusec" / "gpu" / "kernels"
MODULES = {family.__name__: KERNELS.parents[2] / (family.__module__.replace(".", "/") + ".py") for family in FAMILIES}


def files_of(family: str) -> list[Path]:
    """Return the files that a family alone needs: its module, those it imports, and their CUDA sources.

    What several families share (`codegen/`) is left out, and so are modules of other families.
    """
    found, shared = [MODULES[family]], KERNELS / "codegen"
    for path in found:  # grows
        text = path.read_text()
        modules = re.findall(r"^from (fusec\.gpu\.kernels\.\w+(?:\.\w+)+) import", text, re.MULTILINE)
        named = [ROOT / (module.replace(".", "/") + ".py") for module in modules]
        cuda = re.findall(r'"(\w+\.cuh)"', text)  # next to the module, or in a folder around it
        named += [next(at / name for at in path.parents if (at / name).exists()) for name in cuda]
        others = set(MODULES.values())
        found += [f for f in named if f.parent != shared and f not in others and f not in found]
    return found


def worth(rows: Sequence[Mapping[str, Any]], name: str) -> str:
    """Tell the largest share of time that models lose without `name`, and which model that is.

    A model that does not run without it is named instead.
    """
    needed = [named(row) for row in rows if "failed" in row["without"].get(name, {})]
    if needed:
        return f"needed ({needed[0]})"
    found = [(w["worth"], row) for row in rows if "worth" in (w := row["without"].get(name, {}))]
    most, row = max(found, key=lambda pair: pair[0])
    return f"{most:+.1%} ({named(row)})"


def kernel_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a row for each family: its lines, models, worth, and the worth of its further variants.

    rows: rows of leave_one_out.json
    """
    lines: list[list[Any]] = []
    for name in MODULES:
        serves = sum(name in row["without"] for row in rows)
        alone = ALONE.format(name)
        count = sum(len(path.read_text().splitlines()) for path in files_of(name))
        about = max(100, round(count, -2))  # so that few changes of a kernel change this page
        largest = worth(rows, name) if serves else "in no model of the table"
        variants = worth(rows, alone) if any(alone in row["without"] for row in rows) else ""
        lines.append([f"`{name}`", about, serves, largest, variants])
    header = ["family", "lines, about", f"models of {len(rows)}", "largest worth", "of its variants"]
    return "\n".join(table(header, lines))


def page_part() -> str:
    """Return the part of docs/kernels.md that this script writes."""
    data = json.loads(RESULT.read_text())
    return f"{machine_of(data)}.\n\n{kernel_table(data['rows'])}"


if __name__ == "__main__":
    print(page_part())
