"""Hold the options of `fusec serve`, which all its processes share."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, field
from pathlib import Path
from typing import Any

from fusec.errors import FusecError
from fusec.system.dataclass import dataclass

# Names are parts of URLs and of metrics, so they are plain.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")


@dataclass(frozen=True)
class ServerOptions:
    """Options of a server.

    models: paths of `.fusec` files by name.
    devices: one worker process each; numbers of GPUs, or `auto` or `simulated`.
    front_ends: processes that speak HTTP.
    preferred: batch sizes to form, of those that the file has programs for; () means all of them.
    delay_s: seconds that a request may wait for others to share its batch, where the device is idle.
    wait_s: seconds that a request may wait for the device; a longer wait is refused.
    timeout_s: seconds in which a request body must arrive, and from then on the answer.
    drain_s: seconds in which requests are answered after SIGTERM.
    queue: requests that may be in progress at a time.
    body_bytes: largest body of a request.
    memory_bytes: memory for all request bodies in progress.
    shared_memory: clients on this machine may register shared memory for inputs and outputs.
    """

    models: Mapping[str, str]
    host: str = "127.0.0.1"
    port: int = 8000
    devices: tuple[str | int, ...] = ("auto",)
    front_ends: int = 1
    preferred: tuple[int, ...] = ()
    delay_s: float = 0.002
    wait_s: float = 1.0
    timeout_s: float = 30.0
    drain_s: float = 30.0
    queue: int = 1024
    body_bytes: int = 64 << 20
    memory_bytes: int = 1 << 30
    shared_memory: bool = False
    target: str = "auto"
    tune: str = "quick"
    folder: str = field(default="", metadata={"internal": True})  # of sockets and metrics, private to this server

    def socket(self, worker: int) -> str:
        """Return the path of the socket on which a worker process listens once its models are ready."""
        return str(Path(self.folder) / f"worker-{worker}.sock")

    def ready(self, front_end: int) -> Path:
        """Return the path of the file that a front end makes once it is connected to all workers."""
        return Path(self.folder) / f"front-end-{front_end}.ready"

    def to_json(self) -> str:
        """Return the options as text, for the command line of a process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ServerOptions:
        """Read the text of `to_json`."""
        data: dict[str, Any] = json.loads(text)
        for name in ("devices", "preferred"):
            data[name] = tuple(data[name])
        return cls(**data)


def models_of(given: list[str]) -> dict[str, str]:
    """Read `FILE.fusec` or `NAME=FILE.fusec` as paths by name; without a name, it is that of the file.

    Raises FusecError if a name is not plain or comes twice, or a file is missing or no `.fusec` file.
    """
    found: dict[str, str] = {}
    for text in given:
        name, given_name, path = text.partition("=")
        if not given_name or "/" in name:
            path, name = text, Path(text).stem
        if not _NAME.fullmatch(name):
            raise FusecError(
                f"{text}: {name!r} is no name for a model: letters, digits, '_', '-' and '.'; give NAME=FILE"
            )
        if name in found:
            raise FusecError(f"{text}: the name {name!r} is taken by {found[name]}: give NAME=FILE")
        if not path.endswith(".fusec"):
            raise FusecError(f"{path}: is no .fusec file: write one with fusec compile MODEL -o FILE.fusec")
        if not Path(path).is_file():
            raise FusecError(f"{path}: No such file or directory")
        found[name] = str(Path(path).absolute())
    return found
