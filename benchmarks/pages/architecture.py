"""Write docs/architecture.md and docs/files.md: the map of the package, made from its imports and docstrings.

The map answers questions on one screen each. The list of files is a page of its own, because it is long.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import grimp
import networkx as nx

from benchmarks.pages.questions import QUESTIONS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fusec"
ENTRY = {
    "fusec.__main__",
    "fusec.errors",
    "fusec.system",
}  # imported by nearly all, or by none: arrows would tell nothing

MAP = """# The map of fusec

This page shows where each thing is decided. [files.md](files.md) lists every file. Both pages are generated: the
picture from the imports, the tables from the first line of each docstring (`python -m benchmarks.pages.architecture`).

## The life of a model

A model passes these stages:

| stage | what it does | file |
|---|---|---|
STAGES
Read [`fusec/driver.py`](../fusec/driver.py) first, then
[`fusec/compiler/compile_model.py`](../fusec/compiler/compile_model.py), which calls one function for each stage.

## Where is it decided?

QUESTIONS
## Who imports whom

An arrow leads from a layer to a layer that it imports. Arrows that others imply are left out. Nothing imports upwards,
and no files import each other in a circle. [pyproject.toml](../pyproject.toml) holds the order of the folders, and that
of the files in many folders. `make lint` checks it.

PICTURE
## Folders

| layer | folder or file | what it does |
|---|---|---|
FOLDERS"""

FILES = """# The files of fusec

This page lists every file of the package with the first line of its docstring. It is generated
(`python -m benchmarks.pages.architecture`). [architecture.md](architecture.md) shows where each thing is decided.

