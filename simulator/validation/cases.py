"""Cases: a prediction and its measurement, and published sets of them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from simulator.engine.prediction import Prediction


@dataclass(frozen=True, slots=True)
class Case:
    """A row of a published table.

    Attributes:
        name: name of the row.
        measured: measured value, in the unit of the set.
        predicted: predicted value, in the unit of the set.
        alternatives: name of a group of plans for the same model, devices and batch; empty for
            none.
        fitted: whether parameters were fitted to this row.
        interval: interval that contains four fifths of such measurements.
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
        """Return the case of a step; the interval is from P10 to P90 of the prediction.

        Args:
            name: name of the row.
            seconds: measured seconds.
            prediction: prediction of the step.
            alternatives: group of plans that the step's plan belongs to.
            fitted: whether parameters were fitted to this row.
        """
        interval = (prediction.quantile(0.1), prediction.quantile(0.9))
        return cls(name, seconds, prediction.seconds, alternatives, fitted, interval)

    @property
    def error(self) -> float:
        """Predicted over measured, minus one."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """A row that says whether a step ran or ran out of memory.

    Attributes:
        name: name of the row.
        ran: whether the step ran.
        fits: whether it is predicted to fit.
        predicted: predicted seconds.
        measured: measured seconds; None if the step ran out of memory.
        alternatives: name of a group of plans for the same model, devices and batch; empty for
            none.
    """

    name: str
    ran: bool
    fits: bool
    predicted: float
    measured: float | None = None
    alternatives: str = ""


@dataclass(frozen=True, slots=True)
class Unpredicted:
    """A row of a published table without a prediction.

    Attributes:
        name: name of the row.
        why: the reason.
    """

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class PublishedSet:
    """The rows of a published table.

    Attributes:
        name: name in files and on the command line.
        title: title in figures.
        unit: unit of the values.
        source: origin of the rows.
        cases: function that predicts all rows; its optional argument is a folder with other rows.
        target: largest acceptable mean absolute relative error; None for no target.
        note: assumptions, or why a target is missed.
        files: names of the files with the rows, without .csv.
    """

    name: str
    title: str
    unit: str
    source: str
    cases: Callable[..., Iterable[Case | Outcome | Unpredicted]]
    target: float | None = None
    note: str = ""
    files: tuple[str, ...] = ()
