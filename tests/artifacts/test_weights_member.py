"""Test that weights of a `.fusec` file are read and checked once: at first use, or in a thread."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from fusec.artifacts import container, safetensors
from fusec.artifacts.weights_member import WeightsMember
from fusec.errors import ModelError
from fusec.ir import Literal

MEMBER = "weights.safetensors"


@pytest.fixture
def literals(rng: np.random.Generator) -> list[Literal]:
    return [Literal.of(rng.standard_normal((3, 5)).astype(np.float32), f"w{i}") for i in range(4)]


@pytest.fixture
def path(tmp_path: Path, literals: list[Literal]) -> Path:
    path = tmp_path / "net.fusec"
    with container.written(path) as file:
        file.stream(MEMBER, lambda member: safetensors.write(member, literals))
        file.finish({})
    return path


def same(found: dict[str, Literal], literals: list[Literal]) -> bool:
    assert set(found) == {x.digest for x in literals}
    return all(np.array_equal(found[x.digest].array, x.array) for x in literals)


def test_the_first_use_of_a_weight_reads_and_checks_all_once(
    path: Path, literals: list[Literal], monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []
    check = container.Reader.check

    def counted(self: container.Reader, name: str, room: memoryview | None = None) -> memoryview:
        checked.append(name)
        return check(self, name, room)

    monkeypatch.setattr(container.Reader, "check", counted)
    found = WeightsMember(container.Reader(path), MEMBER).literals()
    assert not checked
    assert same(found, literals)
    assert checked == [MEMBER]


def test_a_use_waits_for_the_thread_that_reads(
    path: Path, literals: list[Literal], monkeypatch: pytest.MonkeyPatch
) -> None:
    used, check = threading.Event(), container.Reader.check

    def late(self: container.Reader, name: str, room: memoryview | None = None) -> memoryview:
        assert threading.current_thread() is not threading.main_thread()
        used.wait(0.2)
        return check(self, name, room)

    monkeypatch.setattr(container.Reader, "check", late)
    member = WeightsMember(container.Reader(path), MEMBER)
    with member.read_in_thread():
        assert same(member.literals(), literals)
        used.set()


def test_damage_is_the_error_and_not_what_follows_from_it(path: Path) -> None:
    whole = path.read_bytes()
    at = whole.index(b'"data_offsets"')
    path.write_bytes(whole[:at] + b"?" + whole[at + 1 :])
    member = WeightsMember(container.Reader(path), MEMBER)
    with pytest.raises(ModelError, match=r"weights\.safetensors: no safetensors"):
        member.literals()
    with pytest.raises(ModelError, match="checksum does not fit"), member.read_in_thread():
        member.literals()
    with pytest.raises(ModelError, match="checksum does not fit"), member.read_in_thread():
        pass


def test_a_header_that_changes_between_its_two_reads_is_refused(path: Path) -> None:
    whole = path.read_bytes()
    at = whole.index(b"data_offsets") - 20
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    member = WeightsMember(container.Reader(path), MEMBER)
    path.write_bytes(whole)  # in place: the reader has it open
    with pytest.raises(ModelError, match="was changed while it was read"), member.read_in_thread():
        pass