"""

STAGES = {  # what each stage does, and where; the files are below fusec/
    "import": ("read an ONNX file, a torch program or the text form as a Graph", "frontends/load_model.py"),
    "passes": ("rewrite the Graph: fold, recognise, choose the precision and the layout", "passes/__init__.py"),
    "partition": ("split the Graph into the steps of a Program", "passes/partition/partition_graph.py"),
    "lower": ("write each step for cuDNN as a cuDNN graph, which is plain data", "lower_cudnn.py"),
    "judge": (
        "ask cuDNN if it can run these graphs; partitioning asks for several at a time",
        "gpu/cudnn/legality/oracle.py",
    ),
    "tune": ("time plans and kernels on the GPU, and choose one for each step", "gpu/autotune/__init__.py"),
    "run": ("bind the steps to memory, run them, and capture them as a CUDA graph", "runtime.py"),
}

# From top to bottom. import-linter holds the order of the modules; these are its lines in groups that fit on a screen.
LAYERS = {
    "interfaces": "cli session torch_backend onnx_backend serving scale dask ray generation quantization report "
    "testing",
    "compiler": "driver compiler dynamic_shapes segments runtime",
    "reports and files": "diagnostics convert artifacts lockfile atlas program_cache repro",
    "GPU": "execution gpu",
    "passes": "passes",
    "models": "frontends builder training gradients exporters text",
    "lowering": "lower_cudnn lowering schedule",
    "graph": "ir graph ops reference plans targets",
}

FILE = re.compile(r"[\w/]+\.(?:py|json)")


def questions() -> str:
    """Write a table for each topic. Raises FileNotFoundError for an answer that names a missing file."""
    tables = {topic: "".join(f"| {q} | {linked(a)} |\n" for q, a in rows.items()) for topic, rows in QUESTIONS.items()}
    return "\n".join(f"### {topic}\n\n| question | answer |\n|---|---|\n{rows}" for topic, rows in tables.items())


def stages() -> str:
    """Write the rows of the stages. Raises FileNotFoundError for a missing file."""
    return "".join(f"| {stage} | {what} | {linked(file)} |\n" for stage, (what, file) in STAGES.items())


def linked(text: str) -> str:
    """Turn the names of files below fusec/, and those that begin with tests/ or benchmarks/, into links."""

    def link(found: re.Match[str]) -> str:
        folder = ROOT if found[0].startswith(("tests/", "benchmarks/")) else PACKAGE
        (folder / found[0]).stat()
        return f"[`{found[0]}`](../{(folder / found[0]).relative_to(ROOT)})"

    return FILE.sub(link, text)


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
    """Build the graph of imports between the layers, without edges that others imply.

    Raises ValueError for a part of the package that is in no layer or in two, and for an import upwards.
    """
    package = grimp.build_graph("fusec", cache_dir=None, exclude_type_checking_imports=True)
    layer_of = {f"fusec.{part}": layer for layer, parts in LAYERS.items() for part in parts.split()}
    parts = package.find_children("fusec") - ENTRY
    if parts != set(layer_of) or len(layer_of) != sum(len(names.split()) for names in LAYERS.values()):
        raise ValueError(f"not in exactly one of LAYERS: {sorted(parts ^ set(layer_of))}")
    order = [*LAYERS]
    graph = nx.DiGraph()
    graph.add_nodes_from(order)
    for part, layer in layer_of.items():
        for module in package.find_descendants(part) | {part}:
            for imported in package.find_modules_directly_imported_by(module):
                below = layer_of.get(".".join(imported.split(".")[:2]), layer)
                if order.index(below) < order.index(layer):
                    raise ValueError(f"{module} of {layer} imports {imported} of {below}, which is above it")
                if below != layer:
                    graph.add_edge(layer, below)
    return nx.transitive_reduction(graph)


def picture(graph: nx.DiGraph[str]) -> str:
    """Draw the graph for Mermaid, which GitHub and most Markdown viewers render."""
    name = {layer: layer.replace(" ", "_") for layer in LAYERS}
    boxes = [f'    {name[layer]}["{layer}"]\n' for layer in LAYERS]
    arrows = [f"    {name[above]} --> {name[below]}\n" for above, below in sorted(graph.edges)]
    return "".join(("```mermaid\n", "flowchart TD\n", *boxes, *arrows, "```\n"))


def folders() -> str:
    """Write a row for each folder and file of the package, from the top layer to the bottom one."""
    rows: list[str] = []
    for layer, parts in LAYERS.items():
        rows += (row(PACKAGE / part, layer) for part in parts.split())
    return "".join(rows) + "".join(row(PACKAGE / name, "all") for name in ("errors", "system"))


def row(part: Path, layer: str) -> str:
    path = part if part.is_dir() else part.with_suffix(".py")
    return f"| {layer} | {link(path)} | {summary(path).replace('|', '&#124;')} |\n"


def link(path: Path) -> str:
    return f"[{path.name}{'/' * path.is_dir()}](../{path.relative_to(ROOT)})"


def tables(folder: Path) -> Iterator[str]:
    """Yield a table for a folder, then those of its folders."""
    name = folder.relative_to(ROOT)
    yield f"## {name}/"
    if folder != PACKAGE:
        yield f"\n{summary(folder)}"
    yield "\n| file | what it does |\n|---|---|"
    for path in children(folder):
        yield f"| {link(path)} | {summary(path).replace('|', '&#124;')} |"
    yield ""
    for path in children(folder):
        if path.is_dir() and any(children(path)):
            yield from tables(path)


def main() -> dict[str, str]:
    """Return the text of each page, by its name in docs/."""
    parts = {"STAGES\n": stages() + "\n", "QUESTIONS\n": questions() + "\n", "FOLDERS": folders()}
    page = MAP.replace("PICTURE\n", picture(imports()) + "\n")
    for place, text in parts.items():
        page = page.replace(place, text)
    return {"architecture.md": page, "files.md": FILES + "\n".join(tables(PACKAGE)).rstrip() + "\n"}


if __name__ == "__main__":
    for name, text in main().items():
        (ROOT / "docs" / name).write_text(text)
