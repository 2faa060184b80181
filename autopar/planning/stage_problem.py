"""The problem of stage construction: the layers and the devices of each stage.

The objective is the predicted time of a step. It follows Alpa (Zheng et al., OSDI'22, equation 2):
the first microbatch passes through all stages, and every other one adds the time of the slowest
stage. Here transfers between stages and what a stage does once per step count as well:

    sum of (stage + transfer)
    + max of ((num_micro_batches - 1) x (stage or transfer / 2))
    + max of (once per step)

A transfer counts by half in the first maximum because activations and gradients pass each other.
The second maximum is separate because even a fast stage sees the last microbatch only at the end.

Two more terms of the first maximum come from the microbatches in flight:

- A stage that holds k microbatches starts no other one before the first of them has come back,
  which takes the sum of its own and all later stages and transfers. This happens
  ceil(num_micro_batches / k) times, of which the sum above counts one. So 1f1b, which holds as few
  microbatches as it can, waits for transfers that other schedules overlap.
- Two neighbours that hold k and l < k microbatches wait for each other in the same way: every
  k - l + 1 microbatches take them at least both of their times and the transfer between them.

Schedules that split the backward pass have weight gradients to compute while they wait. There a
stage only waits for the forward passes of earlier ones (`with_few_bubbles`):

    max of (sum of earlier (stage + transfer) / 3 + num_micro_batches x stage)
    + max of (once per step)

`autopar.planning.stage_dp.solve_stages` finds the exact optimum.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from math import inf
from operator import add

from autopar.pipeline.pipeline_schedules import schedule_kind
from autopar.pipeline.schedule_kinds import Pipeline
from autopar.pipeline.submeshes import HostPool, Submesh


@dataclass(frozen=True, slots=True)
class StageCost:
    """The cost of a stage on a submesh with one logical mesh.

    Attributes:
        seconds: forward and backward pass of one microbatch.
        once_seconds: work that happens once per step: gradient synchronization and the update.
        fixed_bytes: memory of one device for parameters, optimizer state and temporaries.
        micro_batch_bytes: memory of one device for the activations of each microbatch in flight.
        logical_shape: shape of the logical mesh.
    """

    seconds: float
    once_seconds: float = 0.0
    fixed_bytes: float = 0.0
    micro_batch_bytes: float = 0.0
    logical_shape: tuple[int, ...] = ()


SCHEDULES_OF_OBJECTIVE = ("gpipe", "1f1b", "1f1b_overlap_friendly")
"""Schedules whose bubbles the objective describes; others may have fewer."""

PASSES = 3
"""Passes of a stage over a microbatch: forward, gradients of inputs, and gradients of weights."""

type Costs = Callable[[int, int, Submesh], Sequence[StageCost]]
"""(first layer, layer after the last, submesh) -> a cost per logical shape that can run."""

type Transfer = Callable[[int, Submesh, Submesh, int | None], float]
"""(first layer of the second stage, submesh of the first stage, submesh of the second stage,
devices of its pool before the second stage) -> seconds to move a microbatch's activations and
gradients.

