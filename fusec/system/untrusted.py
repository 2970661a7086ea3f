"""Read data from untrusted files."""

from __future__ import annotations

import json
from typing import Any


def read_json(text: str | bytes) -> Any:
    """Read JSON. Raises ValueError if the text is not JSON, or is nested too deep for Python.

    Python raises RecursionError for lists nested some thousand deep, and a file of a few bytes can contain them.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("its JSON is nested too deep") from error
