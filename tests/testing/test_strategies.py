"""Test the strategies: graphs are valid, reach every op, and shrink to the simplest one."""

from __future__ import annotations

import contextlib
from collections import Counter

import numpy as np
import pytest
from helpers import HEALTH_CHECKS
from hypothesis import Phase, find, given, seed, settings
from hypothesis import strategies as st

from fusec.ir import NUMBERS, Constant, DType, Graph, TensorType
from fusec.ops import ALL, BY_NAME, CLASSES, Gather
from fusec.passes import rules_by_pass
from fusec.passes.rewriting.pattern import Rule
from fusec.passes.rewriting.rewriter import rewrite
from fusec.reference import evaluate
from fusec.testing.case import Case
from fusec.testing.failure import ops_of
from fusec.testing.generators.arrays import STYLES, draw_array, draw_feeds
from fusec.testing.generators.graph_builder import RandomGraph, Unfit
from fusec.testing.generators.motifs import MOTIFS
from fusec.testing.generators.motifs.repeated_work import repeated_op
from fusec.testing.generators.motifs.rewrite_rules import EQUATIONS, equation
from fusec.testing.generators.operations import DRAWS
from fusec.testing.generators.uniform_provider import register
from fusec.testing.strategies import cases, dtypes, graphs, ops, orders, shapes, single_ops, tensor_types

QUIET = settings(
    backend=register(), database=None, deadline=None, suppress_health_check=HEALTH_CHECKS, phases=[Phase.generate]
)


def many(count: int) -> settings:
    return settings(QUIET, max_examples=count)


@seed(1)
@many(300)
@given(graphs(), cases())
def test_graphs_are_valid_and_can_be_evaluated(graph: Graph, case: Case) -> None:
    graph.verify()
    assert ops_of(graph).total() <= 70
    assert graph.outputs
    results = evaluate(graph, case.inputs(graph), precision=DType.F64)
    assert all(results[name].shape == v.type.shape for name, v in zip(graph.output_names, graph.outputs, strict=True))


def test_every_op_can_be_drawn() -> None:
    assert set(DRAWS) == set(BY_NAME)
    assert len(DRAWS) == len(ALL)


@pytest.mark.parametrize("name", DRAWS)
def test_single_ops_draws_the_given_op(name: str) -> None:
    seen = Counter[str]()

    @seed(3)
    @many(6)
    @given(single_ops(name))
    def look(graph: Graph) -> None:
        graph.verify()
        seen.update(n.op.name for n in graph.nodes)
        evaluate(graph, draw_feeds(graph, 1, "normal"))

    look()
    assert seen[name]


@pytest.mark.slow
def test_graphs_reach_every_op_and_every_kind_of_value() -> None:
    seen, dtypes_seen, orders_seen, ranks = Counter[str](), set[DType](), set[tuple[int, ...]](), set[int]()
    facts = Counter[str]()

    @seed(5)
    @many(3000)
    @given(graphs())
    def look(graph: Graph) -> None:
        seen.update({n.op.name for n in graph.nodes})
        for value in graph.values():
            dtypes_seen.add(value.type.dtype)
            orders_seen.add(value.type.order)
            ranks.add(value.type.rank)
            facts["empty"] += value.type.size == 0
            facts["fan out"] += len(value.users) > 2
            facts["shared constant"] += value.literal is not None and len(value.users) > 1
            facts["escapes"] += any(not u.results for u in value.users) and len(value.users) > 1
        facts["several outputs"] += len(graph.outputs) > 2
        facts["an input returned"] += any(v.node is None for v in graph.outputs)
        facts["one value, two names"] += len(set(graph.outputs)) < len(graph.outputs)

    look()
    assert set(BY_NAME) - set(seen) == set()
    assert {*(d for d in NUMBERS if not d.is_narrow), DType.F8E4M3, DType.F8E5M2, DType.I4, DType.U4} <= dtypes_seen
    assert len(orders_seen) > 12
    assert ranks >= {0, 1, 2, 3, 4, 5}
    assert min(facts.values()) >= 3, facts


