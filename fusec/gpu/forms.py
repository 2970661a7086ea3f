"""Other forms of a step that compute the same: spelled otherwise, or cut in two. Measured times choose.

The partitioner's cost model proposes one form; on a device each competes with what it might have been.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from fusec.cudnn_graph import CudnnGraph
from fusec.errors import LoweringError
from fusec.ir import Graph, Node
from fusec.lower_cudnn import lower
from fusec.ops import Conv, ConvTranspose, ConvWgrad, MatMul, Pointwise
from fusec.passes.partition.answers import canonical_key
from fusec.passes.partition.cost import is_depthwise, is_fast
from fusec.passes.partition.spell import respell, spellings
from fusec.program import Kind, Partition, Program, body_of
from fusec.views import is_view

Form = tuple[Partition, ...]  # steps that take the place of one, in order
PRODUCTS = (Conv, ConvTranspose, ConvWgrad, MatMul)


def forms(graph: Graph, step: Partition, level: str) -> list[Form]:
    """Forms of a cuDNN step worth timing, the one it has first. `none`: that alone; `quick`: cut in two where the
    fused engines are known to be slow; `full`: wherever it can be cut."""
    found: list[Form] = [(step,)]
    if step.kind is not Kind.CUDNN or level == "none":
        return found
    found += [(other,) for other in _spelled(graph, step.nodes) if other.spelling != step.spelling]
    if level == "full" or _slow_when_fused(step):
        for first, second in _cuts(step.nodes):
            parts = [next(iter(_spelled(graph, nodes)), None) for nodes in (first, second)]
            found.append(tuple(part for part in parts if part is not None))
    return found


def lowered(form: Form, tensor_cores: bool) -> list[CudnnGraph] | None:
    """The cuDNN graphs of a form; None if one of them cannot be."""
    try:
        return [lower(part.body, tensor_cores).graph for part in form]
    except LoweringError:
        return None


def rewrite(
    program: Program,
    tensor_cores: bool,
    launch_us: float,
    level: str,
    time_us: Callable[[Mapping[str, CudnnGraph]], Mapping[str, float]],
) -> Program:
    """The program with each step in its fastest form.

    time_us: microseconds of graphs by key; one that cannot run is left out. launch_us: what each launch adds.
    """
    options: dict[str, list[tuple[Form, list[str]]]] = {}
    graphs: dict[str, CudnnGraph] = {}
    keys = [canonical_key(body_of(program.graph, step.nodes)) for step in program.steps]
    for step, key in zip(program.steps, keys, strict=True):
        if step.kind is not Kind.CUDNN or key in options:
            continue
        options[key] = []
        for form in forms(program.graph, step, level):
            made = lowered(form, tensor_cores)
            if made is not None:
                options[key].append((form, [g.key for g in made]))
                graphs |= {g.key: g for g in made}
    contested = {k for choices in options.values() if len(choices) > 1 for _, names in choices for k in names}
    times = time_us({key: graph for key, graph in graphs.items() if key in contested})
    best = {
        key: min(
            range(len(choices)),
            key=lambda i: sum(times.get(k, float("inf")) + launch_us for k in choices[i][1]),
        )
        for key, choices in options.items()
        if len(choices) > 1
    }
    steps: list[Partition] = []
    for step, key in zip(program.steps, keys, strict=True):
        if best.get(key, 0) == 0:
            steps.append(step)
            continue
        chosen = options[key][best[key]][0]
        steps += _again(program.graph, chosen, step)
    rewritten = Program(program.graph, tuple(steps), program.refusals)
    rewritten.verify()
    return rewritten


def _again(graph: Graph, form: Form, step: Partition) -> Iterator[Partition]:
    """The form, found on another step, for this one that does equal work."""
    start = 0
    for part in form:
        nodes = step.nodes[start : start + len(part.nodes)]
        start += len(part.nodes)
        yield Partition(nodes, Kind.CUDNN, respell(body_of(graph, nodes), part.spelling), part.spelling, part.verdict)


def _spelled(graph: Graph, nodes: Sequence[Node]) -> Iterator[Partition]:
    """The nodes as a step in each of their spellings."""
    for names, body in spellings(body_of(graph, nodes)):
        yield Partition(tuple(nodes), Kind.CUDNN, body, names)


def _slow_when_fused(step: Partition) -> bool:
    depthwise = any(is_depthwise(node) for node in step.nodes)
    return depthwise or (step.verdict is not None and not is_fast(step.verdict))


def _cuts(nodes: tuple[Node, ...]) -> Iterator[tuple[tuple[Node, ...], tuple[Node, ...]]]:
    """Behind the product, and behind a first add (a bias or residual, which engines take best), if what is left is
    pointwise. A step is convex and in graph order, so any beginning of it is a step, too."""
    at = next((i for i, node in enumerate(nodes) if isinstance(node.op, PRODUCTS)), None)
    if at is None:
        return
    places = [at + 1]
    if at + 1 < len(nodes) and nodes[at + 1].op.name == "add":
        places.append(at + 2)
    for place in places:
        rest = nodes[place:]
        if rest and all(isinstance(node.op, Pointwise) and not is_view(node) for node in rest):
            yield nodes[:place], rest
