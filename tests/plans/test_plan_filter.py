"""Read filters of plans from what callers give, and write them as JSON and as cache keys."""

from __future__ import annotations

from typing import Any

import pytest

from fusec.errors import FusecError
from fusec.plans.plan_filter import PlanFilter


@pytest.mark.parametrize(
    ("engines", "only", "without"),
    [
        ((), (), ()),
        ("", None, None),
        ((45, 1), (1, 45), ()),
        ("45, 1", (1, 45), ()),
        ("-0,-11", (), (0, 11)),
        (["-0", -11], (), (0, 11)),
        ({7}, (7,), ()),
    ],
)
def test_engines_are_numbers_to_insist_on_or_to_leave_out(engines: Any, only: Any, without: Any) -> None:
    if only is None:
        with pytest.raises(FusecError, match="engines are numbers"):
            PlanFilter.of(engines=engines)
    else:
        made = PlanFilter.of(engines=engines)
        assert (made.only, made.without) == (only, without)


@pytest.mark.parametrize(
    ("given", "modes"), [("a", ("A",)), ("B, FALLBACK", ("B", "fallback")), (["A", "A", "b"], ("A", "B"))]
)
def test_heuristics_are_one_mode_or_several_in_order(given: Any, modes: tuple[str, ...]) -> None:
    assert PlanFilter.of(given).heuristics == modes


def test_reasons_name_the_option() -> None:
    made = PlanFilter.of(engines="-3", workspace_limit=64)
    assert made.reason(3) == "engine 3 is left out by the option engines"
    assert made.reason(4, 64) is None
    assert made.reason(4, 65) == "a workspace of 65 bytes exceeds the option workspace_limit, 64"
    assert PlanFilter.of(engines=[3]).reason(4) == "engine 4 is left out by the option engines"
    assert PlanFilter.of(engines=[3]).reason(3) is None


def test_a_filter_survives_json_and_has_a_key_of_its_own() -> None:
    filters = [
        PlanFilter(),
        PlanFilter.of("B"),
        PlanFilter.of("fallback,A"),
        PlanFilter.of(engines="1"),
        PlanFilter.of(engines="-1"),
        PlanFilter.of(workspace_limit=0),
        PlanFilter.of(workspace_limit=1),
        PlanFilter.of(deterministic=True),
        PlanFilter.of("B", "-0,-7", 1 << 20, True),
    ]
    assert [PlanFilter.from_json(each.to_json()) for each in filters] == filters
    assert len({each.key for each in filters}) == len(filters)
    assert [each.key for each in filters if each.is_default] == [""], "what was stored before stays valid"
    for wrong in ({"engine": 1}, {"workspace_limit": "1"}, {"heuristics": ["C"]}, {"only": [1], "without": [2]}):
        with pytest.raises(ValueError, match=r"no field|bytes|one or several|insist"):
            PlanFilter.from_json(wrong)
