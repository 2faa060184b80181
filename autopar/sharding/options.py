"""What a plan may choose."""

from dataclasses import dataclass
from typing import Literal

Freedom = Literal["any", "replicated", "sharded"]


@dataclass(frozen=True, slots=True)
class ShardingOptions:
    """Limits on the choices of the intra-operator planner; the default is none.

    Attributes:
        data_parallel: shard the batch dim over every device and nothing else that belongs to an example.
        parameters: whether parameters must be whole on every device, or sharded over all of them where a dim allows it.
        optimizer_state: the same for the rest of the carried state.
        time_limit: seconds for the solver.
    """

    data_parallel: bool = False
    parameters: Freedom = "any"
    optimizer_state: Freedom = "any"
    time_limit: float = 60.0


AUTO = ShardingOptions()
DATA_PARALLEL = ShardingOptions(data_parallel=True, parameters="replicated", optimizer_state="replicated")
ZERO2 = ShardingOptions(data_parallel=True, parameters="replicated", optimizer_state="sharded")
ZERO3 = ShardingOptions(data_parallel=True, parameters="sharded", optimizer_state="sharded")
