"""Progress of long subcommands: a bar with an estimate of the time left, on a terminal only."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, override

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Column
from rich.text import Text

_WIDTH = 60
"""Maximum width of a description, in characters."""

_OTHER_WIDTH = 40
"""Width of a line beside the description: a spinner, a bar, and the elapsed and estimated time."""

_EXPECTED_WEIGHT = 0.1
"""Share of the work as which the expected seconds count in the first estimate."""


def estimated_seconds(elapsed: float, share: float, expected: float | None) -> float | None:
    """Return the estimated seconds of all work; None if nothing is known yet.

    Args:
        elapsed: seconds after which `share` of the work was done.
        share: that share, between 0 and 1.
        expected: seconds of the work that were expected before it began; None if unknown.
    """
    if expected is not None:
        weight = _EXPECTED_WEIGHT * (1 - share)
        elapsed += weight * expected
        share += weight
    return elapsed / share if share else None


class _EstimateColumn(ProgressColumn):
    """The estimated seconds of all work, next to those that have elapsed."""

    @override
    def render(self, task: Task) -> Text:
        if not task.total:
            return Text("")
        share = task.completed / task.total
        seconds = estimated_seconds(task.fields["reached"], share, task.fields["expected"])
        if seconds is None or task.elapsed is None:
            return Text("")
        return Text(f"of about {timedelta(seconds=round(max(seconds, task.elapsed)))}")


@dataclass(frozen=True, slots=True)
class ProgressBar:
    """A bar on stderr, which disappears at the end.

    Attributes:
        bar: the live display.
        task: its only task.
    """

    bar: Progress
    task: TaskID

    @property
    def is_shown(self) -> bool:
        """Whether there is a bar: not with JSON, and only on a terminal."""
        return not self.bar.disable

    def update(
        self,
        description: str = "",
        completed: float | None = None,
        total: float | None = None,
        expected: float | None = None,
    ) -> None:
        """Show what is being done, and how far it is.

        Args:
            description: what is being done; unchanged if empty.
            completed: how much is done; unchanged by default.
            total: how much there is to do; unchanged by default.
            expected: expected seconds of all of it; unchanged by default.
        """
        task = self.bar.tasks[0]
        text = description or task.description
        width = max(10, min(_WIDTH, self.bar.console.width - _OTHER_WIDTH))
        text = text if len(text) <= width else f"{text[: width - 3]}..."
        fields: dict[str, Any] = {}
        if completed is not None and completed != task.completed:
            fields["reached"] = task.elapsed or 0.0
        if expected is not None:
            fields["expected"] = expected
        self.bar.update(
            self.task, description=text, completed=completed, total=total, refresh=False, **fields
        )

    def advance(self) -> None:
        """Count one more unit as done."""
        self.update(completed=self.bar.tasks[0].completed + 1)


@contextmanager
def progress_bar(
    description: str, total: float | None = None, as_json: bool = False
) -> Iterator[ProgressBar]:
    """Show a bar while the block runs.

    Args:
        description: what is being done.
        total: how much there is to do; None while that is unknown.
        as_json: whether the subcommand prints JSON, for which there is no bar.
    """
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TimeElapsedColumn(table_column=Column(no_wrap=True)),
        _EstimateColumn(table_column=Column(no_wrap=True)),
    )
    disabled = as_json or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=disabled) as bar:
        task = bar.add_task(description, total=total, reached=0.0, expected=None)
        yield ProgressBar(bar, task)
