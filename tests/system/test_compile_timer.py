"""Test times of a compilation: stages add up to the total, and nothing is counted twice."""

from __future__ import annotations

import contextlib
import threading

from fusec.system.compile_timer import CompileTimes, opened, spent_on


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_inner_stages_are_subtracted_and_stages_add_up() -> None:
    clock = Clock()
    times = CompileTimes(clock=clock)
    with times.stage("all"):
        clock.now += 1.0
        for _ in range(2):
            with times.stage("plans"):
                clock.now += 3.0
                with contextlib.suppress(ValueError), times.stage("runs"):
                    clock.now += 0.5
                    raise ValueError
        clock.now += 0.25
    found = {name: (stage.seconds, stage.count) for name, stage in times.stages.items()}
    assert found == {"all": (1.25, 1), "plans": (6.0, 2), "runs": (1.0, 2)}
    assert times.seconds == sum(seconds for seconds, _ in found.values()) == 8.25
    assert str(times).splitlines() == [
        "    8.2 s  in total",
        "    6.0 s  plans (2)",
        "    1.2 s  all (1)",
        "    1.0 s  runs (2)",
    ]


def test_a_function_is_counted_while_a_record_is_open() -> None:
    @spent_on("work")
    def work(x: int, *, y: int = 0) -> int:
        return x + y

    assert work(1, y=2) == 3
    with opened("all") as times:
        assert work(1, y=2) == 3
        with opened("part") as same:
            work(1)
        assert same is times
        other = threading.Thread(target=work, args=(1,))
        other.start()
        other.join()
    assert {name: stage.count for name, stage in times.stages.items()} == {"work": 2, "part": 1, "all": 1}
    work(1)
    assert times.stages["work"].count == 2
