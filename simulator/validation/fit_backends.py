"""Fit the host's times of a backend, per kernel and per step, to measured training steps.

`python -m simulator.validation.fit_backends` prints the fit of `EAGER`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import minimize

from simulator.transformer import EAGER, Backend
from simulator.validation.cases import Case
from simulator.validation.sets.vtrain import vtrain_single_node_case, vtrain_single_node_rows


def fit_backend(start: Backend, cases: Callable[[Backend], Sequence[Case]]) -> Backend:
    """Return a backend with the times of the host that fit cases best, by mean absolute log error.

    Args:
        start: the backend with its other fields, and with times at which the fit starts.
        cases: function that returns the cases under a backend.

    Raises:
        ValueError: a time is not above 0.
    """
    units = np.array([start.kernel_us, start.step_us])
    if (units <= 0).any():
        raise ValueError(
            f"the fit starts at {start.kernel_us} us a kernel and {start.step_us} us a step; "
            "expected both above 0"
        )

    def backend(values: np.ndarray) -> Backend:
        kernel, step = np.abs(values) * units
        return replace(start, kernel_us=float(kernel), step_us=float(step))

    def loss(values: np.ndarray) -> float:
        return float(np.mean([abs(np.log1p(case.error)) for case in cases(backend(values))]))

    solution = minimize(
        loss,
        np.ones(2),
        method="Nelder-Mead",
        options={"xatol": 0.01, "fatol": 1e-5, "maxfev": 120},
    )
    return backend(solution.x)


def fit_eager() -> Backend:
    """Return `EAGER` with times that are fitted to 40 rows of vTrain's table of single hosts."""
    table = vtrain_single_node_rows()
    rows = list(table[table.fitted].itertuples(index=False))
    return fit_backend(
        EAGER, lambda backend: [vtrain_single_node_case(row, backend) for row in rows]
    )


if __name__ == "__main__":
    print(fit_eager())
