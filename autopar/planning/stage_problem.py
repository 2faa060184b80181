"""Stage construction as a problem: which layers form a stage, and which devices each stage gets.

The time of a step is estimated as in Alpa (Zheng et al., OSDI'22, equation 2): the first microbatch passes through all stages, and
every other one adds the time of the slowest stage. Here transfers between stages and what a stage does once per step count too:

    sum of (stage + transfer) + max of ((micro_batches - 1) x (stage or transfer / 2)) + max of (once per step)

as activations and gradients pass each other on their way, and even a fast stage sees the last microbatch only at the end.

A stage that holds k microbatches starts none before the first of the last k is back, which takes the sum of all stages and transfers
from it on. All microbatches take that ceil(micro_batches / k) times, which is another term of the first maximum (once less, as the sum
before it counts once): 1f1b, which holds as few as it can, waits for transfers where other schedules hide them. Two neighbours that hold
k and l < k wait for one another in the same way: k - l + 1 microbatches take them at least the sum of both and the transfer between.

`stage_search.construct_stages` finds the exact optimum over all ways to cut the layers and to hand out the devices.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from autopar.pipeline.pipeline_schedules import Pipeline, schedule_kind
from autopar.pipeline.submeshes import HostPool, Submesh


@dataclass(frozen=True, slots=True)
class StageCost:
    """What one stage costs on one submesh, seen as one logical mesh.

    Attributes:
        seconds: forward and backward of one microbatch.
        once_seconds: what happens once per step: synchronising gradients, the update.
        fixed_bytes: memory of one device for parameters, optimizer state, temporaries.
        micro_batch_bytes: memory of one device for the activations of each microbatch in flight.
        logical_shape: shape of the logical mesh.
        origin: what the cost is of, for whoever made it.
    """

    seconds: float
    once_seconds: float = 0.0
    fixed_bytes: float = 0.0
    micro_batch_bytes: float = 0.0
    logical_shape: tuple[int, ...] = ()
    origin: object = field(default=None, compare=False, repr=False)


type Costs = Callable[[int, int, Submesh], Sequence[StageCost]]
"""(first layer, layer after the last, submesh) -> a cost per logical shape; none if it can't run there."""

type Transfer = Callable[[int, Submesh, Submesh, int | None], float]
"""(layer before which the cut is, source, destination, devices of its pool before the destination) -> seconds to move a microbatch's
activations and gradients; with None, wherever they take the least."""

type InFlight = Callable[[int, int], int]
"""(number of later stages, number of stages) -> of how many microbatches a stage holds activations."""


@dataclass(frozen=True, slots=True)
class StageProblem:
    """What to cut, and what it costs.

    Attributes:
        num_layers: layers, in the order of the forward pass.
        pools: the devices; all of them get work unless `leave_idle`.
        submeshes: what a stage may get (`enumerate_submeshes`).
        num_micro_batches: microbatches per step.
        costs: exact costs; asked only where the optimum may depend on them, once per stage and submesh.
        in_flight: microbatches in flight, by position (`in_flight_of`).
        lower_bound: cheap bounds of `costs`: for each of its entries one that is nowhere larger. The costs of an intra-operator
            solve are at least those of its parts: the sum over single layers, by logical shape, is such a bound. None: `costs`
            is cheap itself.
        layer_kinds: layers with the same kind are interchangeable: stages of the same kinds in the same order share their costs.
        transfer: seconds between stages; None: nothing.
        leave_idle: whether devices may be left without work.
        backward: whether microbatches come back; if not, no stage waits for them.
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
    backward: bool = True

    def returns(self, in_flight: int) -> int:
        """How often a stage that holds so many microbatches waits until they are back."""
        return -(-self.num_micro_batches // in_flight) - 1 if self.backward else 0

    def turns(self, earlier: int, later: int) -> int:
        """How often two neighbours that hold so many microbatches wait for one another."""
        return (
            (self.num_micro_batches - later) // (earlier - later + 1)
            if self.backward and earlier > later
            else 0
        )

    def __post_init__(self) -> None:
        if self.num_layers < 1 or self.num_micro_batches < 1:
            raise ValueError(
                f"{self.num_layers} layers and {self.num_micro_batches} microbatches; stages need at least one of each"
            )
        if self.layer_kinds is not None and len(self.layer_kinds) != self.num_layers:
            raise ValueError(
                f"{len(self.layer_kinds)} layer kinds for {self.num_layers} layers; one each"
            )


@dataclass(frozen=True, slots=True)
class PlacedStage:
    """Layers `start` to `stop` - 1 on `submesh`."""

    start: int
    stop: int
    submesh: Submesh
    cost: StageCost


@dataclass(frozen=True, slots=True)
class StageSolution:
    """The stages in order.

    Attributes:
        seconds: predicted time of a step.
        num_costs: how many exact costs were asked for.
    """

    stages: tuple[PlacedStage, ...]
    seconds: float
    num_costs: int


class NoStagesError(ValueError):
    """No way to cut the layers fits on the devices."""


def step_seconds(problem: StageProblem, stages: Sequence[PlacedStage]) -> float:
    """The predicted time of a step with these stages: what stage construction minimises."""
    repeats = problem.num_micro_batches - 1
    pairs = pairwise(stages)
    transfers = []
    for k, (a, b) in enumerate(pairs if problem.transfer else ()):
        later = sum(
            each.submesh.num_devices
            for each in stages[k + 1 :]
            if each.submesh.pool == b.submesh.pool
        )
        before = problem.pools[b.submesh.pool].num_devices - later
        transfers.append(problem.transfer(b.start, a.submesh, b.submesh, before))  # pyright: ignore[reportOptionalCall]
    total = sum(stage.cost.seconds for stage in stages) + sum(transfers)
    slowest = repeats * max(
        *(stage.cost.seconds for stage in stages), *(each / 2 for each in transfers), 0.0
    )
    held = [problem.in_flight(later, len(stages)) for later in reversed(range(len(stages)))]
    for k in range(len(stages)):
        back = sum(stage.cost.seconds for stage in stages[k:]) + sum(transfers[k:])
        slowest = max(slowest, problem.returns(held[k]) * back)
    for k, transfer in enumerate(transfers):
        both = stages[k].cost.seconds + transfer + stages[k + 1].cost.seconds
        slowest = max(slowest, problem.turns(held[k], held[k + 1]) * both)
    return total + slowest + max(stage.cost.once_seconds for stage in stages)


def in_flight_of(schedule: str, num_micro_batches: int) -> InFlight:
    """Microbatches in flight by position in the schedule of that name, one stage on each mesh."""
    kind = schedule_kind(schedule)
    return lambda later, stages: kind.in_flight(
        stages - 1 - later, Pipeline(stages, num_micro_batches)
    )
