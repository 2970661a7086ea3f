"""Faults in what a cold compilation leaves out or does early."""

from __future__ import annotations

from mutation.mutants import Mutant
from mutation.mutants import for_tests as _m

COMPILE_TIME: tuple[Mutant, ...] = (
    _m(
        "lost_once_lost_always",
        "tuning",
        "gpu/autotune/plans/plan_selection.py",
        "if rivals.get(k, math.inf) > self.ranked[k].rival_us}",
        "if False}",
        "a graph that lost to a kernel runs its first plan where there is no kernel",
        "gpu/test_rival_times.py",
    ),
    _m(
        "rival_is_itself",
        "tuning",
        "gpu/autotune/candidates/candidate_times.py",
        "if all(each.key != key for each in code)), default",
        "if code), default",
        "a plan is its own rival, so that a slow first plan ends the search",
        "gpu/test_rival_times.py",
    ),
    _m(
        "rival_of_the_fastest_step",
        "tuning",
        "gpu/autotune/candidates/candidate_times.py",
        "rivals[key] = max(rivals.get(key, 0.0), least_us - launch_us)",
        "rivals[key] = least_us - launch_us",
        "a graph of two steps is not searched because one of them has a kernel",
        "gpu/test_rival_times.py",
    ),
    _m(
        "lost_is_complete",
        "tuning",
        "gpu/autotune/plans/plan_search.py",
        "(replace(choice, complete=False), plan) for choice, plan in result.plans]\n    waiting",
        "(replace(choice, complete=True), plan) for choice, plan in result.plans]\n    waiting",
        "another model never tries the other plans of a graph that lost here",
        "gpu/test_rival_times.py",
    ),
    _m(
        "slow_by_one_plan",
        "tuning",
        "gpu/autotune/plans/plan_timing.py",
        "min(times_us) > ABSURD * best_us",
        "max(times_us) > ABSURD * best_us",
        "one slow plan hides the fastest plan of its engine",
        "gpu/autotune/plans/test_plan_search.py",
    ),
    _m(
        "ahead_is_kept",
        "tuning",
        "gpu/launch/cubins.py",
        "        _AHEAD.popitem()[1].cancel()",
        "        _AHEAD.popitem()",
        "kernels that nobody needs are compiled after the compilation",
        "gpu/launch/test_cubins.py",
    ),
)
