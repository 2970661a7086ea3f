"""Write a lock as TOML, and read it. Equal locks have equal text; errors name file and line."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from fusec.errors import ModelError, writing
from fusec.plans.lock_record import FORMAT, NAME, Lock, Locked, LockedPart, in_order
from fusec.plans.plan_record import Choice, Part
from fusec.system import atomic_write

# Format 1 has one plan for each step of cuDNN, no parts and no kernels. Format 2 has no entry for the order of steps.
READS = (1, 2, FORMAT)
_HEAD = "# The choice for each step: plan, kernel or split. Written by `fusec lock`; `fusec lock diff` compares.\n"
_TABLE = re.compile(r"\s*\[\[\s*partition\s*\]\]")
_WORK = re.compile(r"[0-9a-f]{64}")
_MEASURED = ("time_us", "error")
_PLAN = ("engine", "knobs", "workspace_bytes", *_MEASURED)
_PART = ("nodes", "runs", "spelling", "kernel", *_PLAN)
_KEYS = ("name", "shapes", "target", "work")


def write(path: str | Path, lock: Lock) -> None:
    """Write a lock to a file, which is complete or not written at all. Raises FusecError if it cannot be written."""
    with writing(path), atomic_write.written(Path(path).resolve(), durable=True) as file:
        file.write(text_of(lock).encode())


def text_of(lock: Lock) -> str:
    """Return a lock as TOML, with a table for each entry. Measured figures have four digits."""
    lines = [_HEAD, f"format = {FORMAT}"]
    lines += [f"{name} = {json.dumps(lock.versions[name])}" for name in sorted(lock.versions)]
    for entry in in_order(lock.entries):
        lines += ["", "[[partition]]"]
        lines += [f"{key} = {json.dumps(getattr(entry, key))}" for key in _KEYS]
        if len(entry.parts) == 1:
            lines += _part_lines(entry.parts[0])
        else:
            for part in entry.parts:
                lines += ["[[partition.part]]", f"nodes = {part.part.nodes}", *_part_lines(part)]
    return "\n".join(lines) + "\n"


def _part_lines(locked: LockedPart) -> Iterator[str]:
    part, choice = locked.part, locked.choice
    if locked.kernel:
        yield f"kernel = {json.dumps(locked.kernel)}"
    elif part.runs != "cudnn":
        yield f"runs = {json.dumps(part.runs)}"
    else:
        yield f"spelling = {json.dumps(list(part.spelling))}"
    if choice is None:
        return
    yield f"engine = {choice.engine}"
    knobs = ", ".join(f"{k} = {v}" for k, v in choice.knobs)
    yield f"knobs = {{ {knobs} }}" if knobs else "knobs = {}"
    yield f"workspace_bytes = {choice.workspace_bytes}"
    for key in _MEASURED:
        figure = getattr(choice, key)
        if figure is not None:
            yield f"{key} = {float(f'{figure:.4g}')!r}"


def read(path: str | Path) -> Lock:
    """Read a lock from its file. Raises ModelError that names file, line and reason."""
    try:
        return parse(Path(path).read_text(encoding="utf-8"), str(path))
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: not a text file: {error}") from error


def parse(text: str, origin: str = NAME) -> Lock:
    """Read a lock from its text. origin: its name in messages. Raises ModelError."""
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError, ValueError) as error:
        raise ModelError(f"{origin}: {error}") from error
    if data.get("format") not in READS:
        known = ", ".join(map(str, READS))
        raise ModelError(
            f"{origin}: line 1: format is {data.get('format')!r}, this fusec reads {known}: write a new one"
        )
    made_with = {k: v for k, v in data.items() if k not in ("format", "partition")}
    tables = data.get("partition", [])
    if not isinstance(tables, list) or not all(isinstance(v, str) for v in made_with.values()):
        raise ModelError(f"{origin}: line 1: not a lock: versions are strings, `partition` an array of tables")
    numbers = [i for i, line in enumerate(text.split("\n"), 1) if _TABLE.match(line)]
    entries: list[Locked] = []
    seen: set[tuple[str, str]] = set()
    for place, table in enumerate(cast("list[Any]", tables)):
        where = (
            f"{origin}: line {numbers[place]}" if len(numbers) == len(tables) else f"{origin}: partition {place + 1}"
        )
        try:
            entry = _locked(table)
        except ValueError as error:
            raise ModelError(f"{where}: {error}") from error
        if (entry.work, entry.target) in seen:
            raise ModelError(f"{where}: {entry.name} on {entry.target} is locked twice")
        seen.add((entry.work, entry.target))
        entries.append(entry)
    return Lock(made_with, in_order(entries), origin, data["format"])


def _locked(table: Any) -> Locked:
    """Read one table as an entry. Raises ValueError with the reason."""
    data = _table(table, "partition")
    for key in _KEYS:
        if not isinstance(data.get(key), str):
            raise ValueError(f"{key} is {data[key]!r}, not a string" if key in data else f"{key} is missing")
    if not _WORK.fullmatch(data["work"]):
        raise ValueError(f"work is {data['work']!r}, not a SHA-256")
    rest = {key: value for key, value in data.items() if key not in _KEYS}
    if "part" not in rest:
        if "nodes" in rest:
            raise ValueError("nodes belong to the parts of a step")
        parts = (_part({**rest, "nodes": 0}),)
    else:
        tables = rest.pop("part")
        if rest or not isinstance(tables, list) or len(cast("list[Any]", tables)) < 2:
            raise ValueError(f"a step has parts, two or more, or {', '.join(rest) or 'none'}")
        parts = tuple(_part(_table(part, "part")) for part in cast("list[Any]", tables))
    return Locked(data["name"], data["work"], data["target"], data["shapes"], parts)


def _table(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} is no table")
    return cast("dict[str, Any]", value)


def _part(table: Mapping[str, Any]) -> LockedPart:
    if unknown := [key for key in table if key not in _PART]:
        raise ValueError(f"unknown key {unknown[0]!r}")
    kernel = table.get("kernel", "")
    if not isinstance(kernel, str):
        raise ValueError(f"kernel is {kernel!r}, not the name of one")
    runs = table.get("runs", "kernel" if kernel else "cudnn")
    part = Part.from_json({"runs": runs, **({} if runs == "cudnn" else {"spelling": []}), **table})
    if kernel and runs != "kernel":
        raise ValueError(f"a kernel is named where {runs!r} runs")
    if not any(key in table for key in _PLAN):
        return LockedPart(part, None, kernel)
    if runs != "cudnn":
        raise ValueError(f"a plan is named where {runs!r} runs")
    return LockedPart(part, _choice(table))


def _choice(table: Mapping[str, Any]) -> Choice:
    knobs = table.get("knobs")
    if isinstance(knobs, dict):  # the keys of a TOML table are strings
        pairs = cast("dict[str, Any]", knobs).items()
        table = {**table, "knobs": [[int(knob) if knob.isdecimal() else knob, value] for knob, value in pairs]}
    choice = Choice.from_json(table)
    for key in _MEASURED:
        figure = getattr(choice, key)
        if figure is not None and not 0 <= figure < math.inf:
            raise ValueError(f"{key} is {figure!r}, not a number")
    return choice
