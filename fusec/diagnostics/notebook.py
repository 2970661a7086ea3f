"""Describe executables for people at a prompt: one line for `repr`, and a small table for notebooks.

Nothing is computed for it: no cuDNN is asked and no program is compiled. `fusec report` writes the long form.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fusec.diagnostics.explain import Explanation, explain
from fusec.diagnostics.text_table import bytes_text, listed
from fusec.execution.signature import SymbolicSpec, TensorSpec
from fusec.system.printable import printable

if TYPE_CHECKING:
    from fusec.dynamic_shapes.executable import DynamicExecutable
    from fusec.runtime import Executable
    from fusec.segments.executable import SegmentedExecutable

NODES_WIDTH = 60


def program_text(executable: Executable) -> str:
    """Return the line for one program: model, target, precision, device, launches, inputs and outputs."""
    compiled = executable.compiled
    return (
        f"<fusec.Executable {_name(compiled.graph.name)} for {compiled.target.name} in {compiled.options.precision}, "
        f"{_where(executable.device)}: {_launches(_explained(executable))}, "
        f"{_specs(executable.inputs)} -> {_specs(executable.outputs)}>"
    )


def program_html(executable: Executable) -> str:
    """Return a table about one program, with a table of its steps that opens on a click."""
    compiled, explanation = executable.compiled, _explained(executable)
    weights = {id(v.literal): v.type.nbytes for node in compiled.graph.nodes for v in node.results if v.literal}
    rows = {
        "target": f"{compiled.target.name} ({compiled.target.device_name}), {compiled.options.precision}",
        "runs": _where(executable.device),
        "inputs": _specs(executable.inputs),
        "outputs": _specs(executable.outputs),
        "steps": explanation.summary,
        "memory": f"{bytes_text(executable.memory.nbytes)} of values, {bytes_text(sum(weights.values()))} of weights",
    }
    rows |= {"note": explanation.note} if explanation.note else {}
    rows |= {f"hint: {hint.kind}": hint.text for hint in executable.hints}
    head = ("#", "runs as", "ops", "model nodes", "read", "written")
    steps = [
        (
            str(s.index),
            s.runs_as,
            s.ops,
            listed(s.nodes, NODES_WIDTH),
            *map(bytes_text, (s.read_bytes, s.written_bytes)),
        )
        for s in explanation.steps
    ]
    return _card(f"fusec.Executable {_name(compiled.graph.name)}", rows, f"{len(steps)} steps", head, steps)


def shapes_text(executable: DynamicExecutable) -> str:
    """Return the line for a model with symbolic dims: file, device, inputs and outputs, and its programs."""
    return (
        f"<fusec.DynamicExecutable {printable(executable.source.file)}, {_where(executable.device)}: "
        f"{_symbolic(executable)}; {_compiled(executable.shapes)}>"
    )


def shapes_html(executable: DynamicExecutable) -> str:
    """Return a table about a model with symbolic dims, with a table of its programs that opens on a click."""
    ranges = {name: str(sizes) for name, sizes in executable.sizing.ranges.items()}
    rows = {"runs": _where(executable.device), "inputs -> outputs": _symbolic(executable)}
    rows |= {"sizes": ", ".join(f"{name}: {sizes}" for name, sizes in ranges.items())} if ranges else {}
    names = tuple(spec.name for spec in executable.inputs)
    shapes = [tuple(str(list(each[name])) for name in names) for each in executable.shapes]
    return _card(f"fusec.DynamicExecutable {executable.source.file}", rows, _compiled(executable.shapes), names, shapes)


def segments_text(executable: SegmentedExecutable) -> str:
    """Return the line for a model with host steps: file, device, inputs and outputs, and its programs."""
    return (
        f"<fusec.SegmentedExecutable {printable(executable.file)}, {_where(executable.device)}: "
        f"{_symbolic(executable)}; {_compiled(executable.programs)}, with host steps between them>"
    )


def segments_html(executable: SegmentedExecutable) -> str:
    """Return a table about a model with host steps, with a table of its programs that opens on a click."""
    rows = {"runs": _where(executable.device), "inputs -> outputs": _symbolic(executable)}
    programs = [
        (_launches(_explained(each)), f"{_specs(each.inputs)} -> {_specs(each.outputs)}")
        for each in executable.programs
    ]
    more = f"{_compiled(programs)}, with host steps between them"
    return _card(f"fusec.SegmentedExecutable {executable.file}", rows, more, ("runs", "inputs -> outputs"), programs)


def _explained(executable: Executable) -> Explanation:
    """Explain the steps alone, which asks cuDNN nothing."""
    compiled = executable.compiled
    steps = explain(compiled.program, compiled.target, cores=False, libraries=executable.libraries())
    return replace(steps, asked=compiled.asked)


def _launches(explanation: Explanation) -> str:
    counts = explanation.totals
    named = {"cudnn": "cuDNN", "cublaslt": "cuBLASLt", "kernels": "other"}
    kinds = ", ".join(f"{counts[kind]} {name}" for kind, name in named.items() if counts[kind])
    return f"{counts['launches']} launches" + (f" ({kinds})" if kinds else "")


def _where(device: str) -> str:
    return device if device in ("simulated", "cpu") else f"on {device}"


def _name(name: str) -> str:
    return f'"{printable(name)}"'


def _specs(specs: Sequence[TensorSpec | SymbolicSpec]) -> str:
    """Write inputs or outputs: `x float32[1, 3, 224, 224]`; `?` for what a model does not declare."""
    texts: list[str] = []
    for spec in specs:
        dims = "?" if spec.shape is None else ", ".join(str(d) if d != "" else "?" for d in spec.shape)
        kind = "?" if spec.dtype is None else "string" if spec.dtype == object else spec.dtype.name
        texts.append(f"{printable(spec.name)} {kind}[{printable(dims)}]")
    return ", ".join(texts) or "nothing"


def _symbolic(executable: DynamicExecutable | SegmentedExecutable) -> str:
    return f"{_specs(executable.inputs)} -> {_specs(executable.outputs)}"


def _compiled(programs: Sequence[object]) -> str:
    return f"{len(programs)} program{'s' * (len(programs) != 1)} compiled"


def _card(title: str, rows: Mapping[str, str], more: str, head: Sequence[str], table: Sequence[Sequence[str]]) -> str:
    """Return HTML: a title, a row for each fact, and a table in <details>. All texts are escaped here."""
    facts = "".join(f"<tr><th>{_safe(what)}</th>{_cells([text])}</tr>" for what, text in rows.items())
    body = "".join(f"<tr>{_cells(row)}</tr>" for row in table)
    heads = "".join(f"<th>{_safe(text)}</th>" for text in head)
    steps = f"<details><summary>{_safe(more)}</summary><table><tr>{heads}</tr>{body}</table></details>"
    return f"<div><strong>{_safe(title)}</strong><table>{facts}</table>{steps if table else _safe(more)}</div>"


def _cells(texts: Sequence[str]) -> str:
    return "".join(f'<td style="text-align:left">{_safe(text)}</td>' for text in texts)


def _safe(text: str) -> str:
    return html.escape(printable(text))
