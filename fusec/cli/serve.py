"""Run `fusec serve` and `fusec export-triton`: serve compiled models over HTTP, here or in NVIDIA Triton."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from fusec.cli.common import output
from fusec.cli.common.options import AsJson
from fusec.errors import FusecError

# Imports that only a command needs are inside it: see commands.py.


def serve(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="A .fusec file, or NAME=FILE.fusec.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 8000,
    device: Annotated[
        str, typer.Option(help="all: each GPU of this machine, else simulation; simulated; or numbers of GPUs, as 0,1.")
    ] = "all",
    workers: Annotated[int, typer.Option(min=1, help="Worker processes for each device.")] = 1,
    front_ends: Annotated[
        int, typer.Option(min=0, help="Processes that speak HTTP. Default: half of the cores, at most 8.")
    ] = 0,
    preferred: Annotated[
        str, typer.Option(metavar="SIZES", help="Batch sizes to form, as 8,32. Default: all that a file has.")
    ] = "",
    delay_ms: Annotated[
        float, typer.Option(min=0.0, help="Milliseconds that a request waits for others to share its batch.")
    ] = 2.0,
    max_wait_ms: Annotated[
        float, typer.Option(min=1.0, help="Milliseconds that a request waits for the device before it is refused.")
    ] = 1000.0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for a body to arrive, and for its answer.")] = 30.0,
    drain: Annotated[float, typer.Option(min=0.0, help="Seconds to answer what is in progress at SIGTERM.")] = 30.0,
    queue: Annotated[int, typer.Option(min=1, help="Requests in progress; more are refused.")] = 1024,
    max_body: Annotated[int, typer.Option(min=1, help="MiB of the body of a request.")] = 64,
    memory: Annotated[int, typer.Option(min=1, help="MiB for the bodies of all requests in progress.")] = 1024,
    shared_memory: Annotated[
        bool, typer.Option("--shared-memory", help="Let clients on this machine use their shared memory for tensors.")
    ] = False,
    target: Annotated[str, typer.Option(help="Target of the files; auto: this machine's GPU.")] = "auto",
    tune: Annotated[str, typer.Option(help="As for fusec run: none, quick or full.")] = "quick",
    as_json: AsJson = False,
) -> None:
    """Serve compiled models over HTTP (Open Inference Protocol, version 2) until SIGTERM."""
    import os

    from fusec.serving.choose_device import SIMULATED, devices_of
    from fusec.serving.server import supervisor
    from fusec.serving.server.server_options import ServerOptions, models_of

    processes = front_ends or max(1, min(8, (os.cpu_count() or 1) // 2))
    options = ServerOptions(
        models=models_of(models),
        host=host,
        port=port,
        devices=tuple(each for each in devices_of(device) for _ in range(workers)),
        front_ends=processes,
        preferred=_sizes(preferred),
        delay_s=delay_ms / 1e3,
        wait_s=max_wait_ms / 1e3,
        timeout_s=timeout,
        drain_s=drain,
        queue=queue,
        body_bytes=max_body << 20,
        memory_bytes=memory << 20,
        shared_memory=shared_memory,
        target=target,
        tune=tune,
    )
    if options.memory_bytes // processes < options.body_bytes:
        raise FusecError(
            f"--memory {memory} is shared by {processes} front ends, so --max-body {max_body} is too large: "
            f"give at least --memory {max_body * processes}"
        )

    def announce(url: str) -> None:
        names = sorted(options.models)
        address = {"url": url, "models": names, "devices": list(options.devices), "pid": os.getpid()}
        output.result(address, f"serving {', '.join(names)} on {url}", as_json)
        sys.stdout.flush()

    if SIMULATED in options.devices:
        output.say("fusec: models run in simulation, which is slow: no GPU is used", file=sys.stderr)
    supervisor.serve(options, announce)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError:
        sizes = (0,)
    if any(size < 1 for size in sizes):
        raise FusecError(f"--preferred {text}: must be batch sizes joined by commas, as 8,32")
    return sizes


def export_triton(
    model: Annotated[Path, typer.Argument(metavar="MODEL.fusec", help="A compiled model.")],
    repository: Annotated[Path, typer.Argument(metavar="REPOSITORY", help="Folder of Triton's model repository.")],
    name: Annotated[str, typer.Option(help="Name of the model. Default: that of the file.")] = "",
    delay_ms: Annotated[
        float, typer.Option(min=0.0, help="Milliseconds that Triton holds a request to fill a batch.")
    ] = 2.0,
    as_json: AsJson = False,
) -> None:
    """Write a compiled model as a model repository for the Python backend of NVIDIA Triton."""
    from fusec.serving.triton_repository import export

    written = export(model, repository, name, delay_ms / 1e3)
    data = {"model": written.name, "files": [str(path) for path in written.files]}
    output.result(data, "\n".join(f"wrote {path}" for path in written.files), as_json)
