"""The account of a compilation: parts that add up to the whole, and nothing counted twice."""

from __future__ import annotations

import contextlib
import threading

from fusec.system.compile_timer import Account, opened, spent_on


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_is_inside_is_taken_off_and_the_parts_add_up() -> None:
    clock = Clock()
    account = Account(clock=clock)
    with account.of("all"):
        clock.now += 1.0
        for _ in range(2):
            with account.of("plans"):
                clock.now += 3.0
                with contextlib.suppress(ValueError), account.of("runs"):
                    clock.now += 0.5
                    raise ValueError
        clock.now += 0.25
    found = {what: (spent.seconds, spent.count) for what, spent in account.by_what.items()}
    assert found == {"all": (1.25, 1), "plans": (6.0, 2), "runs": (1.0, 2)}
    assert account.seconds == sum(seconds for seconds, _ in found.values()) == 8.25
    assert str(account).splitlines() == [
        "    8.2 s",
        "    6.0 s  plans (2)",
        "    1.2 s  all (1)",
        "    1.0 s  runs (2)",
    ]


def test_a_function_is_entered_where_an_account_is_open() -> None:
    @spent_on("work")
    def work(x: int, *, y: int = 0) -> int:
        return x + y

    assert work(1, y=2) == 3
    with opened("all") as account:
        assert work(1, y=2) == 3
        with opened("part") as same:
            work(1)
        assert same is account
        beside = threading.Thread(target=work, args=(1,))
        beside.start()
        beside.join()
    assert {what: spent.count for what, spent in account.by_what.items()} == {"work": 2, "part": 1, "all": 1}
    work(1)
    assert account.by_what["work"].count == 2
