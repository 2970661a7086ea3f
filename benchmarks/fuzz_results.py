"""Print docs/fuzzing-results.md from benchmarks/results/fuzz.json: `python benchmarks/fuzz_results.py`.

`--add NAME REPORT.json COMMIT STILL_OPEN` first adds a report of `fusec fuzz --json` to the result file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "fuzz.json"


def markdown(runs: list[dict[str, Any]]) -> str:
    """Print the page."""
    lines = [
        "# What long runs of the fuzzer found",
        "",
        "Each row of the first table is one long run of `fusec fuzz`: how many graphs it tried and what it found.",
        "`open` is the number of findings that still failed when the run was added. The tables below it count graphs",
        "and failures per property. `python benchmarks/fuzz_results.py` writes this page from",
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


def main() -> None:
    runs: list[dict[str, Any]] = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    if sys.argv[1:2] == ["--add"]:
        name, report, commit, still_open = sys.argv[2:6]
        data = json.loads(Path(report).read_text())
        row = {k: data[k] for k in ("seed", "target", "workers", "seconds", "examples", "nodes", "properties")}
        if kernels := data["coverage"].get("kernels"):
            row["kernels"] = kernels
        counts = {"findings": len(data["findings"]), "doubts": len(data["doubts"])}
        runs = [r for r in runs if r["name"] != name] + [
            {"name": name, "commit": commit, **row, **counts, "open": still_open}
        ]
        RESULTS.write_text(json.dumps(runs, indent=1) + "\n")
    print(markdown(runs), end="")


if __name__ == "__main__":
    main()
