"""Print docs/fuzzing-results.md from benchmarks/results/fuzz.json: `python benchmarks/checks/fuzz_results.py`.

`--add NAME COMMIT STILL_OPEN REPORT.json ...` first adds a row to the result file: the sum of these reports of
`fusec fuzz --json`, which ran at the same time, each with its own seed.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results" / "fuzz.json"


def markdown(runs: list[dict[str, Any]]) -> str:
    """Print the page."""
    lines = [
        "# What long runs of the fuzzer found",
        "",
        "Each row of the first table is one long run of `fusec fuzz`: how many graphs it tried and what it found.",
        "`open` is the number of findings that still failed when the run was added. The tables below it count graphs",
        "and failures per property. `python benchmarks/checks/fuzz_results.py` writes this page from",
        "`benchmarks/results/fuzz.json`.",
        "",
        "| run | commit | graphs | nodes | seconds | findings | doubts | open |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for r in runs:
        cells = [r["name"], r["commit"], r["examples"], r["nodes"], round(r["seconds"]), r["findings"], r["doubts"]]
        lines.append("| " + " | ".join(map(str, [*cells, r["open"]])) + " |")
    for r in runs:
        lines += ["", f"## {r['name']}", "", "| property | graphs | failures | ms a graph |", "|---|---:|---:|---:|"]
        lines += [f"| `{n}` | {p['runs']} | {p['failures']} | {p['ms']:.1f} |" for n, p in r["properties"].items()]
        if kernels := r.get("kernels"):  # older runs did not count them
            lines += ["", "| kernel family | kernels run on the device |", "|---|---:|"]
            lines += [f"| `{n}` | {count} |" for n, count in kernels.items()]
    return "\n".join(lines) + "\n"


def row(name: str, commit: str, still_open: str, reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Add up reports of runs at the same time; `seconds` is the longest, `seed` the first."""
    properties: dict[str, dict[str, float]] = {}
    kernels: Counter[str] = Counter()
    for report in reports:
        kernels.update(report["coverage"].get("kernels") or {})
        for what, counts in report["properties"].items():
            total = properties.setdefault(what, dict.fromkeys(("runs", "skips", "failures", "seconds"), 0))
            for key in total:
                total[key] += counts[key]
            total["ms"] = 1000 * total["seconds"] / max(1, total["runs"])
    added = {key: sum(report[key] for report in reports) for key in ("workers", "examples", "nodes")}
    return {
        "name": name,
        "commit": commit,
        "seed": reports[0]["seed"],
        "target": reports[0]["target"],
        **added,
        "seconds": max(report["seconds"] for report in reports),
        "properties": properties,
        **({"kernels": dict(kernels)} if kernels else {}),
        **{kind: sum(len(report[kind]) for report in reports) for kind in ("findings", "doubts")},
        "open": still_open,
    }


def main() -> None:
    runs: list[dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    if sys.argv[1:2] == ["--add"]:
        name, commit, still_open, *files = sys.argv[2:]
        added = row(name, commit, still_open, [json.loads(Path(file).read_text()) for file in files])
        runs = [r for r in runs if r["name"] != name] + [added]
        RESULTS.write_text(json.dumps(runs, indent=1) + "\n")
    print(markdown(runs), end="")


if __name__ == "__main__":
    main()
