"""Run `fusec lock`: write a lock file, and compare lock files."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from fusec.cli.common import files, output, verbosity
from fusec.cli.common.groups import WriteUnlessNamed
from fusec.cli.common.options import AsJson
from fusec.cli.common.request import Request, compiles
from fusec.errors import CheckError, FusecError

# Imports that only a command needs are inside it: see commands.py.


app = typer.Typer(cls=WriteUnlessNamed, help="Write which plan runs each step to a lock file, and compare lock files.")


@app.command()
@verbosity.with_verbosity
@compiles("tune", "budget")
def write(
    request: Request,
    target: Annotated[
        list[str] | None,
        typer.Option(help="A GPU of `fusec targets`; may be repeated. auto: this machine's, or an H200."),
    ] = None,
    file: Annotated[Path, typer.Option("-o", "--output", help="The file to write.")] = Path("fusec.lock"),
    as_json: AsJson = False,
) -> None:
    """Write which candidate each step runs as, and which plan or kernel runs it.

    For this machine's GPU these are the fastest. For another GPU the cost model chooses the candidate, and the first
    plan that cuDNN builds runs it. A .fusec file holds its own choices.
    """
    from fusec import driver, lockfile
    from fusec.gpu import device

    files.check_writable(file)
    entries: list[lockfile.Locked] = []
    with output.progress() as report:
        for name in dict.fromkeys(target or ["auto"]):
            if not request.is_compiled and device.is_present(driver.resolve_target(name)):
                entries += request.executable(name, report).lock().entries
            else:
                entries += lockfile.make([request.build(name, report)]).entries
    lock = lockfile.Lock(lockfile.versions(), lockfile.in_order(entries))
    lockfile.write(file, lock)
    count = sum(entry.name != lockfile.WHOLE for entry in lock.entries)
    output.result({"partitions": count}, f"{count} partitions locked in {file}", as_json)
    output.wrote(file, as_json)


_Compared = Annotated[
    str, typer.Argument(metavar="LOCK|MODEL", help="Another lock file, or a model to compile with this cuDNN.")
]


@app.command()
@verbosity.with_verbosity
@compiles(model=_Compared)
def diff(
    old: Annotated[Path, typer.Argument(metavar="LOCK", help="A lock file.")],
    request: Request,
    target: Annotated[str, typer.Option(help="For a model: a GPU of `fusec targets`.")] = "auto",
    cudnn: Annotated[
        str | None,
        typer.Option(metavar="VERSION", help="For a model: a release of cuDNN, such as 9.28, which pip installs."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the differences between two lock files, or what this cuDNN and GPU would change. No GPU is needed.

    With --cudnn: what that release would change.
    """
    from fusec import lockfile
    from fusec.lockfile import changes

    before, new = lockfile.read(old), request.model
    if cudnn is not None:
        lines = _with_release(cudnn, new)
    elif new.endswith((".lock", ".toml")):
        lines = changes.differences(before, lockfile.read(new))
    else:
        with output.progress() as report:
            lines = changes.changes(before, request.build(target, report))
    output.result({"differences": lines}, "\n".join(lines) or "no difference", as_json)
    if lines:
        raise CheckError(f"{old}: {len(lines)} differences")


def _with_release(version: str, model: str) -> list[str]:
    """Run the command of this process with another release of cuDNN, and return the differences that it finds."""
    from fusec.atlas import releases

    if model.endswith((".lock", ".toml")):
        raise FusecError("--cudnn compares a lock with a model, not with a lock")
    with output.progress() as report:
        report(f"install {version}", 0, 0)
        with releases.release(version) as installed:
            report(f"ask {installed.version}", 0, 0)
            start = "from fusec.cli import main; main()"
            done = releases.run(installed, start, [*_without(sys.argv[1:], "--cudnn"), "--json"])
    if done.returncode not in (0, 1) or not done.stdout:
        reason = (done.stderr.strip().splitlines() or ["the process ended without a message"])[-1]
        raise FusecError(f"cuDNN {installed.version}: {reason.removeprefix('fusec: error: ')}")
    # a library that does not come from this environment's wheel gives its version as one number
    found: list[str] = json.loads(done.stdout)["differences"]
    return [re.sub(r"(?<=^cudnn: )(.*) -> \d+$", rf"\1 -> {installed.version}", line) for line in found]


def _without(arguments: Sequence[str], option: str) -> list[str]:
    """Return a command line without an option and its value."""
    left = [word for word in arguments if not word.startswith(f"{option}=")]
    if option in left:
        del left[left.index(option) : left.index(option) + 2]
    return left