With None for the devices, the seconds of the fastest place."""

type InFlight = Callable[[int, int], int]
"""(number of later stages, number of stages) -> microbatches whose activations a stage holds."""


@dataclass(frozen=True, slots=True)
class StageProblem:
    """The layers and devices of a pipeline, with the costs of every possible stage.

    Attributes:
        num_layers: number of layers; stages are runs of layers in the order of the forward pass.
        pools: the devices. All of them get work unless `leave_idle`.
        submeshes: submeshes that a stage may get (`enumerate_submeshes`).
        num_micro_batches: number of microbatches per step.
        costs: exact costs. They are requested once per stage and submesh, and only where the
            optimum may depend on them.
        in_flight: number of microbatches in flight by position of the stage (`in_flight_of`).
        lower_bound: cheap lower bounds of `costs`: for each of its entries there is one that is
            nowhere larger. The sum over single layers is such a bound of an intra-operator solve.
            None if `costs` is cheap itself.
        layer_kinds: kinds of the layers. Stages whose layers have the same kinds in the same order
            share their costs.
        transfer: seconds between neighbouring stages; None if transfers take no time.
        leave_idle: whether devices may be left without work.
        min_stages: least number of stages.
        backward: whether microbatches come back. If not, no stage waits for them.
        limit: seconds of a known step. Stages whose own work takes as long need no costs.
        few_bubbles: whether a stage waits for earlier ones only, before its first microbatch.

    Raises:
        ValueError: there are no layers or no microbatches, or not one kind per layer.
    """

    num_layers: int
    pools: tuple[HostPool, ...]
    submeshes: tuple[Submesh, ...]
    num_micro_batches: int
    costs: Costs
    in_flight: InFlight = lambda later, stages: later + 1
    lower_bound: Costs | None = None
    layer_kinds: Sequence[Hashable] | None = None
    transfer: Transfer | None = None
    leave_idle: bool = False
    min_stages: int = 1
    backward: bool = True
    limit: float = inf
    few_bubbles: bool = False

    def __post_init__(self) -> None:
        if self.num_layers < 1 or self.num_micro_batches < 1:
            raise ValueError(
                f"{self.num_layers} layers and {self.num_micro_batches} microbatches; stages need"
                " at least one of each"
            )
        if self.layer_kinds is not None and len(self.layer_kinds) != self.num_layers:
            raise ValueError(
                f"{len(self.layer_kinds)} layer kinds for {self.num_layers} layers; expected a kind"
                " for each layer"
            )

    @property
    def max_stages(self) -> int:
        """The largest number of stages: each has at least a layer and a device."""
        return min(self.num_layers, sum(pool.num_devices for pool in self.pools))

    def num_returns(self, in_flight: int) -> int:
        """Return how often a stage with `in_flight` microbatches waits for them to come back."""
        return -(-self.num_micro_batches // in_flight) - 1 if self.backward else 0

    def num_turns(self, earlier: int, later: int) -> int:
        """Return how often two neighbours with these microbatches in flight wait for each other."""
        if not self.backward or earlier <= later:
            return 0
        return (self.num_micro_batches - later) // (earlier - later + 1)


def with_few_bubbles(problem: StageProblem) -> StageProblem:
    """Return the problem of a schedule with few bubbles, with `PASSES` times its objective.

    A stage waits for the forward passes of one microbatch, as in the schedule ZB-H1 (Qi et al.,
    ICLR'24). They are all passes of a microbatch of a third of the size.
    """

    def scaled(costs: Costs) -> Costs:
        return lambda *stage: [
            replace(cost, once_seconds=PASSES * cost.once_seconds) for cost in costs(*stage)
        ]

    return replace(
        problem,
        num_micro_batches=PASSES * problem.num_micro_batches,
        costs=scaled(problem.costs),
        lower_bound=problem.lower_bound and scaled(problem.lower_bound),
        backward=False,
        few_bubbles=True,
    )


@dataclass(frozen=True, slots=True)
class PlacedStage:
    """Layers `start` to `stop` - 1 on a submesh, with their cost there."""

    start: int
    stop: int
    submesh: Submesh
    cost: StageCost


@dataclass(frozen=True, slots=True)
class StageSolution:
    """The optimal stages of a stage problem.

    Attributes:
        stages: the stages in order.
        seconds: predicted time of a step.
        num_costs: number of exact costs that were requested.
    """

    stages: tuple[PlacedStage, ...]
    seconds: float
    num_costs: int


class NoStagesError(ValueError):
    """No stages of the layers fit on the devices."""


NO_MEMORY = (
    "the state and the activations of the step do not fit in memory, even if all devices share them"
    " evenly; use more devices, smaller microbatches or remat"
)
"""The error where even the lower bound of the memory of a stage is too large."""


def step_seconds(problem: StageProblem, stages: Sequence[PlacedStage]) -> float:
    """Return the predicted time of a step, the objective that stage construction minimizes.

    Args:
        problem: the problem that the stages solve.
        stages: stages in order, of all layers.
    """
    transfers = _transfers(problem, stages)
    seconds = [stage.cost.seconds for stage in stages]
    in_flight = [problem.in_flight(later, len(stages)) for later in reversed(range(len(stages)))]
    once = max(stage.cost.once_seconds for stage in stages)
    if problem.few_bubbles:
        waits = accumulate(map(add, seconds, transfers or [0.0] * len(seconds)), initial=0.0)
        ends = (
            wait + problem.num_micro_batches * own
            for wait, own in zip(waits, seconds, strict=False)
        )
        return max(ends) + once
    repeats = problem.num_micro_batches - 1
    slowest = repeats * max(*seconds, *(transfer / 2 for transfer in transfers), 0.0)
    for k, num_held in enumerate(in_flight):
        round_trip = sum(seconds[k:]) + sum(transfers[k:])
        slowest = max(slowest, problem.num_returns(num_held) * round_trip)
    for k, transfer in enumerate(transfers):
        both = seconds[k] + transfer + seconds[k + 1]
        slowest = max(slowest, problem.num_turns(in_flight[k], in_flight[k + 1]) * both)
    total = sum(seconds) + sum(transfers)
    return total + slowest + once


def _transfers(problem: StageProblem, stages: Sequence[PlacedStage]) -> list[float]:
    """Return the seconds of the transfer after each stage but the last."""
    if problem.transfer is None:
        return []
    transfers = []
    for k, (source, destination) in enumerate(pairwise(stages)):
        pool = destination.submesh.pool
        submeshes = [stage.submesh for stage in stages[k + 1 :]]
        later = sum(mesh.num_devices for mesh in submeshes if mesh.pool == pool)
        before = problem.pools[pool].num_devices - later
        transfers.append(
            problem.transfer(destination.start, source.submesh, destination.submesh, before)
        )
    return transfers


def in_flight_of(schedule: str, num_micro_batches: int) -> InFlight:
    """Return the microbatches in flight by position of the stage, with one stage on each mesh.

    Args:
        schedule: name of the schedule.
        num_micro_batches: number of microbatches per step.
    """
    kind = schedule_kind(schedule)

    @cache
    def in_flight(later: int, stages: int) -> int:
        return kind.in_flight(stages - 1 - later, Pipeline(stages, num_micro_batches))

    return in_flight
