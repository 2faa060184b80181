"""The process that runs cells of one model, one after another, and prints a JSON line for each.

python -m experiments.reach.reach_worker MODEL METHOD [METHOD ...]
"""

import json
import sys
from dataclasses import asdict

MARK = "cell: "
"""What a line starts with that has the result of a cell."""


def main(model: str, *methods: str) -> None:
    """Run the cells of `model`; if it cannot be built, each of them has failed."""
    from experiments.reach.public_models import build_public_step
    from experiments.reach.reach_cells import ReachCell, ReachRun, brief_text

    try:
        run = ReachRun(model, build_public_step(model))
    except Exception as error:
        reason = brief_text(f"cannot be built: {type(error).__name__}: {error}")
        for method in methods:
            _print(ReachCell(model, method, "failed", reason))
        return
    for method in methods:
        _print(run.cell(method))


def _print(cell) -> None:
    print(MARK + json.dumps(asdict(cell)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
