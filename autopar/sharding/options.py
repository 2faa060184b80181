"""What a plan may choose."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from jax.sharding import PartitionSpec

from simulator.work import CollectiveKind

Freedom = Literal["any", "replicated", "sharded"]


@dataclass(frozen=True, slots=True)
class ShardingOptions:
    """Limits on the choices of the intra-operator planner; the default is none.

    Attributes:
        data_parallel: shard the batch dim over every device and nothing else that belongs to an example.
        parameters: whether parameters must be whole on every device, or sharded over all of them where a dim allows it.
        optimizer_state: the same for the rest of the carried state.
        batch_axis: a mesh axis that the batch dim must be sharded along, wherever there is one.
        forbidden: collectives that the plan must do without, e.g. {"all_gather", "all_to_all"}.
        prefer_reduce_scatter: never complete by all_reduce what a reduce_scatter can complete.
        pins: specs that must hold, by path of an input (`0/params/*/kernel`), of an output (`result/1`), or by the name that
            `jax.ad_checkpoint.checkpoint_name` gave a value; `*` matches anything.
        time_limit: seconds for the solver.
    """

    data_parallel: bool = False
    parameters: Freedom = "any"
    optimizer_state: Freedom = "any"
    batch_axis: str | None = None
    forbidden: frozenset[CollectiveKind] = frozenset()
    prefer_reduce_scatter: bool = False
    pins: Mapping[str, PartitionSpec] = field(default_factory=dict)
    time_limit: float = 60.0


AUTO = ShardingOptions()
DATA_PARALLEL = ShardingOptions(data_parallel=True, parameters="replicated", optimizer_state="replicated")
ZERO2 = ShardingOptions(data_parallel=True, parameters="replicated", optimizer_state="sharded")
ZERO3 = ShardingOptions(data_parallel=True, parameters="sharded", optimizer_state="sharded")
