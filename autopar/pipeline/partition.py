"""The partition of a traced step into the tasks of a pipeline, with their data dependences.

`autopar.pipeline.partitioner` builds it.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Protocol

from jax.extend.core import Var

from autopar.ir.equation_groups import dependents, flow
from autopar.ir.evaluate import Numbered
from autopar.ir.graph import Atom, variables
from autopar.ir.memo import memoized_on_step
from autopar.ir.step_graph import Combine, StepGraph
from autopar.microbatch.gradients import accumulate_p
from autopar.sharding.dataflow import find_batch_factors, step_factors
from simulator.program import Phase, Run


class Task(NamedTuple):
    """The computation of one stage in one phase, whatever the microbatch.

    Attributes:
        stage: number of the stage.
        phase: F, B (or I and W), U; or S, the whole step.
        round: round of the update, 0 for other phases. A round reads what other stages computed in
            earlier rounds.
    """

    stage: int
    phase: Phase
    round: int = 0

    @property
    def name(self) -> str:
        """The task's name in the program, without a microbatch."""
        return Run(self.stage, self.phase, self.round).task


WHOLE_STEP_TASK = Task(0, "S")
"""The one task of a step that is not partitioned."""


@dataclass(frozen=True, slots=True)
class Total:
    """A value accumulated over microbatches.

    Attributes:
        part: contribution of one microbatch.
        sum: running sum of the contributions.
        total: value for the whole batch, which the stage's update computes from the sum.
        combine: how the contributions are combined.
        index: if the contributions are rows of the total, the running sum that counts microbatches.
    """

    part: Atom
    sum: Var
    total: Var
    combine: Combine
    index: Var | None = None


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """The values of a step that depend on the batch, up to the values that are accumulated.

    Attributes:
        dims: dims of a value that count examples, for the values that have such dims.
        rows: the dim of each value with exactly one such dim.
        mixed: values that depend on the batch and have no such dim, or several.
    """

    dims: dict[Var, frozenset[int]]
    rows: dict[Var, int]
    mixed: frozenset[Var]


@memoized_on_step
def batch_facts(step: StepGraph) -> BatchFacts:
    """Return the values of `step` that depend on the batch."""
    _, dims = find_batch_factors(step, step_factors(step))
    totals = (v for eqn in step.jaxpr.eqns if eqn.primitive is accumulate_p for v in eqn.outvars)
    for var in dependents(enumerate(step.jaxpr.eqns), totals):
        dims.pop(var, None)
    rows = {var: min(var_dims) for var, var_dims in dims.items() if len(var_dims) == 1}
    examples = [step.jaxpr.invars[i] for i in step.batch]
    of_batch = flow(step.jaxpr.eqns, examples, stops={accumulate_p})
    return BatchFacts(dims, rows, frozenset(of_batch.difference(rows)))


class Partitioner(Protocol):
    """A rule that partitions a step, as a value: it partitions any trace of that step alike."""

    def partition(self, step: StepGraph) -> "Partition":
        """Return the tasks of `step`."""
        ...


