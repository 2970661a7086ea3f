"""Compare programs: totals, and the groups of ops that run differently, for a fleet of GPUs or for two versions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from difflib import SequenceMatcher

from fusec.diagnostics.explain.compare import step_groups
from fusec.diagnostics.explain.data import Decline
from fusec.diagnostics.text_table import bytes_text
from fusec.report.records import ReportedProgram, ReportedStep
from fusec.report.render import time_text
from fusec.system.dataclass import dataclass

Sides = tuple[tuple[ReportedStep, ...], ...]  # for each program, the steps of a group


@dataclass(frozen=True)
class StepGroup:
    """Steps that compute the same on each side. count: number of places where the sides run like this one."""

    sides: Sides
    nodes: tuple[str, ...]
    count: int


@dataclass(frozen=True)
class TotalsRow:
    """A figure of each program. change: from the first to the second. trend: `more` or `less` if less is better."""

    label: str
    cells: tuple[str, ...]
    change: str = ""
    trend: str = ""


@dataclass(frozen=True)
class SideBySide:
    """Programs in columns.

    different: groups that fuse or run differently. replanned: groups that differ in the plan alone.
    equal, count: number of groups that fuse and run the same way, and of all groups.
    refusals: titles, each with the refusals that only one program has.
    """

    names: tuple[str, ...]
    programs: tuple[ReportedProgram, ...]
    totals: tuple[TotalsRow, ...]
    different: tuple[StepGroup, ...]
    replanned: tuple[StepGroup, ...]
    equal: int
    count: int
    refusals: tuple[tuple[str, tuple[Decline, ...]], ...] = ()

    @property
    def places_different(self) -> int:
        """Count the groups that fuse or run differently."""
        return sum(group.count for group in self.different)

    @property
    def places_replanned(self) -> int:
        """Count the groups that differ in the plan alone."""
        return sum(group.count for group in self.replanned)


def fleet(programs: Sequence[ReportedProgram]) -> SideBySide:
    """Compare the programs of one model on several GPUs."""
    return _side_by_side([program.target for program in programs], programs, _by_nodes(programs))


def difference(old: ReportedProgram, new: ReportedProgram, names: Sequence[str]) -> SideBySide:
    """Compare two programs: of two versions of a model, two GPUs, or two releases of cuDNN.

    Steps of one model are matched by its nodes. Those of two models are matched in order, by ops and shapes, as a diff
    of texts does.
    """
    programs = (old, new)
    groups = _by_nodes(programs) if old.model == new.model else _in_order(old, new)
    refused = [{_refusal_key(d): d for d in (*p.explanation.left_out, *p.explanation.declined)} for p in programs]
    refusals = tuple(
        (f"Only in {names[i]}", tuple(d for key, d in refused[i].items() if key not in refused[1 - i])) for i in (0, 1)
    )
    side = _side_by_side(names, programs, groups)
    return replace(side, refusals=refusals)


def _refusal_key(decline: Decline) -> tuple[str, ...]:
    message = decline.message if decline.stage != "fusec" else ""  # because fusec's message names the value
    return decline.op, decline.ops, decline.stage, decline.code, message


def _side_by_side(names: Sequence[str], programs: Sequence[ReportedProgram], groups: Sequence[Sides]) -> SideBySide:
    different = [group for group in groups if _varies(group, _fusion)]
    same = [group for group in groups if not _varies(group, _fusion)]
    return SideBySide(
        tuple(names),
        tuple(programs),
        tuple(_totals(programs)),
        _merged(different),
        _merged([group for group in same if _varies(group, _plans)]),
        len(same),
        len(groups),
    )


def _varies(group: Sides, what: Callable[[Sequence[ReportedStep]], object]) -> bool:
    first, *others = map(what, group)
    return any(other != first for other in others)


def _fusion(steps: Sequence[ReportedStep]) -> tuple[tuple[str, str], ...]:
    return tuple((step.explained.ops, step.runner) for step in steps)


def _plans(steps: Sequence[ReportedStep]) -> tuple[tuple[str, str], ...]:
    chosen = [step.plans.chosen for step in steps if step.plans is not None]
    return tuple((plan.engine, plan.knobs) for plan in chosen if plan is not None)


def _merged(groups: Sequence[Sides]) -> tuple[StepGroup, ...]:
    """Merge groups that look the same into one with the count of places."""
    found: dict[object, StepGroup] = {}
    for sides in groups:
        nodes = tuple(dict.fromkeys(name for steps in sides for step in steps for name in step.explained.nodes))
        key = tuple((_fusion(steps), _plans(steps)) for steps in sides)
        known = found.get(key)
        found[key] = (
            StepGroup(sides, nodes, 1)
            if known is None
            else StepGroup(known.sides, (*known.nodes, *nodes), known.count + 1)
        )
    return tuple(found.values())


def _by_nodes(programs: Sequence[ReportedProgram]) -> list[Sides]:
    """Group steps that share model nodes on any side, so that no group splits a step."""
    steps = [program.steps for program in programs]
    groups = step_groups(steps, lambda step: step.keys, lambda step: step.explained.kind != "view")
    return [tuple(map(tuple, sides)) for sides in groups]


def _in_order(old: ReportedProgram, new: ReportedProgram) -> list[Sides]:
    """Pair steps with equal ops and shapes in order. The steps between two pairs are one group."""
    before, after = old.working, new.working
    groups: list[Sides] = []
    matcher = SequenceMatcher(None, list(map(_work, before)), list(map(_work, after)), autojunk=False)
    for tag, a, b, c, d in matcher.get_opcodes():
        if tag == "equal":
            groups += [((one,), (other,)) for one, other in zip(before[a:b], after[c:d], strict=True)]
        else:
            groups.append((before[a:b], after[c:d]))
    return groups


def _work(step: ReportedStep) -> tuple[str, ...]:
    return step.explained.ops, *(tensor.shape for tensor in step.tensors_written)


# Label, figure, how to write it, and if less of it is better.
_Figure = tuple[str, Callable[[ReportedProgram], float | None], Callable[[float], str], bool]
_FIGURES: tuple[_Figure, ...] = (
    ("launches", lambda p: p.explanation.totals["launches"], str, True),
    ("cuDNN steps", lambda p: p.explanation.totals["cudnn"], str, False),
    ("… precompiled", lambda p: p.explanation.totals["precompiled"], str, False),
    ("… compiled at run time", lambda p: p.explanation.totals["runtime"], str, True),
    ("cuBLASLt steps", lambda p: p.explanation.totals["cublaslt"] or None, str, False),
    ("other kernels", lambda p: p.explanation.totals["kernels"], str, True),
    ("limit of all steps", lambda p: p.limit_us, time_text, True),
    (
        "measured, all steps",
        lambda p: None if p.is_simulated or not p.bench else p.bench.whole.median_us,
        time_text,
        True,
    ),
    ("read", lambda p: p.explanation.totals["read_bytes"], lambda n: bytes_text(int(n)), True),
    ("written", lambda p: p.explanation.totals["written_bytes"], lambda n: bytes_text(int(n)), True),
    ("never stored", lambda p: p.explanation.totals["virtual_bytes"], lambda n: bytes_text(int(n)), False),
    ("arena of values", lambda p: p.memory.arena_bytes, lambda n: bytes_text(int(n)), True),
    ("weights", lambda p: p.memory.weight_bytes, lambda n: bytes_text(int(n)), True),
    ("largest workspace", lambda p: p.memory.workspace_bytes, lambda n: bytes_text(int(n)), True),
    ("kinds of refusals", lambda p: len(p.refusals), str, True),
)


def _totals(programs: Sequence[ReportedProgram]) -> list[TotalsRow]:
    texts: tuple[tuple[str, Callable[[ReportedProgram], str]], ...] = (
        ("target", lambda p: p.target),
        ("precision", lambda p: p.precision),
        ("cuDNN", lambda p: p.versions.get("cudnn") or "not asked"),
    )
    rows = [TotalsRow(label, tuple(map(of, programs))) for label, of in texts]
    for label, of, write, less_is_better in _FIGURES:
        amounts = [of(program) for program in programs]
        if all(amount is None for amount in amounts):
            continue
        cells = tuple("" if amount is None else write(amount) for amount in amounts)
        change, trend = "", ""
        match amounts:
            case [int() | float() as old, int() | float() as new] if old != new:
                change = f"{100 * (new - old) / old:+.1f} %" if old else f"+{write(new)}"
                trend = ("less" if new < old else "more") if less_is_better else ""
            case _:
                pass
        rows.append(TotalsRow(label, cells, change, trend))
    return rows
