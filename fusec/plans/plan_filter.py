"""Define which plans a compilation may use: heuristic modes, engines, workspace, and a fixed order of sums."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, fields
from typing import Any, cast

from fusec.errors import FusecError
from fusec.system.dataclass import dataclass

MODES = ("A", "B", "fallback")
DEFAULT_MODES = ("A", "fallback")

Names = str | Collection[str]
Engines = str | Collection[int | str]


@dataclass(frozen=True)
class PlanFilter:
    """Filter of the plans that a compilation may use.

    heuristics: modes of cuDNN's heuristics whose plans are listed, in this order
    only: engines of cuDNN to insist on, sorted; empty: all
    without: engines to leave out, sorted
    workspace_limit: the most bytes of scratch memory that a plan may need; None: no limit
    deterministic: leave out plans whose numerical notes say NONDETERMINISTIC
    """

    heuristics: tuple[str, ...] = DEFAULT_MODES
    only: tuple[int, ...] = ()
    without: tuple[int, ...] = ()
    workspace_limit: int | None = None
    deterministic: bool = False

    @classmethod
    def of(
        cls,
        heuristics: Names = DEFAULT_MODES,
        engines: Engines = (),
        workspace_limit: int | None = None,
        deterministic: bool = False,
    ) -> PlanFilter:
        """Make a filter from what a caller gives.

        heuristics: names of modes, as a list or joined by commas; upper and lower case are equal
        engines: numbers, as a list or joined by commas: `45,1` are engines to insist on, `-0,-11` engines to leave out

        Raises FusecError if a value is none of these.
        """
        only, without = _engines_of(engines)
        if workspace_limit is not None and not (type(workspace_limit) is int and workspace_limit >= 0):
            raise FusecError(f"workspace_limit is a number of bytes, 0 or more, not {workspace_limit!r}")
        return cls(_modes_of(heuristics), only, without, workspace_limit, deterministic)

    @property
    def is_default(self) -> bool:
        """Tell if no plan is left out, and cuDNN's usual modes list them."""
        return self == PlanFilter()

    @property
    def needs_builds(self) -> bool:
        """Tell if only building a plan shows that it may be used."""
        return self.deterministic or self.workspace_limit is not None

    @property
    def key(self) -> str:
        """Return a text for cache keys that differs between filters; empty for the default."""
        return "" if self.is_default else json.dumps(self.to_json(), sort_keys=True)

    def reason(self, engine: int, workspace_bytes: int = 0) -> str | None:
        """Return why a plan may not be used; None if it may."""
        if engine in self.without or (self.only and engine not in self.only):
            return f"engine {engine} is left out by the option engines"
        if self.workspace_limit is not None and workspace_bytes > self.workspace_limit:
            return f"a workspace of {workspace_bytes} bytes exceeds the option workspace_limit, {self.workspace_limit}"
        return None

    def to_json(self) -> dict[str, Any]:
        """Return the fields that differ from the default, as JSON data."""
        usual = asdict(PlanFilter())
        return {name: value for name, value in asdict(self).items() if value != usual[name]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PlanFilter:
        """Read what `to_json` returned. Raises ValueError for other data."""
        if unknown := sorted(set(data) - {field.name for field in fields(cls)}):
            raise ValueError(f"a filter of plans has no field {unknown[0]!r}")
        numbers = {name: [int(n) for n in data.get(name, ())] for name in ("only", "without")}
        engines = [*numbers["only"], *(f"-{n}" for n in numbers["without"])]
        try:
            return cls.of(
                data.get("heuristics", DEFAULT_MODES),
                engines,
                data.get("workspace_limit"),
                bool(data.get("deterministic", False)),
            )
        except FusecError as error:
            raise ValueError(str(error)) from error


def _modes_of(given: Any) -> tuple[str, ...]:
    names = given.split(",") if isinstance(given, str) else given
    known = {mode.lower(): mode for mode in MODES}
    if not isinstance(names, Collection) or not names:
        raise FusecError(f"heuristics is one or several of {', '.join(MODES)}, not {given!r}")
    modes: dict[str, None] = {}
    for name in cast("Collection[Any]", names):
        mode = known.get(name.strip().lower()) if isinstance(name, str) else None
        if mode is None:
            raise FusecError(f"heuristics is one or several of {', '.join(MODES)}, not {name!r}")
        modes[mode] = None
    return tuple(modes)


def _engines_of(given: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the engines to insist on, and those to leave out, which have a minus sign."""
    names = given.split(",") if isinstance(given, str) else given
    if not isinstance(names, Collection):
        raise FusecError(f"engines are numbers, as in 45,1 or -0,-11, not {given!r}")
    only: set[int] = set()
    without: set[int] = set()
    for name in cast("Collection[Any]", names):
        text = str(name).strip() if type(name) in (int, str) else ""
        if not text.removeprefix("-").isdecimal():
            raise FusecError(f"engines are numbers, as in 45,1 or -0,-11, not {name!r}")
        (without if text.startswith("-") else only).add(abs(int(text)))
    if only and without:
        raise FusecError("engines names some to insist on and some to leave out: give one kind, because one is enough")
    return tuple(sorted(only)), tuple(sorted(without))