@dataclass(frozen=True)
class Partition:
    """A step as the tasks of a pipeline.

    Attributes:
        num_stages: number of stages.
        eqns: numbered equations of each task, in order. Equations that several tasks compute for
            themselves are in each of these tasks.
        totals: values that each forward or backward task accumulates.
        partitioner: the rule that made this partition.
        external_reads: values that are read outside of these tasks.
        input_homes: stage of each input whose stage is given.
    """

    step: StepGraph
    num_stages: int
    eqns: dict[Task, tuple[Numbered, ...]]
    totals: dict[Task, tuple[Total, ...]]
    partitioner: Partitioner
    external_reads: tuple[Var, ...] = ()
    input_homes: Mapping[int, int] = field(default_factory=dict)
    _divided: dict[int, "Partition"] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def divided(self, parts: int) -> "Partition":
        """Return the same tasks for microbatches that are divided into `parts` parts.

        Raises:
            MicrobatchError: microbatches cannot be divided that way; see `StepGraph.cut`.
        """
        if parts not in self._divided:
            self._divided[parts] = self.partitioner.partition(self.step.split_microbatches(parts))
        return self._divided[parts]

    @cached_property
    def batch_facts(self) -> BatchFacts:
        """The values of the step that depend on the batch."""
        return batch_facts(self.step)

    @property
    def is_whole_step(self) -> bool:
        """Whether one task runs the whole step, microbatches included."""
        return WHOLE_STEP_TASK in self.eqns

    def input_microbatches(self, i: int) -> int:
        """Return the number of values that input `i` enters the tasks as.

        A batch that is divided outside of tasks enters as one value per microbatch, any other input
        as one value.
        """
        return self.step.num_micro_batches if i in self.step.batch and not self.is_whole_step else 1

    @cached_property
    def completed(self) -> dict[Task, tuple[Total, ...]]:
        """The totals that the first round of each stage's update computes from sums."""
        completed: dict[Task, tuple[Total, ...]] = {}
        for task, totals in self.totals.items():
            first_round = Task(task.stage, "U")
            completed[first_round] = (*completed.get(first_round, ()), *totals)
        return completed

    @cached_property
    def producers(self) -> dict[Var, Task]:
        """The task that produces each value: the first of several that compute it."""
        producers: dict[Var, Task] = {}
        for task, eqns in self.eqns.items():
            for _, eqn in eqns:
                for var in eqn.outvars:
                    producers.setdefault(var, task)
        for task, totals in self.totals.items():
            producers.update((total.sum, task) for total in totals)
        for task, totals in self.completed.items():
            producers.update((total.total, task) for total in totals)
        return producers

    @cached_property
    def reads(self) -> dict[Task, tuple[Var, ...]]:
        """The values that each task uses and others compute: inputs and other tasks' results."""
        if self.is_whole_step:
            return {WHOLE_STEP_TASK: tuple(self.step.jaxpr.invars)}
        return {task: self._reads(task) for task in self.eqns}

    def _reads(self, task: Task) -> tuple[Var, ...]:
        eqns = self.eqns[task]
        completed = self.completed.get(task, ())
        computed = {var for _, eqn in eqns for var in eqn.outvars}
        computed.update(total.total for total in completed)
        read: list[Atom] = [total.sum for total in completed]
        read += [atom for _, eqn in eqns for atom in eqn.invars]
        read += [total.part for total in self.totals.get(task, ())]
        local = computed.union(self.step.jaxpr.constvars)
        return tuple(dict.fromkeys(var for var in variables(read) if var not in local))

    @cached_property
    def results(self) -> dict[Task, tuple[Var, ...]]:
        """The values that each task computes for other tasks or for the step, without its sums."""
        results: dict[Task, dict[Var, None]] = {task: {} for task in self.eqns}
        used = [var for reads in self.reads.values() for var in reads]
        used += variables(self.step.jaxpr.outvars)
        used += self.external_reads
        for var in used:
            task = self.producers.get(var)
            if task is None or any(var is total.sum for total in self.totals.get(task, ())):
                continue
            results[task][var] = None
        return {task: tuple(variables) for task, variables in results.items()}

    @cached_property
    def input_stages(self) -> dict[int, tuple[int, ...]]:
        """The stages that read each input of the step.

        The first one is the input's home: for a carried input, the stage that computes its next
        value.
        """
        number = {var: i for i, var in enumerate(self.step.jaxpr.invars)}
        stages: dict[int, list[int]] = defaultdict(list)
        for i, home in self.input_homes.items():
            stages[i].append(home)
        for o, i in self.step.carried.items():
            atom = self.step.jaxpr.outvars[o]
            if isinstance(atom, Var) and atom in self.producers:
                stages[i].append(self.producers[atom].stage)
        for task, reads in self.reads.items():
            for var in reads:
                if var in number:
                    stages[number[var]].append(task.stage)
        return {i: tuple(dict.fromkeys(stages[i])) or (0,) for i in number.values()}
