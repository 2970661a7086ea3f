"""Run the mutation suite and write its results: `python benchmarks/mutants.py [--workers N] [--commit HASH]`.

Which planted faults the fuzzer finds, by which property, after how many graphs.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from mutation.mutants import MUTANTS  # noqa: E402 - found through the line above
from mutation.suite import BUDGET, hunt_all  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    rows = results["mutants"]
    caught = [r for r in rows if r["caught"]]
    counts = sorted(r["examples"] for r in caught)
    by = Counter(r["property"] for r in caught)
    lines = [
        f"{len(caught)} of {len(rows)} planted faults found within {results['budget']} graphs; median "
        f"{statistics.median(counts):g} graphs, at most {counts[-1]}. Commit {results['commit']}, {results['date']}.",
        "",
        "Caught by: " + ", ".join(f"`{name}` {count}" for name, count in by.most_common()) + ".",
        "",
        "| area | fault | what it breaks | caught by | graphs | ops left |",
        "|---|---|---|---|---:|---:|",
    ]
    for row in rows:
        found = [f"`{row['property']}`", row["examples"], row["ops"]] if row["caught"] else ["not caught", "", ""]
        lines.append("| " + " | ".join(map(str, [row["area"], f"`{row['name']}`", row["why"], *found])) + " |")
    return "\n".join(lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--commit", default="")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("names", nargs="*", help="only these")
    options = parser.parse_args()
    commit = (
        options.commit
        or subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True, cwd=ROOT
        ).stdout.strip()
    )
    chosen = [m for m in MUTANTS if not options.names or m.name in options.names]

    rows: list[dict[str, Any]] = []

    def write() -> None:
        results = {
            "commit": commit,
            "date": dt.datetime.now(dt.UTC).date().isoformat(),
            "python": platform.python_version(),
            "budget": BUDGET,
            "mutants": sorted(rows, key=_place),
        }
        options.output.write_text(json.dumps(results, indent=1) + "\n")

    def tell(row: dict[str, Any]) -> None:
        rows.append(row)
        write()  # a run that is cut short keeps what it has
        verdict = f"{row.get('property')} after {row.get('examples')}" if row["caught"] else "NOT CAUGHT"
        print(f"{row['name']:28} {verdict} {row.get('error', '')}", file=sys.stderr, flush=True)

    hunt_all(chosen, options.workers, BUDGET, tell)
    print(f"{sum(r['caught'] for r in rows)} of {len(rows)} caught")


def _place(row: dict[str, Any]) -> int:
    return [m.name for m in MUTANTS].index(row["name"])


if __name__ == "__main__":
    main()
