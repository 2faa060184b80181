"""A traced step: a flat jaxpr, the user's names of its inputs and outputs, and its microbatches."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import jax
from jax.extend.core import Jaxpr, Primitive, Var

from autopar.ir import graph
from autopar.ir.array_cuts import NO_ARRAYS, CutTree
from autopar.ir.array_sizes import value_bytes
from autopar.ir.evaluate import Numbered
from autopar.ir.graph import aval_of
from autopar.ir.preparation import Preparation, TracedValue


class MicrobatchError(ValueError):
    """The step can't be run in microbatches with the same result."""


type Combine = Literal["sum", "mean", "same", "rows"]
"""How the values of microbatches are combined: summed, averaged, any one of equal values, or
put together row by row."""


type RandomBits = Literal["exact", "fold_in"]
"""The random bits of microbatches.

exact: those that the examples have in the whole batch; refused for generators that can't draw them
alone. fold_in: such generators draw other bits, from a key for each microbatch.
"""


type BatchStatistics = Literal["exact", "microbatch"]
"""The statistics of the batch in microbatches.

exact: those of the whole batch; refused where they can't be accumulated. microbatch: where they
can't be accumulated, each microbatch uses its own (`autopar.microbatch.own_statistics`).
"""


type WhileLoops = Literal["exact", "microbatch"]
"""The while loops of microbatches that run until the last example is done.

exact: refused where what they keep of the others may depend on the number of iterations.
microbatch: each microbatch runs them until the last of its own examples is done.
"""


@dataclass(frozen=True, slots=True)
class Exactness:
    """In what the microbatches of a step may differ from the whole batch.

    Attributes:
        rng: the random bits of microbatches.
        batch_statistics: the statistics of the batch.
        while_loops: the while loops that run until the last example is done.
    """

    rng: RandomBits = "exact"
    batch_statistics: BatchStatistics = "exact"
    while_loops: WhileLoops = "exact"


EXACT = Exactness()
"""Microbatches that have the numbers of the whole batch."""


type Remat = Literal["keep", "auto", "none"]
"""What the backward pass computes again instead of keeping it.

keep: what `jax.checkpoint` says. auto: what the planner chooses, so that the step fits into memory
in least time; it may keep what `jax.checkpoint` would compute again. none: nothing. In loops,
`jax.checkpoint` stays as it is.
"""


@dataclass(frozen=True, slots=True)
class Loop:
    """Equations that run for each microbatch.

    Attributes:
        body: the numbered equations.
        marks: the numbered `accumulate` equations at which they end.
    """

    body: tuple[Numbered, ...]
    marks: tuple[Numbered, ...]


@dataclass(frozen=True, slots=True)
class Microbatching:
    """How a step runs in microbatches.

    Attributes:
        count: the number of microbatches.
        body: numbered equations that run for each microbatch.
        tail: numbered equations that run once, on the accumulated values.
        marks: the numbered `accumulate` equations. The body ends at their operands, the tail starts
            at their results.
        combine: how the results of each mark are combined.
        powers: for values with a row per example, by (equation, result), the power of the batch
            size with which they scale.
        chunks: the number of runs of neighbouring examples in a microbatch. Examples of a run stay
            together, such as the pairs of a preference loss; usually a run is one example.
        parts: the number of equal parts of a microbatch that the step tells apart, usually one. It
            is two if the step takes the first half of the batch.
        loops: the body and the marks, split into loops over all microbatches that run one after
            another. Earlier loops accumulate statistics of the batch that later ones read, such as
            the sum of a mask that divides a loss.
        own_statistics: the lines of code where each microbatch uses its own statistics instead of
            the statistics of the batch, as "FILE:LINE".
        own_loops: the lines of code where each microbatch runs a while loop until the last of its
            own examples is done.
    """

    count: int
    body: tuple[Numbered, ...]
    tail: tuple[Numbered, ...]
    marks: tuple[Numbered, ...]
    combine: tuple[Combine, ...]
    powers: Mapping[tuple[int, int], int] = field(default_factory=dict, repr=False)
    chunks: int = 1
    parts: int = 1
    loops: tuple[Loop, ...] = ()
    own_statistics: tuple[str, ...] = ()
    own_loops: tuple[str, ...] = ()

    @property
    def num_marks(self) -> list[int]:
        """The number of marks in each loop."""
        return [len(loop.marks) for loop in self.loops]


def _places(step: "StepGraph") -> tuple[TracedValue, ...]:
    """Return the values that a step computes for the whole batch before its microbatches."""
    prepared = step.preparation.places if step.preparation else ()
    return (*prepared, *(step.first_pass.places if step.first_pass else ()))


