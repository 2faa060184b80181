"""Fits what the host costs, per kernel and per step, to measured training steps."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import minimize

from simulator.transformer import Backend
from simulator.validation.cases import Case


def fit_backend(start: Backend, cases: Callable[[Backend], Sequence[Case]]) -> Backend:
    """`start` with the host's two times that make `cases` of a backend nearest to their measurements, in mean absolute log error."""
    units = np.array([start.kernel_us, start.step_us])
    if (units <= 0).any():
        raise ValueError(
            f"the fit starts at {start.kernel_us} us a kernel and {start.step_us} us a step; expected both above 0"
        )

    def backend(values: np.ndarray) -> Backend:
        kernel, step = np.abs(values) * units
        return replace(start, kernel_us=float(kernel), step_us=float(step))

    def loss(values: np.ndarray) -> float:
        return float(np.mean([abs(np.log1p(case.error)) for case in cases(backend(values))]))

    found = minimize(
        loss,
        np.ones(2),
        method="Nelder-Mead",
        options={"xatol": 0.01, "fatol": 1e-5, "maxfev": 120},
    )
    return backend(found.x)
