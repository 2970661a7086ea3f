"""Hold the `--json` output of every command to its schema, which docs/schemas.md publishes.

A new key goes into docs/schemas/fusec-1.json. A key that goes away or changes its meaning makes a fusec-2.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import onnx
import pytest
import typer
from cli.command import SHAPE, fusec
from jsonschema.exceptions import best_match
from quantization.models import images, residual_net

from fusec.cli import commands

SCHEMA: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "docs" / "schemas" / "fusec-1.json").read_text(encoding="utf-8")
)

pytestmark = pytest.mark.cudnn


def closed(schema: Any) -> Any:
    """Return the schema without room for keys that it does not name. The published one allows later keys."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    return {**made, "additionalProperties": False} if "properties" in made and "type" in made else made


CLOSED = closed(SCHEMA)

# The calls of each command, with `MODEL`, `NET` and `DATA` for files.
SHAPED = ("MODEL", *SHAPE, "--target", "h200")
CALLS: dict[str, list[tuple[str, ...]]] = {
    "compile": [SHAPED, (*SHAPED, "--channels-last")],
    "run": [SHAPED, (*SHAPED, "--compare", "onnxruntime"), (*SHAPED, "missing.onnx")],
    "explain": [("MODEL", *SHAPE, "--target", "h200,t4", "--precision", "bf16", "--must-fuse", "conv*+relu")],
    "verify": [SHAPED],
    "convert": [(*SHAPED, "-o", "out.onnx")],
    "quantize": [("NET", "--data", "DATA", "-o", "int8.onnx", "--report")],
    "bench": [(*SHAPED, "--runs", "2", "--profile")],
    "repro": [(*SHAPED, "--partition", "0", "-o", "repro")],
    "fuzz": [("--property", "wrong.py:wrong", "--examples", "30", "--workers", "1", "--database", "database")],
    "fuzz replay": [("fusec-findings",)],
    "lock write": [(*SHAPED, "-o", "fusec.lock")],
    "lock diff": [("fusec.lock", *SHAPED), ("fusec.lock", *SHAPED, "--precision", "fp16")],
    "cache info": [()],
    "cache export": [("plans.zip",)],
    "cache import": [("plans.zip",)],
    "cache trust": [("model.fusec",)],
    "cache clear": [()],
    "report write": [(*SHAPED, "--no-cores", "-o", "report.html")],
    "report diff": [("MODEL", *SHAPED, "--no-cores", "-o", "diff.html")],
    "export-triton": [("model.fusec", "repository")],
    "serve": [],  # it runs until it is ended; tests/serving/server/test_server.py reads its line
    "atlas": [("--pattern", "conv+bias+relu", "--target", "h200")],
    "targets": [()],
    "doctor": [(), ("--ops",)],
}


def names() -> Iterator[str]:
    """Yield the commands that have `--json`, with the names of their groups."""
    group: Any = typer.main.get_command(commands.app)
    for name, command in group.commands.items():
        if any("--json" in parameter.opts for parameter in command.params):
            yield name
        for inner, below in getattr(command, "commands", {}).items():
            if any("--json" in parameter.opts for parameter in below.params):
                yield f"{name} {inner}"


def test_every_command_has_a_schema() -> None:
    commands_ = set(names())
    assert commands_ == set(CALLS), "give the command a call here"
    assert commands_ <= set(SCHEMA["$defs"]), "give the command a definition in docs/schemas/fusec-1.json"


def test_the_schema_is_one() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.slow
def test_outputs_are_as_the_schema_says(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command, one after the other, since some read what others wrote."""
    monkeypatch.chdir(tmp_path)
    onnx.save(residual_net(), "net.onnx")
    np.savez("data.npz", x=images())
    Path("wrong.py").write_text("def wrong(graph):\n    assert all(node.op.name != 'relu' for node in graph.nodes)\n")
    assert fusec("compile", model, *SHAPE, "-o", "model.fusec").exit_code == 0
    files = {"MODEL": str(model), "NET": "net.onnx", "DATA": "data.npz"}
    for name, calls in CALLS.items():
        if name.startswith("cache"):  # one of them clears it
            monkeypatch.setenv("FUSEC_CACHE", str(tmp_path / "cache"))
        for call in calls:
            result = fusec(*name.split(), *(files.get(word, word) for word in call), "--json")
            assert result.stdout, f"{name}: {result.stderr}"
            check(name, json.loads(result.stdout))


def test_a_model_with_host_steps_is_explained_as_the_schema_says(tmp_path: Path) -> None:
    nodes = [
        onnx.helper.make_node("NonZero", ["x"], ["places"]),
        onnx.helper.make_node("Cast", ["places"], ["y"], to=1),
    ]
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [4])
    y = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, "n"])
    path = tmp_path / "host.onnx"
    graph = onnx.helper.make_graph(nodes, "host", [x], [y])
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8), path)
    result = fusec("explain", path, "--target", "h200", "--json")
    told = json.loads(result.stdout)
    assert "segments" in told["targets"][0]
    check("explain", told)


def check(name: str, told: Any) -> None:
    """Fail unless an output has all keys of its definition, and no other."""
    resolver = {**CLOSED, "$ref": f"#/$defs/{name.replace(' ', '%20')}"}
    error = best_match(jsonschema.Draft202012Validator(resolver).iter_errors(told))
    assert error is None, f"{name}: {error.json_path}: {error.message}"
