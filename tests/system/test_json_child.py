"""Test child processes that exchange lines of JSON: answers, the description of an end, and a close meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from fusec.system.json_child import JsonChild


@pytest.fixture
def child() -> Iterator[JsonChild]:
    child = JsonChild("system.json_echo")
    yield child
    child.close()


def test_each_question_gets_its_answer(child: JsonChild) -> None:
    for number in range(3):
        assert child.ask({"number": number}, 60) == {"answer": {"number": number}}
    assert child.receive(0.01) is None and not child.ended


def test_the_end_is_described_by_the_last_line_of_stderr(child: JsonChild) -> None:
    assert child.ask({"exit": 3}, 60) is None and child.ended
    assert child.end() == ("", "the process ended with status 3: last words")
    child.tell({})  # nobody reads it
    child.close()
    assert child.last_line() == "it was closed"


def test_a_signal_is_named(child: JsonChild) -> None:
    assert child.ask({}, 60) == {"answer": {}}
    child.kill()
    assert child.receive(60) is None
    assert child.end("the echo") == ("SIGKILL", "the echo was killed by SIGKILL: it wrote nothing to stderr")


def test_one_thread_may_close_a_child_while_another_describes_its_end(
    child: JsonChild, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert child.ask({"exit": 1}, 60) is None
    closing, seek = threading.Thread(target=child.close), child._errors.seek

    def seek_while_another_closes(*arguments: Any) -> int:
        if closing.ident is None:
            closing.start()
            closing.join(0.5)
        return seek(*arguments)

    monkeypatch.setattr(child._errors, "seek", seek_while_another_closes)
    assert child.last_line() == "last words"
    closing.join(60)
    assert child.last_line() == "it was closed"
