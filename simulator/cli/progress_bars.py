"""Progress of long subcommands: a bar with an estimate of the time left, on a terminal only."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_WIDTH = 60
"""Maximum width of a description, in characters."""


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
        self, description: str, completed: float | None = None, total: float | None = None
    ) -> None:
        """Name what is being done.

        Args:
            description: what is being done.
            completed: how much is done; unchanged by default.
            total: how much there is to do; unchanged by default.
        """
        text = description if len(description) <= _WIDTH else f"{description[: _WIDTH - 3]}..."
        self.bar.update(self.task, description=text, completed=completed, total=total)

    def advance(self) -> None:
        """Count one more unit as done."""
        self.bar.advance(self.task)


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
        TimeElapsedColumn(),
        TextColumn("of about"),
        TimeRemainingColumn(),
    )
    disabled = as_json or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=disabled) as bar:
        yield ProgressBar(bar, bar.add_task(description, total=total))
