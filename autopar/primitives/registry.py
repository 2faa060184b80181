"""The registry of primitives: a frozen record per JAX primitive with all that planning knows of it.

Each family of primitives (contractions, reductions, ...) has a module with the records of its
primitives. To teach the planner a primitive, add a record to its family.
`tests/autopar/sharding/test_rules.py` then runs every sharding that the record allows and compares
it with the unsharded equation, and `tests/autopar/primitives/test_registry.py` checks what it says
of linearity. A primitive without a record is replicated: every device computes all of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax.extend.core.primitives
import jax.extend.random
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Primitive

from autopar.primitives.equation_work import KernelRule, memory_kernel
from autopar.primitives.factors import OpFactors
from autopar.primitives.local_forms import LocalRule
from autopar.primitives.rule_helpers import ShardingRule, replicated
from simulator.work import CollectiveKind

type OperandLayout = tuple[str, object]
"""A layout that a kernel needs: the name of the change that a copy makes, and its parameters."""

type LayoutRule = Callable[[JaxprEqn], list[OperandLayout | None]]
"""Maps an equation to the layouts that its kernel needs of operands and results; None: any."""

FusionClass = Literal[
    "elementwise", "indexing", "input", "reduction", "update", "contraction", "kernel"
]
"""How XLA:GPU fuses an equation with its neighbours.

elementwise: computes each element by itself; inlined into the kernels that read it.
indexing: picks or spreads elements without arithmetic; inlined into the kernels that read it.
input: writes its result, and computes its operands inside its own kernel.
reduction: as input, over the elements of its operand.
update: writes into its first operand in place.
contraction: a matrix product or convolution of cuBLAS or cuDNN, with an epilogue.
kernel: a kernel of its own that reads and writes device memory.
"""

Movement = Literal["identity", "shape", "cast", "part"]
"""What an equation without arithmetic does to its operand.

identity: result i is operand i. shape: elements are rearranged or repeated. cast: elements are
converted. part: some elements are picked.
"""

Algebra = Literal[
    "product", "quotient", "power", "sum", "linear", "selection", "homogeneous", "invariant"
]
"""How a result depends on the scale and on sums of its operands.

