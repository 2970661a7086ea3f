"""Test the text of locks: equal locks have equal text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fusec.errors import ModelError
from fusec.lockfile.toml_text import parse, text_of
from fusec.plans.lock_record import Lock, Locked, LockedPart
from fusec.plans.plan_record import Choice, Part

CHOICE = Choice(7, ((0, 2), (3, 11), (14, 1)), 128)
ONE = Locked("conv+relu", "a" * 64, "h200", "f16[8,8]", (LockedPart(Part(0, "cudnn", ("zero_bias",)), CHOICE),))


def lock(*entries: Locked) -> Lock:
    return parse(text_of(Lock({"cudnn": "9.19"}, entries)))


def test_one_step_may_be_locked_for_two_targets() -> None:
    other = replace(ONE, target="a100", parts=(replace(ONE.parts[0], choice=replace(CHOICE, engine=4)),))
    found = lock(ONE, other)
    assert found.choice(ONE.work, "h200") == CHOICE
    assert found.choice(ONE.work, "a100") == replace(CHOICE, engine=4)
    assert found.choice(ONE.work, "l40") is None
    text = text_of(Lock({}, (ONE, replace(ONE, name="again"))))
    with pytest.raises(ModelError, match="on h200 is locked twice"):
        parse(text)


def test_knobs_in_any_order_are_the_same_plan() -> None:
    text = text_of(Lock({}, (ONE,)))
    assert "{ 0 = 2, 3 = 11, 14 = 1 }" in text
    turned = parse(text.replace("{ 0 = 2, 3 = 11, 14 = 1 }", "{ 14 = 1, 0 = 2, 3 = 11 }"))
    assert turned.entries == parse(text).entries == (ONE,)
    assert text_of(turned) == text


def test_parts_keep_their_own_forms() -> None:
    parts = (
        LockedPart(Part(2, "cudnn", ("as_convolution",)), replace(CHOICE, engine=1)),
        LockedPart(Part(1, "kernel", ()), None, "relu of f16"),
        LockedPart(Part(1, "cudnn", ()), CHOICE),
    )
    found = lock(replace(ONE, parts=parts))
    assert found.entries[0].parts == parts
    assert found.choice(ONE.work, "h200") is None, "none of its plans runs the whole step"
    assert [part.spelling for part in found.entries[0].split] == [("as_convolution",), (), ()]
