"""The progress bar of subcommands that plan or compile."""

from collections.abc import Iterator
from contextlib import contextmanager

from autopar.progress import progress_listener
from simulator.cli.progress_bars import progress_bar


@contextmanager
def planning_progress(description: str, as_json: bool = False) -> Iterator[None]:
    """Show a bar that receives the progress of planning and compilation while the block runs.

    Where there is no bar because stderr is no terminal, progress goes where it goes without this
    function; with JSON there is none.

    Args:
        description: what is being done.
        as_json: whether the subcommand prints JSON.
    """
    with progress_bar(description, as_json=as_json) as bar:
        if not bar.is_shown and not as_json:
            yield
            return
        done = 0.0

        def show(text: str, share: float | None, seconds: float | None) -> None:
            nonlocal done
            if share is not None:
                done = share = max(done, share)  # a search may start again
            total = None if share is None and seconds is None else 1.0
            bar.update(text and f"{description}: {text}", share, total, seconds)

        with progress_listener(show):
            yield
