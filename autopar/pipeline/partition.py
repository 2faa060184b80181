"""Partition of a traced step into the tasks of a pipeline: what each runs, reads and makes. `autopar.pipeline.partitioner` builds it."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from jax.extend.core import Var

from autopar.ir import control_flow
from autopar.ir.evaluate import Numbered
from autopar.ir.graph import Atom
from autopar.ir.memo import memoized_on_step
from autopar.ir.step_graph import Combine, StepGraph
from autopar.microbatch.gradients import accumulate_p
from autopar.sharding.dataflow import batch_factors, step_factors
from simulator.program import Phase, Run


class Task(NamedTuple):
    """What one instruction runs, whatever the microbatch.

    Attributes:
        stage: number of the stage.
        phase: F, B (or I and W), U; or S, the whole step.
        round: of the update: a round uses what other stages made in the ones before. 0 for other phases.
    """

    stage: int
    phase: Phase
    round: int = 0

    @property
    def name(self) -> str:
        """What the program calls it, whatever the microbatch."""
        return Run(self.stage, self.phase, self.round).task


WHOLE_STEP_TASK = Task(0, "S")
"""The one task of a step that is not cut."""


@dataclass(frozen=True, slots=True)
class Total:
    """A value accumulated over microbatches.

    Attributes:
        part: what one microbatch contributes.
        sum: what they have added up to so far.
        total: what it is for the whole batch; the stage's update makes it, first of all.
        combine: how the parts are put together.
    """

    part: Atom
    sum: Var
    total: Var
    combine: Combine


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """What depends on the batch in a step, up to what is accumulated.

    Attributes:
        dims: the dims of values that count examples.
        rows: for values with one such dim, that one.
        mixed: values without exactly one that depend on the batch all the same.
    """

    dims: dict[Var, frozenset[int]]
    rows: dict[Var, int]
    mixed: frozenset[Var]


@memoized_on_step
def batch_facts(step: StepGraph) -> BatchFacts:
    """Return what depends on the batch in `step`."""
    _, dims = batch_factors(step, step_factors(step))
    rows = {var: min(each) for var, each in dims.items() if len(each) == 1}
    reached = {step.jaxpr.invars[i] for i in step.batch}
    while True:  # more than once for what loops carry
        known = len(reached)
        for eqn in step.jaxpr.eqns:
            if eqn.primitive is accumulate_p or reached.isdisjoint(
                a for a in eqn.invars if isinstance(a, Var)
            ):
                continue
            reached.update(eqn.outvars)
            if eqn.primitive is control_flow.loop_result_p:
                reached.update(a for a in eqn.invars[:1] if isinstance(a, Var))
        if len(reached) == known:
            return BatchFacts(dims, rows, frozenset(reached.difference(rows)))


@dataclass(frozen=True)
class Cut:
    """A step as tasks.

    Attributes:
        eqns: the numbered equations of each task, in order; those that several tasks need are in each of them.
        totals: for each forward or backward task what it accumulates.
        num_stages: stages.
        parts: the same tasks for microbatches that are cut into so many parts.
        wanted: values that are read outside of these tasks.
        joined: for each result with a row per example, what one microbatch makes of it.
        homes: for inputs whose place is given, the stage where they are.
    """

    step: StepGraph
    num_stages: int
    eqns: dict[Task, tuple[Numbered, ...]]
    totals: dict[Task, tuple[Total, ...]]
    parts: "Callable[[int], Cut]"
    wanted: tuple[Var, ...] = ()
    joined: dict[Var, Var] = field(default_factory=dict)
    homes: Mapping[int, int] = field(default_factory=dict)

    @cached_property
    def facts(self) -> BatchFacts:
        """What depends on the batch in the step, and how."""
        return batch_facts(self.step)

    @property
    def is_whole_step(self) -> bool:
        """Whether one task runs the whole step, microbatches included."""
        return WHOLE_STEP_TASK in self.eqns

    def micro_batches(self, i: int) -> int:
        """Return the number of parts that tasks read input `i` in: its microbatches, if it is a batch that is cut outside of tasks."""
        return self.step.num_micro_batches if i in self.step.batch and not self.is_whole_step else 1

    def part(self, atom: Atom) -> Atom:
        """What makes an output: the value of one microbatch, if it is joined from all of them."""
        return self.joined.get(atom, atom) if isinstance(atom, Var) else atom

    @cached_property
    def completed(self) -> dict[Task, tuple[Total, ...]]:
        """For the first round of each stage's update, the totals that it makes of sums."""
        found: dict[Task, tuple[Total, ...]] = {}
        for task, totals in self.totals.items():
            first = Task(task.stage, "U")
            found[first] = (*found.get(first, ()), *totals)
        return found

    @cached_property
    def made_by(self) -> dict[Var, Task]:
        """The task that makes a value for others: values that several make are not handed on."""
        found: dict[Var, list[Task]] = defaultdict(list)
        for task, eqns in self.eqns.items():
            for _, eqn in eqns:
                for var in eqn.outvars:
                    found[var].append(task)
        made = {var: tasks[0] for var, tasks in found.items()}
        made.update((each.sum, task) for task, totals in self.totals.items() for each in totals)
        made.update(
            (each.total, task) for task, totals in self.completed.items() for each in totals
        )
        return made

    @cached_property
    def reads(self) -> dict[Task, tuple[Var, ...]]:
        """Values that a task uses and does not make: inputs of the step, and what other tasks made."""
        if self.is_whole_step:
            return {WHOLE_STEP_TASK: tuple(self.step.jaxpr.invars)}
        return {task: self._reads(task) for task in self.eqns}

    @cached_property
    def results(self) -> dict[Task, tuple[Var, ...]]:
        """Values that a task makes for other tasks or as outputs of the step, its sums aside."""
        wanted: dict[Task, dict[Var, None]] = {task: {} for task in self.eqns}
        outputs = (
            part for atom in self.step.jaxpr.outvars if isinstance(part := self.part(atom), Var)
        )
        for var in (
            *(var for reads in self.reads.values() for var in reads),
            *outputs,
            *self.wanted,
        ):
            task = self.made_by.get(var)
            if task is not None and all(var is not each.sum for each in self.totals.get(task, ())):
                wanted[task][var] = None
        return {task: tuple(found) for task, found in wanted.items()}

    def _reads(self, task: Task) -> tuple[Var, ...]:
        eqns = self.eqns[task]
        made = {var for _, eqn in eqns for var in eqn.outvars}
        made.update(each.total for each in self.completed.get(task, ()))
        read: list[Atom] = [each.sum for each in self.completed.get(task, ())]
        read += [atom for _, eqn in eqns for atom in eqn.invars]
        read += [each.part for each in self.totals.get(task, ())]
        constants = set(self.step.jaxpr.constvars)
        found = (a for a in read if isinstance(a, Var) and a not in made and a not in constants)
        return tuple(dict.fromkeys(found))

    @cached_property
    def input_stages(self) -> dict[int, tuple[int, ...]]:
        """For each input of the step the stages that read it; the first is where its next value is made, if it is carried."""
        number = {var: i for i, var in enumerate(self.step.jaxpr.invars)}
        found = {i: [self.homes[i]] if i in self.homes else [] for i in number.values()}
        for o, i in self.step.carried.items():
            atom = self.step.jaxpr.outvars[o]
            if isinstance(atom, Var) and atom in self.made_by:
                found[i].append(self.made_by[atom].stage)
        for task, reads in self.reads.items():
            for var in reads:
                if var in number:
                    found[number[var]].append(task.stage)
        return {i: tuple(dict.fromkeys(stages)) or (0,) for i, stages in found.items()}
