"""Methods: what a plan may choose, and on which devices. The value of `parallelize(method=...)`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jax.sharding import Mesh, PartitionSpec

from autopar.plan import Plan
from autopar.sharding.options import AUTO, DATA_PARALLEL, ZERO2, ZERO3, ShardingOptions
from autopar.sharding.pins import specs_by_path
from autopar.trace import StepGraph
from simulator.cluster import Cluster

type Device = Any  # jax.Device, which type checkers can't see
type Devices = Mesh | int | Sequence[int] | Sequence[Device] | None
"""A mesh, a number of devices, a mesh shape such as (2, 4), a list of devices, or None for all that are there."""


@dataclass(frozen=True)
class PlanningMethod:
    """What the methods that make a plan have in common.

    Attributes:
        devices: where to run: a `jax.sharding.Mesh`, a mesh shape such as (2, 4), a number or a list of devices; all by default.
        num_micro_batches: parts to cut the batch into; gradients from `autopar.grad` are accumulated over them.
        cluster: the hardware that the cost model describes (a `simulator.Cluster`, a name or a path); the devices' own by
            default.
        memory_budget: bytes of one device that the step may use; by default its memory less the reserve that its cluster
            file states.
    """

    devices: Devices = None
    num_micro_batches: int = 1
    cluster: Cluster | str | Path | None = None
    memory_budget: float | None = None

    @property
    def sharding(self) -> ShardingOptions:
        """What plans may choose, for any step."""
        raise NotImplementedError

    def sharding_of(self, step: StepGraph) -> ShardingOptions:
        """What plans of `step` may choose."""
        return self.sharding

    def __post_init__(self) -> None:
        if self.num_micro_batches < 1:
            raise ValueError(f"num_micro_batches is {self.num_micro_batches}, expected at least 1")


@dataclass(frozen=True)
class ShardParallel(PlanningMethod):
    """Finds the cheapest sharding of every value: data, operator and ZeRO parallelism in any mixture.

    Attributes:
        options: limits on what it may choose, and specs that it must keep.
    """

    options: ShardingOptions = AUTO

    @property
    def sharding(self) -> ShardingOptions:
        return self.options


class DataParallel(PlanningMethod):
    """Shards the batch; parameters and optimizer state are whole on every device."""

    @property
    def sharding(self) -> ShardingOptions:
        return DATA_PARALLEL


class Zero2Parallel(PlanningMethod):
    """Data parallelism with sharded gradients and optimizer state (ZeRO stage 2, arXiv 1910.02054)."""

    @property
    def sharding(self) -> ShardingOptions:
        return ZERO2


class Zero3Parallel(PlanningMethod):
    """Data parallelism with sharded gradients, optimizer state and parameters (ZeRO stage 3, or FSDP)."""

    @property
    def sharding(self) -> ShardingOptions:
        return ZERO3


@dataclass(frozen=True)
class ManualShardParallel(PlanningMethod):
    """Keeps the shardings that the user gives and leaves everything else to XLA; nothing is solved.

    Inputs without a spec are whole on every device, outputs that are the next value of an input are where that input is, and the
    rest is wherever XLA's propagation puts it. (Alpa's `ManualShardingOption`; give `devices` as a `jax.sharding.Mesh` for axis
    names of your own.)

    Attributes:
        in_specs: a tuple with an entry for each argument that is not static, as `jax.jit` takes `in_shardings`: a pytree of
            PartitionSpecs that is a prefix of the argument, None where nothing is given.
        out_specs: the same for the result.
        pins: specs by path or name, as in `ShardingOptions`, instead or in addition.
    """

    in_specs: Any = None
    out_specs: Any = None
    pins: Mapping[str, PartitionSpec] = field(default_factory=dict)

    @property
    def sharding(self) -> ShardingOptions:
        return ShardingOptions(mode="manual", pins=self.pins)

    def sharding_of(self, step: StepGraph) -> ShardingOptions:
        """Raises ShardingError when the specs don't have the structure of the arguments or the result."""
        inputs = specs_by_path(self.in_specs, step.in_tree, step.in_paths, "in_specs")
        results = [f"result/{path}".removesuffix("/") for path in step.out_paths]
        outputs = specs_by_path(self.out_specs, step.out_tree, results, "out_specs")
        return replace(self.sharding, pins={**inputs, **outputs, **self.pins})


@dataclass(frozen=True)
class PlanMethod:
    """Runs a plan that is there already, without solving.

    Attributes:
        devices: where to run; must be as many as the plan's mesh has, by default the first ones that are there.
    """

    plan: Plan
    devices: Devices = None


type Method = PlanningMethod | PlanMethod
