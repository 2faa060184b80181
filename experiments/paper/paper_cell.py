"""Computes the rows of one part of a figure in a process of its own.

    python -m experiments.paper.paper_cell FIGURE PART SIZE FILE

A part that fails has one row, with the status "failed" and the reason, so that the figure is drawn
from the other parts.
"""

import sys
from pathlib import Path

import pandas as pd

from experiments import sweep_progress
from experiments.isolate import check_not_stopped, end_with_run, reason_of, run_script
from experiments.paper.compute_rows import write_part


def main(name: str, part: str, size: str, path: str) -> None:
    """Compute the rows of a part in another process, or write why that failed.

    Args:
        name: name of the figure.
        part: name of the part.
        size: "full" or "smoke".
        path: the file.
    """
    command = [sys.executable, "-m", "experiments.paper.compute_rows", name, part, size, path]
    status, errors = run_script(command)
    check_not_stopped(status)
    outcome = "ok"
    if status:
        reason = reason_of(status, errors)
        row = {"part": part, "status": "failed", "reason": reason}
        write_part(pd.DataFrame([row]), Path(path))
        outcome = f"FAILED {reason.splitlines()[0][:200]}"
    progress = sweep_progress.finish(f"paper/{name}/{part}")
    sweep_progress.say(f"{name:<26} {part:<16} {outcome}{progress and f'  ({progress})'}")


if __name__ == "__main__":
    end_with_run()
    main(*sys.argv[1:])
