"""Seconds of an equation on a mesh: its kernels, its collectives, resharding of its operands."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Var
from jax.extend.core.primitives import concatenate_p, convert_element_type_p

from autopar.ir import control_flow
from autopar.ir.array_sizes import array_bytes
from autopar.ir.graph import Atom, aval_of
from autopar.ir.spec import Spec, Specs, local_shape
from autopar.ir.step_graph import StepGraph
from autopar.primitives import kernel_of, record_of
from autopar.primitives.factors import OpFactors
from autopar.primitives.shard_map import SHARD_MAP
from autopar.sharding import manual_regions
from autopar.sharding.candidates import Candidates, Option
from autopar.sharding.dataflow import Dataflow
from autopar.sharding.distinct_options import each_once
from autopar.sharding.equation_contents import Content, loop_sums
from autopar.sharding.mesh_costs import MeshCosts, Step, is_local
from autopar.sharding.reshard_hoisting import moved_bytes
from autopar.xla_fusion import Moved, Traffic, takes_two_kernels
from simulator.work import Kernel


class EquationSeconds:
    """Prices the options of each equation of a step, and memoizes them in the costs of the mesh.

    Attributes:
        repeats: how often each equation runs in a step.
        producers: the equation that computes each value.
    """

    def __init__(
        self,
        step: StepGraph,
        flow: Dataflow,
        traffic: Traffic,
        contents: Sequence[Content | None],
        costs: MeshCosts,
    ) -> None:
        self.repeats = repeats_in_step(step)
        self._sums = loop_sums(step, costs.completes_behind_loops)
        self.producers = {var: eqn for eqn in step.jaxpr.eqns for var in eqn.outvars}
        self._contents = contents
        self._num_micro_batches = step.num_micro_batches
        self._eqns = step.jaxpr.eqns
        self._flow = flow
        self._traffic = traffic
        self._costs = costs
        self._mesh = costs.mesh
        self._launch = costs.model.kernel(Kernel("", "memory", 0.0, 0.0))  # of an empty kernel
        self._memo: dict[Any, np.ndarray | None] = costs.memo.setdefault("costs", {})
        self._resharding: dict[Any, tuple[np.ndarray, np.ndarray]] = costs.memo.setdefault(
            "resharding", {}
        )

    def computing(
        self, number: int, eqn: JaxprEqn, factors: OpFactors, candidates: Candidates
    ) -> np.ndarray | None:
        """Return the seconds of the kernel and of completing partial results under each option.

        The shape is (2, options); None if all are zero, as for most equations of a fused kernel.
        The traffic of the kernel is what it adds when it is fused.
        """
        if eqn.primitive in control_flow.MARKERS:
            return self._marker(number, eqn, candidates)
        if eqn.primitive.name == SHARD_MAP:
            return np.array([manual_regions.seconds(eqn, self._costs)]).T * self.repeats[number]
        key = self._contents[number], candidates
        if key not in self._memo:
            moved = self._traffic.moved[number]
            seconds = np.array(
                each_once(
                    lambda option: self._option(eqn, factors, option, moved), candidates.options
                )
            ).T
            self._memo[key] = seconds if seconds.any() else None
        seconds = self._memo[key]
        return None if seconds is None else seconds * self.repeats[number]

    def accumulating(self, atom: Var, var: Var, specs: Specs) -> np.ndarray:
        """Return the seconds of accumulating microbatches, shape (2, options).

        The sum is read and written, the addend read. The reading of an addend that is converted
        counts with the conversion.

        Args:
            atom: the addend.
            var: the sum.
            specs: spec of the addend under each option.
        """
        producer = self.producers.get(atom)
        converted = producer is not None and producer.primitive is convert_element_type_p
        joined = aval_of(atom).shape != aval_of(var).shape  # written, not added
        passes = 2 if converted or joined else 3
        shapes = each_once(partial(local_shape, aval_of(atom).shape, mesh=self._mesh), specs)
        sizes = [passes * array_bytes(shape, aval_of(var).dtype) for shape in shapes]
        seconds = self._num_micro_batches * np.array([self._costs.copy(size) for size in sizes])
        return np.array([seconds, np.zeros_like(seconds)])

    def synchronizing(self, ways: list[Option]) -> np.ndarray:
        """Return the seconds of each way to complete an accumulated value, shape (2, ways)."""
        combined = self._costs.combined
        seconds = [
            sum(combined.collective(*step) for step in way.collectives)
            + self._costs.copy(way.copied)
            for way in ways
        ]
        return np.array([[0.0] * len(ways), seconds])

    def resharding(
        self, number: int | None, atom: Var, specs: Specs, required: Specs
    ) -> np.ndarray | None:
        """Return the seconds of resharding an operand, shape (specs, required); None if all are 0.

        Args:
            number: number of the equation that reads it; None for an output of the step.
            atom: the operand.
            specs: spec of the value under each option of its decision.
            required: needed spec under each option of the decision that it depends on.
        """
        eqn = None if number is None else self._eqns[number]
        num_bytes = moved_bytes(self.producers.get(atom), atom)
        alike = 1  # number of operands that are resharded together
        if eqn is not None and eqn.primitive is concatenate_p:
            alike = sum(a.aval == atom.aval for a in eqn.invars)
        matrix = self._costs_of(atom).reshard_matrix(alike * num_bytes, specs, required)
        if eqn is not None and atom in self._sums:
            scattered = self._scattering(atom, specs, required)
            matrix = scattered if matrix is None else matrix + scattered
        if matrix is None:
            return None
        if number is None or eqn is None:
            return self._scaled(matrix, alike)
        # Of equal costs, each slice is resharded rather than the whole before the loop.
        weight = 1 + 1e-6 if eqn.primitive is control_flow.loop_slice_p else 1.0
        readers = 1
        factors = self._flow.factors[number]
        if atom not in self._flow.per_example and factors and factors.decides:
            # The compiler makes one copy for all equations that need the same spec.
            readers = self._flow.readers[atom]
        return self._scaled(matrix, alike, weight, readers, self.repeats[number])

    def _scaled(
        self, matrix: np.ndarray, alike: int, weight: float = 1.0, readers: int = 1, runs: float = 1
    ) -> np.ndarray:
        """Return the seconds in a step of resharding an operand: one array for all that are alike.

        Args:
            matrix: seconds of resharding all operands that are resharded together.
            alike: their number.
            weight: factor by which one is preferred to others of equal cost.
            readers: number of equations that share the copy.
            runs: how often the equation runs in a step.
        """
        key = id(matrix), alike, weight, readers, runs
        if key not in self._resharding:
            # With its result, the matrix is kept, so that no other one gets its id.
            self._resharding[key] = matrix, matrix / alike * weight / readers * runs
        return self._resharding[key][1]

    def _scattering(self, atom: Var, specs: Specs, required: Specs) -> np.ndarray:
        """Return the seconds, in one iteration, to add up parts of a value.

        If the loop only adds up a part of what an all_reduce returns, XLA makes a reduce_scatter of
        it, which stays in the loop.

        Args:
            atom: a value that a loop only adds up.
            specs: spec of the value under each option of its decision.
            required: needed spec under each option of the decision that it depends on.
        """
        aval = aval_of(atom)

        def seconds(present: Spec, needed: Spec) -> float:
            if present == needed or not is_local(present, needed):
                return 0.0
            before = {axis for axes in present for axis in axes}
            axes = tuple(axis for axes in needed for axis in axes if axis not in before)
            num_bytes = array_bytes(local_shape(aval.shape, present, self._mesh), aval.dtype)
            return self._costs.collective("reduce_scatter", num_bytes, axes)

        return np.array([each_once(partial(seconds, present), required) for present in specs])

    def _costs_of(self, atom: Atom) -> MeshCosts:
        """Return the costs of collectives on a value."""
        return self._costs.combined if self._flow.is_combined(atom) else self._costs

    def _marker(self, number: int, eqn: JaxprEqn, candidates: Candidates) -> np.ndarray:
        """Return the seconds of a marker, shape (2, options).

        A loop launches a kernel per iteration, which counts. A stacked output is initialized with
        zeros, and each iteration writes its slice.
        """
        seconds = np.zeros((2, len(candidates.options)))
        if eqn.primitive is control_flow.loop_p:
            seconds[0] = self.repeats[number] * (eqn.params["length"] or 1) * self._launch
        elif eqn.primitive is control_flow.loop_stack_p:
            aval = aval_of(eqn.invars[0])
            sizes = each_once(
                lambda spec: array_bytes(local_shape(aval.shape, spec, self._mesh), aval.dtype),
                candidates.operands[0],
            )
            seconds[0] = [self.repeats[number] * self._costs.copy(3 * size) for size in sizes]
        return seconds

    def _option(
        self, eqn: JaxprEqn, factors: OpFactors, option: Option, moved: Moved
    ) -> tuple[float, float]:
        """Return the seconds of the kernel and of completing partial results under one option."""
        specs = [factors.operand_spec(k, option.assignment) for k in range(len(eqn.invars))]
        specs += [factors.result_spec(r, option.assignment) for r in range(len(eqn.outvars))]
        avals = [aval_of(atom) for atom in (*eqn.invars, *eqn.outvars)]
        shapes = [
            local_shape(aval.shape, spec, self._mesh)
            for aval, spec in zip(avals, specs, strict=True)
        ]
        sizes = [array_bytes(shape, aval.dtype) for shape, aval in zip(shapes, avals, strict=True)]
        completion = sum(
            self._completion(eqn.outvars[0], step, moved.together) for step in option.collectives
        )
        completion += self._costs.copy(option.copied)
        count = len(eqn.invars)
        kernel = self._kernel(eqn, shapes, sizes[:count], sizes[count:], moved)
        return kernel, completion

    def _completion(self, var: Var, step: Step, together: int) -> float:
        """Return the seconds, in one iteration, of a collective that completes a partial result.

        XLA copies partial statistics of one kernel into one array, and completes them together. It
        completes a sum over iterations by one all_reduce behind the loop.
        """
        kind, num_bytes, axes = step
        iterations = self._sums.get(var)
        if iterations and kind == "all_reduce":
            return self._costs_of(var).collective(kind, num_bytes, axes) / iterations
        costs = self._costs if iterations else self._costs_of(var)
        if together == 1 or kind != "all_reduce" or var not in self._flow.batch_statistics:
            return costs.collective(kind, num_bytes, axes)
        return costs.collective(kind, together * num_bytes, axes) / together + self._costs.copy(
            4 * num_bytes
        )

    def _kernel(
        self,
        eqn: JaxprEqn,
        shapes: list[tuple[int, ...]],
        operands: list[int],
        results: list[int],
        moved: Moved,
    ) -> float:
        """Return the seconds of an equation's share of its kernels, and of copies.

        Args:
            eqn: the equation.
            shapes: shapes of the shards of its operands and results.
            operands: bytes of the operands' shards.
            results: bytes of the results' shards.
            moved: memory traffic of the equation.
        """
        if record_of(eqn).reads_part:
            operands = [min(size, max(results)) for size in operands]
        total = sum(n * size for n, size in zip(moved.reads, operands, strict=True))
        total += sum(n * size for n, size in zip(moved.writes, results, strict=True))
        copies = sum(
            n * self._costs.copy(2 * size)
            for n, size in zip(moved.copies, (*operands, *results), strict=bool(moved.copies))
        )
        if not total:
            return copies
        kernels = moved.kernels + (any(moved.writes) and takes_two_kernels(eqn, shapes[0]))
        return (
            self._costs.model.kernel(kernel_of(eqn, total, shapes))
            + (kernels - 1) * self._launch
            + copies
        )


def repeats_in_step(step: StepGraph) -> list[float]:
    """Return how often each equation runs in a step, with loops and microbatches."""
    counts = control_flow.repeats(step.jaxpr.eqns)
    for number, _ in step.microbatching.body if step.microbatching else ():
        counts[number] *= step.num_micro_batches
    return counts
