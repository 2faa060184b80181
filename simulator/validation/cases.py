"""A prediction beside a measurement, and the published sets of them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from simulator.engine.prediction import Prediction


@dataclass(frozen=True, slots=True)
class Case:
    """One row of a published table.

    Attributes:
        name: which row it is.
        measured, predicted: in the unit of the set.
        alternatives: what the plan competes with: rows with the same text were measured for the same model, devices and batch.
        fitted: whether parameters were fitted to this row.
        interval: where four fifths of the measurements are expected.
    """

    name: str
    measured: float
    predicted: float
    alternatives: str = ""
    fitted: bool = False
    interval: tuple[float, float] | None = None

    @classmethod
    def of_step(
        cls,
        name: str,
        seconds: float,
        prediction: Prediction,
        alternatives: str = "",
        fitted: bool = False,
    ) -> "Case":
        """A step that was measured to take `seconds`, with the interval from P10 to P90 of the prediction."""
        interval = (prediction.quantile(0.1), prediction.quantile(0.9))
        return cls(name, seconds, prediction.seconds, alternatives, fitted, interval)

    @property
    def error(self) -> float:
        """Predicted over measured, minus one."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True)
class Unpredicted:
    """One row of a published table without a prediction, and why."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class PublishedSet:
    """Rows of one published table.

    Attributes:
        title: for a table; `name` is for files and the command line.
        unit: of what is predicted.
        source: where the rows are from.
        target: mean absolute error that we want at most, a fraction; None where there is no target.
        cases: predicts all rows; given a folder, those of its files in place of the tables that come along.
        files: the names of these files, without .csv.
        note: what was assumed, or why a target is missed.
    """

    name: str
    title: str
    unit: str
    source: str
    cases: Callable[..., Iterable[Case | Unpredicted]]
    target: float | None = None
    note: str = ""
    files: tuple[str, ...] = ()
