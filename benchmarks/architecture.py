"""Print docs/architecture.md: the map of the package, made from its imports and docstrings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import grimp
import networkx as nx

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fusec"
ENTRY = {
    "fusec.__main__",
    "fusec.errors",
    "fusec.system",
}  # imported by nearly all, or by none: arrows would tell nothing

INTRODUCTION = """# The map of fusec

This page shows where each thing is decided. It is generated: the picture from the imports, the tables from the first
line of each docstring (`python -m benchmarks.architecture > docs/architecture.md`).

A model takes this way:

```
model.onnx → frontends → Graph → passes → Graph → partition → Program → lower_cudnn → cuDNN graphs → plans → run
```

Read [`fusec/driver.py`](../fusec/driver.py) first. It calls one function for each stage.

## Where is it decided?

| question | file |
|---|---|
QUESTIONS
## Who imports whom

An arrow leads from a folder or module to what it imports. What follows from other arrows is left out. Nothing imports
upwards; [pyproject.toml](../pyproject.toml) holds the order, and `make lint` checks it, also inside the folders.
"""


FILE = re.compile(r"[\w/]+\.(?:py|json)")
QUESTIONS = {  # the answers name files below fusec/, which become links
    "In which order do passes run, and why?": "`PIPELINE` in passes/__init__.py",
    "Which ops become one step?": "passes/partition/candidates.py proposes, passes/partition/cover.py chooses",
    "Why did an op not fuse? Who decides?": "passes/partition/cover.py (`_pick`, `_decide`); cuDNN, which "
    "gpu/cudnn/legality_judge.py asks",
    "Who words the reason why an op did not fuse?": "`WITHOUT` in lower_cudnn.py for an op; passes/partition/cover.py, "
    "passes/partition/strict_rounding.py, lowering/known_bugs/graph_rules.py, and gpu/cudnn/error_messages.py for "
    "cuDNN's answers. `STAGES` in diagnostics/explain/__init__.py names who refused",
    "What does cuDNN compute wrongly?": "lowering/known_bugs/graph_rules.py, lowering/known_bugs/plan_rules.py",
    "Who consults these rules?": "for graphs lower_cudnn.py, lowering/graph_builder.py, gpu/cudnn/partition_oracles.py "
    "and gpu/cudnn/legality.py; for plans gpu/cudnn/plan_list.py, gpu/cudnn/plan_builder.py, "
    "gpu/autotune/plan_bench.py and gpu/autotune/tuning_cache.py",
    "Does cuDNN, cuBLASLt or a kernel run a step?": "gpu/autotune/step_candidates.py lists the candidates, "
    "gpu/autotune/candidate_times.py chooses by time, gpu/autotune/step_selection.py stores the choice. Without a GPU: "
    "`alone` in passes/partition/__init__.py",
    "Which plan of cuDNN runs a graph?": "gpu/autotune/plan_selection.py",
    "Which variant of a kernel runs?": "gpu/autotune/variant_selection.py",
    "When is a choice not measured again?": "gpu/autotune/tuning_cache.py; "
    "gpu/shape_transfer/transfer_choices.py for other sizes",
    "Where are choices stored, and by which key?": "plans/plan_cache.py; `PlanKey` in plans/plan_record.py, which "
    "gpu/backend.py (`_environment`) and gpu/autotune/tuning_cache.py fill",
    "Where are cuDNN's verdicts stored, and by which key?": "plans/sqlite_cache.py; `_environment` in "
    "gpu/cudnn/legality.py",
    "How does a convolution split its sum among blocks?": "gpu/kernels/convolution/split_k.py",
    "What happens to a weight?": "frontends/onnx/tensors.py reads it when it is first used, frontends/onnx/emit.py "
    "makes it a constant, passes/rewriting/derived_constants.py folds constants into it "
    "(passes/folding/fold_scales.py: factors), passes/layout/precision.py casts it, passes/layout/assign_layout.py "
    "orders it, execution/shared_weights.py stores it once, execution/step_binding.py uploads it, "
    "lowering/packing.py packs narrow types",
    "Which layers does quantisation leave in float?": "quantization/placement.py by kind, "
    "quantization/choose_float.py by their loss",
    "Where is a value stored?": "schedule/memory_plan.py; schedule/buffer_donation.py for state",
    "Which figures of a GPU are used?": "those of the compiled target, such as targets/h200.json; "
    "gpu/kernels/codegen/gpu_figures.py reads what shapes kernels, and gpu/kernels/__init__.py hands it to each family",
    "What does a call do?": "runtime.py",
    "Where is a CUDA graph captured?": "gpu/launch/cuda_graph.py",
    "Where is a model split at a host step?": "frontends/onnx/segments.py; segments/executable.py runs the parts",
    "How does the server form batches?": "serving/server/batch_queue.py",
    "How is a failing graph made smaller?": "testing/runner/shrink.py; testing/runner/crash_shrink.py for crashes",
}


def questions() -> str:
    """Write the rows of the questions. Raises FileNotFoundError for an answer that names a missing file."""
    rows: list[str] = []
    for question, answer in QUESTIONS.items():
        for name in FILE.findall(answer):
            (PACKAGE / name).stat()
        linked = FILE.sub(r"[`\g<0>`](../fusec/\g<0>)", answer)
        rows.append(f"| {question} | {linked} |\n")
    return "".join(rows)


def summary(path: Path) -> str:
    """Read the first line of a module's docstring; a package's is in its `__init__.py`."""
    file = path / "__init__.py" if path.is_dir() else path
    return (ast.get_docstring(ast.parse(file.read_text())) or "").partition("\n")[0]


def children(folder: Path) -> Iterator[Path]:
    """Yield the modules and packages of a folder, modules first."""
    modules = sorted(p for p in folder.glob("*.py") if not p.name.startswith("__"))
    packages = sorted(p.parent for p in folder.glob("*/__init__.py"))
    yield from (*modules, *packages)


def imports() -> nx.DiGraph[str]:
    """Build the graph of imports between the parts of `fusec`, without edges that others imply."""
    whole = grimp.build_graph("fusec", cache_dir=None, exclude_type_checking_imports=True)
    parts = sorted(whole.find_children("fusec") - ENTRY)
    graph = nx.DiGraph()
    graph.add_nodes_from(parts)
    for importer in parts:
        for imported in parts:
            direct = {
                (one, other)
                for one in whole.find_descendants(importer) | {importer}
                for other in whole.find_modules_directly_imported_by(one)
                if other == imported or other.startswith(f"{imported}.")
            }
            if importer != imported and direct:
                graph.add_edge(importer, imported)
    return nx.transitive_reduction(graph)


def picture(graph: nx.DiGraph[str]) -> list[str]:
    """Draw the graph for Mermaid, which GitHub and most Markdown viewers render."""
    lines = ["```mermaid", "flowchart TD"]
    for part in sorted(graph.nodes):
        name = part.removeprefix("fusec.")
        lines.append(f'    {name}["{name}/"]' if (PACKAGE / name).is_dir() else f'    {name}(["{name}.py"])')
    lines += [
        f"    {one.removeprefix('fusec.')} --> {other.removeprefix('fusec.')}" for one, other in sorted(graph.edges)
    ]
    return [*lines, "```"]


def tables(folder: Path) -> Iterator[str]:
    """Yield a table for a folder, then those of its folders."""
    name = folder.relative_to(ROOT)
    yield f"### {name}/"
    if folder != PACKAGE:
        yield f"\n{summary(folder)}"
    yield "\n| file | what it does |\n|---|---|"
    for path in children(folder):
        label = f"{path.name}/" if path.is_dir() else path.name
        yield f"| [{label}](../{path.relative_to(ROOT)}) | {summary(path).replace('|', '&#124;')} |"
    yield ""
    for path in children(folder):
        if path.is_dir() and any(children(path)):
            yield from tables(path)


def main() -> str:
    return (
        "\n".join(
            (
                INTRODUCTION.replace("QUESTIONS\n", questions() + "\n"),
                *picture(imports()),
                "\n## Files\n",
                *tables(PACKAGE),
            )
        ).rstrip()
        + "\n"
    )


if __name__ == "__main__":
    print(main(), end="")
