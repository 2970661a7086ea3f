"""Hold the answers of all releases, and write them as JSON in a format with a version.

Equal answers are written once: `cells[release][target]` holds, for each pattern, the place of its answer in `answers`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, field
from pathlib import Path
from typing import Any

from fusec.atlas.patterns import Pattern
from fusec.errors import FusecError
from fusec.system.dataclass import dataclass

SCHEMA = "fusec-atlas/1"  # raise the number when a key changes its meaning or goes away


@dataclass
class Atlas:
    """Answers about patterns.

    An answer has `accepted`. If that is true, it has `precompiled` and `runtime` (engines in cuDNN's order), `plans`
    (how many are offered), and `spelling`: the names of the rewrites that lead to it, empty for the pattern as it is.
    If it is false, it has `stage`, `code`, `message`, and `nearest`: the first change that is accepted, with its
    engines, or null.

    releases: for each release its `cudnn` number and `nvrtc` version
    cells: answers by release and target, for each pattern
    offered: likewise the patterns whose plan was built for another release or GPU, and is only offered by this one
    """

    patterns: Sequence[Pattern]
    releases: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    cells: dict[str, dict[str, list[dict[str, Any]]]] = field(default_factory=dict[str, dict[str, Any]])
    offered: dict[str, dict[str, list[int]]] = field(default_factory=dict[str, dict[str, Any]])

    def add(self, version: str, lines: Sequence[Mapping[str, Any]]) -> None:
        """Add the lines that `ask.main` printed for a release."""
        self.releases[version] = {"cudnn": lines[0]["cudnn"], "nvrtc": lines[0]["nvrtc"]}
        self.cells[version], self.offered[version] = {}, {}
        for line in lines:
            answers = [dict(answer) for answer in line["answers"]]
            built = [answer.pop("built", True) for answer in answers]
            self.cells[version][line["target"]] = answers
            self.offered[version][line["target"]] = [place for place, is_built in enumerate(built) if not is_built]

    def to_json(self) -> dict[str, Any]:
        """Return the whole as JSON data, releases in order of their versions."""
        known: dict[str, int] = {}
        versions = sorted(self.releases, key=number)
        cells = {
            version: {
                target: [known.setdefault(json.dumps(answer, sort_keys=True), len(known)) for answer in answers]
                for target, answers in self.cells[version].items()
            }
            for version in versions
        }
        return {
            "schema": SCHEMA,
            "patterns": [asdict(pattern) for pattern in self.patterns],
            "releases": {version: self.releases[version] for version in versions},
            "answers": [json.loads(text) for text in known],
            "cells": cells,
            "offered": {version: self.offered[version] for version in versions},
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Atlas:
        """Read an atlas. Raises FusecError for another version of the format."""
        if data.get("schema") != SCHEMA:
            raise FusecError(f"the atlas is of format {data.get('schema')!r}, not {SCHEMA!r}: write it anew")
        answers = data["answers"]
        cells = {
            version: {target: [answers[place] for place in places] for target, places in row.items()}
            for version, row in data["cells"].items()
        }
        patterns = [Pattern(**pattern) for pattern in data["patterns"]]
        return Atlas(patterns, dict(data["releases"]), cells, dict(data["offered"]))


def number(version: str) -> list[int]:
    """Return a version as numbers, which sort as releases do."""
    return [int(part) for part in version.split(".")]


def read(path: Path) -> Atlas:
    """Read an atlas from a file. Raises FusecError if it is no atlas."""
    try:
        return Atlas.from_json(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FusecError(f"{path}: is no atlas: {error}") from error


def text(atlas: Atlas) -> str:
    """Return the JSON, a line for each entry of a list or row, so that versions of the file can be compared."""
    data = atlas.to_json()
    lines: list[str] = []
    for key, value in data.items():
        if isinstance(value, list):
            rows = ",\n".join(json.dumps(each, ensure_ascii=False, separators=(",", ":")) for each in value)
            lines.append(f'"{key}": [\n{rows}\n]')
        elif isinstance(value, dict):
            rows = ",\n".join(
                f"{json.dumps(name)}: {json.dumps(each, separators=(',', ':'))}" for name, each in value.items()
            )
            lines.append(f'"{key}": {{\n{rows}\n}}')
        else:
            lines.append(f'"{key}": {json.dumps(value)}')
    return "{\n" + ",\n".join(lines) + "\n}\n"
