"""Test the table as JSON: it is read as written, equal answers are stored once, and the committed one is valid."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from fusec.atlas import document, page
from fusec.atlas.patterns import patterns
from fusec.errors import FusecError

DOCS = Path(__file__).parents[2] / "docs"
SCHEMA = json.loads((DOCS / "schemas" / "fusec-atlas-1.json").read_text())

TAKEN: dict[str, Any] = {"accepted": True, "precompiled": [10], "runtime": [], "plans": 3, "spelling": []}
REFUSED: dict[str, Any] = {
    "accepted": False,
    "stage": "plan",
    "code": "CUDNN_STATUS_NOT_SUPPORTED",
    "message": "no </script> engine",
    "nearest": {"change": "in fp16", "precompiled": [], "runtime": [7], "plans": 1, "spelling": []},
}


def small() -> document.Atlas:
    atlas = document.Atlas(patterns("conv")[:2])
    for version, number in (("9.19.0.56", 91900), ("9.9.0.1", 90900)):
        answers = [{**TAKEN, "built": number == 91900}, REFUSED]
        atlas.add(version, [{"target": "h200", "cudnn": number, "nvrtc": "13.5", "answers": answers}])
    return atlas


def test_what_is_written_is_read(tmp_path: Path) -> None:
    data = json.loads(document.text(small()))
    jsonschema.validate(data, SCHEMA)
    assert list(data["releases"]) == ["9.9.0.1", "9.19.0.56"]  # by number, not by letter
    assert data["answers"] == [TAKEN, REFUSED]
    assert data["offered"] == {"9.9.0.1": {"h200": [0]}, "9.19.0.56": {"h200": []}}
    path = tmp_path / "atlas.json"
    path.write_text(document.text(small()))
    assert document.read(path).to_json() == data


@pytest.mark.parametrize(
    ("text", "reason"),
    [("{", "is no atlas"), ("[]", "is no atlas"), ('{"schema": "fusec-atlas/2"}', "'fusec-atlas/2'")],
)
def test_another_file_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "atlas.json"
    path.write_text(text)
    with pytest.raises(FusecError, match=reason):
        document.read(path)


def test_the_page_holds_the_data_and_needs_no_network() -> None:
    html = page.html(document.text(small()))
    assert not re.search(r"(?:src|href)=|https?:|@import|fetch\(", html)
    # a browser ends the script at the first end tag
    script = html.split("<script>")[1].split("</script>")[0]
    assert "no <\\/script> engine" in script
    assert script.rstrip().endswith("draw();")
    held = re.search(r"^const data = (.*?);\nconst \$", script, re.MULTILINE | re.DOTALL)
    assert held is not None
    assert json.loads(held[1].replace("<\\/", "</")) == small().to_json()


def test_the_committed_table_is_valid_and_that_of_the_patterns() -> None:
    text = (DOCS / "atlas.json").read_text()
    assert len(text) < 1_000_000
    jsonschema.validate(json.loads(text), SCHEMA)
    atlas = document.read(DOCS / "atlas.json")
    assert list(atlas.patterns) == list(patterns()), "write it anew: fusec atlas --cudnn … -o docs"
    for rows in atlas.cells.values():
        assert set(rows) == {"t4", "a100", "l4", "h100", "h200", "b200"}
        assert {len(row) for row in rows.values()} == {len(patterns())}
    assert (DOCS / "atlas.html").read_text() == page.html(text)
