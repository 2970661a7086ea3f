"""Chosen plans on disk, shared by processes, and the plans that must not be used again.

One SQLite file beside that of cuDNN's answers, with the same promises: see cache.py.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fusec.cache import Store, folder
from fusec.plans import Choice, Entry, Place, PlanKey

MAX_ENTRIES = 20_000  # up to 200 KB each, with the code of an engine compiled at run time; most are 5 KB
FILE = "plans.sqlite"


class PlanStore:
    """Entries by key, and reasons by quarantined plan. An entry that fails its checksum counts as absent."""

    def __init__(self, path: Path | None = None, max_entries: int = MAX_ENTRIES):
        self._store = Store(path or folder() / FILE, max_entries)

    def get(self, key: PlanKey) -> Entry | None:
        """The entry; it counts as used now, so that others go first."""
        text = self._store.get([key.digest], touch=True).get(key.digest)
        return None if text is None else _entry(json.loads(text))

    def put(self, key: PlanKey, entry: Entry) -> None:
        """Keep an entry, in place of what was there."""
        blob = None if entry.blob is None else base64.b64encode(entry.blob).decode()
        data = {"kind": "plan", "key": asdict(key), "choice": asdict(entry.choice), "blob": blob}
        self._store.put({key.digest: json.dumps(data)})

    def quarantine(self, place: Place, graph: str, choice: Choice, reason: str) -> None:
        """Never offer this plan of the graph again, here."""
        plan = {"engine": choice.engine, "knobs": [list(k) for k in choice.knobs]}
        data = {"kind": "quarantine", "place": asdict(place), "graph": graph, **plan, "reason": reason}
        self._store.put({_quarantine_key(place, graph, choice): json.dumps(data)})

    def quarantined(self, place: Place) -> Callable[[str, Choice], str | None]:
        """Why a plan of a graph must not be used there; None if it may."""

        def reason(graph: str, choice: Choice) -> str | None:
            key = _quarantine_key(place, graph, choice)
            text = self._store.get([key]).get(key)
            return None if text is None else f"quarantined: {json.loads(text)['reason']}"

        return reason

    def __len__(self) -> int:
        return len(self._store)


def _quarantine_key(place: Place, graph: str, choice: Choice) -> str:
    # another driver computes the same wrong numbers; another cuDNN may not
    parts = ["quarantine", place.device, place.cudnn, graph, choice.engine, [list(k) for k in choice.knobs]]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _entry(data: dict[str, Any]) -> Entry | None:
    choice = data["choice"]
    choice["knobs"] = tuple((k, v) for k, v in choice["knobs"])
    try:
        blob = None if data["blob"] is None else base64.b64decode(data["blob"], validate=True)
    except binascii.Error:
        return None
    return Entry(Choice(**choice), blob)
