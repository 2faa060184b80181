"""Methods that run an existing plan, or derive one from another step."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from autopar.checks import NONE, check, instance, integer, satisfying
from autopar.devices import DEVICES, Devices
from autopar.ir.step_graph import RandomBits
from autopar.methods import COMMON_CHECKS, PlanningMethod
from autopar.plan import Plan
from simulator.hardware.heterogeneous import AnyCluster

PLAN = instance("an autopar.Plan, such as plan_step returns", Plan)
_PARALLELIZED = satisfying(
    "a step that autopar.parallelize returns",
    lambda step: hasattr(step, "get_last_executable") and step.method.runs_step,
)


@dataclass(frozen=True)
class PlanMethod:
    """Runs an existing plan without solving.

    Attributes:
        plan: the plan, such as `plan_step` returns or `Plan.load` reads.
        devices: the devices to run on, as many as the plan's mesh has; by default the first ones
            of the backend. On a Ray cluster only their number may be given.

    Example:
        >>> method = autopar.PlanMethod(autopar.Plan.load("train_step.json"))
    """

    plan: Plan
    devices: Devices = None

    runs_step: ClassVar[bool] = True
    cluster: ClassVar[None] = None
    """None: the cost model describes the devices themselves."""

    @property
    def random_bits(self) -> RandomBits:
        """The random bits of microbatches."""
        return self.plan.rng

    def __post_init__(self) -> None:
        check(self, plan=PLAN, devices=DEVICES)


@dataclass(frozen=True)
class FollowParallel:
    """Runs a step with the placements of another one, e.g. an evaluation of the parameters.

    The step reads the inputs that both steps share where the followed step keeps them, without
    resharding. Inputs are matched by name, shape and dtype. If the followed step is a pipeline, the
    step runs in the same stages, forward only, and results with a row per example are put together
    from the microbatches.

    Attributes:
        src_func: the parallelized step to follow. It must have been compiled, e.g. by a call.
        num_micro_batches: number of microbatches in a pipeline; 1 by default.
        rng: the random bits of microbatches, as in `PlanningMethod`; by default those of the
            followed step.

    Example:
        >>> @autopar.parallelize(method=autopar.FollowParallel(train_step))
        ... def eval_step(state, batch): ...
    """

    src_func: Any
    num_micro_batches: int | None = None
    rng: RandomBits | None = field(default=None, kw_only=True)

    runs_step: ClassVar[bool] = True

    @property
    def cluster(self) -> AnyCluster | str | Path | None:
        """The hardware that the followed step is planned for."""
        return self.src_func.method.cluster

    @property
    def random_bits(self) -> RandomBits:
        """The random bits of microbatches."""
        return self.src_func.method.random_bits if self.rng is None else self.rng

    def __post_init__(self) -> None:
        check(
            self,
            src_func=_PARALLELIZED,
            num_micro_batches=integer() | NONE,
            rng=COMMON_CHECKS["rng"] | NONE,
        )


@dataclass(frozen=True)
class CreateStateParallel:
    """Creates a state with the placements that a training step reads it with.

    Each device computes its own shards, so that the state is never whole on one device.

    Attributes:
        train_step: the parallelized step; the state is its first argument.
        other_args: the other arguments of the step, arrays or ShapeDtypeStructs, as a sequence; a
            single one that is neither list nor tuple may be given as it is.

    Example:
        >>> @autopar.parallelize(method=autopar.CreateStateParallel(train_step, batch))
        ... def create_state(rng): ...
    """

    train_step: Any
    other_args: Any

    runs_step: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check(self, train_step=_PARALLELIZED)


type Method = PlanningMethod | PlanMethod | FollowParallel | CreateStateParallel
