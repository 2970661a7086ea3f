"""Test which steps never run at the same time, although they need none of each other's results."""

from __future__ import annotations

import pytest
from lowering.bodies import BODIES, load

from fusec.lower_cudnn import lower

pytest.importorskip("cupy")
from fusec.gpu.launch.cuda_graph import StepLaunch, one_after_another


def nothing() -> None:
    pass


def test_steps_that_share_scratch_or_whose_blocks_meet_wait_for_each_other() -> None:
    plain, scratch = StepLaunch(nothing), StepLaunch(nothing, shares_scratch=True)
    meets = StepLaunch(nothing, blocks_meet=True)
    launches = [meets, plain, scratch, plain, meets, plain]
    assert one_after_another(launches, ((), (), (1,), (), (3,), None)) == ((), (), (0, 1), (), (0, 2, 3), None)


def test_blocks_of_a_batch_norm_meet() -> None:
    found = {title for title, text in BODIES.items() if lower(load(text)).graph.blocks_meet}
    assert found == {title for title in BODIES if "batch norm" in title} and len(found) == 4
