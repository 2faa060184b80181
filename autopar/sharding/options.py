"""Options of the intra-operator planner: what a sharding may do."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

from jax.sharding import PartitionSpec
from pydantic import PlainSerializer, PlainValidator

from autopar.checks import FLAG, NONE, TEXT, AllowedValues, by_name, check, instance, one_of, real
from simulator.files import brief
from simulator.work import CollectiveKind

Freedom = Literal["any", "replicated", "sharded"]

Mode = Literal["solve", "heuristic", "manual"]
"""How shardings are chosen: by the solver, by the heuristic, or by the user and XLA."""


def _partition_spec(value: Any) -> PartitionSpec:
    """Return a PartitionSpec from its JSON form, a list with an entry per dim.

    Raises:
        ValueError: it is not one.
    """
    if isinstance(value, PartitionSpec):
        return value
    if not isinstance(value, list) or not all(map(_is_entry, value)):
        raise ValueError(
            "expected a list that has for each dim a mesh axis, a list of mesh axes, or null,"
            f" such as ['x', null]; got {brief(value)}"
        )
    return PartitionSpec(*(tuple(axes) if isinstance(axes, list) else axes for axes in value))


def _is_entry(axes: object) -> bool:
    """Return whether a value of JSON says over which mesh axes a dim is sharded."""
    if isinstance(axes, list):
        return all(isinstance(axis, str) for axis in axes)
    return axes is None or isinstance(axes, str)


def _collectives(value: Any) -> frozenset[CollectiveKind]:
    if not isinstance(value, Collection) or isinstance(value, str | Mapping):
        raise TypeError
    return frozenset(map(one_of(*get_args(CollectiveKind)).take, value))


PINS = by_name(
    instance("", PartitionSpec),
    "a dict from paths or names to jax.sharding.PartitionSpecs, {'0/w': P('x')} for instance",
)
FORBIDDEN = AllowedValues(
    f"a set of some of {', '.join(map(repr, get_args(CollectiveKind)))}", _collectives
)

type _Pin = Annotated[PartitionSpec, PlainValidator(_partition_spec), PlainSerializer(list)]
type _Kinds = Annotated[frozenset[CollectiveKind], PlainSerializer(sorted)]


@dataclass(frozen=True, slots=True)
class ShardingOptions:
    """Restrictions of the intra-operator planner; by default there are none.

    Attributes:
        mode: "solve" finds the cheapest sharding. "heuristic" shards the batch over the first mesh
            axis and the largest dim of each parameter over each mesh axis that divides it; each
            equation then takes the sharding that needs the least resharding. "manual" replicates
            inputs that are not pinned; XLA propagates the pins.
        data_parallel: shard the batch dim over all devices, and no other dim of values per example.
        parameters: whether parameters must be replicated, or sharded over all devices where a dim
            allows it.
        optimizer_state: the same for the other carried state.
        batch_axis: a mesh axis over which every batch dim must be sharded.
        forbidden: collectives that the plan must not use, e.g. {"all_gather", "all_to_all"}.
        prefer_reduce_scatter: use no all_reduce where a reduce_scatter is possible.
        pins: specs that must hold, by path of an input (`0/params/*/kernel`) or of an output
            (`result/1`), or by the name that `jax.ad_checkpoint.checkpoint_name` gives a value; `*`
            matches any text.
        time_limit: seconds for the solver.
        tolerance: relative distance from the optimum at which the solver may stop. For large
            problems it may stop at 0.01 in any case.
    """

    mode: Mode = "solve"
    data_parallel: bool = False
    parameters: Freedom = "any"
    optimizer_state: Freedom = "any"
    batch_axis: str | None = None
    forbidden: _Kinds = frozenset()
    prefer_reduce_scatter: bool = False
    pins: Mapping[str, _Pin] = field(default_factory=dict)
    time_limit: float = 60.0
    tolerance: float = 0.0

    def __post_init__(self) -> None:
        check(
            self,
            mode=one_of(*get_args(Mode)),
            data_parallel=FLAG,
            parameters=one_of(*get_args(Freedom)),
            optimizer_state=one_of(*get_args(Freedom)),
            batch_axis=TEXT | NONE,
            forbidden=FORBIDDEN,
            prefer_reduce_scatter=FLAG,
            pins=PINS,
            time_limit=real(above=0.0),
            tolerance=real(most=1.0),
        )


AUTO = ShardingOptions()
DATA_PARALLEL = ShardingOptions(
    data_parallel=True, parameters="replicated", optimizer_state="replicated"
)
ZERO2 = ShardingOptions(data_parallel=True, parameters="replicated", optimizer_state="sharded")
ZERO3 = ShardingOptions(data_parallel=True, parameters="sharded", optimizer_state="sharded")
