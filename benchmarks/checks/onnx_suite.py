"""Run onnx's backend test suite as users run models, and count the cases that pass, fail, and are refused.

Usage: python -m benchmarks.checks.onnx_suite [--device cpu|cuda] [--workers N] [--output FILE] [--commit HASH]
`cpu` is simulation. Each worker is a process with an oracle of its own; all share FUSEC_CACHE. Writes a row for the
device into benchmarks/results/onnx_suite.json, or into FILE, which `python -m benchmarks.common.result_files FILE` adds
to it. `pytest --accept tests/frontends` then writes the table of docs/onnx.md. The exit status is 1 if a case fails, or
if the refused cases differ from tests/onnx_suite/record.txt.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import onnx

from benchmarks.common.result_files import KEYS, ROOT, gpu, parser, write_row

sys.path.insert(0, str(ROOT / "tests"))  # because the suite's module is a test's

from onnx_suite.suite import FAMILIES, Case, Outcome, cases, outcomes, unlike_the_record

from fusec.driver import resolve_target
from fusec.gpu.cudnn.without_driver.deviceless import cudnn_number

NAME = "onnx_suite.json"
SHARDS = 128  # many, because some cases take a hundred times as long as others


def _shard(number: int, on: str) -> dict[Case, Outcome]:
    return outcomes(cases()[number::SHARDS], on)


def ran(on: str, workers: int) -> dict[Case, Outcome]:
    """Run all cases in worker processes, each with a shard at a time, and return their outcomes."""
    os.environ.setdefault("FUSEC_WORKERS", str(max(1, len(os.sched_getaffinity(0)) // workers)))
    found: dict[Case, Outcome] = {}
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(_shard, number, on) for number in range(SHARDS)]
        for done, future in enumerate(as_completed(futures), 1):
            found |= future.result()
            print(f"{done} of {SHARDS} shards, {sum(bool(o.failed) for o in found.values())} cases failed", flush=True)
    return {case: found[case] for case in cases()}


def row(found: Mapping[Case, Outcome], on: str) -> dict[str, Any]:
    """Count the outcomes by family, and list the failures."""
    families = {
        family: {
            "cases": len(mine),
            "refused": sum(bool(o.refused) for o in mine),
            "failed": sum(bool(o.failed) for o in mine),
        }
        for family in FAMILIES
        for mine in [[o for (kind, _), o in found.items() if kind == family]]
    }
    return {
        "device": on,
        **(gpu() if on == "cuda" else {"cudnn": int(cudnn_number() or 0)}),
        "target": resolve_target("auto").name,
        "onnx": onnx.__version__,
        "families": families,
        "wrong": unlike_the_record(found, on),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Print the rows of a result file as a Markdown table."""
    lines = ["| On | cuDNN | Cases | Passed | Refused | Failed | Commit |", "|---|---|---|---|---|---|---|"]
    for each in rows:
        families = each["families"].values()
        total, refused, failed = (sum(family[key] for family in families) for key in ("cases", "refused", "failed"))
        where = each.get("gpu", f"simulation ({each['target']})")
        counted = f"{total} | {total - refused - failed} | {refused} | {failed}"
        lines.append(f"| {where} | {each['cudnn']} | {counted} | {each['commit'][:7]} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    options = parser(__doc__, NAME)
    options.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    given = options.parse_args()
    begin = time.monotonic()
    found = ran(given.device, given.workers)
    seconds = round(time.monotonic() - begin, 1)
    new = {**row(found, given.device), "workers": given.workers, "seconds": seconds}
    write_row(given.output, {}, given.commit, new, KEYS[NAME])
    print(*new["wrong"], f"{len(new['wrong'])} cases are wrong; {seconds} s: {given.output}", sep="\n")
    return bool(new["wrong"])


if __name__ == "__main__":
    sys.exit(main())
