"""Test choices, keys and entries of plans as plain data."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from fusec.plans.plan_record import Choice, PlanKey
from fusec.plans.verdict import Plan

KEY = PlanKey("graph", "h200", "NVIDIA H200", "580", "91900", "1.28.0", "quick")


def test_a_choice_comes_back_from_json() -> None:
    for choice in (Choice(4, ((2, 1), (12, 35)), 512, 1.5, 1e-4), Choice(0, ())):
        assert Choice.from_json(json.loads(json.dumps(choice.to_json()))) == choice


@pytest.mark.parametrize(
    "broken",
    [{"engine": "4"}, {"engine": -1}, {"engine": True}, {"knobs": [[1]]}, {"knobs": [["a", 1]]}, {"knobs": None},
     {"workspace_bytes": 1.5}, {"workspace_bytes": -1}, {"time_us": "fast"}, {"complete": 1}],
)  # fmt: skip
def test_a_malformed_choice_is_refused(broken: dict[str, object]) -> None:
    (field,) = broken
    with pytest.raises(ValueError, match=f"{field} (is|are) .*, not "):
        Choice.from_json({**Choice(4, ((2, 1),)).to_json(), **broken})


def test_a_choice_is_known_by_engine_and_knobs() -> None:
    choice = Choice.of(Plan(4, ((2, 1),), True, 64, True))
    assert (choice.identity, choice.workspace_bytes, choice.time_us) == ((4, ((2, 1),)), 64, None)


def test_a_digest_depends_on_every_field_and_on_no_process() -> None:
    changed = {dataclasses.replace(KEY, **{f.name: "x"}).digest for f in dataclasses.fields(KEY)}
    assert len({KEY.digest, *changed}) == len(dataclasses.fields(KEY)) + 1
    program = f"from fusec.plans.plan_record import PlanKey; print(PlanKey(**{KEY.to_json()!r}).digest)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == KEY.digest
