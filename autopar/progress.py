"""Progress lines on stderr during planning, compilation, training and tuning.

They appear if stderr is a terminal. AUTOPAR_PROGRESS=1 shows them always, AUTOPAR_PROGRESS=0 never.
"""

import os
import sys

from rich.console import Console

PROGRESS_VARIABLE = "AUTOPAR_PROGRESS"


def log_progress(text: str) -> None:
    """Print a line of progress to stderr, if progress is shown."""
    setting = os.environ.get(PROGRESS_VARIABLE)
    if setting == "1" or (setting != "0" and sys.stderr.isatty()):
        Console(stderr=True, highlight=False, soft_wrap=True).print(text, markup=False)


def ranges(numbers: tuple[int, ...]) -> str:
    """Return `0-3` for consecutive numbers, else all numbers, separated by commas."""
    if len(numbers) > 1 and numbers == tuple(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(map(str, numbers))
