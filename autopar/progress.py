"""What long steps of planning and compiling tell while they run: lines on stderr.

They are shown where somebody looks at a terminal; AUTOPAR_PROGRESS=1 shows them anywhere, AUTOPAR_PROGRESS=0 nowhere.
"""

import os
import sys

from rich.console import Console

PROGRESS_VARIABLE = "AUTOPAR_PROGRESS"


def log_progress(text: str) -> None:
    """Show a line of progress, if anybody wants to see it."""
    wanted = os.environ.get(PROGRESS_VARIABLE)
    if wanted == "1" or (wanted != "0" and sys.stderr.isatty()):
        Console(stderr=True, highlight=False, soft_wrap=True).print(text, markup=False)


def ranges(numbers: tuple[int, ...]) -> str:
    """`0-3` for consecutive numbers, else all of them."""
    if len(numbers) > 1 and numbers == tuple(range(numbers[0], numbers[-1] + 1)):
        return f"{numbers[0]}-{numbers[-1]}"
    return ",".join(map(str, numbers))
