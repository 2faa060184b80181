"""The progress bar of subcommands that plan or compile."""

from collections.abc import Iterator
from contextlib import contextmanager

from autopar.progress import progress_listener
from simulator.cli.progress_bars import ProgressBar, progress_bar


@contextmanager
def planning_progress(
    description: str, total: int | None = None, as_json: bool = False
) -> Iterator[ProgressBar]:
    """Show a bar that receives the progress of planning and compilation while the block runs.

    Where there is no bar because stderr is no terminal, progress goes where it goes without this
    function; with JSON there is none.

    Args:
        description: what is being done.
        total: number of units that the block counts itself; by default those of planning.
        as_json: whether the subcommand prints JSON.
    """
    with progress_bar(description, total, as_json) as bar:
        if not bar.is_shown and not as_json:
            yield bar
            return

        def show(text: str, done: int | None, count: int | None) -> None:
            if total is None:
                bar.update(f"{description}: {text}", done, count)

        with progress_listener(show):
            yield bar
