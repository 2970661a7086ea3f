"""Choose the memory orders of inputs and outputs: row-major, unless the caller chose channels last.

`AssignLayout` follows them and puts copies where they cost least. `insert_interface_copies` copies those that it left
in another order, such as where that pass is disabled.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fusec.errors import FusecError
from fusec.ir import Graph, Node, TensorType, Value, channels_last, quote
from fusec.ops import Relayout
from fusec.passes.base import Options, Orders, names_of
from fusec.schedule.aliasing import same_storage

Order = tuple[int, ...]

RANKS = (3, 4, 5)  # of inputs and outputs that the caller names
IMAGES = (4, 5)  # of those that are images, if the caller names none


def chosen(graph: Graph, wanted: bool | Collection[str], state: Mapping[str, str]) -> Orders:
    """List the inputs and outputs to store channels last: the named ones, or all images if True.

    Raises FusecError for a name that is no input or output, is state, or has no channels.
    """
    types: dict[str, list[TensorType]] = {}
    for name, value in (
        *((v.name, v) for v in graph.inputs),
        *zip(graph.output_names, graph.outputs, strict=True),
    ):
        types.setdefault(name, []).append(value.type)
    held = {*state, *state.values()}
    if isinstance(wanted, bool):
        found = [n for n, ts in types.items() if wanted and n not in held and all(t.rank in IMAGES for t in ts)]
    else:
        found = names(wanted)
    require_known(types, found)
    for name in found:
        if name in held:
            raise FusecError(f"channels_last: {quote(name)} is state, whose memory order fusec chooses")
        for type in types[name]:
            if type.rank not in RANKS:
                raise FusecError(
                    f"channels_last: {quote(name)} is {type}; channels are the second of {RANKS[0]} to {RANKS[-1]} dims"
                )
    return tuple((name, channels_last(types[name][0].rank)) for name in types if name in set(found))


def names(wanted: Collection[str]) -> list[str]:
    """Return one name, or several, as a list without duplicates."""
    return list(dict.fromkeys(names_of("channels_last", wanted)))


def require_known(known: Collection[str], wanted: Collection[str]) -> None:
    """Check that each name is an input or output of the model.

    Raises FusecError for the first name that is not.
    """
    for name in wanted:
        if name not in known:
            named = ", ".join(map(quote, known))
            raise FusecError(f"channels_last: {quote(name)} is no input or output of the model; those are {named}")


def normal_order(type: TensorType, order: Order) -> Order:
    """Return the order to record: row-major wherever dims other than 1 are stored so."""
    return () if same_storage(type.shape, order, ()) else order


def first_user(graph: Graph, value: Value) -> Node:
    """Return the first node in graph order that reads a value, or the return node."""
    users = set(value.users)
    return next((node for node in graph.nodes if node in users), graph.return_node)


def set_input_orders(graph: Graph, options: Options) -> None:
    """Give inputs the memory orders that the caller chose."""
    chosen = dict(options.orders)
    for value in graph.inputs:
        if value.name in chosen:
            graph.set_type(value, value.type.with_order(normal_order(value.type, chosen[value.name])))


def returned(graph: Graph, options: Options) -> list[Order]:
    """List the memory order of each output; an output that replaces state has the order of that state."""
    chosen, inputs = dict(options.orders), {v.name: v for v in graph.inputs}
    replaced = {output: inputs[name].type.order for name, output in options.state if name in inputs}
    return [
        replaced.get(name, normal_order(value.type, chosen.get(name, ())))
        for name, value in zip(graph.output_names, graph.outputs, strict=True)
    ]


def insert_interface_copies(graph: Graph, options: Options) -> None:
    """Copy inputs and outputs that are not stored as the caller chose."""
    chosen = dict(options.orders)
    copies: dict[tuple[Value, Order], Value] = {}
    for value in graph.inputs:
        own = value.type.order
        wanted = normal_order(value.type, chosen.get(value.name, own))
        if wanted == normal_order(value.type, own):
            continue
        graph.set_type(value, value.type.with_order(wanted))
        if value.uses:
            copy = graph.insert(Relayout(own), [value], before=first_user(graph, value), names=(value.name,))
            for user, index in value.uses:
                if user is not copy:
                    graph.set_input(user, index, copy.result)
    last = graph.return_node
    for index, (name, value) in enumerate(zip(graph.output_names, graph.outputs, strict=True)):
        order = normal_order(value.type, chosen.get(name, value.type.order))
        if order == normal_order(value.type, value.type.order):
            continue
        if (value, order) not in copies:
            copies[value, order] = graph.insert(Relayout(order), [value], before=last, names=(value.name,)).result
        graph.set_input(last, index, copies[value, order])
