"""HiGHS, the solver of integer programs, without its debug output."""

import ctypes
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import Lock
from typing import Any

import numpy as np

_DEBUG_LINE = b"HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();\n"
"""Line that HiGHS 1.12 prints whatever its options are (ERGO-Code/HiGHS#2783)."""

_STDOUT = 1

_lock = Lock()


def minimize(
    cost: np.ndarray,
    integrality: np.ndarray,
    upper: np.ndarray,
    rows: Any,
    row_bounds: tuple[np.ndarray | float, np.ndarray],
    time_limit: float,
    gap: float,
) -> Any:
    """Return the result of `scipy.optimize.milp` for an integer program.

    Args:
        cost: cost of each variable.
        integrality: 1 for integer variables, 0 for continuous ones.
        upper: upper bound of each variable; the lower bounds are 0.
        rows: sparse matrix of the constraints, shape (rows, variables).
        row_bounds: lower and upper bounds of the rows.
        time_limit: seconds.
        gap: relative gap at which HiGHS may stop.
    """
    # SciPy takes most of a second to import, and workers on other hosts solve nothing.
    from scipy.optimize import Bounds, LinearConstraint, milp

    with without_debug_line() if _has_stdout() else nullcontext():
        return milp(
            cost,
            integrality=integrality,
            bounds=Bounds(np.zeros(len(cost)), upper),  # pyright: ignore[reportArgumentType]
            constraints=LinearConstraint(rows, *row_bounds),  # pyright: ignore[reportArgumentType]
            options={"time_limit": time_limit, "mip_rel_gap": gap},
        )


@contextmanager
def without_debug_line() -> Iterator[None]:
    """Drop the debug line from what the process prints to stdout in the block; keep the rest.

    The line comes from `printf` in C++, past `sys.stdout`, so the file descriptor is redirected.
    """
    with _lock, tempfile.TemporaryFile() as printed:
        _flush()
        stdout = os.dup(_STDOUT)
        os.dup2(printed.fileno(), _STDOUT)
        try:
            yield
        finally:
            _flush()
            os.dup2(stdout, _STDOUT)
            os.close(stdout)
            printed.seek(0)
            os.write(_STDOUT, printed.read().replace(_DEBUG_LINE, b""))


def _has_stdout() -> bool:
    """Return whether stdout is open, in Python and as a file descriptor."""
    try:
        os.fstat(_STDOUT)
    except OSError:
        return False
    return sys.stdout is not None and not sys.stdout.closed


def _flush() -> None:
    """Write what Python and C have buffered for stdout."""
    sys.stdout.flush()
    ctypes.CDLL(None).fflush(None)
