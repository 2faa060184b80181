"""Results of a search: one trial per candidate."""

from dataclasses import asdict, dataclass, fields
from math import inf
from typing import TYPE_CHECKING, Literal

from autopar.tuning.search_space import Candidate

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class Trial:
    """The result of trying a candidate.

    Attributes:
        candidate: a value for each knob.
        status: "fits", "does not fit" into the memory of a device, or "invalid" if the step can't
            be built, planned or compiled.
        predicted_seconds: the predicted time of a step.
        predicted_bytes: the predicted peak memory of the device that needs most.
        measured_seconds: the measured time of a step, for the best candidates.
        reason: why the candidate is invalid or does not fit.
    """

    candidate: Candidate
    status: Literal["fits", "does not fit", "invalid"]
    predicted_seconds: float | None = None
    predicted_bytes: int | None = None
    measured_seconds: float | None = None
    reason: str = ""

    @property
    def rank(self) -> tuple[int, float]:
        """A sort key; smaller is better.

        Measured candidates come first, then predicted ones, both by time, then those that do not
        fit, by memory, then invalid ones.
        """
        if self.status == "invalid":
            return 3, inf
        if self.status == "does not fit":
            return 2, self.predicted_bytes or inf
        if self.measured_seconds is not None:
            return 0, self.measured_seconds
        return 1, self.predicted_seconds or 0.0

    def __str__(self) -> str:
        knobs = ", ".join(f"{name}={value}" for name, value in self.candidate.items())
        if self.status == "invalid":
            return f"{knobs}: {self.reason}"
        results: list[str] = []
        if self.predicted_seconds is not None:
            results.append(f"{self.predicted_seconds * 1e3:.2f} ms")
        if self.predicted_bytes is not None:
            results.append(f"{self.predicted_bytes / 1e9:.2f} GB")
        if self.measured_seconds is not None:
            results.append(f"measured {self.measured_seconds * 1e3:.2f} ms")
        if self.reason:
            results.append(self.reason)
        return f"{knobs}: {', '.join(results)}"


RESULTS = tuple(field.name for field in fields(Trial) if field.name != "candidate")
"""The columns of `TuningResult.table` besides the knobs."""


@dataclass(frozen=True, slots=True)
class TuningResult:
    """All trials of a search, in order."""

    trials: tuple[Trial, ...]

    @property
    def best(self) -> Candidate:
        """The fastest candidate, measured if possible. Raises ValueError if none fits."""
        trial = min(self.trials, key=lambda trial: trial.rank)
        if trial.status != "fits":
            raise ValueError(
                f"none of {len(self.trials)} candidates fits; the nearest to it: {trial}"
            )
        return trial.candidate

    @property
    def table(self) -> "pd.DataFrame":
        """A row for each candidate, the best first.

        Columns are the knobs and the other fields of `Trial`.
        """
        # The import takes a second, and only tables need it.
        import pandas as pd

        rows = []
        for trial in sorted(self.trials, key=lambda trial: trial.rank):
            row = asdict(trial)
            rows.append({**row.pop("candidate"), **row})
        return pd.DataFrame(rows)
