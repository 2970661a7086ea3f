"""Test which stored choices are used and which are not, without a GPU."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from fusec.gpu.autotune.cache import code_digest
from fusec.gpu.autotune.cache import tuning_cache as module
from fusec.gpu.autotune.cache.tuning_cache import KnownChoices, TuningCache
from fusec.gpu.autotune.cache.tuning_environment import TuningEnvironment
from fusec.gpu.measure.tolerance import TOLERANCE
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.plans.plan_cache import PlanStore
from fusec.plans.plan_filter import PlanFilter
from fusec.plans.plan_record import Choice, Entry, Part
from fusec.targets.target import load

HERE = TuningEnvironment("h200", "NVIDIA H200", "580.1", "9.19", "1.28", load("h200").figures_digest)
CHOICE = Choice(3, ((0, 1), (2, 5)), 64, 12.5, 1e-6)
GRAPH = CudnnGraph((), ())


def kept(folder: Path, place: TuningEnvironment = HERE, **more: Any) -> TuningCache:
    return TuningCache(PlanStore(folder), place, "quick", KnownChoices(**more))


@pytest.mark.parametrize(
    "field", ["target", "device", "driver", "cudnn", "frontend"], ids=lambda field: f"another {field}"
)
def test_what_was_measured_elsewhere_is_not_known_here(tmp_path: Path, field: str) -> None:
    here, there = kept(tmp_path), kept(tmp_path, replace(HERE, **{field: "another"}))
    here.store_choice(GRAPH.key, CHOICE)
    here.store_step_choice("work", 2.0, [Part(1, "kernel", ())])
    here.store_kernel_variant("kernel", {"fastest": 1})
    assert (
        there.entry(GRAPH.key) is None
        and there.step_choice("work", 2.0) is None
        and there.kernel_variant("kernel") == {}
    )
    entry = here.entry(GRAPH.key)
    assert entry is not None and entry.choice == CHOICE
    assert here.step_choice("work", 2.0) == (Part(1, "kernel", ()),) and here.kernel_variant("kernel") == {"fastest": 1}


def test_a_plan_found_wrong_is_no_longer_known(tmp_path: Path) -> None:
    carried = {GRAPH.key: [Entry(replace(CHOICE, engine=4, time_us=None))]}
    here = kept(tmp_path, plans=carried)
    here.store_choice(GRAPH.key, CHOICE)
    here.quarantine(GRAPH.key, replace(CHOICE, knobs=((0, 2),)), "another plan of the engine")
    assert here.entry(GRAPH.key) is not None and len(here.suggested(GRAPH.key)) == 1
    here.quarantine(GRAPH.key, CHOICE, "off by 0.3")
    assert here.entry(GRAPH.key) is None
    here.quarantine(GRAPH.key, carried[GRAPH.key][0].choice, "off by 0.4")
    assert here.suggested(GRAPH.key) == ()


def test_a_plan_is_read_once_to_be_checked_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, read = kept(tmp_path), list[str]()
    here.store_choice(GRAPH.key, CHOICE)
    get = PlanStore.get
    monkeypatch.setattr(PlanStore, "get", lambda self, key: read.append(key.digest) or get(self, key))
    here.quarantine_known_wrong({GRAPH.key: GRAPH})
    entry = here.entry(GRAPH.key)
    assert entry is not None and entry.choice == CHOICE
    at_level, by_name = read[0], read[1:]  # the plan's blob may be stored under its name
    assert at_level not in by_name

    here.quarantine_known_wrong({GRAPH.key: GRAPH})
    here.store_choice(GRAPH.key, replace(CHOICE, engine=4))
    entry = here.entry(GRAPH.key)
    assert entry is not None and entry.choice.engine == 4


def test_a_form_is_the_fastest_among_what_there_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New kernels, or launches that cost something else, and it is measured again."""
    here = kept(tmp_path)
    here.store_step_choice("work", 2.0, [Part(1, "kernel", ())])
    assert here.step_choice("work", 3.0) is None and here.step_choice("other work", 2.0) is None
    monkeypatch.setattr(module, "candidate_code_digest", lambda: "with one more kernel")
    assert here.step_choice("work", 2.0) is None


def test_a_step_is_tuned_again_after_an_edit_of_the_targets_figures(tmp_path: Path) -> None:
    """Candidates are made with the figures of the target's file. The plans that cuDNN offers do not depend on them."""
    h200 = load("h200")
    properties = json.dumps({**json.loads(h200.properties), "multiProcessorCount": 144})
    edited = [
        replace(h200, properties=properties),
        replace(h200, memory_bandwidth=3.0e12),
        replace(h200, launch_us=1.0),
    ]
    here = kept(tmp_path)
    here.store_step_choice("work", 2.0, [Part(1, "kernel", ())])
    here.store_choice(GRAPH.key, CHOICE)
    for target in edited:
        there = kept(tmp_path, replace(HERE, figures=target.figures_digest))
        assert there.step_choice("work", 2.0) is None and there.entry(GRAPH.key) is not None
    assert kept(tmp_path).step_choice("work", 2.0) is not None


def test_the_environment_has_the_figures_of_the_gpu_here(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy")
    module = pytest.importorskip("fusec.gpu.autotune.cache.tuning_environment")
    monkeypatch.setattr(module.device, "detect", lambda: load("t4"))
    made = module.environment_here("Tesla T4", PlanFilter(), False)
    assert (made.target, made.figures) == ("t4", load("t4").figures_digest)


def test_the_code_digest_covers_all_code_of_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that is edited, added in a new folder or taken away changes the digest; nothing else does."""
    told = code_digest.candidate_code_digest.__wrapped__
    assert len(told()) == 64 and told() == code_digest.candidate_code_digest()
    package = Path(code_digest.kernels.__file__).parent
    shutil.copytree(package, tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    files = tmp_path / "kernels"
    monkeypatch.setattr(code_digest.kernels, "__path__", [str(files)])
    seen = [told()]
    assert seen == [code_digest.candidate_code_digest()]
    (files / "codegen" / "prelude.cuh").write_text("// another")
    seen.append(told())
    (files / "another").mkdir()
    (files / "another" / "family.py").write_text("KERNEL = 1")
    seen.append(told())
    (files / "another" / "notes.txt").write_text("no code")
    assert told() == seen[-1]
    (files / "norm" / "row_reduction.py").unlink()
    seen.append(told())
    assert len({*seen}) == 4


class PlanBench:
    """Revives what it serialized; `off` is what the check says of the two."""

    def __init__(self, off: float | None):
        self.off = off

    def serialized(self, plan: Any) -> bytes:
        return b"plan"

    def revive(self, graph: CudnnGraph, blob: bytes) -> Any:
        return "revived"

    def is_revived(self, plan: Any) -> bool:
        return False

    def error(self, graph: CudnnGraph, plan: Any, other: Any) -> float | None:
        return self.off


@pytest.mark.parametrize("off", [0.0, TOLERANCE * 2, float("nan"), None])
def test_a_plan_is_stored_if_it_computes_the_same_when_read_back(tmp_path: Path, off: float | None) -> None:
    here = kept(tmp_path)
    here.store_choice(GRAPH.key, CHOICE)
    if off == 0.0:
        here.store_plan(GRAPH, CHOICE, "plan", cast("Any", PlanBench(off)))
    else:
        with pytest.warns(UserWarning, match="engine 3 is not stored: read back, its results are off by"):
            here.store_plan(GRAPH, CHOICE, "plan", cast("Any", PlanBench(off)))
    entry = here.entry(GRAPH.key)
    assert entry is not None
    assert entry.blob == (b"plan" if off == 0.0 else None)
