"""Partition a traced step into the tasks of a pipeline.

The data dependences of the step decide which stage and phase each equation belongs to, and so which
values cross between stages:

- Forward and backward equations belong to the stage of their layer
  (`autopar.layering.layer_scopes`). Equations outside of layers belong to the last stage that
  computes one of their operands.
- Each stage computes for itself what depends only on constants or small inputs, and, outside of
  layers, on inputs alone. It casts for itself a weight that several stages read.
- A gradient that several stages contribute to (tied weights) is accumulated in each of them; the
  update adds up these sums.
- A parameter is updated where its gradient is. An update whose stages need one another's results
  (a global norm) takes several rounds.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Literal, Var

from autopar.ir.equation_groups import Unit, units
from autopar.ir.graph import Atom
from autopar.ir.step_graph import Combine, StepGraph
from autopar.layering.layer_scopes import layer_of
from autopar.pipeline.backward_split import split_backward_tasks
from autopar.pipeline.partition import WHOLE_STEP_TASK, Partition, Task, Total
from autopar.pipeline.update_placement import is_small, update_stages
from autopar.primitives import record_of


@dataclass(frozen=True, slots=True)
class WholeStep:
    """The partition of a step into one task of one stage."""

    def partition(self, step: StepGraph) -> Partition:
        """Return `step` as one task."""
        eqns = {WHOLE_STEP_TASK: tuple(enumerate(step.jaxpr.eqns))}
        return Partition(step, 1, eqns, {}, self)


@dataclass(frozen=True, slots=True)
class LayerStages:
    """The partition of a step into stages of layers.

    Attributes:
        stage_of_layer: stage of each layer; stages are numbered in the order of layers.
        split_backward: whether each B is split into I, which other stages depend on, and W, the
            rest.
        input_homes: stage of each input whose stage is given.
        forward: whether there are forward tasks alone. What is left of a backward pass follows from
            the last values that it reads.
    """

    stage_of_layer: tuple[int, ...]
    split_backward: bool = False
    input_homes: Mapping[int, int] = field(default_factory=dict)
    forward: bool = False

    def partition(self, step: StepGraph) -> Partition:
        """Return the tasks of `step`."""
        builder = _PartitionBuilder(step, self)
        builder.place_body()
        builder.spread_casts()
        builder.place_totals()
        builder.place_tail()
        partition = builder.partition()
        return split_backward_tasks(partition) if self.split_backward else partition


def whole_step_partition(step: StepGraph) -> Partition:
    """Return `step` as the one task of one stage."""
    return WholeStep().partition(step)


def partition_step(
    step: StepGraph,
    stage_of_layer: Sequence[int],
    split_backward: bool = False,
    input_homes: Mapping[int, int] | None = None,
    forward: bool = False,
) -> Partition:
    """Partition `step` into the tasks of a pipeline.

    Args:
        step: the step, traced in layers and with its accumulated values marked.
        stage_of_layer: stage of each layer; stages are numbered in the order of layers.
        split_backward: whether to split each B into I, which other stages depend on, and W, the
            rest.
        input_homes: stage of each input whose stage is given.
        forward: whether there are forward tasks alone.
    """
    homes = input_homes or {}
    return LayerStages(tuple(stage_of_layer), split_backward, homes, forward).partition(step)


def stages_of_layers(layers: Sequence[Sequence[int]], count: int) -> list[int]:
    """Return the stage of each layer.

    Args:
        layers: the layers of each stage.
        count: number of layers; layers that are in no stage belong to the last one.
    """
    stage_of = {layer: stage for stage, own in enumerate(layers) for layer in own}
    return [stage_of.get(layer, len(layers) - 1) for layer in range(max(count, len(stage_of)))]


class _PartitionBuilder:
    """Assigns units of equations to tasks.

    A unit is one equation, or all equations of a loop or branch. It is identified by the number of
    its first equation.

    Attributes:
        body: units that run for each microbatch.
        tail: units of the update.
        producer: unit that computes each value.
        num_readers: number of units that read each value.
        task_of: task of each unit that belongs to one, by unit number.
        anywhere: numbers of the units that every task computes for itself where it needs them.
        totals: values that each task accumulates.
        total_stage: stage that accumulates each total.
    """

    def __init__(self, step: StepGraph, rule: LayerStages) -> None:
        self.step = step
        self.rule = rule
        self.num_stages = max(rule.stage_of_layer) + 1
        micro = step.microbatching
        self.body = units(micro.body if micro else enumerate(step.jaxpr.eqns))
        shared = {unit.number for unit in self.body}
        self.tail = [
            unit for unit in units(micro.tail if micro else ()) if unit.number not in shared
        ]
        self.producer = {var: unit for unit in (*self.body, *self.tail) for var in unit.makes}
        self.num_readers = Counter(var for unit in (*self.body, *self.tail) for var in unit.reads)
        self.inputs = set(step.jaxpr.invars)
        self.constants = set(step.jaxpr.constvars)
        self.task_of: dict[int, Task] = {}
        self.anywhere: set[int] = set()
        self.totals: dict[Task, list[Total]] = defaultdict(list)
        self.total_stage: dict[Var, int] = {}

    # -- forward and backward

    def place_body(self) -> None:
        """Assign the units of the body to tasks.

        A unit's position counts the tasks that a microbatch passes through before it: 0F 1F ... 1B
        0B. It is the position of the unit's layer, or the last one among the units that it depends
        on if that is later.
        """
        last = self.num_stages - 1
        position_of: dict[Var, int] = {}
        for unit in self.body:
            label = self._label(unit)
            positions = [position_of[var] for var in unit.reads if var in position_of]
            sources = positions if label is None else unit.reads
            if not sources or self._is_constant(unit):
                self.anywhere.add(unit.number)
                continue
            position = max([*positions, *(() if label is None else (label,))])
            position_of.update(dict.fromkeys(unit.makes, position))
            self.task_of[unit.number] = (
                Task(position, "F") if position <= last else Task(2 * last + 1 - position, "B")
            )

    def spread_casts(self) -> None:
        """Let each stage cast and reshape for itself a weight that several stages read.

        The weight itself is then sent as an input, once per step instead of once per microbatch.
        """
        readers: dict[Var, list[Unit]] = defaultdict(list)
        for unit in self.body:
            for var in unit.reads:
                readers[var].append(unit)
        batch = {self.step.jaxpr.invars[i] for i in self.step.batch}
        for unit in self.body:
            task = self.task_of.get(unit.number)
            if (
                task is None
                or len(unit.eqns) != 1
                or record_of(unit.eqns[0][1]).movement not in ("shape", "cast")
            ):
                continue
            is_weight = all(
                (var in self.inputs and var not in batch) or self._is_anywhere(var)
                for var in unit.reads
            )
            reading = (
                self.task_of.get(reader.number) for var in unit.makes for reader in readers[var]
            )
            if is_weight and any(
                other is not None and other.stage != task.stage for other in reading
            ):
                del self.task_of[unit.number]
                self.anywhere.add(unit.number)

    def _is_anywhere(self, var: Var) -> bool:
        return var in self.producer and self.producer[var].number in self.anywhere

    def _is_constant(self, unit: Unit) -> bool:
        """Whether the unit depends only on constants and on units that are computed anywhere."""
        return all(var in self.constants or self._is_anywhere(var) for var in unit.reads)

    def _label(self, unit: Unit) -> int | None:
        """Return the unit's layer by its position (see `place_body`); None outside of layers."""
        label = layer_of(unit.eqns[0][1])
        if label is None:
            return None
        layer, is_backward = label
        if is_backward and self.rule.forward:
            return None
        stage = self.rule.stage_of_layer[layer]
        return 2 * self.num_stages - 1 - stage if is_backward else stage

    # -- what is accumulated

    def place_totals(self) -> None:
        """Assign each accumulated value to the task that computes its contributions."""
        micro = self.step.microbatching
        if micro is None:
            return
        combines = iter(micro.combine)
        sums: list[Unit] = []
        for _, mark in micro.marks:
            for atom, total in zip(mark.invars, mark.outvars, strict=True):
                sums += self._accumulate(atom, total, next(combines))
        self.tail = [*sums, *self.tail]
        self.producer.update((var, unit) for unit in sums for var in unit.makes)

    def _accumulate(self, atom: Atom, total: Var, combine: Combine) -> list[Unit]:
        """Accumulate `atom` over microbatches into `total`.

        Returns:
            The units that move to the update: sums of what several stages contribute, where each
            stage now accumulates its own contribution.
        """
        if isinstance(atom, Literal):
            self._add_total(Task(0, "F"), Total(atom, Var(total.aval), total, combine))
            return []
        unit = self.producer.get(atom)
        if combine == "rows":
            self._join(atom, total)
            return []
        if unit is None:
            self._add_total(Task(0, "F"), Total(atom, Var(atom.aval), total, combine))
            return []
        is_linear = combine != "same" or self.step.num_micro_batches == 1
        if is_linear and self._adds_stages(unit, atom):
            ((number, eqn),) = unit.eqns
            del self.task_of[unit.number]
            self.body.remove(unit)
            terms = [Var(var.aval) for var in unit.reads]
            moved: list[Unit] = []
            for part, term in zip(unit.reads, terms, strict=True):
                moved += self._accumulate(part, term, combine)
            addition = eqn.replace(invars=list(terms), outvars=[total])
            return [*moved, Unit(((number, addition),), tuple(terms), (total,))]
        task = self.task_of.get(unit.number, Task(0, "F"))
        self._add_total(task, Total(atom, Var(atom.aval), total, combine))
        return []

    def _join(self, atom: Var, total: Var) -> None:
        """Put the rows of microbatches together in the task that computes or last reads them."""
        unit = self.producer.get(atom)
        if unit is not None:
            task = self.task_of.get(unit.number, Task(0, "F"))
        else:
            tasks = (self.task_of.get(unit.number) for unit in self.body if atom in unit.reads)
            stages = [task.stage for task in tasks if task is not None and task.phase == "F"]
            task = Task(max(stages, default=0), "F")
        index = next((total.index for total in self.totals[task] if total.index is not None), None)
        if index is None:
            one = Literal(np.int32(1), ShapedArray((), np.dtype(np.int32)))
            index = Var(one.aval)
            self._add_total(task, Total(one, index, Var(one.aval), "sum"))
        self._add_total(task, Total(atom, Var(total.aval), total, "rows", index))

    def _add_total(self, task: Task, total: Total) -> None:
        self.totals[task].append(total)
        self.total_stage[total.total] = task.stage

    def _adds_stages(self, unit: Unit, var: Var) -> bool:
        """Whether the unit adds results of different stages for the accumulation alone."""
        eqn = unit.eqns[0][1]
        if not record_of(eqn).is_addition or self.num_readers[var] > 0:
            return False
        if len(unit.reads) != 2 or len(eqn.invars) != 2:
            return False
        producers = (self.producer.get(var) for var in unit.reads)
        numbers = [producer.number for producer in producers if producer is not None]
        return len({self.task_of[n].stage for n in numbers if n in self.task_of}) > 1

    # -- the update

    def place_tail(self) -> None:
        """Assign the units of the update to stages and rounds.

        A unit that reads a result of another stage is in a later round than that result.
        """
        self._spread_small_updates()
        pending = [unit for unit in self.tail if unit.number not in self.anywhere]
        stage_with = self.total_stage | self._first_readers()
        stage_of = update_stages(pending, self.producer, self.inputs, stage_with)
        produced_in: dict[Var, tuple[int, int]] = {
            var: (stage, 0) for var, stage in self.total_stage.items()
        }
        for unit in pending:
            stage = stage_of[unit.number]
            sources = [produced_in[var] for var in unit.reads if var in produced_in]
            round_ = max((turn + (source != stage) for source, turn in sources), default=0)
            self.task_of[unit.number] = Task(stage, "U", round_)
            produced_in.update(dict.fromkeys(unit.makes, (stage, round_)))

    def _spread_small_updates(self) -> None:
        """Let every stage compute for itself small values that depend only on small inputs."""
        for unit in self.tail:
            is_local = all(
                var in self.constants
                or (var in self.inputs and is_small(var))
                or self._is_anywhere(var)
                for var in unit.reads
            )
            if is_local and all(map(is_small, unit.makes)):
                self.anywhere.add(unit.number)

    def _first_readers(self) -> dict[Var, int]:
        """Return the first stage whose body reads each input that is not small."""
        first: dict[Var, int] = {}
        for unit in self.body:
            task = self.task_of.get(unit.number)
            if task is None:
                continue
            for var in unit.reads:
                if var in self.inputs and not is_small(var):
                    first[var] = min(task.stage, first.get(var, task.stage))
        return first

    # -- assembly

    def partition(self) -> Partition:
        """Return the partition; every stage has an F and, in microbatches, a B and a U."""
        tasks: dict[Task, list[Unit]] = defaultdict(list)
        for stage in range(self.num_stages):
            tasks[Task(stage, "F")] = []
        for unit in (*self.body, *self.tail):
            if unit.number in self.task_of:
                tasks[self.task_of[unit.number]].append(unit)
        if self.step.microbatching is not None:
            for stage in range(self.num_stages):
                tasks.setdefault(Task(stage, "B"), [])
                tasks.setdefault(Task(stage, "U"), [])
        self._add_anywhere(tasks)
        return Partition(
            self.step,
            self.num_stages,
            {
                task: tuple(eqn for unit in tasks[task] for eqn in unit.eqns)
                for task in sorted(tasks, key=self._position)
            },
            {task: tuple(totals) for task, totals in self.totals.items()},
            self.rule,
            input_homes=self.rule.input_homes,
        )

    def _position(self, task: Task) -> tuple[int, int, int]:
        """The task's place in the order 0F 1F ... 1B 0B, followed by the rounds of the update."""
        if task.phase == "U":
            return 2 * self.num_stages, task.round, task.stage
        return (task.stage if task.phase == "F" else 2 * self.num_stages - 1 - task.stage), 0, 0

    def _add_anywhere(self, tasks: dict[Task, list[Unit]]) -> None:
        """Add to each task the units that it computes for itself.

        Units that only the step's outputs need go to the first stage.
        """
        order = {unit.number: position for position, unit in enumerate((*self.body, *self.tail))}
        needed = {
            task: self._needed_anywhere(self._read_by(task, task_units))
            for task, task_units in tasks.items()
        }
        computed = {
            var for added in needed.values() for unit in added.values() for var in unit.makes
        }
        first = Task(0, "F" if self.step.microbatching is None else "U")
        needed[first] |= self._needed_anywhere(
            atom
            for atom in self.step.jaxpr.outvars
            if isinstance(atom, Var) and atom not in computed
        )
        for task, task_units in tasks.items():
            task_units += needed[task].values()
            task_units.sort(key=lambda unit: order[unit.number])

    def _read_by(self, task: Task, task_units: Sequence[Unit]) -> Iterator[Var]:
        yield from (var for unit in task_units for var in unit.reads)
        yield from (
            total.part for total in self.totals.get(task, ()) if isinstance(total.part, Var)
        )

    def _needed_anywhere(self, variables: Iterable[Var]) -> dict[int, Unit]:
        """Return by number the units computed anywhere that the values depend on."""
        pending = list(variables)
        needed: dict[int, Unit] = {}
        while pending:
            unit = self.producer.get(pending.pop())
            if unit is not None and unit.number in self.anywhere and unit.number not in needed:
                needed[unit.number] = unit
                pending.extend(unit.reads)
        return needed
