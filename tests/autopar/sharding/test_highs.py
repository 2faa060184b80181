"""HiGHS prints nothing while it solves."""

import ctypes
import os

import numpy as np
import pytest
from scipy.sparse import eye_array

from autopar.sharding import highs
from autopar.sharding.highs import minimize, without_debug_line

LINE = b"HighsMipSolverData::transformNewIntegerFeasibleSolution tmpSolver.run();\n"


def test_the_debug_line_is_dropped_and_the_rest_is_printed_in_order(capfd):
    libc = ctypes.CDLL(None)
    print("before")
    with without_debug_line():
        libc.printf(b"from C\n")
        libc.fflush(None)
        libc.printf(LINE)
        libc.fflush(None)
        os.write(1, b"from Python\n")
        libc.printf(LINE)
    libc.printf(LINE.replace(b"run", b"stop"))
    libc.fflush(None)
    print("after")
    assert capfd.readouterr().out.splitlines() == [
        "before",
        "from C",
        "from Python",
        LINE.decode().replace("run", "stop").strip(),
        "after",
    ]


def test_stdout_is_restored_after_an_error(capfd):
    with pytest.raises(ValueError, match="wrong"), without_debug_line():
        raise ValueError("wrong")
    os.write(1, b"after\n")
    assert capfd.readouterr().out == "after\n"


def solved() -> list[float]:
    """Return the solution of a program with x >= 0.3 and x integer, for two variables."""
    ones = np.ones(2)
    result = minimize(ones, np.array([1, 0]), 9 * ones, eye_array(2), (0.3, 9 * ones), 5.0, 0.0)
    return result.x.tolist()


def test_integer_variables_are_rounded_up_and_others_are_not():
    assert solved() == pytest.approx([1.0, 0.3])


def test_programs_are_solved_without_a_stdout(monkeypatch):
    monkeypatch.setattr(highs.sys, "stdout", None)
    assert solved() == pytest.approx([1.0, 0.3])
