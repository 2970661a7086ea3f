"""Run the fuzzer: choose its properties, budget, folder of findings and database.

`runner/supervisor.py` runs the workers, `runner/chunk.py` runs the examples, `runner/database.py` stores what later
runs use.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from fusec.errors import FusecError, TargetError
from fusec.gpu import device as gpu
from fusec.targets.target import load as load_target
from fusec.testing.case import Property
from fusec.testing.child_process import fuzz_folder
from fusec.testing.resolve import CASES, GRAPHS, absolute, known_properties, property_of, strategy_of
from fusec.testing.runner.database import State
from fusec.testing.runner.report import FuzzReport, PropertyCount
from fusec.testing.runner.shrink import SECONDS as SHRINK_S
from fusec.testing.runner.supervisor import Run, WorkPlan
from fusec.testing.runner.task import Task

EXAMPLES = 2000  # unless the caller says how many, or how long
MAX_FINDINGS = 10

Progress = Callable[[FuzzReport], None]


class FuzzInterrupted(KeyboardInterrupt):  # as KeyboardInterrupt is
    """The user pressed Ctrl-C; `report` holds the results until then."""

    def __init__(self, report: FuzzReport):
        super().__init__()
        self.report = report


def fuzz(
    properties: Sequence[str] | None = None,
    *,
    time: float | None = None,
    examples: int | None = None,
    seed: int = 0,
    target: str = "h200",
    device: bool = False,
    workers: int | None = None,
    database: str | os.PathLike[str] | None = None,
    findings: str | os.PathLike[str] | None = None,
    max_findings: int = MAX_FINDINGS,
    fresh: bool = False,
    graphs: str = GRAPHS,
    cases: str = CASES,
    shrink_s: float = SHRINK_S,
    hang_s: float = 60.0,
    progress: Progress | None = None,
) -> FuzzReport:
    """Run properties on random graphs and return what was found.

    properties: names of `fusec.testing.properties.table.PROPERTIES`, or `path/to/file.py:function` of your own;
        default: all that this machine can run.
    time, examples: the budget, in seconds and in examples; the first limit reached ends the run; default: 2000
        examples.
    seed: seed of the random graphs. With the same seed and database, a second run continues with new examples.
    target: the GPU model to compile for.
    device: also run the properties that need a GPU, which must be of the model `target`.
    workers: number of processes; default: one per CPU core.
    database: folder that stores finished examples and open findings; default: inside fusec's cache.
    findings: folder for findings; default: `fusec-findings`.
    max_findings: number of findings that ends the run.
    fresh: empty the database first.
    graphs, cases: strategies, as `module:name` or `file.py:name`.
    shrink_s: the most seconds to shrink a finding.
    hang_s: seconds after which a property that has not returned counts as hung.
    progress: called with the report so far, a few times a second.

    Raises FusecError if an argument is bad.
    Raises FuzzInterrupted: at Ctrl-C; it is a KeyboardInterrupt with the report.
    """
    _need_hypothesis()
    for name, value in (("time", time), ("examples", examples), ("workers", workers), ("max_findings", max_findings)):
        if value is not None and value <= 0:
            raise FusecError(f"{name} must be more than 0, not {value}")
    model = _target(target, device)
    chosen, left_out = _choose(properties, device)
    for strategy in (graphs, cases):
        strategy_of(strategy)  # here, because an error in a worker process would only end that worker
    state = State(Path(database) if database is not None else fuzz_folder())
    if fresh:
        state.forget()
    task = Task(tuple(chosen), seed, model, absolute(graphs), absolute(cases), shrink_s, hang_s)
    plan = WorkPlan(
        task,
        seconds=time,
        examples=examples if examples is not None or time is not None else EXAMPLES,
        workers=workers or len(os.sched_getaffinity(0)),
        findings=Path(findings if findings is not None else "fusec-findings").absolute(),
        max_findings=max_findings,
    )
    report = FuzzReport(seed, model, {name: PropertyCount() for name in chosen}, plan.workers, left_out=left_out)
    with tempfile.TemporaryDirectory(prefix="run-", dir=state.folder) as scratch:
        run = Run(plan, state, report, Path(scratch), progress or (lambda report: None))
        try:
            run.run_all()
        except KeyboardInterrupt:
            report.interrupted = True
            raise FuzzInterrupted(report) from None
        finally:
            run.close()
    return report


def _need_hypothesis() -> None:
    if importlib.util.find_spec("hypothesis") is None:
        raise FusecError("fuzzing needs Hypothesis, which is not installed: pip install 'fusec[fuzz]'")


def _target(name: str, device: bool) -> str:
    model = load_target(name)
    if device and not gpu.is_present(model):
        here = gpu.detect()
        found = f"this machine has a {here.name}: give --target {here.name}" if here else "this machine has no GPU"
        raise TargetError(f"fuzzing on the device needs a GPU of the model {name}; {found}")
    return model.name


def _choose(names: Sequence[str] | None, device: bool) -> tuple[dict[str, Property], dict[str, str]]:
    """Choose the properties to run; also return the skipped ones, each with the reason."""
    if names:
        chosen = {absolute(name): property_of(name) for name in names}
        for name, property in chosen.items():
            if missing := _missing(property, device, named=True):
                raise FusecError(f"property {name}: {missing}")
        return chosen, {}
    known = known_properties()
    left_out = {
        name: missing for name, property in known.items() if (missing := _missing(property, device, named=False))
    }
    return {name: property for name, property in known.items() if name not in left_out}, left_out


def _missing(property: Property, device: bool, named: bool) -> str:
    """Return the reason why a property cannot run here; empty if it can."""
    if property.needs == "gpu" and not device:
        return "needs a GPU: --device"
    if property.needs == "onnxruntime" and importlib.util.find_spec("onnxruntime") is None:
        return "needs onnxruntime, which is not installed: pip install 'fusec[demo]'"
    if property.needs == "cudnn" and importlib.util.find_spec("cudnn") is None:
        return "needs cuDNN, which is not installed: pip install 'fusec[cu13]'"
    if property.needs == "cudnn" and not (named or device):
        return "asks the real cuDNN, seconds an example: name it with --property"
    return ""
