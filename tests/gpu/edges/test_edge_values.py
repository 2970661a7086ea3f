"""Test edge values: every op that cuDNN or a kernel runs has rows of them, and gives for them what it means."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from gpu.edges import device, forms, here
from gpu.edges.device import Result
from gpu.edges.documented import DOCUMENTED, section, stale, undocumented
from gpu.edges.judged import Disagreement
from gpu.edges.row import Row
from gpu.edges.table import table
from gpu.kernels.cases import FIGURES
from gpu.kernels.emulator import needs_compiler

from fusec.gpu.kernels import FAMILIES
from fusec.lower_cudnn import LOWER
from fusec.ops import BY_NAME

SAMPLE = 60  # rows that a default run takes; another FUSEC_TEST_SEED takes others
CHUNK = 50  # rows whose kernels are one library of the emulator
PAGE = Path(__file__).parents[3] / "docs" / "hazards.md"


def test_every_op_has_rows() -> None:
    assert {row.op for row in table().values()} == set(BY_NAME)


def test_every_op_that_is_lowered_is_lowered_in_a_row() -> None:
    lowered = {n.op.name for row in table().values() if any(True for _ in forms.lowered(row)) for n in row.nodes}
    assert lowered >= set(LOWER)


def test_every_family_of_kernels_has_a_row() -> None:
    steps = [(row.nodes, row.outputs) for row in table().values() if not row.whole]
    without = [
        f.__name__ for f in FAMILIES if not any(f(nodes, outputs, FIGURES) is not None for nodes, outputs in steps)
    ]
    assert not without


def test_the_page_names_every_documented_difference(request: pytest.FixtureRequest) -> None:
    page = PAGE.read_text()
    start = page.index("## Edge values")
    end = page.find("\n## ", start)
    end = len(page) if end < 0 else end + 1
    if request.config.getoption("--accept"):
        PAGE.write_text(page[:start] + section() + page[end:])
    assert page[start:end].strip() == section().strip(), "write it anew with --accept"


def test_an_entry_is_about_its_own_forms_rows_and_values_only() -> None:
    (maximum,) = [d for d in DOCUMENTED if d.what.startswith("max, min")]
    lost, other = Disagreement("nan lost", "nan , 1", "nan", "1"), Disagreement("value", "2 , 1", "2", "1")
    results = [
        Result("max f32", "cudnn", "ran", found=[lost]),
        Result("max f32", "kernel", "ran", found=[lost]),
        Result("add f32", "cudnn", "ran", found=[lost]),
        Result("matmul+max ", "simulated as_convolution", "ran", found=[lost, other]),
    ]
    assert [(r.row, r.form, d.kind) for r, d in undocumented(results)] == [
        ("max f32", "kernel", "nan lost"),
        ("add f32", "cudnn", "nan lost"),
        ("matmul+max ", "simulated as_convolution", "value"),
    ]
    assert maximum not in stale(results)
    assert maximum in stale(results[1:3])


@needs_compiler
def test_some_rows_give_what_they_mean_simulated_and_emulated() -> None:
    titles = sorted(table())
    seed = int(os.environ.get("FUSEC_TEST_SEED", "0"))
    _check_holds(_on_cpu([table()[t] for t in random.Random(seed).sample(titles, SAMPLE)]))


@needs_compiler
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_the_sum_of_squares_of_an_infinity_is_infinite(dtype: str) -> None:
    found = [d for _, _, some in here.emulated([table()[f"channel_sums {dtype}"]]) for d in some]
    assert {d.label for d in found if d.kind != "denormals"} <= {"inf and -inf"}


@needs_compiler
def test_the_emulator_flushes_denormals_as_the_gpu_does() -> None:
    ((_, _, found),) = here.emulated([table()["add f32"]])
    assert {d.kind for d in found} == {"denormals"}
    assert "0 , denormal" in {d.label for d in found}


@needs_compiler
@pytest.mark.slow
def test_all_rows_give_what_they_mean_simulated_and_emulated() -> None:
    _check_holds(_on_cpu(list(table().values())))


@pytest.mark.gpu
def test_all_rows_give_what_they_mean_on_the_gpu() -> None:
    """In processes of its own: one that a row ends takes no other row with it."""
    results = device.run_all(list(table()), max(1, min(device.WORKERS, (os.cpu_count() or 2) - 1)))
    assert not [(r.row, r.form, r.said) for r in results if r.status in ("died", "failed")]
    assert len({r.form.split()[0] for r in results if r.status == "ran"}) == 4  # cudnn, kernel, cupy, compiled
    _check_holds(results)
    assert not [d.what for d in stale(results)], "no row needs these entries any more"


def _on_cpu(rows: Sequence[Row]) -> Iterator[Result]:
    for name, form, found in (*here.simulated(rows), *here.compiled(rows)):
        yield Result(name, form, "ran", found=found)
    for start in range(0, len(rows), CHUNK):
        for name, form, found in here.emulated(rows[start : start + CHUNK]):
            yield Result(name, form, "ran", found=found)


def _check_holds(results: Sequence[Result] | Iterator[Result]) -> None:
    lines = [f"{r.row} | {r.form} | {d.kind} | {d.label}: {d.got} for {d.want}" for r, d in undocumented(results)]
    assert not lines, f"{len(lines)} differences that are not documented:\n" + "\n".join(lines[:50])
