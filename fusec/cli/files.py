"""Read and write for the command line: option texts, .npy and .npz files, whole files, progress bars."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import stat
import sys
import tokenize
import warnings
import zipfile
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from fusec.errors import CudnnNotAskedWarning, FusecError
from fusec.system import atomic_write
from fusec.system.printable import printable, printable_lines

Model = Annotated[str, typer.Argument(metavar="MODEL", help="An ONNX file, or a graph in fusec's text form.")]
Target = Annotated[
    str, typer.Option("--target", help="A GPU of `fusec targets`; auto: this machine's, or an H200; cpu: NumPy.")
]
Precision = Annotated[str, typer.Option(help="fp32, tf32, fp16 or bf16; sums are fp32 in all.")]
Shapes = Annotated[
    list[str] | None,
    typer.Option("--shape", metavar="NAME=SIZES", help="Shape of an input with symbolic dims: x=1,3,224,224."),
]
Disable = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="Leave out a pass or a rewrite rule; may be repeated.")
]
Rounding = Annotated[
    str,
    typer.Option(help="fused: inside a step 16-bit values stay in fp32; source: rounded as in the model."),
]
Locked = Annotated[
    Path | None, typer.Option(metavar="LOCK", help="Take the plans of this lock; fail rather than choose anew.")
]
Deterministic = Annotated[
    bool, typer.Option("--deterministic", help="The same bits from every call: no sums in an order that varies.")
]
ChannelsLast = Annotated[
    bool,
    typer.Option(
        "--channels-last", help="Inputs and outputs of rank 4 and 5 lie channels last in memory; shapes stay N, C, …."
    ),
]
Tune = Annotated[
    str, typer.Option(help="On a GPU: none takes cuDNN's first plan, quick times the likely ones, full all.")
]
Budget = Annotated[
    str | None, typer.Option(metavar="TIME", help="Stop timing plans after this time, say 20s; the rest next time.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, all else on stderr.")]
Report = Callable[[str, int, int], None]  # stage, done, total (0: not known)
PATIENCE_S = 1.0  # a stage shorter than this shows no bar


_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


def seconds_of(text: str, option: str) -> float:
    """Return `90`, `60s`, `10m` or `1h30m` in seconds."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if not parts or "".join(a + b for a, b in parts) != text or not any(float(a) for a, _ in parts):
        raise FusecError(f"{option} {text}: a time is written 60s, 10m or 1h30m")
    return sum(float(number) * _UNITS[unit or "s"] for number, unit in parts)


def budget_of(text: str | None) -> float:
    """Return the seconds of --budget; infinite if it is not given."""
    return math.inf if text is None else seconds_of(text, "--budget")


