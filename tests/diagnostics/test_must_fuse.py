"""Test must-fuse patterns: what counts as a place, when a place is whole, and what is said when it is not."""

from __future__ import annotations

import random
import time
from fnmatch import fnmatchcase

import pytest
from passes.partition.judges import AcceptAll, Measured

from fusec.diagnostics.must_fuse import Glob, assert_fused, check
from fusec.errors import CheckError
from fusec.ir import Graph
from fusec.passes.partition import partition
from fusec.plans.verdict import Refused, Verdict
from fusec.schedule.program import Program
from fusec.targets.target import load
from fusec.text import parse

# two blocks: the second sums two convolutions, of which only one can take the add
RESIDUAL = """
graph "g" (%x: f32[1,4,6,6]) {
  %w = constant [0.5, 1.0, 1.5, 2.0, 0.5, 1.0, 1.5, 2.0, 0.5, 1.0, 1.5, 2.0, 0.5, 1.0, 1.5, 2.0] : f32[4,4,1,1]
  %b = constant [1.0, 2.0, 3.0, 4.0] : f32[1,4,1,1]
  %c = conv(%x, %w) {strides=[1,1], pads=[0,0,0,0], dilations=[1,1]} : f32[1,4,6,6] loc("first")
  %d = add(%c, %b)
  %e = relu(%d)
  %f = conv(%e, %w) {strides=[1,1], pads=[0,0,0,0], dilations=[1,1]} : f32[1,4,6,6] loc("main")
  %g = add(%f, %b)
  %h = conv(%x, %w) {strides=[1,1], pads=[0,0,0,0], dilations=[1,1]} : f32[1,4,6,6] loc("shortcut")
  %i = add(%h, %b)
  %j = add(%g, %i)
  %k = relu(%j)
  %l = softmax(%k)
  return %l
}"""


def program(judge: AcceptAll | None = None, text: str = RESIDUAL) -> Program:
    return partition(parse(text), judge or Measured(), load("h200"))


class NoRelu(AcceptAll):
    """Refuses everything that ends in a relu after a convolution."""

    def verdict(self, body: Graph) -> Verdict:
        names = [node.op.name for node in body.nodes]
        if "conv" in names and "relu" in names:
            return Refused("plan", "CUDNN_STATUS_NOT_SUPPORTED", "no relu today")
        return super().verdict(body)


@pytest.mark.parametrize(
    ("pattern", "places"),
    [
        ("conv+bias+relu", 1),
        ("conv*+relu", 2),
        ("conv*+add+relu", 1),
        ("conv+bias", 3),
        ("conv*", 3),
        ("*relu", 2),
        ("add+relu", 1),
    ],
)
def test_places_that_are_one_step(pattern: str, places: int) -> None:
    assert check(program(), pattern) == (places, [])
    assert_fused(program(), pattern)


def test_a_split_sequence_is_named_with_its_source_and_the_reason() -> None:
    with pytest.raises(CheckError) as caught:
        assert_fused(program(NoRelu()), "conv*+relu")
    message = str(caught.value)
    assert "2 of 2 places" in message
    assert "conv+bias+relu (first) runs as cudnn conv+bias | cudnn relu: no relu today" in message


def test_ops_of_two_steps_are_not_one() -> None:
    with pytest.raises(CheckError, match=r"(?s)1 of 1 places.*relu\+softmax.*kernel softmax"):
        assert_fused(program(), "relu+softmax")


def test_a_pattern_that_never_occurs_fails_and_shows_the_closest_steps() -> None:
    with pytest.raises(CheckError, match=r"no sequence of ops matches 'conv\+gelu'; closest steps: .*conv\+bias"):
        assert_fused(program(), "conv+gelu")


def test_one_of_two_convolutions_takes_the_residual() -> None:
    """`shortcut` also leads to add+relu, but only one convolution can hold them."""
    places, misses = check(program(), "conv+bias+add+relu")
    assert (places, misses) == (1, [])


def test_globs_read_piece_by_piece_match_fnmatch() -> None:
    pieces = ["a", "b", "+", "*", "?", "[ab]", "[!a]", "[]", "["]
    rng = random.Random(1)
    matched = 0
    for _ in range(20000):
        pattern = "".join(rng.choices(pieces, k=rng.randint(0, 5)))
        text = "".join(rng.choices("ab+]", k=rng.randint(0, 5)))
        middle = rng.randint(0, len(text))
        glob = Glob(pattern)
        got = glob.accepts(glob.advance(glob.advance(glob.start, text[:middle]), text[middle:]))
        assert got == fnmatchcase(text, pattern), (pattern, text)
        matched += got
    assert matched > 1000


def test_time_does_not_grow_with_the_number_of_paths() -> None:
    """A swish doubles the number of paths; forty of them in a row have a million million."""
    gates = "\n".join(f"  %s{i} = sigmoid(%n{i})\n  %n{i + 1} = mul(%n{i}, %s{i})" for i in range(40))
    text = f'graph "g" (%n0: f32[4,8]) {{\n{gates}\n  return %n40\n}}'
    start = time.perf_counter()
    assert check(program(text=text), "*sigmoid+mul+tanh") == (0, [])
    assert check(program(AcceptAll(), text), "sigmoid+mul*") == (40, [])
    assert time.perf_counter() - start < 5


def test_any_library_counts_unless_cudnn_is_required() -> None:
    of = program()
    assert check(of, "softmax") == (1, []), "a kernel's"
    assert_fused(of, "conv*+relu", cudnn_only=True)
    with pytest.raises(CheckError, match=r"1 of 1 places .* not one cuDNN step:\n.* runs as kernel softmax"):
        assert_fused(of, "softmax", cudnn_only=True)
    blas = {step: "cublaslt" for step in of.steps if "conv" in step.signature}
    assert_fused(of, "conv*+relu", libraries=blas)
    with pytest.raises(CheckError, match=r"2 of 2 places .*\n.* runs as cublaslt conv\+bias\+relu"):
        assert_fused(of, "conv*+relu", cudnn_only=True, libraries=blas)
