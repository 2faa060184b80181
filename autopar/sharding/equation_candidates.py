"""The options of an equation that the user's restrictions and deferred gradients allow."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from jax.extend.core import JaxprEqn, Var

from autopar.ir import control_flow
from autopar.ir.graph import aval_of
from autopar.ir.spec import Spec, Specs
from autopar.ir.step_graph import StepGraph
from autopar.primitives.factors import Assignment, OpFactors
from autopar.primitives.shard_map import SHARD_MAP
from autopar.sharding import manual_regions
from autopar.sharding.candidates import (
    Candidates,
    Option,
    batch_on,
    batch_only,
    completions,
    followed,
    is_compilable,
    scattered_if_possible,
)
from autopar.sharding.dataflow import Dataflow
from autopar.sharding.deferred_sync import fits, leads, partial_completions, synchronizations
from autopar.sharding.distinct_options import each_once
from autopar.sharding.equation_contents import Content, result_sizes
from autopar.sharding.mesh_costs import MeshCosts
from autopar.sharding.options import ShardingOptions
from autopar.sharding.pins import ShardingError


class EquationCandidates:
    """Lists the options of each equation of a step, and memoizes them in the costs of the mesh.

    Attributes:
        mesh: the logical mesh.
        deferred: mesh axes along which gradients are completed once per step.
    """

    def __init__(
        self,
        step: StepGraph,
        flow: Dataflow,
        costs: MeshCosts,
        options: ShardingOptions,
        deferred: tuple[str, ...],
        contents: Sequence[Content | None],
    ) -> None:
        self.mesh = costs.mesh
        self.deferred = deferred
        self._contents = contents
        self._flow = flow
        self._limits = options
        self._body = (
            frozenset(number for number, _ in step.microbatching.body)
            if step.microbatching
            else frozenset()
        )
        # Pins restrict inputs and named values only, and are no part of the key.
        key = repr(replace(options, pins={})), deferred
        self._memo: dict[Any, Candidates | None] = costs.memo.setdefault(key, {})

    def following(
        self, number: int, eqn: JaxprEqn, factors: OpFactors, leader: int, specs: Specs
    ) -> Candidates | None:
        """Return a candidate per spec of the followed operand; None if one is impossible."""
        key = self._contents[number], self._is_deferred(number), leader, specs
        if key not in self._memo:
            assignments = followed(factors, leader, specs, self.mesh)
            candidates = None
            if assignments is not None and all(
                self.fits(number, assignment) for assignment in set(assignments)
            ):
                options = each_once(
                    lambda a: self._completions(number, eqn, factors, a, False)[0], assignments
                )
                candidates = Candidates.of(factors, options)
            self._memo[key] = candidates
        return self._memo[key]

    def deciding(self, number: int, eqn: JaxprEqn, factors: OpFactors) -> Candidates:
        """Return the candidates of an equation that decides."""
        marked = self._flow.batch_factors[number]
        if eqn.primitive.name == SHARD_MAP:  # depends on more than its factors
            return Candidates.of(factors, self._options(number, eqn, factors, marked))
        key = self._contents[number], self._is_deferred(number)
        candidates = self._memo.get(key)
        if candidates is None:
            candidates = self._memo[key] = Candidates.of(
                factors, self._options(number, eqn, factors, marked)
            )
        return candidates

    def synchronizing(self, var: Var, specs: Specs) -> list[tuple[Spec, Option]]:
        """Return the ways to complete an accumulated value, each with the spec it starts from.

        Args:
            var: the accumulated value.
            specs: specs of its partial sums.
        """
        aval = aval_of(var)
        ways = synchronizations(
            tuple(aval.shape),
            aval.dtype.itemsize,
            specs,
            self._may_scatter(),
            self.mesh,
            self.deferred,
        )
        if self._limits.prefer_reduce_scatter:
            scattered = scattered_if_possible([way for _, way in ways])
            ways = [(source, way) for source, way in ways if way in scattered]
        return ways

    def fits(self, number: int, assignment: Assignment) -> bool:
        """Return whether an equation may be sharded by `assignment` with deferred gradients."""
        return not self._is_deferred(number) or fits(
            assignment, self._flow.batch_factors[number], self.deferred
        )

    def of_input(self, path: str, rows: Collection[int], specs: Specs) -> Specs:
        """Return the specs of an input that shard its batch dims `rows` over the deferred axes.

        Raises:
            ShardingError: none of the specs does.
        """
        deferred = set(self.deferred)
        allowed = tuple(
            spec
            for spec in specs
            if leads(spec, self.deferred) and all(deferred <= {*spec[dim]} for dim in rows if spec)
        )
        if not allowed:
            raise ShardingError(
                f"{path} can't be divided by examples along {', '.join(self.deferred)}"
            )
        return allowed

    def _is_deferred(self, number: int) -> bool:
        """Return whether results of the equation stay partial along the deferred axes."""
        return bool(self.deferred) and number in self._body

    def _options(
        self, number: int, eqn: JaxprEqn, factors: OpFactors, marked: frozenset[int]
    ) -> list[Option]:
        """Return the options of an equation that the user's restrictions allow."""
        if eqn.primitive.name == SHARD_MAP:
            if self._is_deferred(number):
                raise ShardingError(
                    "a shard_map of the step decides itself how examples are sharded"
                )
            return list(
                completions(
                    factors,
                    manual_regions.assignment(eqn, self.mesh),
                    result_sizes(eqn),
                    False,
                    self.mesh,
                )
            )
        assignments = [a for a in factors.assignments(self.mesh) if self.fits(number, a)]
        if not assignments:
            name = f"{eqn.primitive.name} in {eqn.source_info.name_stack}"
            raise ShardingError(
                f"{name} can't be divided by examples along {', '.join(self.deferred)}"
            )
        limits = self._limits
        # A marker without a batch dim may be sharded over any dim: weights enter loops in shards,
        # and their gradients leave them in shards.
        if limits.data_parallel and (marked or eqn.primitive not in control_flow.MARKERS):
            assignments = batch_only(assignments, marked, self.mesh)
        if limits.batch_axis is not None and self.mesh.sizes[limits.batch_axis] > 1:
            assignments = batch_on(assignments, marked, limits.batch_axis)
        options = [
            o
            for a in assignments
            for o in self._completions(number, eqn, factors, a, self._may_scatter())
        ]
        options = [option for option in options if is_compilable(eqn, factors, option)]
        return scattered_if_possible(options) if limits.prefer_reduce_scatter else options

    def _may_scatter(self) -> bool:
        return not self._limits.data_parallel or self._limits.optimizer_state == "sharded"

    def _completions(
        self, number: int, eqn: JaxprEqn, factors: OpFactors, assignment: Assignment, scatter: bool
    ) -> tuple[Option, ...]:
        if self._is_deferred(number):
            return partial_completions(
                factors, assignment, result_sizes(eqn), scatter, self.mesh, self.deferred
            )
        return completions(factors, assignment, result_sizes(eqn), scatter, self.mesh)