@pytest.mark.parametrize("rule", EQUATIONS, ids=lambda r: r.name)
def test_every_rule_matches_a_drawn_graph(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusec.testing.generators.motifs.rewrite_rules.EQUATIONS", (rule,))
    fired = Counter[str]()

    @st.composite
    def one(draw: st.DrawFn) -> Graph:
        builder = RandomGraph(draw)
        builder.input(TensorType((2, 3, 4), DType.F32))
        try:
            equation(builder)
        except Unfit:
            fired["unfit"] += 1
        return builder.finish(0)

    @seed(7)
    @many(25)
    @given(one())
    def look(graph: Graph) -> None:
        graph.verify()
        fired.update(rewrite(graph, [rule]))

    look()
    assert fired[rule.name], fired


def test_a_repeated_gather_keeps_its_indices_in_range() -> None:
    @st.composite
    def one(draw: st.DrawFn) -> Graph:
        builder = RandomGraph(draw)
        x = builder.input(TensorType((1, 3), DType.I64))
        builder.add(Gather(1), x, builder.graph.constant(np.array([2])))
        with contextlib.suppress(Unfit):
            repeated_op(builder)
        return builder.finish(0)

    @seed(1)
    @many(60)
    @given(one())
    def look(graph: Graph) -> None:
        evaluate(graph, draw_feeds(graph, 1, "integers"))  # raises where an index is out of range

    look()


def test_every_motif_can_be_built() -> None:
    built = Counter[str]()

    @st.composite
    def one(draw: st.DrawFn) -> str:
        builder = RandomGraph(draw)
        builder.input(TensorType((2, 4, 4, 4), DType.F32))
        builder.pointwise("relu", builder.values[0])
        motif = builder.pick(tuple(MOTIFS))
        try:
            motif(builder)
        except Unfit:
            return ""
        return motif.__name__

    @seed(1)
    @many(400)
    @given(one())
    def look(name: str) -> None:
        built[name] += 1

    look()
    assert {motif.__name__ for motif in MOTIFS} <= set(built)
    assert built[""] < 0.25 * built.total()
    assert rules_by_pass()


@pytest.mark.slow
def test_strategies_shrink_to_the_simplest_example() -> None:
    smallest = settings(database=None, derandomize=True, suppress_health_check=HEALTH_CHECKS)
    assert find(dtypes(), lambda d: True, settings=smallest) is DType.F32
    assert find(shapes(2, 2), lambda s: True, settings=smallest) == (2, 2)
    assert find(orders(3), lambda o: True, settings=smallest) == ()
    assert str(find(tensor_types(1), lambda t: True, settings=smallest)) == "f32[2]"
    graph = find(graphs(), lambda g: any(n.op.name == "conv" for n in g.nodes), settings=smallest)
    assert ops_of(graph).total() <= 5, graph
    assert find(cases(), lambda c: True, settings=smallest).to_json() == Case().to_json()


def test_ops_come_with_types_that_they_accept() -> None:
    names = Counter[str]()

    @seed(2)
    @many(150)
    @given(ops())
    def look(drawn: object) -> None:
        op, types = drawn  # type: ignore[misc]
        op.infer(*types)
        names[op.name] += 1

    look()
    assert len(names) > 40


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dtype", [DType.F32, DType.F16, DType.BF16, DType.I8, DType.U8, DType.BOOL])
def test_styles(style: str, dtype: DType, rng: np.random.Generator) -> None:
    array = draw_array(rng, TensorType((8, 50), dtype), style)
    assert array.dtype == dtype.numpy
    assert array.shape == (8, 50)
    wide = array.astype(np.float64)
    assert len(np.unique(wide)) > 1
    assert np.isfinite(wide).all() == (style != "special" or not dtype.is_float)
    if style == "integers":
        assert np.array_equal(wide, np.round(wide))
        assert np.abs(wide).max() <= 3
    if style == "positive" and dtype.is_float:
        assert wide.min() > 0
    if style == "ties" and dtype is DType.F32:
        assert np.signbit(wide[wide == 0]).any()
        assert not np.signbit(wide[wide == 0]).all()


def test_indices_stay_in_range_and_no_nan_is_cast_to_an_integer(rng: np.random.Generator) -> None:
    graph = Graph()
    x, i = graph.add_input("x", TensorType((3, 4), DType.F32)), graph.add_input("i", TensorType((50,), DType.I64))
    graph.set_outputs([graph.add(BY_NAME["gather"](axis=0), x, i)])  # type: ignore[call-arg]
    feeds = draw_feeds(graph, 1, "special")
    assert set(feeds["i"].tolist()) == {-3, -2, -1, 0, 1, 2}
    assert not np.isfinite(draw_feeds(graph, 2, "special")["x"]).all()
    graph.set_outputs([graph.add(BY_NAME["cast"](to=DType.I32), x)])  # type: ignore[call-arg]
    assert np.isfinite(draw_feeds(graph, 2, "special")["x"]).all()


def test_a_case_is_plain_data() -> None:
    case = Case(3, "ties", "fp16", frozenset({"assign_layout"}), "moody", "t4")
    assert Case.from_json(case.to_json()).to_json() == case.to_json()
    feeds = {"x": np.ones(3, np.float32)}
    graph = Graph()
    graph.set_outputs([graph.add_input("x", TensorType((3,), DType.F32))])
    assert Case.from_json(case.to_json(), feeds).inputs(graph)["x"] is feeds["x"]


def test_uniform_backend_varies_shrinks_and_repeats() -> None:
    drawn: list[list[int]] = []

    def run() -> int:
        smallest = []

        @seed(9)
        @settings(backend=register(), max_examples=400, database=None, deadline=None)
        @given(st.integers(0, 99), st.integers(0, 99))
        def look(a: int, b: int) -> None:
            drawn[-1].append(a)
            if a > 40 and b > 50:
                smallest.append((a, b))
                raise ValueError

        drawn.append([])
        with pytest.raises(ValueError):
            look()
        assert smallest[-1] == (41, 51)
        return len(drawn[-1])

    run()
    run()
    assert drawn[0] == drawn[1]
    plain: list[int] = []

    @seed(9)
    @many(300)
    @given(st.integers(0, 99))
    def spread(a: int) -> None:
        plain.append(a)

    spread()
    assert len(set(plain)) > 85


def test_unused_constants_are_removed() -> None:
    @seed(4)
    @many(50)
    @given(graphs())
    def look(graph: Graph) -> None:
        assert all(v.uses for n in graph.nodes for v in n.results if isinstance(n.op, Constant))

    look()


def test_every_pointwise_attribute_has_values_to_draw() -> None:
    from fusec.testing.generators.operations.pointwise import ATTRIBUTES

    needed = {key for c in CLASSES.values() for key in c.row.defaults}
    assert needed - {"axis"} == set(ATTRIBUTES)
