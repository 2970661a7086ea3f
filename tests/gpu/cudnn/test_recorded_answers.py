"""Test the recorded answers of cuDNN: they are what it says, and other code or another cuDNN does not read them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gpu.cudnn import recorded_answers
from gpu.cudnn.recorded_answers import NEW, asked, asking_modules, recorded, seed, summary, write

from fusec import driver
from fusec.gpu.cudnn.legality.oracle import Oracle
from fusec.plans.sqlite_cache import Store
from fusec.targets.target import load
from fusec.text import parse

# A convolution with an epilogue, a product with one, and an epilogue that cuDNN refuses in part.
TEXT = """graph "g" (
  %x: f16[2,8,6,6] {0,2,3,1}, %w: f16[16,8,3,3] {0,2,3,1}, %z: f16[2,16,6,6] {0,2,3,1}, %a: f16[8,32], %b: f16[32,16]
) {
  %c = conv(%x, %w) {strides=[1, 1], pads=[1, 1, 1, 1], dilations=[1, 1], groups=1}
  %s = add(%c, %z)
  %r = relu(%s)
  %m = matmul(%a, %b)
  %g = gelu(%m)
  %n = softmax(%g) {axis=1, log=false}
  return %r, %n
}"""


def build(store: Store) -> None:
    with Oracle(load("h200"), store=store) as oracle:
        driver.build(parse(TEXT), target="h200", oracle=oracle)


@pytest.mark.cudnn
def test_cudnn_answers_as_recorded(fusec_cache: Path, tmp_path: Path) -> None:
    build(Store(fusec_cache / "answers.sqlite"))  # so that these answers are recorded
    build(Store(tmp_path / "answers.sqlite"))
    today, known = asked(tmp_path), recorded()
    assert len(today) >= 3
    both = today.keys() & known.keys()
    if not both:
        pytest.skip(summary())
    assert {key: json.loads(today[key]) for key in both} == {key: json.loads(known[key]) for key in both}


def test_answers_are_of_this_code() -> None:
    """Otherwise every run asks cuDNN everything."""
    assert recorded(), NEW


def test_the_code_that_asks_is_what_the_oracle_and_the_worker_import() -> None:
    names = asking_modules().keys()
    needed = {"worker", "legality.oracle", "legality.graph_check", "plans.emit", "without_driver.driver_stand_in"}
    assert needed <= names
    assert not {"load_engines", "plans.built_plan", "legality.judges"} & names


def test_answers_of_other_code_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded_answers, "FILE", tmp_path / "answers.json.gz")
    write({"key": "text"}, tmp_path / "answers.json.gz")
    assert recorded() == {"key": "text"}
    seed(tmp_path)
    assert Store(tmp_path / "answers.sqlite").get(["key"]) == {"key": "text"}
    assert not asked(tmp_path), "which belongs to no target"
    monkeypatch.setattr(recorded_answers, "code_digest", lambda: "another")
    assert recorded() == {}
    assert "cudnn_answers.py" in summary()
    seed(tmp_path / "empty")
    assert not (tmp_path / "empty").exists()
