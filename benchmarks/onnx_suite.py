"""Run onnx's backend test suite as users run models, and write what it comes to.

Usage: python -m benchmarks.onnx_suite [--device cpu|cuda] [--workers N] [--output FILE] [--commit HASH]. `cpu` is
simulation. Each worker is a process with an oracle of its own; all share FUSEC_CACHE. Writes a row for the device into
benchmarks/results/onnx_suite.json, or into FILE: `python -m benchmarks.machine FILE` then puts it there. Status 1: a
case fails, or is refused otherwise than tests/onnx_suite/record.txt says. `pytest --accept tests/frontends` then writes
the table of docs/onnx.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import onnx

from benchmarks.machine import KEYS, RESULTS, ROOT, device, keep

sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from onnx_suite.suite import FAMILIES, Case, Outcome, cases, outcomes, unlike_the_record  # noqa: E402

from fusec.driver import resolve_target  # noqa: E402
from fusec.gpu.cudnn.deviceless import cudnn_number  # noqa: E402

NAME = "onnx_suite.json"
SHARDS = 128  # many: some cases take a hundred times as long as others


def _shard(number: int, on: str) -> dict[Case, Outcome]:
    return outcomes(cases()[number::SHARDS], on)


def ran(on: str, workers: int) -> dict[Case, Outcome]:
    """What each case comes to, in processes that each take a shard at a time."""
    os.environ.setdefault("FUSEC_WORKERS", str(max(1, len(os.sched_getaffinity(0)) // workers)))
    found: dict[Case, Outcome] = {}
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(_shard, number, on) for number in range(SHARDS)]
        for done, future in enumerate(as_completed(futures), 1):
            found |= future.result()
            print(f"{done} of {SHARDS} shards, {sum(bool(o.failed) for o in found.values())} cases failed", flush=True)
    return {case: found[case] for case in cases()}


def row(found: Mapping[Case, Outcome], on: str) -> dict[str, Any]:
    """Counts by family, and each failure in its words."""
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
        **(device() if on == "cuda" else {"cudnn": int(cudnn_number() or 0)}),
        "target": resolve_target("auto").name,
        "onnx": onnx.__version__,
        "families": families,
        "wrong": unlike_the_record(found, on),
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows of a result file in Markdown."""
    lines = ["| On | cuDNN | Cases | Passed | Refused | Failed | Commit |", "|---|---|---|---|---|---|---|"]
    for each in rows:
        families = each["families"].values()
        all_, refused, failed = (sum(family[key] for family in families) for key in ("cases", "refused", "failed"))
        where = each.get("gpu", f"simulation ({each['target']})")
        counted = f"{all_} | {all_ - refused - failed} | {refused} | {failed}"
        lines.append(f"| {where} | {each['cudnn']} | {counted} | {each['commit'][:7]} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--output", type=Path, default=RESULTS / NAME)
    parser.add_argument("--commit", default="", help="where there is no git history to ask")
    given = parser.parse_args()
    begin = time.monotonic()
    found = ran(given.device, given.workers)
    seconds = round(time.monotonic() - begin, 1)
    new = {**row(found, given.device), "workers": given.workers, "seconds": seconds}
    keep(given.output, {}, given.commit, new, KEYS[NAME])
    print(*new["wrong"], f"{len(new['wrong'])} cases are wrong; {seconds} s: {given.output}", sep="\n")
    return bool(new["wrong"])


if __name__ == "__main__":
    sys.exit(main())