def _joins(microbatching: Microbatching) -> list[bool]:
    """Return for each accumulated value whether it has the rows of all microbatches."""
    return [how == "rows" for how in microbatching.combine]


@dataclass(frozen=True, eq=False, slots=True)
class FirstPass:
    """What a step computes in a pass over its microbatches before the one that it is.

    Attributes:
        step: the pass as a step. Its results are inputs of the step, after the prepared ones.
        reads: the numbers of the inputs of the step that are the inputs of the pass.
        places: where the results are computed in the traces of the step.
        lines: the lines of code that compute the results, as "FILE:LINE".
        has_backward: whether its microbatches have products of a backward pass.
    """

    step: "StepGraph"
    reads: tuple[int, ...]
    places: tuple[TracedValue, ...]
    lines: tuple[str, ...]
    has_backward: bool


@dataclass(frozen=True, eq=False)
class StepGraph:
    """A traced step, compared and hashed by identity, so that analyses can be memoized on it.

    Attributes:
        jaxpr: a flat jaxpr, with an input per array leaf of the arguments and an output per leaf of
            the result. With microbatches it is the jaxpr of one microbatch.
        in_paths: the user's name of each input, e.g. `0/params/Dense_0/kernel`.
        out_paths: the user's name of each output.
        batch: the numbers of the inputs whose first dim is the batch.
        carried: for each output that is the next value of an input (a state that a training loop
            feeds back), the number of that input.
        in_tree: the structure of the arguments, with a tuple in place of an array in pieces.
        out_tree: the structure of the result, with a tuple in place of an array in pieces.
        arguments: the user's arguments, some of whose arrays are inputs in pieces. A pipeline stage
            has none of its own.
        result: the user's result, some of whose arrays are outputs in pieces.
        retrace: a function that returns the same step for another number of microbatches.
        divides_evenly: a function that returns whether it is known without a trace that every
            microbatch can be split into a number of parts (`split_microbatches`).
        name: the name of the user's function.
        microbatching: how the step runs in microbatches; None if it does not.
        received_inputs: for a pipeline stage, the inputs that other stages send, with their batch
            dims.
        cross_task_values: for a pipeline stage, the values that pass from one of its tasks to
            another.
        task_ends: for a pipeline stage, the number of the last equation of each task of a
            microbatch.
        saved_for_backward: for a pipeline stage, the values that are stored from the forward pass
            of a microbatch until its backward pass.
        saved_for_weights: for a pipeline stage with weight gradients of their own, the values that
            are stored from the forward pass and the input gradients of a microbatch until them.
        in_flight: for a pipeline stage, the number of microbatches whose saved values it stores at
            the same time (`saved_in_flight`).
        positions: the number of an input that is no argument: the positions of the examples in the
            batch (`autopar.microbatch.row_positions`). None if the step needs none.
        preparation: what the inputs after the arguments are computed from before the step
            (`autopar.microbatch.prepared_inputs`). None if there are no such inputs.
        first_pass: the pass over the microbatches that computes further inputs
            (`autopar.microbatch.first_pass`). None if the step is one pass.
        unconstrained: the lines whose `jax.lax.with_sharding_constraint` is left out.
    """

    jaxpr: Jaxpr
    in_paths: tuple[str, ...]
    out_paths: tuple[str, ...]
    batch: frozenset[int]
    carried: dict[int, int]
    in_tree: Any
    out_tree: Any
    retrace: "Callable[[int], StepGraph]" = field(repr=False)
    arguments: CutTree = field(default=NO_ARRAYS, repr=False)
    result: CutTree = field(default=NO_ARRAYS, repr=False)
    divides_evenly: Callable[[int], bool] = field(default=lambda parts: False, repr=False)
    name: str = "the step"
    microbatching: Microbatching | None = None
    received_inputs: Mapping[int, frozenset[int]] = field(default_factory=dict)
    cross_task_values: tuple[Var, ...] = ()
    task_ends: tuple[int, ...] = ()
    saved_for_backward: tuple[Var, ...] = ()
    saved_for_weights: tuple[Var, ...] = ()
    in_flight: int = 1
    positions: int | None = None
    preparation: Preparation | None = None
    first_pass: FirstPass | None = None
    unconstrained: tuple[str, ...] = ()

    def leaves(self, args: Sequence[Any]) -> list[Any]:
        """Return the inputs that the user's arguments `args` consist of.

        Raises:
            ValueError: The structure is not that of the step's arguments.
        """
        leaves, tree = jax.tree.flatten(tuple(args))
        if tree != self.arguments.tree:
            raise ValueError(f"arguments of structure {tree}, expected {self.arguments.tree}")
        return self.arguments.pieces(leaves)

    def split_microbatches(self, ways: int) -> "StepGraph":
        """Return the step with every microbatch split into `ways` equal parts, one per device.

        Raises:
            MicrobatchError: The results of the parts can't be combined.
        """
        if self.microbatching and self.microbatching.own_statistics:
            raise MicrobatchError(
                "statistics of a microbatch, as in batch normalization, need the examples of all"
                " devices"
            )
        if self.microbatching and self.microbatching.parts > 1:
            raise MicrobatchError(
                "parts of the batch, such as its first half, need the examples of all devices"
            )
        parts = self.retrace(self.num_micro_batches * ways)
        if parts.positions != self.positions:
            raise MicrobatchError(
                "the parts of a microbatch depend otherwise on the positions of their examples than"
                " a microbatch does"
            )
        if _places(parts) != _places(self):
            raise MicrobatchError(
                "the parts of a microbatch need other values of the whole batch than a microbatch"
                " does"
            )
        if parts.microbatching and self.microbatching:
            if self.run_length % parts.run_length:
                raise MicrobatchError(
                    f"runs of {parts.run_length} examples, which stay together, are not in runs of"
                    f" {self.run_length}"
                )
            if self.num_micro_batches == 1:
                raise MicrobatchError("a single microbatch is not split further")
            if "rows" in self.microbatching.combine and self.chunks % ways:
                raise MicrobatchError(
                    f"the {self.chunks} runs of examples of a microbatch, whose rows are joined,"
                    f" can't be split {ways} ways"
                )
            if _joins(parts.microbatching) != _joins(self.microbatching):
                raise MicrobatchError(
                    "the parts of a microbatch accumulate other values than a microbatch does"
                )
            if parts.microbatching.num_marks != self.microbatching.num_marks:
                raise MicrobatchError(
                    "the parts of a microbatch accumulate other statistics than a microbatch does"
                )
        return parts

    @cached_property
    def fingerprint(self) -> str:
        """A short hash of the jaxpr."""
        return graph.fingerprint(self.jaxpr)

    @cached_property
    def equation_forms(self) -> list[tuple[Primitive, tuple[int, ...]]]:
        """The primitive of each equation, and the ranks of its operands and results.

        Shardings that are planned for this step apply to another trace of it if these agree. A
        trace for microbatches of one example may sum over one dim less.
        """
        return [
            (eqn.primitive, tuple(aval_of(atom).ndim for atom in (*eqn.invars, *eqn.outvars)))
            for eqn in self.jaxpr.eqns
        ]

    @property
    def num_micro_batches(self) -> int:
        """The number of microbatches."""
        return self.microbatching.count if self.microbatching else 1

    @property
    def state(self) -> tuple[Var, ...]:
        """The carried inputs and the sums over microbatches."""
        marks = self.microbatching.marks if self.microbatching else ()
        carried = (self.jaxpr.invars[i] for i in self.carried.values())
        return (*carried, *(var for _, mark in marks for var in mark.outvars))

    @property
    def saved_in_flight(self) -> tuple[Var, ...]:
        """The values that each microbatch in flight stores at most.

        Where the backward pass recomputes, the weight gradients may read more values than the
        forward pass stores.
        """
        saved = self.saved_for_backward, self.saved_for_weights
        return max(saved, key=lambda values: sum(map(value_bytes, values)))

    @property
    def chunks(self) -> int:
        """The number of runs of examples in a microbatch (see `autopar.microbatch.batch_rows`)."""
        return self.microbatching.chunks if self.microbatching else 1

    @property
    def run_length(self) -> int:
        """The number of neighbouring examples in a run."""
        if not self.batch:
            return 1
        return aval_of(self.jaxpr.invars[min(self.batch)]).shape[0] // self.chunks

    @property
    def completed(self) -> range:
        """The numbers of the inputs that the first pass completes."""
        count = len(self.first_pass.places) if self.first_pass else 0
        end = len(self.jaxpr.invars) if self.positions is None else self.positions
        return range(end - count, end)

    @property
    def in_avals(self) -> Any:
        """The arguments of the step as ShapeDtypeStructs, with the whole batch."""
        return jax.tree.unflatten(self.in_tree, self.input_avals[: self.in_tree.num_leaves])

    @cached_property
    def input_avals(self) -> list[jax.ShapeDtypeStruct]:
        """The inputs of the step, with the whole batch: the leaves of its arguments come first."""

        def whole_batch_aval(i: int, var: Var) -> jax.ShapeDtypeStruct:
            aval = aval_of(var)
            shape = aval.shape
            if i in self.batch:
                shape = (shape[0] * self.num_micro_batches, *shape[1:])
            return jax.ShapeDtypeStruct(shape, aval.dtype, weak_type=aval.weak_type)

        return [whole_batch_aval(i, var) for i, var in enumerate(self.jaxpr.invars)]
