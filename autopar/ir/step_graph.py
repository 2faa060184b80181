"""A traced step: one flat jaxpr, what its inputs and outputs are to the user, and how it runs in microbatches."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import jax
from jax.extend.core import Jaxpr, Var

from autopar.ir import graph
from autopar.ir.evaluate import Numbered
from autopar.ir.graph import aval_of


class MicrobatchError(ValueError):
    """The step can't be run in microbatches with the same result."""


type Combine = Literal["sum", "mean", "same", "rows"]
"""How the microbatches' values make that of the batch: added up, averaged, any of them, or put together row by row."""


@dataclass(frozen=True, slots=True)
class Loop:
    """Equations that run for each microbatch, and the numbered `accumulate` equations at which they end."""

    body: tuple[Numbered, ...]
    marks: tuple[Numbered, ...]


@dataclass(frozen=True, slots=True)
class Microbatching:
    """How a step runs in microbatches.

    Attributes:
        count: number of microbatches.
        body: numbered equations that run for each, up to the marked values.
        tail: numbered equations that run once, on the accumulated values.
        marks: the numbered `accumulate` equations: the body ends at their operands, the tail starts at their results.
        combine: how each of their results is put together.
        powers: for values with a row per example, told by (equation, result), the power of the batch's size that they grow with.
        chunks: runs of neighbouring examples that a microbatch consists of, as many as examples unless the step puts some together,
            as the pairs of a preference loss.
        loops: the body and the marks as they run, one loop over all microbatches after another: first those that accumulate statistics
            of the batch that a later one reads, such as the sum of a mask that divides a loss.
    """

    count: int
    body: tuple[Numbered, ...]
    tail: tuple[Numbered, ...]
    marks: tuple[Numbered, ...]
    combine: tuple[Combine, ...]
    powers: Mapping[tuple[int, int], int] = field(default_factory=dict, repr=False)
    chunks: int = 1
    loops: tuple[Loop, ...] = ()


@dataclass(frozen=True, eq=False)
class StepGraph:
    """A traced step. It is itself alone: what is found out about it is remembered by its identity.

    Attributes:
        jaxpr: flat; an input per array leaf of the arguments, an output per leaf of the result.
        in_paths: what the user calls each input, e.g. `0/params/Dense_0/kernel`.
        out_paths: the same for each output.
        batch: inputs whose first dim is the batch.
        carried: for each output that is the next value of an input (a state that a training loop feeds back), that input.
        in_tree: structure of the arguments.
        out_tree: structure of the result.
        retrace: the same step, traced for another number of microbatches.
        name: what the user calls the function.
        microbatching: how microbatches are put together, in which case the jaxpr is that of one microbatch; None otherwise.
        received_inputs: of a stage of a pipeline, the inputs that other stages send, with their batch dims.
        cross_task_values: of a stage of a pipeline, the values that go from one of its programs to another.
        saved_for_backward: of a stage of a pipeline, the values that stay from the forward pass of a microbatch until its backward pass.
        in_flight: of a stage of a pipeline, of how many microbatches it holds those at the same time.
    """

    jaxpr: Jaxpr
    in_paths: tuple[str, ...]
    out_paths: tuple[str, ...]
    batch: frozenset[int]
    carried: dict[int, int]
    in_tree: Any
    out_tree: Any
    retrace: "Callable[[int], StepGraph]" = field(repr=False)
    name: str = "the step"
    microbatching: Microbatching | None = None
    received_inputs: Mapping[int, frozenset[int]] = field(default_factory=dict)
    cross_task_values: tuple[Var, ...] = ()
    saved_for_backward: tuple[Var, ...] = ()
    in_flight: int = 1

    def leaves(self, args: Sequence[Any]) -> list[Any]:
        """The leaves of arguments for the step. Of another structure: `ValueError`."""
        leaves, tree = jax.tree.flatten(tuple(args))
        if tree != self.in_tree:
            raise ValueError(f"arguments of structure {tree}, expected {self.in_tree}")
        return leaves

    def split_microbatches(self, ways: int) -> "StepGraph":
        """The step with every microbatch cut once more, into `ways` equal parts, such as devices take.

        Raises:
            MicrobatchError: the parts can't be put together.
        """
        found = self.retrace(self.num_micro_batches * ways)
        if found.microbatching and self.microbatching:
            if self.run_length % found.run_length:
                raise MicrobatchError(
                    f"runs of {found.run_length} examples, which stay together, are not in runs of {self.run_length}"
                )
            if [len(loop.marks) for loop in found.microbatching.loops] != [
                len(loop.marks) for loop in self.microbatching.loops
            ]:
                raise MicrobatchError(
                    "the parts of a microbatch accumulate other statistics than a microbatch does"
                )
        return found

    @cached_property
    def fingerprint(self) -> str:
        """A short hash of the jaxpr."""
        return graph.fingerprint(self.jaxpr)

    @property
    def num_micro_batches(self) -> int:
        return self.microbatching.count if self.microbatching else 1

    @property
    def chunks(self) -> int:
        """Runs of neighbouring examples that a microbatch consists of (`autopar.microbatch.batch_rows`)."""
        return self.microbatching.chunks if self.microbatching else 1

    @property
    def run_length(self) -> int:
        """Neighbouring examples that stay together in a microbatch."""
        return (
            aval_of(self.jaxpr.invars[min(self.batch)]).shape[0] // self.chunks if self.batch else 1
        )

    @property
    def in_avals(self) -> Any:
        """The arguments of the step as ShapeDtypeStructs, with the whole batch."""
        count = self.num_micro_batches

        def full(i: int, var: Var) -> jax.ShapeDtypeStruct:
            shape = (
                (aval_of(var).shape[0] * count, *aval_of(var).shape[1:])
                if i in self.batch
                else aval_of(var).shape
            )
            return jax.ShapeDtypeStruct(shape, aval_of(var).dtype, weak_type=aval_of(var).weak_type)

        return jax.tree.unflatten(
            self.in_tree, [full(i, var) for i, var in enumerate(self.jaxpr.invars)]
        )