product: linear in each operand. quotient: linear in the first operand, divided by the second.
power: an integer power of its operand. sum: linear in its data operands jointly. linear: linear in
its data operand. selection: picks one of its data operands for each element. homogeneous: scales
with a positive factor, but is not additive (max, abs, sort). invariant: does not change with a
positive factor that its operands have in common (comparisons, sign, is_finite).
"""


class MissingRuleError(NotImplementedError):
    """A primitive has no record and can't be replicated.

    It has effects, or operands that are no arrays.
    """

    def __init__(self, eqn: JaxprEqn) -> None:
        shapes = ", ".join(str(atom.aval) for atom in eqn.invars)
        results = ", ".join(str(var.aval) for var in eqn.outvars)
        super().__init__(
            f"no sharding rule for primitive {eqn.primitive.name!r},"
            f" used as ({shapes}) -> ({results})"
            f" in {str(eqn.source_info.name_stack) or 'the step'}: it has effects, or works on"
            " something other than arrays; rules live in autopar/primitives"
        )


def _whole_or_refused(eqn: JaxprEqn) -> OpFactors:
    """Replicate an equation whose primitive has no record, if that is possible."""
    avals = (atom.aval for atom in (*eqn.invars, *eqn.outvars))
    if eqn.effects or not all(isinstance(aval, ShapedArray) for aval in avals):
        raise MissingRuleError(eqn)
    return replicated(eqn)


_ELEMENTWISE_KERNEL = memory_kernel()


@dataclass(frozen=True, slots=True)
class PrimitiveRecord:
    """What planning knows of one primitive.

    Attributes:
        factors: how its dims may be sharded.
        local: its form on shards; None: the primitive itself, with the same parameters.
        local_by_shape: whether `local` depends on the shapes of shards, but not on their place.
        work: its kernel, with the FLOP that it takes.
        fusion: how XLA:GPU fuses it.
        movement: what it does to its operand if it does no arithmetic.
        is_view: whether its result shares the memory of its first operand. (A transpose does if it
            is of a matrix, see `autopar.xla_fusion.is_view`.)
        is_recomputed: whether fusions that read its result compute it again instead of storing it.
        layouts: the layouts that its kernel needs of operands and results.
        algebra: how its result scales; None: nonlinear, or unknown.
        data: the operands that are data; the others are indices, sizes or conditions.
        commutes: whether its two operands may be exchanged.
        collective: the collective that it is inside a `jax.shard_map` region.
        runs_body: whether it runs a jaxpr of its own, of unknown cost.
        runs_on_shards: whether an equation runs on shards, because XLA's partitioner would compute
            wrong numbers, or all of the results on every device, or add collectives.
    """

    factors: ShardingRule = _whole_or_refused
    local: LocalRule | None = None
    local_by_shape: bool = False
    work: KernelRule = _ELEMENTWISE_KERNEL
    fusion: FusionClass = "kernel"
    movement: Movement | None = None
    is_view: bool = False
    is_recomputed: bool = True
    layouts: LayoutRule | None = None
    algebra: Algebra | None = None
    data: slice = slice(None)
    commutes: bool = False
    runs_body: bool = False
    collective: CollectiveKind | None = None
    runs_on_shards: bool | Callable[[JaxprEqn], bool] = False

    @property
    def is_replicated_only(self) -> bool:
        """Whether every device computes it whole because no better rule is known."""
        return self.factors in (replicated, _whole_or_refused) and not self.passes_through

    @property
    def ignores_place(self) -> bool:
        """Whether all shards are computed alike, wherever in the array they are."""
        return self.local is None or self.local_by_shape

    @property
    def is_addition(self) -> bool:
        """Whether it adds two arrays."""
        return self.algebra == "sum" and self.commutes

    @property
    def passes_through(self) -> bool:
        """Whether result i is operand i."""
        return self.movement == "identity"

    @property
    def is_inlined(self) -> bool:
        """Whether it is inlined into the kernels that read its result."""
        return self.fusion in ("elementwise", "indexing")

    @property
    def reads_part(self) -> bool:
        """Whether it reads only the elements of its data that it returns."""
        return self.movement == "part"

    @property
    def is_contraction(self) -> bool:
        """Whether it is a matrix product or convolution."""
        return self.algebra == "product" and self.fusion != "elementwise"

    @property
    def is_costly(self) -> bool:
        """Whether it may take much longer than a pass over its operands."""
        return self.is_contraction or self.runs_body


PUBLIC_PRIMITIVES = {
    primitive.name: primitive
    for module in (jax.extend.core.primitives, jax.extend.random, lax)
    for primitive in vars(module).values()
    if isinstance(primitive, Primitive)
}
"""The primitives that are public objects of JAX, by name."""

_RECORDS: dict[Primitive | str, PrimitiveRecord] = {}

_UNKNOWN = PrimitiveRecord()


def register(primitive: Primitive | str, record: PrimitiveRecord) -> None:
    """Add the record of a primitive.

    Args:
        primitive: the primitive, or JAX's name of it. If JAX has no public primitive of that name,
            the record applies to every primitive so named.
        record: its record.

    Raises:
        ValueError: the primitive has a record already.
    """
    key = PUBLIC_PRIMITIVES.get(primitive, primitive) if isinstance(primitive, str) else primitive
    if key in _RECORDS:
        raise ValueError(f"primitive {primitive} has a record already")
    _RECORDS[key] = record


def record_of(eqn: JaxprEqn) -> PrimitiveRecord:
    """Return the record of an equation's primitive, or a default record."""
    primitive = eqn.primitive
    return _RECORDS.get(primitive) or _RECORDS.get(primitive.name) or _UNKNOWN


def is_registered(primitive: Primitive) -> bool:
    """Return whether the primitive has a record."""
    return primitive in _RECORDS or primitive.name in _RECORDS
