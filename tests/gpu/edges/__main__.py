"""Run the table of edge values and print where results differ: `python -m gpu.edges [--here] [--json PATH] [title...]`.

`PYTHONPATH` is the repository and its `tests`. `--here` simulates and emulates instead of running on a GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu.edges import device, here
from gpu.edges.device import Result
from gpu.edges.table import table

CHUNK = 50  # rows whose kernels are one library of the emulator


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m gpu.edges", description=__doc__)
    parser.add_argument("titles", nargs="*", help="words that titles of rows contain; all rows without any")
    parser.add_argument("--json", help="where to write everything")
    parser.add_argument("--here", action="store_true", help="simulate and emulate; no GPU is needed")
    parser.add_argument("--workers", type=int, default=device.WORKERS)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        device.work()
        return 0
    titles = [t for t in table() if not given.titles or any(word in t for word in given.titles)]
    since = time.monotonic()
    results = _here(titles) if given.here else device.run_all(titles, given.workers, _progress)
    took = time.monotonic() - since
    if given.json:
        Path(given.json).write_text(json.dumps({"seconds": took, "results": [r.data for r in results]}, indent=0))
    report(results)
    print(f"{len(results)} forms of {len(titles)} rows in {took:.0f} s")
    return 0


def _here(titles: Sequence[str]) -> list[Result]:
    rows = [table()[t] for t in titles]
    found = [*here.simulated(rows), *here.compiled(rows)]
    for start in range(0, len(rows), CHUNK):
        found += here.emulated(rows[start : start + CHUNK])
    return [Result(name, form, "ran", found=differ) for name, form, differ in found]


def _progress(done: int, total: int) -> None:
    if done % 100 == 0:
        print(f"{done} of {total}", file=sys.stderr, flush=True)


def report(results: Sequence[Result]) -> None:
    """Report what did not run, and what differs: one line for each form and kind, with examples."""
    for status in ("died", "failed", "no plan"):
        some = [r for r in results if r.status == status]
        print(f"\n== {status}: {len(some)}")
        for r in some:
            print(f"  {r.row} | {r.form} | {' '.join(r.said.split())[:160]}")
    lines: list[tuple[Any, ...]] = []
    for r in results:
        kinds = Counter[str]()
        for d in r.found:
            kinds[d.kind] += d.count
        for kind, count in kinds.items():
            some = [f"{d.label}: {d.got} for {d.want}" for d in r.found if d.kind == kind]
            lines.append((r.row, r.form, kind, count, "; ".join(some[:6])))
    print(f"\n== differ: {len(lines)}   (row | form | kind | elements | edge values: got for wanted)")
    for line in lines:
        print(" | ".join(map(str, line))[:420])
    print("\n", dict(Counter(r.status for r in results)), dict(Counter(r.form.split()[0] for r in results)))


if __name__ == "__main__":
    raise SystemExit(main())
