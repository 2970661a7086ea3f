"""Test that parsing is the inverse of printing, and that any bad text raises a ModelError."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from ops.cases import CASES, Case

from fusec.errors import ModelError
from fusec.ir import NUMBERS, Constant, DType, Graph, Literal, TensorType, Value, print_graph, print_node, print_op
from fusec.ops import pw
from fusec.ops.pointwise import Pointwise
from fusec.reference import evaluate
from fusec.text import parse, parse_op

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6) | st.sampled_from(
    ["x", "layer1.0/conv", "a:b", "a:", '"', "\\", "\n", "%", "x y", "return", "0", "ü", "\x85", "\u2028", "}"]
)
APPLIED = [case for cases in CASES.values() for case in cases]
EXTREMES = np.array([np.nan, np.inf, -np.inf, -0.0, 5e-324, 1e300, 0.1])
PROFILE = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def weights_of(graph: Graph) -> dict[str, np.ndarray[Any, Any]]:
    return {node.op.literal.label: node.op.literal.array for node in graph.nodes if isinstance(node.op, Constant)}


def round_trip(graph: Graph, locations: bool = False) -> Graph:
    return parse(print_graph(graph, locations), weights_of(graph))


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Draw a graph of a few cases, applied to inputs, constants and each other's results."""
    graph = Graph(draw(NAMES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    for case in draw(st.lists(st.sampled_from(APPLIED), min_size=1, max_size=5)):
        _apply(draw, graph, case, rng)
    values = draw(st.lists(st.sampled_from(list(graph.values())), min_size=1, max_size=4))
    names = draw(st.lists(NAMES, min_size=len(values), max_size=len(values), unique=True))
    graph.set_outputs(values, names)
    graph.verify()
    return graph


def _apply(draw: st.DrawFn, graph: Graph, case: Case, rng: np.random.Generator) -> None:
    arguments: list[Value] = []
    dtype = draw(st.sampled_from([DType.F64, DType.F32, DType.F16, DType.BF16]))
    extreme = draw(st.booleans())
    for array in case.arrays(rng):
        if array.dtype.kind == "f":
            with np.errstate(all="ignore"):
                array = (rng.choice(EXTREMES, array.shape) if extreme else array).astype(dtype.numpy)
        type = TensorType(array.shape, DType.of(array.dtype))
        same_type = [v for v in graph.values() if v.type.same_value_type(type)]
        origin = draw(st.lists(NAMES, max_size=2))
        match draw(st.integers(0, 2)):
            case 0 if same_type:
                arguments.append(draw(st.sampled_from(same_type)))
            case 1:
                name = graph.fresh_name(draw(NAMES))  # the label is what a large weight is looked up by
                literal = Literal.of(array, name)
                graph.rename(graph.insert(Constant(literal), origin=origin).result, f"{name}.c")
                arguments.append(list(graph.values())[-1])
            case _:
                order = draw(st.permutations(range(type.rank)))
                arguments.append(graph.add_input(graph.fresh_name(draw(NAMES)) + "'", type.with_order(tuple(order))))
    graph.insert(case.op_of(dtype), arguments, names=[draw(NAMES)], origin=draw(st.lists(NAMES, max_size=2)))


@PROFILE
@given(graphs(), st.booleans())
def test_parsing_what_was_printed_gives_it_back(graph: Graph, locations: bool) -> None:
    again = round_trip(graph, locations)
    assert print_graph(again, locations) == print_graph(graph, locations)
    for old, new in zip(graph.nodes, again.nodes, strict=True):
        assert [v.type for v in old.results] == [v.type for v in new.results]
        if isinstance(old.op, Constant) and isinstance(new.op, Constant):
            assert old.op.literal.digest == new.op.literal.digest or np.isnan(old.op.literal.array).any()
        else:
            assert old.op == new.op
        if locations:
            assert old.origin == new.origin


@PROFILE
@given(st.sampled_from(NUMBERS), st.data())
def test_inline_elements_are_exact(dtype: DType, data: st.DataObject) -> None:
    """Equal bit by bit, except the payload of NaNs."""
    raw = data.draw(st.binary(min_size=dtype.itemsize * 8, max_size=dtype.itemsize * 8))
    array = np.frombuffer(raw, dtype.numpy) if dtype is not DType.BOOL else np.frombuffer(raw, np.uint8) % 2 == 0
    if dtype.is_narrow_int or dtype is DType.F4E2M1:  # a byte holds more than they do
        array = np.frombuffer(raw, np.int8).astype(np.float32 if dtype is DType.F4E2M1 else np.int8).astype(dtype.numpy)
    graph = Graph()
    graph.set_outputs([graph.constant(array.reshape(2, 4))])
    got = next(iter(round_trip(graph).nodes)).op.literal.array  # type: ignore[attr-defined]
    assert got.dtype == array.dtype and got.shape == (2, 4)
    with np.errstate(invalid="ignore"):
        number = ~np.isnan(array.astype(np.float64))
    assert got.reshape(-1)[number].tobytes() == array[number].tobytes()
    assert np.isnan(got.reshape(-1)[~number].astype(np.float64)).all()


@pytest.mark.parametrize(
    "spelled", ["inf", "-inf", "nan", "-0.0", "0", "1", "5e-324", "1.7976931348623157e+308", "1e5", "3."]
)
def test_float_literals(spelled: str) -> None:
    graph = parse(f'graph "g" () {{\n  %c = constant [{spelled}] : f64[]\n  return %c\n}}')
    got = evaluate(graph, {})["c"]
    np.testing.assert_array_equal(got, float(spelled))
    assert np.signbit(got) == np.signbit(float(spelled))


@pytest.mark.parametrize("value", [2**64 - 1, 2**63, 0])
def test_unsigned_literals_keep_every_bit(value: int) -> None:
    graph = Graph()
    graph.set_outputs([graph.constant(np.array([value], np.uint64))])
    assert int(evaluate(round_trip(graph), {})["v0"][0]) == value


def test_large_constants_are_looked_up(rng: np.random.Generator) -> None:
    big = rng.normal(size=17).astype(np.float32)
    text = 'graph "g" () {\n  %w = constant weight("a \\"b\\"") : f32[17]\n  return %w\n}'
    np.testing.assert_array_equal(evaluate(parse(text, {'a "b"': big}), {})["w"], big)
    assert print_graph(parse(text, {'a "b"': big})) == text


def test_comments_and_free_spacing() -> None:
    text = """# one graph
      graph "g"(%x: f32[2,],)   # inputs
      {%y=relu(%x):f32[2] return
        %y as "out" } # the end"""
    assert print_graph(parse(text)) == ('graph "g" (%x: f32[2]) {\n  %y = relu(%x) : f32[2]\n  return %y as "out"\n}')


def test_result_types_may_be_left_out_and_orders_given() -> None:
    text = (
        'graph "g" (%x: f32[1,2,3,4]{0,2,3,1}) {\n  %y = relu(%x)\n  %z = relu(%x) : f32[1,2,3,4]\n  return %y, %z\n}'
    )
    y, z = parse(text).outputs
    assert y.type.order == (0, 2, 3, 1)
    assert z.type.order == ()


@pytest.mark.parametrize(
    ("rest", "type"),
    [
        (" {1,0}", "f32[2,3]{1,0}"),
        (" # a comment\n  {1,0}", "f32[2,3]{1,0}"),
        ("{ 1, 0 }", "f32[2,3]{1,0}"),
        ("\n of [4,3]", "f32[2,3] of [4,3]"),
        ("{1,0} of [4,3]", "f32[2,3]{1,0} of [4,3]"),
        ("{1,0}\tof [4,3]", "f32[2,3]{1,0} of [4,3]"),
        (" ", "f32[2,3]"),
    ],
)
def test_a_type_is_read_to_its_end_also_after_a_shorter_one(rest: str, type: str) -> None:
    inputs = f"%a: f32[2,3], %b: f32[2,3]{{1,0}}, %c: f32[2,3]{rest}"
    assert str(parse(f'graph "g" ({inputs}) {{ return %c }}').inputs[2].type) == type


def test_the_result_types_of_a_node_are_inferred_once(monkeypatch: pytest.MonkeyPatch) -> None:
    op = type(pw("tanh"))
    infer, asked = op.infer, list[TensorType]()

    def counted(self: Pointwise, *operands: TensorType) -> tuple[TensorType, ...]:
        asked.extend(operands)
        return infer(self, *operands)

    monkeypatch.setattr(op, "infer", counted)
    parse('graph "g" (%a: f32[2,3]) { %b = tanh(%a) : f32[2,3] return %b }')
    assert asked == [TensorType((2, 3), DType.F32)]


def test_colons_belong_to_names_but_the_last() -> None:
    (x,) = parse('graph "g" (%x:0: f32[2]) { return %x:0 }').inputs
    assert x.name == "x:0"


def test_equal_ops_print_the_same_text() -> None:
    graph = parse('graph "g" (%x: f32[2]) { %y = swish(%x) {beta=2} return %y }')
    assert "{beta=2.0}" in print_graph(graph)
    graph.set_op(next(graph.nodes), pw("swish", beta=2))
    assert "{beta=2.0}" in print_graph(graph)


def test_a_rare_attribute_is_printed_where_it_has_no_default() -> None:
    text = 'graph "g" (%x: f8e4m3[2,4], %w: f8e4m3[4,2]) {\n  %y = matmul(%x, %w)ATTRIBUTES : f32[2,2]\n  return %y\n}'
    fast, plain = text.replace("ATTRIBUTES", " {fast_sums=true}"), text.replace("ATTRIBUTES", "")
    assert str(parse(fast)) == fast
    assert str(parse(text.replace("ATTRIBUTES", " {fast_sums=false}"))) == str(parse(plain)) == plain


def test_graphs_without_inputs_or_outputs() -> None:
    for text in ('graph "" () {\n  return \n}', 'graph "" (%x: f32[]) {\n  return \n}'):
        assert print_graph(parse(text)) == text


def test_a_node_prints_as_in_the_graph() -> None:
    graph = parse('graph "g" (%x: f32[2]) {\n  %y = relu(%x) : f32[2] loc("a", "b")\n  return %y\n}')
    (node,) = graph.nodes
    assert (repr(node), print_node(node, locations=True)) == (
        "%y = relu(%x) : f32[2]",
        '%y = relu(%x) : f32[2] loc("a", "b")',
    )


# texts that are wrong ----------------------------------------------------------------------------------

VALID = """graph "g" (%x: f32[1,4,5,5]{0,2,3,1}, %"a b": bool[3]) {
  %c = constant [1.0, -inf, nan] : f16[3] loc("n1", "n2")
  %w = constant weight("w") : f32[4,2,3,3]
  %n = logical_not(%"a b") : bool[3]
  %y = conv(%x, %w) {strides=[1, 1], pads=[0, 0, 0, 0], dilations=[1, 1], groups=2} : f32[1,4,3,3]
  %p = pad(%c) {pads=[0, 1], mode="constant", value=-1e3} : f16[4]
  %q = cast(%p) {to=i32} : i32[4]
  %s, %t = split(%y) {axis=1, sizes=[1, 3]} : f32[1,1,3,3], f32[1,3,3,3]
  %r = reduce(%t) {kind="sum", axes=[2, 3], keepdims=true} : f32[1,3,1,1]
  return %n, %q as "out", %s, %r
}"""
TOKENS = [
    *re.findall(r'%?"[^"]*"|%?[\w.+-]+|\S', VALID),
    *[
        "inf",
        "1" * 5000,
        "-1",
        "1e999",
        "18446744073709551616",
        "0",
        "none",
        "true",
        "nan",
        "=",
        "[" * 500,
        "\x00",
        "\\",
    ],
    *["f8", "9" * 19, "-9223372036854775808", "'", '"', "%", "\n", "#", "weight", "constant", "return", "ü", "²", "٣"],
]
WEIGHTS = {"w": np.ones((4, 2, 3, 3), np.float32)}


def check_parses_or_refuses(text: str) -> None:
    """A text is refused by a ModelError, or is a graph that survives being printed."""
    try:
        printed = print_graph(parse(text, WEIGHTS), locations=True)
    except ModelError:
        return
    assert print_graph(parse(printed, WEIGHTS), locations=True) == printed


def test_the_text_that_is_edited_is_valid() -> None:
    assert print_graph(parse(VALID, WEIGHTS), locations=True) == VALID.replace("-1e3", "-1000.0")


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_edited_text_parses_or_is_refused(data: st.DataObject) -> None:
    text = VALID
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        until = data.draw(st.integers(at, min(len(text), at + 12)) | st.just(at))
        new = data.draw(st.sampled_from(TOKENS) | st.text(max_size=3) | st.just(""))
        text = text[:at] + new + text[until:]
    check_parses_or_refuses(text)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_exchanged_tokens_parse_or_are_refused(data: st.DataObject) -> None:
    """Exchanged tokens are still tokens, so errors come from later stages of the parser."""
    tokens = list(re.finditer(r'%?"[^"]*"|%?[\w.+-]+', VALID))
    match = data.draw(st.sampled_from(tokens))
    check_parses_or_refuses(VALID[: match.start()] + data.draw(st.sampled_from(TOKENS)) + VALID[match.end() :])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_random_attributes_are_taken_or_refused(data: st.DataObject) -> None:
    """Draw attribute values of every kind for any op, also huge and negative ones."""
    case = data.draw(st.sampled_from([c for c in APPLIED if c.op.attributes]))
    types = [TensorType(a.shape, DType.of(a.dtype)) for a in case.arrays(np.random.default_rng(0))]
    numbers = st.sampled_from(
        ["0", "-1", "1", "3", "9223372036854775807", "-9223372036854775808", "1e308", "nan", "inf"]
    )
    lists = st.lists(numbers, max_size=6).map(lambda items: f"[{', '.join(items)}]")
    values = numbers | lists | st.sampled_from(["true", "none", '"linear"', "f32", "[[1]]", '["a"]'])
    spelled = ", ".join(f"{k}={data.draw(values)}" for k in case.op.attributes)
    inputs = ", ".join(f"%x{i}: {t}" for i, t in enumerate(types))
    names = ", ".join(f"%x{i}" for i in range(len(types)))
    check_parses_or_refuses(f'graph "g" ({inputs}) {{\n  %y = {case.op.name}({names}) {{{spelled}}}\n  return %y\n}}')


@PROFILE
@given(st.text())
@example("")
@example("\ufeff" + VALID)
@example(VALID.replace("\n", "\r\n"))
@example(VALID * 2)
@example("#")
@example('graph "')
@example('graph "g" (' + "%x: f32[1], " * 3)
@example("[" * 100_000)
def test_any_text_parses_or_is_refused(text: str) -> None:
    check_parses_or_refuses(text)


@pytest.mark.parametrize(
    "text",
    [
        'graph "g" (%x: f32[1]) { %y = reshape(%x) {shape=' + "[" * 100_000 + "} return %y }",
        'graph "g" (%x: f32[1]) { %y = reshape(%x) {shape=[' + "9" * 5000 + "]} return %y }",
        'graph "g" (%x: f32[' + "9" * 5000 + "]) { return %x }",
        'graph "g" (%x: f32[4294967296,4294967296,4294967296]) { return %x }',
        'graph "g" (%x: f32[1]) { %y = expand(%x) {shape=[9223372036854775807,9223372036854775807]} return %y }',
        'graph "g" (%x: f32[1]) { %y = pad(%x) {pads=[0,9223372036854775807]} return %y }',
        'graph "g" (%x: f32[' + ",".join("1" * 40) + "]) { return %x }",
        'graph "g" () { %c = constant [' + "1," * 50 + "1e400] : f32[51] return %c }",
        'graph "g" () { %c = constant [1e39] : f32[1] return %c }',
        'graph "g" () { %c = constant [[1]] : f32[1] return %c }',
        'graph "g" () { %c = constant [1.5] : i32[1] return %c }',
        'graph "g" () { %c = constant [300] : u8[1] return %c }',
        'graph "g" () { %c = constant [true] : f32[1] return %c }',
        'graph "g" () { %c = constant [1] : bool[1] return %c }',
        'graph "g" () { %c = constant [none] : f32[1] return %c }',
        'graph "g" () { %c = constant [f32] : f32[1] return %c }',
        'graph "g" () { %c = constant weight("nope") : f32[1] return %c }',
    ],
    ids=lambda text: text[11:60],
)
def test_constants_that_do_not_fit_are_refused(text: str) -> None:
    with pytest.raises(ModelError):
        parse(text)


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ('cast(%x) {to="f16"}', "to takes a dtype without quotes, such as f16"),
        ("softmax(%x) {axis=0.5}", "axis takes a whole number"),
        ("transpose(%x) {perm=0}", "perm takes a list, each item a whole number"),
        ('reduce(%x) {kind="sum", axes=[0], keepdims=1}', "keepdims takes true or false"),
        ("reduce(%x) {kind=1}", "kind takes a text in double quotes"),
        ('clip(%x) {min="0", max=1.0}', "min takes a number"),
    ],
)
def test_an_attribute_of_another_type(node: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse(f'graph "g" (%x: f32[2]) {{ %y = {node} return %y }}')


BODY = 'graph "b" (%h: f32[2], %x: f32[2]) { %y = add(%h, %x) : f32[2] return %y, %y as "row" }'


def scanned(body: str, attributes: str = "steps=3, states=1, sequences=1") -> str:
    return (
        'graph "g" (%a: f32[2], %s: f32[3,2]) {\n'
        f"  %l, %r = scan(%a, %s) {{body={body}, {attributes}}} : f32[2], f32[3,2]\n  return %l, %r\n}}"
    )


def nested(depth: int) -> str:
    """A graph with this many graphs, each within the one before."""
    text = 'graph "b" (%h: f32[2]) { return %h }'
    for _ in range(depth - 1):
        text = f'graph "b" (%h: f32[2]) {{ %y = scan(%h) {{body={text}, steps=2, states=1}} return %y }}'
    return text


def test_a_body_is_a_graph_of_its_own() -> None:
    """Its names may be those of values around it, also after it."""
    text = scanned(BODY.replace("%h", "%a").replace("%y", "%l"))
    graph = parse(text)
    assert print_graph(graph, locations=True) == text
    assert [v.name for v in graph.outputs] == ["l", "r"]
    assert graph.outputs[0].node is next(iter(graph.nodes))


def test_equal_bodies_are_equal_ops() -> None:
    ops = [next(iter(parse(scanned(body)).nodes)).op for body in (BODY, BODY.replace(" : f32[2]", ""), BODY)]
    assert len(set(ops)) == 1
    (other,) = parse(scanned(BODY.replace("add", "mul"))).nodes
    assert other.op not in ops


@pytest.mark.parametrize("depth", range(1, 6))
def test_bodies_within_bodies(depth: int) -> None:
    graph = parse(nested(depth))
    again = parse(print_graph(graph))
    assert print_graph(again) == print_graph(graph)
    assert [n.op for n in again.nodes] == [n.op for n in graph.nodes]


@pytest.mark.parametrize(
    ("text", "message", "at"),
    [
        (nested(6), "graphs nested deeper than 4", 'graph "b" (%h: f32[2]) { return'),
        (scanned(BODY.replace("add(%h, %x)", "add(%h, %a)")), "%a is not defined", "%a)"),
        (scanned(BODY.replace("return %y,", "return %s,")), "%s is not defined", "%s, %y as"),
        (scanned(BODY.replace("add", "sun")), "unknown op 'sun'", "sun("),
        (scanned("3"), "body takes a graph", "3, steps=3"),
        (scanned('"graph"'), "body takes a graph", '"graph", steps=3'),
        (scanned(f"[{BODY}]"), "body takes a graph", "[graph"),
        (scanned("graph"), "expected a string in double quotes", ", steps=3"),
        (scanned(BODY[:-1]), "expected a %name, found 'steps'", "steps=3"),
        (scanned(BODY.replace(" : f32[2] return", " : f32[3] return")), "declared f32[3] but", "add("),
        (scanned(BODY, "steps=3, states=5"), "a body of 2 inputs for 5 states and sequences", "scan("),
        (scanned(BODY, "steps=4, states=1, sequences=1"), "operand 1 is f32[3,2], not f32[4,2]", "scan("),
        (scanned(BODY).replace("[2], f32[3,2]\n", "[2], f32[2]\n"), "declared f32[2] but", "scan("),
    ],
    ids=lambda v: v[:40] if " " in v else None,
)
def test_errors_of_bodies_point_at_the_place(text: str, message: str, at: str) -> None:
    with pytest.raises(ModelError) as error:
        parse(text)
    first, line, caret = str(error.value).split("\n")
    assert message in first
    assert line[caret.index("^") :].startswith(at), str(error.value)


def test_many_lines_are_read_quickly() -> None:
    """The time of a token does not depend on its place."""
    lines = "\n".join(f"  %y{i} = relu(%{f'y{i - 1}' if i else 'x'}) : f32[2]" for i in range(5000))
    graph = parse(f'graph "g" (%x: f32[2]) {{\n{lines}\n  return %y4999\n}}')
    assert len(graph) == 5000


@pytest.mark.parametrize(
    "name",
    ["\x1b[2J", "a\nb\r\t\x07\x00", "\x85\x9b\x7f", "\u202ea\u2066", "\u2028", "\ud800", "\U000e0001", "é名\U0001f600"],
)
def test_names_are_printed_without_control_characters_and_read_back(name: str) -> None:
    graph = Graph(name)
    x = graph.add_input(name, TensorType((2,), DType.F32))
    graph.set_outputs([x], [f"{name}!"])
    text = str(graph)
    assert all(line.isprintable() for line in text.split("\n"))
    back = parse(text)
    assert (back.name, back.inputs[0].name, list(back.output_names)) == (name, name, [f"{name}!"])


@pytest.mark.parametrize("name", CASES)
def test_an_op_alone_is_parsed_as_it_is_printed(name: str) -> None:
    for case in CASES[name]:
        assert repr(parse_op(print_op(case.op))) == repr(case.op), "repr: NaN is not equal to itself"


@pytest.mark.parametrize(
    ("text", "reason"),
    [("relu {} x", "unexpected 'x' after the op"), ("nothing", "unknown op 'nothing'"), ("cast", "cast needs to=…")],
)
def test_what_is_no_op_alone_is_an_error(text: str, reason: str) -> None:
    with pytest.raises(ModelError, match=re.escape(reason)):
        parse_op(text)
