"""What is known of a candidate, and of all of them."""

from dataclasses import asdict, dataclass
from math import inf
from typing import TYPE_CHECKING, Literal

from autopar.tuning.search_space import Candidate

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class Trial:
    """A candidate, tried.

    Attributes:
        status: "invalid": the step can't be made, planned or compiled so; `reason` says why, also where it does not fit.
        predicted_seconds, predicted_bytes: of a step, and of the fullest device.
        measured_seconds: of a step on the devices that are here, where it was among the best.
    """

    candidate: Candidate
    status: Literal["fits", "does not fit", "invalid"]
    predicted_seconds: float | None = None
    predicted_bytes: int | None = None
    measured_seconds: float | None = None
    reason: str = ""

    @property
    def rank(self) -> tuple[int, float]:
        """Smaller is better: measured before predicted, then what does not fit, by how much, then what is invalid."""
        if self.status == "fits":
            measured = self.measured_seconds is not None
            return (
                (0, self.measured_seconds or 0.0)
                if measured
                else (1, self.predicted_seconds or 0.0)
            )
        return (2, self.predicted_bytes or inf) if self.status == "does not fit" else (3, inf)

    def __str__(self) -> str:
        knobs = ", ".join(f"{name}={value}" for name, value in self.candidate.items())
        if self.status == "invalid":
            return f"{knobs}: {self.reason}"
        found = (
            [f"{self.predicted_seconds * 1e3:.2f} ms"] if self.predicted_seconds is not None else []
        )
        found += (
            [f"{self.predicted_bytes / 1e9:.2f} GB"] if self.predicted_bytes is not None else []
        )
        found += (
            [f"measured {self.measured_seconds * 1e3:.2f} ms"]
            if self.measured_seconds is not None
            else []
        )
        return f"{knobs}: {', '.join([*found, *([self.reason] if self.reason else [])])}"


@dataclass(frozen=True, slots=True)
class TuningResult:
    """Everything that was tried, in that order."""

    trials: tuple[Trial, ...]

    @property
    def best(self) -> Candidate:
        """The fastest candidate: of those measured if there are any. Raises ValueError when none fits."""
        trial = min(self.trials, key=lambda trial: trial.rank)
        if trial.status != "fits":
            raise ValueError(
                f"none of {len(self.trials)} candidates fits; the nearest to it: {trial}"
            )
        return trial.candidate

    @property
    def table(self) -> "pd.DataFrame":
        """A row for each candidate, the best first: a column for each knob, and the other fields of its `Trial`."""
        import pandas as pd  # takes a second to import, and only tables need it

        rows = []
        for trial in sorted(self.trials, key=lambda trial: trial.rank):
            row = asdict(trial)
            rows.append({**row.pop("candidate"), **row})
        return pd.DataFrame(rows)