def shapes_of(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Read `x=1,3,224,224` as name and sizes; `x=` is a scalar."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, text in _pairs("--shape", "NAME=1,3,224,224", texts):
        try:
            shapes[name] = tuple(int(size) for size in text.split(",")) if text else ()
        except ValueError:
            raise FusecError(f"--shape {name}={text}: sizes are whole numbers joined by commas") from None
    return shapes


def arrays_of(texts: Sequence[str]) -> dict[str, tuple[Path, Any]]:
    """Read `x=file.npy` as name, file and array; the array is mapped, so nothing large is read yet."""
    return {name: (Path(text), _array(Path(text))) for name, text in _pairs("--input", "NAME=file.npy", texts)}


def _pairs(option: str, form: str, texts: Sequence[str]) -> list[tuple[str, str]]:
    pairs: dict[str, str] = {}
    for text in texts:
        # the last `=`: names of tensors may hold one, sizes do not
        name, sign, value = text.rpartition("=")
        if not sign or not name:
            raise FusecError(f"{option} {text}: write {option} {form}")
        if name in pairs:
            raise FusecError(f"{option} is given twice for {name!r}")
        pairs[name] = value
    return list(pairs.items())


def _array(path: Path) -> Any:
    """Map the array of a .npy file. Never unpickles, and checks a header against the size of the file."""
    from numpy.lib.format import open_memmap  # late: numpy would double the time of `fusec --help`

    try:
        if not path.is_file():
            raise FusecError(
                f"{path}: is not a regular file" if path.exists() else f"{path}: No such file or directory"
            )
        return open_memmap(path, mode="r")
    except OSError as error:
        raise FusecError(f"{path}: {error.strerror or error}") from error
    except (ValueError, EOFError, SyntaxError, OverflowError, tokenize.TokenError) as error:
        reason = "holds Python objects, which are never read" if "Python objects" in str(error) else str(error)
        raise FusecError(f"{path}: not a readable .npy file: {reason}") from error


def print_note(note: str) -> None:
    """Print the note that goes with a result, if there is one."""
    if note:
        say(note)


def json_text(data: Any) -> str:
    """Return one JSON document, with escapes for all characters that a terminal could obey."""
    return json.dumps(_plain(data), indent=1, allow_nan=False).replace("\x7f", "\\u007f")


def say(text: object, file: IO[str] | None = None, flush: bool = False) -> None:
    """Print a text that may hold names from a model or a file, with control characters escaped.

    Line breaks are fusec's own, except in what the command line gave, such as a file's name.
    """
    told = printable_lines(str(text))
    for given in (part for argument in sys.argv[1:] for part in (argument, *argument.split("=")) if "\n" in part):
        told = told.replace(printable_lines(given), printable(given))
    print(told, file=file, flush=flush)


def _plain(data: Any) -> Any:
    """Replace NaN and infinity, which JSON does not have, by null."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: _plain(value) for key, value in data.items()}
    return [_plain(value) for value in data] if isinstance(data, list | tuple) else data


def check_writable(path: Path | None) -> None:
    """Raise FusecError if a file cannot be written, before the work that makes its contents."""
    if path is None:
        return
    try:
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            raise FusecError(f"{path}: exists and is not a regular file")
        if not path.resolve().parent.is_dir():
            raise FusecError(f"{path}: there is no folder {printable(str(path.parent))}")
        if not os.access(path.resolve().parent, os.W_OK):
            raise FusecError(f"{path}: the folder {path.parent} cannot be written")
    except (OSError, ValueError) as error:  # ValueError: a null byte in the name
        raise FusecError(f"{path}: {error}") from error


def write_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """Write a file that is there whole or not at all: to a temporary file, which then replaces it."""
    check_writable(path)
    try:
        # through a link: replace what it points to, not the link
        with atomic_write.written(path.resolve(), durable=True) as file:
            write(file)
    except OSError as error:
        raise FusecError(f"{path}: cannot write: {error.strerror or error}") from error


def write_npz(path: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays by name, as numpy.savez does; any name is allowed, also `file`."""
    from numpy.lib.format import write_array  # late, as above

    def write(file: IO[bytes]) -> None:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    write_array(member, array, allow_pickle=False)

    write_whole(path, write)


@contextlib.contextmanager
def plain_warnings() -> Generator[None]:
    """Escape warnings as `say` does, because they name files and nodes, and Python prints them as they are."""
    standard = warnings.formatwarning

    def escaped(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        return standard(printable(str(message)), category, filename, lineno, line)

    warnings.formatwarning = escaped
    try:
        yield
    finally:
        warnings.formatwarning = standard


class _LateBars(Progress):
    """Progress bars that show only stages longer than PATIENCE_S."""

    def get_renderables(self) -> Iterable[Any]:
        late = [task for task in self.tasks if (task.elapsed or 0.0) > PATIENCE_S]
        if late:
            yield self.make_tasks_table(late)


@contextlib.contextmanager
def without_cudnn_warning() -> Generator[None]:
    """Suppress the warning that cuDNN was not asked, because the command prints it with its result."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CudnnNotAskedWarning)
        yield


@contextlib.contextmanager
def progress() -> Generator[Report]:
    """Return a function to report progress to; it shows bars on stderr if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda stage, done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    current: list[tuple[str, TaskID]] = []
    with _LateBars(*columns, console=Console(stderr=True), transient=True) as bars:

        def report(stage: str, done: int, total: int) -> None:
            kind = stage.partition(" ")[0]  # `pass layout` and `pass cse` share a bar
            if not current or current[0][0] != kind:
                if current:
                    bars.remove_task(current.pop()[1])
                current.append((kind, bars.add_task(stage, total=None)))
            bars.update(current[0][1], description=stage, completed=done, total=total or None)

        yield report
