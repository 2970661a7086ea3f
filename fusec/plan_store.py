"""Chosen plans on disk, shared by processes, and the plans that must not be used again.

One SQLite file beside that of cuDNN's answers, with the same promises: see cache.py.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from fusec.cache import Store, folder
from fusec.errors import ModelError
from fusec.plans import Choice, Entry, Knobs, Place, PlanKey

MAX_ENTRIES = 20_000  # up to 200 KB each, with the code of an engine compiled at run time; most are 5 KB
FILE = "plans.sqlite"
FORMAT = "fusec plans 1"


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
        self._store.put({key.digest: _plan_text(key, entry)})

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

    def info(self) -> dict[str, Any]:
        """Where it is, how much it holds, and for which devices."""
        rows = [json.loads(text) for text in self._store.items().values()]
        plans = Counter(row["key"]["device"] for row in rows if row["kind"] == "plan")
        wrong = sum(row["kind"] == "quarantine" for row in rows)
        return {
            "path": str(self._store.path),
            "bytes": self._store.nbytes,
            "plans": dict(sorted(plans.items())),
            "quarantined": wrong,
        }

    def clear(self) -> None:
        """Forget all plans, and which ones are quarantined."""
        self._store.clear()

    def export(self) -> dict[str, Any]:
        """Everything but serialized plans, as data for `merge`."""
        rows = [json.loads(text) for text in self._store.items().values()]
        return {"format": FORMAT, "entries": [{k: v for k, v in row.items() if k != "blob"} for row in rows]}

    def merge(self, data: object) -> int:
        """Take in what `export` gave; how many entries. ModelError if it is something else.

        Choices are data: whatever they say, cuDNN builds what it offers itself.
        """
        if not isinstance(data, dict) or cast(dict[str, Any], data).get("format") != FORMAT:
            raise ModelError(f"no plans exported by fusec: the format is not {FORMAT!r}")
        texts: dict[str, str] = {}
        for row in cast(dict[str, Any], data).get("entries", []):
            try:
                if row["kind"] == "plan":
                    key, choice = PlanKey(**row["key"]), _choice(row["choice"])
                    texts[key.digest] = _plan_text(key, Entry(choice))
                else:
                    place, choice = Place(**row["place"]), Choice(row["engine"], _knobs(row["knobs"]))
                    texts[_quarantine_key(place, row["graph"], choice)] = json.dumps(row)
            except (KeyError, TypeError, ValueError) as error:
                raise ModelError(f"entry {len(texts)} of the exported plans is malformed: {error!r}") from error
        self._store.put(texts)
        return len(texts)

    def __len__(self) -> int:
        return len(self._store)


def _quarantine_key(place: Place, graph: str, choice: Choice) -> str:
    # another driver computes the same wrong numbers; another cuDNN may not
    parts = ["quarantine", place.device, place.cudnn, graph, choice.engine, [list(k) for k in choice.knobs]]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _plan_text(key: PlanKey, entry: Entry) -> str:
    blob = None if entry.blob is None else base64.b64encode(entry.blob).decode()
    return json.dumps({"kind": "plan", "key": asdict(key), "choice": asdict(entry.choice), "blob": blob})


def _entry(data: dict[str, Any]) -> Entry:
    return Entry(_choice(data["choice"]), None if data["blob"] is None else base64.b64decode(data["blob"]))


def _choice(data: dict[str, Any]) -> Choice:
    measured = (data["workspace_bytes"], data["time_us"], data["error"], data["complete"])
    return Choice(data["engine"], _knobs(data["knobs"]), *measured)


def _knobs(pairs: list[list[int]]) -> Knobs:
    return tuple((int(kind), int(value)) for kind, value in pairs)
