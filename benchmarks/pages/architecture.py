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

| question | file |
|---|---|
QUESTIONS
## Who imports whom

An arrow leads from a layer to a layer that it imports. Arrows that others imply are left out. Nothing imports upwards;
[pyproject.toml](../pyproject.toml) holds the order of all modules, and `make lint` checks it, also inside the folders.

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
    "judge": ("ask cuDNN if it can run these graphs; partitioning asks for several at a time", "gpu/cudnn/legality.py"),
    "tune": ("time plans and kernels on the GPU, and choose one for each step", "gpu/autotune/__init__.py"),
    "run": ("bind the steps to memory, run them, and capture them as a CUDA graph", "runtime.py"),
}

# From top to bottom. import-linter holds the order of the modules; these are its lines in groups that fit on a screen.
LAYERS = {
    "interfaces": "cli session torch_backend onnx_backend serving scale dask ray generation quantization report "
    "testing",
    "compiler": "driver compiler dynamic_shapes segments runtime",
    "reports and files": "diagnostics convert artifacts lockfile atlas repro",
    "GPU": "execution gpu",
    "passes": "passes",
    "models": "frontends builder training gradients exporters text",
    "lowering": "lower_cudnn lowering schedule",
    "graph": "ir graph ops reference plans targets",
}

FILE = re.compile(r"[\w/]+\.(?:py|json)")
QUESTIONS = {  # the answers name files below fusec/, which become links
    "In which order do passes run, and why?": "`PIPELINE` in passes/__init__.py",
    "Which ops become one step?": "passes/partition/candidates.py proposes, passes/partition/cover.py chooses",
    "Why did an op not fuse? Who decides?": "passes/partition/cover.py (`_pick`, `_decide`); cuDNN, which "
    "gpu/cudnn/legality_judge.py asks",
    "Who words the reason why an op did not fuse?": "`WITHOUT` in lower_cudnn.py for an op; passes/partition/cover.py, "
    "passes/partition/strict_rounding.py, lowering/known_bugs/graph_rules.py, and gpu/cudnn/error_messages.py for "
    "cuDNN's answers. `STAGES` in diagnostics/explain/explain_program.py names who refused",
    "Where would I add an op, a rule, a pass, a lowering, a kernel, a GPU, an ONNX op or a command?": "the tables of "
    "[CONTRIBUTING.md](../CONTRIBUTING.md#where-additions-go) list the files of each",
    "Where would I add a fused op?": "its meaning in a file of ops, such as ops/normalization.py; a rule that "
    "recognises it in passes/rules/norm.py or next to it; lower_cudnn.py if cuDNN runs it, `FAMILIES` in "
    "gpu/kernels/__init__.py if a kernel does. CONTRIBUTING.md lists all files",
    "What does cuDNN compute wrongly?": "lowering/known_bugs/graph_rules.py, lowering/known_bugs/plan_rules.py",
    "Who consults these rules?": "for graphs lower_cudnn.py, lowering/graph_builder.py, gpu/cudnn/judges.py "
    "and gpu/cudnn/legality.py; for plans gpu/cudnn/plan_list.py, gpu/cudnn/plan_builder.py, "
    "gpu/autotune/plan_bench.py and gpu/autotune/tuning_cache.py",
    "Does cuDNN, cuBLASLt or a kernel run a step?": "gpu/autotune/step_candidates.py lists the candidates, "
    "gpu/autotune/candidate_times.py chooses by time, gpu/autotune/step_selection.py stores the choice. Without a GPU: "
    "passes/partition/cover.py, and passes/partition/partition_graph.py for what cuDNN does not run",
    "Which plan of cuDNN runs a graph?": "gpu/autotune/plan_selection.py",
    "Which variant of a kernel runs?": "gpu/autotune/variant_selection.py",
    "When is a choice not measured again?": "gpu/autotune/tuning_cache.py; "
    "gpu/shape_transfer/transfer_choices.py for other sizes",
    "Where are choices stored, and by which key?": "plans/plan_cache.py; `PlanKey` in plans/plan_record.py, which "
    "gpu/autotune/tuning_environment.py and gpu/autotune/tuning_cache.py fill",
    "Where are cuDNN's verdicts stored, and by which key?": "plans/sqlite_cache.py; `_environment` in "
    "gpu/cudnn/legality.py",
    "Where is split-K chosen: how many blocks share the sum of a convolution?": "gpu/kernels/convolution/split_k.py",
    "Which results reject a plan or a kernel?": "gpu/autotune/result_check.py for plans, gpu/launch/kernel_launcher.py "
    "for variants of a kernel; gpu/measure/tolerance.py is the bound",
    "When does tuning stop?": "`LEVELS` and the budget in gpu/autotune/plan_search.py; `SECONDS` in "
    "gpu/autotune/coordinate_descent.py for the whole model",
    "What does `--budget` stop?": "questions to cuDNN (`within` in gpu/cudnn/judges.py): what was not asked about runs "
    "unfused (passes/partition/cover.py). Timing, in gpu/autotune/plan_search.py: each graph still gets a plan. "
    "gpu/backend.py bounds the search over the whole model",
    "How often is a plan or kernel timed, and how?": "`_time_last` and `ROUNDS` in gpu/autotune/plan_search.py; "
    "gpu/measure/timer.py measures, on data of gpu/measure/random_inputs.py",
    "Which plans may a compilation use: engines, workspace, fixed order of sums?": "plans/plan_filter.py",
    "Who knows that cuDNN refuses a graph, such as a depthwise convolution of 8-bit integers?": "no file: cuDNN is "
    "asked, and plans/verdict.py records its answer. `WITHOUT` in lower_cudnn.py and `refusal` in gpu/cudnn/judges.py "
    "hold what fusec does not ask. gpu/kernels/__init__.py finds a kernel for it",
    "What happens when cuDNN crashes or hangs?": "it runs in a process of its own: gpu/cudnn/worker_process.py tells "
    "how that ended, and gpu/cudnn/worker_pool.py starts another. On the GPU, gpu/autotune/plan_search.py puts a plan "
    "that costs the process its GPU into quarantine (plans/plan_cache.py)",
    "What happens when the GPU has no memory left?": "`out_of_memory` in gpu/launch/stream_calls.py makes it an "
    "ExecutionError, in a call and while plans and kernels are timed. gpu/autotune/plan_bench.py leaves out plans "
    "whose workspace does not fit",
    "Who holds a plan, and who frees it?": "gpu/autotune/plan_selection.py holds the plans of a backend, and with it "
    "they go: Python frees gpu/cudnn/built_plan.py, and gpu/cublaslt/descriptors.py its own",
    "What is the least time of a step (roofline), and its modelled time?": "passes/partition/cost_model.py",
    "Which options does a compilation have, and where are they checked?": "execution/compile_options.py",
    "What happens to a weight?": "frontends/onnx/tensors.py reads it when it is first used, frontends/onnx/emit.py "
    "makes it a constant, passes/rewriting/derived_constants.py folds constants into it "
    "(passes/folding/fold_scales.py: factors), passes/layout/precision.py casts it, passes/layout/assign_layout.py "
    "orders it, execution/shared_weights.py stores it once, execution/step_binding.py uploads it, "
    "lowering/packing.py packs narrow types",
    "Where are the scales of 8-bit products folded?": "passes/quantization/integer_products.py folds them into one "
    "factor of the exact sums, after passes/quantization/move_scales.py moved them to its operands; "
    "passes/quantization/run_in_fp8.py does so for fp8. The factor runs in the epilogue of the product: of cuDNN "
    "(lower_cudnn.py), cuBLASLt (gpu/cublaslt/match.py) or a kernel. passes/folding/fold_scales.py folds factors of "
    "floats into weights",
    "Which layers does quantisation leave in float?": "quantization/placement.py by kind, "
    "quantization/choose_float.py by their loss",
    "Where is a value stored?": "schedule/memory_plan.py; schedule/buffer_donation.py for state",
    "Which figures of a GPU are used? What changes with more multiprocessors?": "those of the compiled target, such "
    "as targets/h200.json; gpu/kernels/codegen/gpu_figures.py reads what shapes kernels, and gpu/kernels/__init__.py "
    "hands it to each family. No other file names a number of multiprocessors. Choices of steps timed with other "
    "figures are not used",
    "What stays when a process is killed?": "complete files: system/atomic_write.py writes each whole or not at all, "
    "for plans/plan_cache.py, .fusec files, locks and reports. Verdicts stay in plans/sqlite_cache.py, finished "
    "chunks of the fuzzer in testing/runner/database.py. No child process (system/parent_death.py) and no shared "
    "memory (scale/shared_block.py) stays. scale/device_queue.py and serving/server/supervisor.py start a dead worker "
    "again",
    "What does a call do?": "runtime.py",
    "Where is a CUDA graph captured?": "gpu/launch/cuda_graph.py",
    "Which steps run side by side?": "schedule/dependencies.py finds the steps that each must wait for; "
    "gpu/launch/cuda_graph.py captures both orders and times them",
    "Where is a launch made dependent?": "`dependent` of a `Launch` (gpu/kernels/codegen/kernel.py), which each kernel "
    "sets for itself; gpu/launch/dependent_launch.py launches it so",
    "Where is CUDA source compiled?": "gpu/nvrtc.py",
    "Where does a decoder store keys and values?": "generation/decoder_graph.py makes them state of two programs; "
    "execution/state.py holds state on the device",
    "Which input sizes are padded, and to what?": "dynamic_shapes/padding.py pads where frontends/padding_proof.py "
    "proves that results stay the same; serving/batch_sizes.py pads rows of a batch",
    "Where is a model split at a host step?": "where the import of a node raises `HostValueError` "
    "(frontends/onnx/host_values.py); frontends/onnx/segmented/segments.py makes the segments, "
    "segments/executable.py runs them",
    "How does the server form batches?": "serving/server/batch_queue.py",
    "When does the server refuse a request?": "serving/server/infer_handler.py, before it is read or queued; "
    "serving/server/model_worker.py where it waited too long, serving/server/worker_link.py where the worker is late",
    "Which plans and kernels of others does this machine run?": "those that plans/trusted_plans.py lists; "
    "artifacts/read_file.py and gpu/launch/cubins.py ask it",
    "Where does a step get its name, such as `conv+bias+relu`?": "`signature` and "
    "`display_name` in schedule/program.py",
    "What does the fuzzer compare, and how close must results be?": "`PROPERTIES` in testing/properties/table.py; "
    "testing/error_bounds/bounds.py bounds the difference",
    "How is a failing graph made smaller?": "testing/runner/shrink.py; testing/runner/crash_shrink.py for crashes",
}


def questions() -> str:
    """Write the rows of the questions. Raises FileNotFoundError for an answer that names a missing file."""
    return "".join(f"| {question} | {linked(answer)} |\n" for question, answer in QUESTIONS.items())


def stages() -> str:
    """Write the rows of the stages. Raises FileNotFoundError for a missing file."""
    return "".join(f"| {stage} | {what} | {linked(file)} |\n" for stage, (what, file) in STAGES.items())


def linked(text: str) -> str:
    """Turn the names of files below fusec/ into links."""
    for name in FILE.findall(text):
        (PACKAGE / name).stat()
    return FILE.sub(r"[`\g<0>`](../fusec/\g<0>)", text)


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
