"""What is remembered of plans and forms, and what of it is not taken: without a GPU, by what the store holds."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from fusec.gpu.autotune import tuning_cache as module
from fusec.gpu.autotune.tuning_cache import KnownChoices, TuningCache, TuningEnvironment
from fusec.gpu.measure.tolerance import TOLERANCE
from fusec.lowering.cudnn_graph import CudnnGraph
from fusec.plans.plan_cache import PlanStore
from fusec.plans.plan_record import Choice, Entry, Part

HERE = TuningEnvironment("h200", "NVIDIA H200", "580.1", "9.19", "1.28")
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


def test_a_form_is_the_fastest_among_what_there_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """New kernels, or launches that cost something else, and it is measured again."""
    here = kept(tmp_path)
    here.store_step_choice("work", 2.0, [Part(1, "kernel", ())])
    assert here.step_choice("work", 3.0) is None and here.step_choice("other work", 2.0) is None
    monkeypatch.setattr(module, "candidate_code_digest", lambda: "with one more kernel")
    assert here.step_choice("work", 2.0) is None


def test_what_competes_is_told_by_all_code_of_its_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that is edited, added in a new folder or taken away changes the digest; nothing else does."""
    told = module.candidate_code_digest.__wrapped__
    assert len(told()) == 64 and told() == module.candidate_code_digest()
    package = Path(module.kernels.__file__).parent
    shutil.copytree(package, tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    files, real = tmp_path / "kernels", module.resources.files
    monkeypatch.setattr(module.resources, "files", lambda each: files if each is module.kernels else real(each))
    seen = [told()]
    assert seen == [module.candidate_code_digest()]
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
def test_a_plan_is_kept_if_what_comes_of_it_was_seen_to_compute_the_same(tmp_path: Path, off: float | None) -> None:
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
