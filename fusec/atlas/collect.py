"""Ask releases of cuDNN about every pattern, one process for each release."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from fusec.atlas.document import Atlas
from fusec.atlas.releases import Release, release, run
from fusec.errors import FusecError

_ASK = "from fusec.atlas.ask import main; sys.exit(main())"


def collect(
    atlas: Atlas,
    versions: Sequence[str],
    targets: Sequence[str],
    only: str,
    progress: Callable[[str, int, int], None],
    arrived: Callable[[Atlas], None],
) -> None:
    """Add the answers of releases to an atlas.

    versions: as for `releases.release`
    only: a glob of the names of patterns, for which the atlas was made
    progress: receives stage, targets done, and all targets
    arrived: is called after each release

    Raises FusecError if a release cannot be installed or asked.
    """
    proven: dict[str, Any] = {}
    for place, version in enumerate(versions):
        done = place * len(targets)
        progress(f"install {version}", done, len(versions) * len(targets))
        with release(version) as installed:
            lines: list[dict[str, Any]] = []
            for target in targets:
                progress(f"ask {installed.version}", done + len(lines), len(versions) * len(targets))
                line, proven = _asked(installed, target, only, proven)
                lines.append(line)
            atlas.add(installed.version, lines)
        arrived(atlas)


def _asked(installed: Release, target: str, only: str, proven: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ask one release about one target; return its line, and the plans that are built now."""
    done = run(installed, _ASK, text=json.dumps({"targets": [target], "only": only, "proven": proven}))
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode or len(lines) != 2:
        reason = lines[-1].get("failed") if lines else (done.stderr.strip().splitlines() or ["no answer"])[-1]
        raise FusecError(f"cuDNN {installed.version} for {target}: {reason}")
    return lines[0], lines[1]["proven"]
