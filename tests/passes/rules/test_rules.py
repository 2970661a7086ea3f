"""Test that every equation holds: random leaves, both sides in float64, and the rewrite itself."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from passes.cases import assert_same_meaning

import fusec.passes.rules
from fusec.ir import DType, Graph, TensorType, Value
from fusec.ops import Pointwise, pw
from fusec.passes import names, rules_by_pass
from fusec.passes.rewriting.expression import Apply, TracedTensor, subterms
from fusec.passes.rewriting.pattern import Rule, instantiate
from fusec.passes.rewriting.rewriter import Local, rewrite
from fusec.reference import evaluate

EQUATIONS: dict[str, Rule] = {r.name: r for known in rules_by_pass().values() for r in known if isinstance(r, Rule)}
INTEGRAL = [name for name, r in EQUATIONS.items() if r.dtypes == "any"]
# Rules of real numbers whose last op takes integers too.
REAL_ONLY = [
    name
    for name, r in EQUATIONS.items()
    if r.dtypes == "float" and issubclass(r.pattern.op, Pointwise) and r.pattern.op.row.rule == "number"
]


def leaf(graph: Graph, rule: Rule, name: str, dtype: DType, rng: np.random.Generator) -> Value:
    """An input or constant as the rule's sample asks for: a shape, `positive`, or (length, fill)."""
    sample: Any = rule.sample.get(name, (2, 3, 4))
    positive = sample == "positive"
    shape = (2, 3, 4) if positive else sample
    if rule.parameters[name] == "Weight" or (name in ("s", "b") and rule.parameters[name] == "TracedTensor"):
        array = np.full(shape[0], shape[1]) if isinstance(shape[-1], float) else rng.uniform(0.5, 2, shape)
        return graph.constant(array.astype(dtype.numpy), name)
    value = graph.add_input(name, TensorType(shape, dtype))
    return graph.add(pw("exp"), value) if positive else value


def left_side(rule: Rule, dtype: DType, rng: np.random.Generator) -> Graph:
    graph = Graph("g")
    leaves = {
        n: leaf(graph, rule, n, dtype, rng) for n, kind in rule.parameters.items() if kind in ("TracedTensor", "Weight")
    }
    known = {n: rule.sample.get(n, float(rng.uniform(0.1, 0.9))) for n, k in rule.parameters.items() if k == "Scalar"}
    known |= {n: rule.sample[n] for n, k in rule.parameters.items() if k == "Attribute" and n in rule.sample}
    before = None
    if dtype is not DType.F64:  # numbers take the root's dtype: a stand-in root says which
        stand_in = next(iter(leaves.values()))
        before = graph.insert(pw("identity"), [stand_in])
    graph.set_outputs([instantiate(graph, rule.pattern, leaves, known, before)], ["y"])
    graph.prune()
    return graph


def in_f64(rule: Rule, rng: np.random.Generator) -> Graph:
    return left_side(rule, DType.F64, rng)


def test_every_rule_is_in_a_pass() -> None:
    """A rule that no pass lists would never be applied."""
    applied = {id(rule) for known in rules_by_pass().values() for rule in known}
    modules = [importlib.import_module(m.name) for m in pkgutil.walk_packages(fusec.passes.__path__, "fusec.passes.")]
    rules = [each for module in modules for each in vars(module).values() if isinstance(each, Rule | Local)]
    assert not {rule.name for rule in rules if id(rule) not in applied}


@pytest.mark.parametrize("name", EQUATIONS)
def test_both_sides_agree(name: str, rng: np.random.Generator) -> None:
    rule = EQUATIONS[name]
    for _ in range(3):
        before = in_f64(rule, rng)
        after = before.clone()
        assert rewrite(after, [rule]), f"{rule.equation} does not match its own pattern"
        after.prune()
        after.verify()
        assert_same_meaning(before, after, rng, 1e-12)


@pytest.mark.parametrize("name", INTEGRAL)
def test_rules_for_any_dtype_hold_for_integers(name: str, rng: np.random.Generator) -> None:
    before = left_side(EQUATIONS[name], DType.I32, rng)
    after = before.clone()
    assert rewrite(after, [EQUATIONS[name]])
    assert_same_meaning(before, after, rng, 0)


@pytest.mark.parametrize("name", [n for n, r in EQUATIONS.items() if r.size > 1])
def test_a_value_needed_elsewhere_prevents_the_match(name: str, rng: np.random.Generator) -> None:
    """Each inner op in turn becomes an output too."""
    rule = EQUATIONS[name]
    inner = [node.result for node in in_f64(rule, rng).nodes if node.op.name != "constant"][:-1]
    leaves = [v.name for v in inner if rule.sample.get("x") == "positive" or rule.sample.get("y") == "positive"][:1]
    for value in inner:
        if value.name in leaves:  # the exp that makes a leaf positive: using it elsewhere is no matter
            continue
        graph = in_f64(rule, rng)
        graph.set_outputs([*graph.outputs, graph.value(value.name)], ["y", "also"])
        assert not rewrite(graph, [rule]), f"{rule.equation} fires although {value.name} is used elsewhere"


@pytest.mark.parametrize("name", REAL_ONLY)
def test_rules_of_real_numbers_leave_integers_alone(name: str) -> None:
    """A root of the pattern's kind over integers, where the op takes them."""
    rule, graph = EQUATIONS[name], Graph("g")
    x = graph.add_input("x", TensorType((2, 3), DType.I32))
    arity = len(rule.pattern.operands)
    two = graph.constant(np.array(2, np.int32))
    graph.set_outputs([graph.add(rule.pattern.build(dict(rule.sample)), *[x, two][:arity])], ["y"])
    assert not rewrite(graph, [rule])


def test_names_are_unique() -> None:
    assert {"gelu_x_halved", "merge_constants", "fold_batchnorm"} <= names()
    by_name = {r.name: r for known in rules_by_pass().values() for r in known}
    assert all(r is by_name[r.name] for known in rules_by_pass().values() for r in known)
    assert not by_name.keys() & rules_by_pass().keys()


def test_leaves_are_all_used() -> None:
    for rule in EQUATIONS.values():
        found = {t.name for t in subterms(rule.pattern) if isinstance(t, TracedTensor)}
        assert found == {n for n, k in rule.parameters.items() if k in ("TracedTensor", "Weight")}, rule.name
        assert isinstance(rule.pattern, Apply)


@pytest.mark.parametrize("name", EQUATIONS)
def test_both_sides_agree_on_nan_and_infinity(name: str, rng: np.random.Generator) -> None:
    rule = EQUATIONS[name]
    before = in_f64(rule, rng)
    after = before.clone()
    rewrite(after, [rule])
    feeds = {
        v.name: rng.choice(np.array([np.nan, np.inf, -np.inf, -0.0, 0.0, 1.0, -2.0]), v.type.shape)
        for v in before.inputs
    }
    (want,), (got,) = (evaluate(g, feeds, precision=DType.F64).values() for g in (before, after))
    assert np.array_equal(np.isnan(got), np.isnan(want))
    infinite = np.isinf(want)
    assert np.array_equal(got[infinite], want[infinite])
    assert np.array_equal(np.isinf(got), infinite)


def test_the_folder_of_rules_is_a_module() -> None:
    """`import fusec.passes.rules.activation as name` reads attributes, which a function of that name would hide."""
    assert isinstance(fusec.passes.rules, ModuleType)
