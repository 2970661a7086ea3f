"""Read data from files that anybody may have written."""

from __future__ import annotations

import json
from typing import Any


def read_json(text: str | bytes) -> Any:
    """Read JSON; ValueError for whatever is none.

    Python raises RecursionError for lists nested some thousand deep, which a few bytes of a file can ask for.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("its JSON is nested too deep") from error
