"""Draw progress bars on stderr. Imported only for a terminal, because rich takes as long to import as the rest."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.text import Text

PATIENCE_S = 1.0  # a stage shorter than this shows no bar


class _Count(MofNCompleteColumn):
    """The number of parts that are done; nothing if the number of all is not known."""

    def render(self, task: Task) -> Text:
        return super().render(task) if task.total is not None else Text("")


class _BarsOfLongStages(Progress):
    """Progress bars that show only stages longer than PATIENCE_S."""

    def get_renderables(self) -> Iterable[Any]:
        late = [task for task in self.tasks if (task.elapsed or 0.0) > PATIENCE_S]
        if late:
            yield self.make_tasks_table(late)


@contextlib.contextmanager
def bars() -> Generator[Callable[[str, int, int], None]]:
    """Return a function that draws a stage: its name, and how many of how many parts are done.

    A spinner and the time move also in a stage that cannot tell how much of it is done.
    """
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), _Count(), TimeElapsedColumn())
    current: list[tuple[str, TaskID]] = []
    with _BarsOfLongStages(*columns, console=Console(stderr=True), transient=True) as shown:

        def report(stage: str, done: int, total: int) -> None:
            kind = stage.partition(" ")[0]  # `pass assign_layout` and `pass cse` share a bar
            if not current or current[0][0] != kind:
                if current:
                    shown.remove_task(current.pop()[1])
                current.append((kind, shown.add_task(stage, total=None)))
            # one thing to do has no part that is done: its bar would stand still, so it pulses instead
            shown.update(current[0][1], description=stage, completed=done, total=total if total > 1 else None)

        yield report
