"""The results of the last planning in this process, which the public API returns on request.

This is the only global state of planning: `method_planning` and `pipeline_planner` record here what
they decided.
"""

from dataclasses import dataclass

from autopar.ir.spec import LogicalMesh
from autopar.plan import PipelineSchedule
from autopar.planning.stage_construction import ConstructedStages


@dataclass(frozen=True, slots=True)
class OptionTrial:
    """One combination of pipeline options that a search planned, or could not plan.

    Attributes:
        num_micro_batches: number of microbatches.
        schedule: pipeline schedule and layer option.
        seconds: predicted time of a step; None if there is no plan.
        reason: why there is no plan; "" if there is one.
        num_bytes: predicted bytes of the fullest device; None if there is no plan.
        mesh: logical mesh of a step that runs as one program; None for pipelines.
    """

    num_micro_batches: int
    schedule: PipelineSchedule
    seconds: float | None
    reason: str = ""
    num_bytes: int | None = None
    mesh: LogicalMesh | None = None

    @property
    def options(self) -> str:
        """The combination as text."""
        chunks = f" x {self.schedule.num_chunks} chunks" if self.schedule.num_chunks > 1 else ""
        option = self.schedule.layer_option
        remat = ", remat" if option is not None and option.remat_layer else ""
        mesh = f" on {' x '.join(map(str, self.mesh.shape))}" if self.mesh else ""
        return f"{self.num_micro_batches} microbatches, {self.schedule.name}{mesh}{chunks}{remat}"

    def __str__(self) -> str:
        outcome = f"{self.seconds:.4g} s" if self.seconds is not None else self.reason
        return f"{self.options}: {outcome}"


_trials: list[OptionTrial] = []
_stages: list[ConstructedStages] = []


def start_search() -> list[OptionTrial]:
    """Forget the last search, and return the list to which the new one appends its trials."""
    _trials.clear()
    return _trials


def record_stages(stages: ConstructedStages) -> None:
    """Make `stages` the result of `get_last_dp_result`."""
    _stages[:] = [stages]


def get_last_search_result() -> tuple[OptionTrial, ...]:
    """Return every combination of options that the last search in this process tried."""
    return tuple(_trials)


def get_last_dp_result() -> ConstructedStages | None:
    """Return the last decision of automatic stage construction in this process."""
    return _stages[-1] if _stages else None
