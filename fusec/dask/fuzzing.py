"""Spread a run of the fuzzer over the workers of a Dask cluster, and merge their reports."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fusec.dask.spread import connected
from fusec.system.atomic_write import written
from fusec.system.dataclass import dataclass
from fusec.testing.resolve import absolute
from fusec.testing.runner.report import Found, FuzzReport, PropertyCount

PARTS = 1000  # distance between the seeds of two runs, and so the most workers of a run

Files = dict[str, bytes]


@dataclass
class FuzzPart:
    """The report of one worker. findings: the files of each folder of a finding, by its name."""

    report: FuzzReport
    findings: dict[str, Files]


def fuzz_cluster(address: str, findings: Path, options: Mapping[str, Any]) -> FuzzReport:
    """Run the fuzzer on each worker of a cluster, with other graphs on each, and return one report.

    Dask repeats the part of a worker that dies. Findings are written here.

    address: address of Dask's scheduler, such as `tcp://10.0.0.1:8786`.
    findings: folder for findings.
    options: options of `fusec.testing.fuzz.fuzz`; `examples` counts those of all workers, `time` is that of each.
        A worker runs as many processes as it has threads.
    Raises FusecError if the cluster cannot be reached or has no workers.
    """
    options = {**options, "graphs": absolute(options["graphs"])} if "graphs" in options else options
    options = {**options, "properties": [absolute(name) for name in options.get("properties") or ()] or None}
    with connected(address) as client:
        threads: dict[str, int] = client.nthreads()
        futures = [
            client.submit(
                _run_part,
                _part(options, number, len(threads), count),
                workers=[worker],
                allow_other_workers=True,
                pure=False,
            )
            for number, (worker, count) in enumerate(threads.items())
        ]
        return _merged(client.gather(futures), findings, options.get("seed", 0))


def _part(options: Mapping[str, Any], number: int, parts: int, processes: int) -> dict[str, Any]:
    """Return the options of one part."""
    examples = options.get("examples")
    share = {} if examples is None else {"examples": -(-examples // parts)}
    return {**options, **share, "seed": options.get("seed", 0) * PARTS + number, "workers": processes}


def _run_part(options: Mapping[str, Any]) -> FuzzPart:
    from fusec.testing.fuzz import fuzz  # needs Hypothesis

    with tempfile.TemporaryDirectory(prefix="fusec-fuzz-") as scratch:
        report = fuzz(**options, database=Path(scratch) / "database", findings=Path(scratch) / "findings")
        folders = [Path(found.folder) for found in (*report.findings, *report.doubts)]
        files = {folder.name: {path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders}
    return FuzzPart(report, files)


def _merged(parts: list[FuzzPart], folder: Path, seed: int) -> FuzzReport:
    """Merge reports, and write the findings. Findings of one signature are one."""
    report = replace(parts[0].report, seed=seed, findings=[], doubts=[], properties={}, seconds=0.0, workers=0)
    report.examples = report.nodes = report.shrinking = 0
    for number, part in enumerate(parts):
        one = part.report
        report.workers += one.workers
        report.seconds = max(report.seconds, one.seconds)
        report.examples += one.examples
        report.nodes += one.nodes
        report.shrinking += one.shrinking
        for name, count in one.properties.items():
            report.properties.setdefault(name, PropertyCount()).add(
                [count.runs, count.skips, count.failures, count.seconds]
            )
        report.left_out |= one.left_out
        if number:
            report.coverage.merge(one.coverage)
        for found, known in ((one.findings, report.findings), (one.doubts, report.doubts)):
            for finding in found:
                _add(finding, known, part.findings, folder)
    return report


def _add(finding: Found, known: list[Found], files: Mapping[str, Files], folder: Path) -> None:
    same = next((other for other in known if other.signature == finding.signature), None)
    if same is not None:
        same.count += finding.count
        return
    goal = folder / Path(finding.folder).name
    goal.mkdir(parents=True, exist_ok=True)
    for name, data in files[goal.name].items():
        with written(goal / name, durable=False) as file:
            file.write(data)
    known.append(replace(finding, folder=str(goal)))
