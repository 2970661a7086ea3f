"""Run the mutation suite and write its results.

Usage: python benchmarks/checks/mutants.py [--workers N] [--fresh] [NAME...]
The results say which planted faults the fuzzer finds, by which property and after how many graphs, and which tests find
the faults that are planted for tests. A fault that was caught before is not hunted again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from mutation.mutants import Mutant  # noqa: E402
from mutation.suite import ALL, BUDGET, digest, hunt_all  # noqa: E402

from benchmarks.common.result_files import date_and_commit, write  # noqa: E402 - found through the line above

RESULTS = ROOT / "benchmarks" / "results" / "mutants.json"
VERSIONS = ("numpy", "hypothesis", "onnx", "onnxruntime")


def table(results: dict[str, Any]) -> str:
    """Print the results as Markdown."""
    planted = {m.name: bool(m.tests) for m in ALL}
    rows = [r for r in results["mutants"] if not planted[r["name"]]]
    tested = [r for r in results["mutants"] if planted[r["name"]]]
    control, caught = results["control"], [r for r in rows if r["caught"]]
    counts = sorted(r["examples"] for r in caught)
    by = Counter(r["property"] for r in caught)
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    open_ = [f"`{r['name']}`" for r in results["mutants"] if not r["caught"]]
    unhunted = [f"`{name}`" for name in results["planted"] if name not in {r["name"] for r in results["mutants"]}]
    lines = [
        f"{sum(not by_tests for by_tests in planted.values())} faults are planted for the fuzzer, {len(rows)} were "
        f"hunted, {len(caught)} found within {results['budget']} graphs: median {statistics.median(counts):g} graphs, "
        f"at most {counts[-1]}. Without a fault, the same budget gave {len(control['not_of_it'])} findings. "
        f"{sum(planted.values())} are planted for tests, {len(tested)} were tried, {sum(r['caught'] for r in tested)} "
        "found.",
        "",
        *([f"Not found: {', '.join(open_)}.", ""] if open_ else []),
        *([f"Not hunted yet: {', '.join(unhunted)}.", ""] if unhunted else []),
        f"{len({r['commit'] for r in (control, *rows, *tested)})} commits, the last {results['commit']}; "
        f"{results['date']}; Python {results['python']}, {versions}.",
        "",
        "Caught by: " + ", ".join(f"`{name}` {count}" for name, count in by.most_common()) + ".",
        "",
        "| area | fault | what it breaks | caught by | graphs | ops left | seconds |",
        "|---|---|---|---|---:|---:|---:|",
    ]
    for row in rows:
        found = [f"`{row['property']}`", row["examples"], row["ops"]] if row["caught"] else ["not caught", "", ""]
        lines.append(_line(row["area"], f"`{row['name']}`", row["why"], *found, round(row["seconds"])))
    lines += ["", "By tests, the first of which to fail is named:", ""]
    lines += ["| area | fault | what it breaks | caught by |", "|---|---|---|---|"]
    for row in tested:
        found = f"`{row['property'].removeprefix('tests/')}`" if row["caught"] else "not caught"
        lines.append(_line(row["area"], f"`{row['name']}`", row["why"], found))
    return "\n".join(lines)


def _line(*cells: Any) -> str:
    return "| " + " | ".join(str(cell).replace("|", r"\|") for cell in cells) + " |"


def _commit() -> str:
    """Return the commit, with a plus sign if the package has uncommitted edits."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "fusec") else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--commit", default="")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--fresh", action="store_true", help="hunt caught faults again")
    parser.add_argument("names", nargs="*", help="hunt only these")
    options = parser.parse_args()
    commit = options.commit or _commit()

    rows: dict[str, dict[str, Any]] = {}
    control: dict[str, Any] = {}
    if options.output.exists():
        known = json.loads(options.output.read_text())
        control = known["control"]
        digests = {m.name: digest(m) for m in ALL}
        rows = {r["name"]: r for r in known["mutants"] if r["digest"] == digests.get(r["name"])}
    caught = set[str]() if options.fresh else {name for name, row in rows.items() if row["caught"]}
    chosen: list[Mutant | None] = [
        m for m in ALL if (m.name in options.names if options.names else m.name not in caught)
    ]
    if not options.names and (options.fresh or control.get("commit") != commit):
        chosen.insert(0, None)

    def tell(row: dict[str, Any]) -> None:
        row["commit"] = commit
        if row["name"] == "none":
            control.clear()
            control.update(row)
        else:
            rows[row["name"]] = row
        results = {
            **date_and_commit(commit),
            "python": platform.python_version(),
            "versions": {name: metadata.version(name) for name in VERSIONS},
            "budget": BUDGET,
            "planted": [m.name for m in ALL],
            "control": control,
            "mutants": [rows[m.name] for m in ALL if m.name in rows],
        }
        write(options.output, results)  # after each row, because the run may be stopped
        verdict = f"{row.get('property')} after {row['examples']}" if row["caught"] else f"NONE in {row['examples']}"
        verdict += "".join(f"; not of it: {of['property']}" for of in row["not_of_it"])
        print(f"{row['name']:28} {verdict}, {row['seconds']} s {row.get('error', '')}", file=sys.stderr, flush=True)

    hunt_all(chosen, options.workers, BUDGET, tell)
    print(f"{sum(r['caught'] for r in rows.values())} of {len(ALL)} caught")


if __name__ == "__main__":
    main()
