"""One stage of a plan as a step of its own, which the intra-operator planner can shard.

A step that is not partitioned is its own stage. In the graph of a pipeline stage, the inputs, sums,
update and outputs are in the order in which the stage uses them: the order of the whole step
follows the names of parameters, by which stages that compute the same would differ.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from autopar.ir import graph
from autopar.ir.equation_groups import units
from autopar.ir.evaluate import Numbered
from autopar.ir.step_graph import MicrobatchError, Microbatching, StepGraph
from autopar.pipeline.partition import Partition, Task, Total
from simulator.program import Phase


@dataclass(frozen=True)
class StageGraph:
    """The tasks of a stage, one after the other, as one step that ends in the update.

    Attributes:
        partition: the whole step as tasks.
        stage: number of the stage.
        step: the stage as a step. Its inputs are the inputs of the whole step that the stage reads,
            then the values that it receives from other stages; its outputs are the outputs of the
            whole step that it computes, then the values that it sends.
        inputs: number in the whole step of each of the first inputs.
        received: values that other stages send to this one.
        outputs: number in the whole step of each of the first outputs.
        sent: values that this stage sends to others.
        tasks: equations of each task, numbered as in `step`.
    """

    partition: Partition
    stage: int
    step: StepGraph
    inputs: tuple[int, ...]
    received: tuple[Var, ...]
    outputs: tuple[int, ...]
    sent: tuple[Var, ...]
    tasks: dict[Task, tuple[Numbered, ...]]

    @cached_property
    def task_of(self) -> dict[int, Task]:
        """The task that each equation is charged to: the first that computes it.

        Equations that bring results to where the next step reads them belong to no task.
        """
        task_of: dict[int, Task] = {}
        for task, eqns in self.tasks.items():
            for number, _ in eqns:
                task_of.setdefault(number, task)
        return task_of

    def divided(self, parts: int) -> "StageGraph":
        """Return the graph of this stage for microbatches that are divided into `parts` parts.

        Raises:
            MicrobatchError: microbatches cannot be divided that way; see `StepGraph.cut`.
        """
        return stage_graph(self.partition.divided(parts), self.stage)


def stage_graphs(partition: Partition) -> list[StageGraph]:
    """Return the graph of every stage."""
    return [stage_graph(partition, stage) for stage in range(partition.num_stages)]


def stage_graph(partition: Partition, stage: int) -> StageGraph:
    """Return the graph of one stage."""
    if partition.is_whole_step:
        return _whole_step_graph(partition)
    whole = partition.step
    tasks = [task for task in partition.eqns if task.stage == stage]
    stage_eqns = _StageEquations(partition, tasks)
    inputs = _inputs(partition, stage, stage_eqns.eqns)
    received = _received(partition, tasks, inputs, stage_eqns)
    outputs = _outputs(partition, stage, stage_eqns.positions)
    sent = _sent(partition, tasks, stage_eqns.eqns)
    consts = dict(zip(whole.jaxpr.constvars, whole.jaxpr.consts, strict=True))
    invars = [*(whole.jaxpr.invars[i] for i in inputs), *received]
    outvars = [*(whole.jaxpr.outvars[o] for o in outputs), *sent]
    position = {i: k for k, i in enumerate(inputs)}
    dims = partition.batch_facts.dims
    divided = _DividedSteps(partition, stage, tuple(tasks), (*received, *sent))
    step = StepGraph(
        jaxpr=Jaxpr(
            constvars=list(consts),
            invars=invars,
            outvars=outvars,
            eqns=stage_eqns.eqns,
            consts=list(consts.values()),
            debug_info=whole.jaxpr.debug_info.with_unknown_names(),
        ),
        in_paths=(
            *(whole.in_paths[i] for i in inputs),
            *(f"received/{k}" for k in range(len(received))),
        ),
        out_paths=(
            *(whole.out_paths[o] for o in outputs),
            *(f"sent/{k}" for k in range(len(sent))),
        ),
        batch=frozenset(position[i] for i in inputs if i in whole.batch),
        carried={
            k: position[whole.carried[o]]
            for k, o in enumerate(outputs)
            if whole.carried.get(o) in position
        },
        in_tree=jax.tree.structure(invars),
        out_tree=jax.tree.structure(outvars),
        microbatching=stage_eqns.microbatching,
        name=f"{whole.name}, stage {stage}",
        cross_task_values=_passed_between(partition, tasks, stage_eqns),
        task_ends=stage_eqns.task_ends,
        saved_for_backward=_saved(partition, tasks, received, ("F",), ("B", "I", "W")),
        saved_for_weights=_saved(partition, tasks, received, ("F", "I"), ("W",)),
        retrace=divided.step,
        divides_evenly=divided.is_even,
        received_inputs={
            len(inputs) + k: dims.get(var, frozenset()) for k, var in enumerate(received)
        },
    )
    return StageGraph(
        partition,
        stage,
        step,
        inputs,
        received,
        outputs,
        sent,
        {task: stage_eqns.renumbered(partition.eqns[task]) for task in tasks},
    )


def _whole_step_graph(partition: Partition) -> StageGraph:
    """Return the graph of the only stage of a step that is not partitioned: the step itself."""
    jaxpr = partition.step.jaxpr
    return StageGraph(
        partition,
        0,
        partition.step,
        inputs=tuple(range(len(jaxpr.invars))),
        received=(),
        outputs=tuple(range(len(jaxpr.outvars))),
        sent=(),
        tasks=partition.eqns,
    )


class _StageEquations:
    """The equations of a stage in the order in which it runs them, each once.

    Attributes:
        eqns: the body of a microbatch, the equations that accumulate, the update.
        totals: values that the stage accumulates.
        positions: place of each value in the order in which the stage computes values.
        microbatching: how the stage runs in microbatches.
        task_ends: number of the last equation of each task of a microbatch.
    """

    def __init__(self, partition: Partition, tasks: Sequence[Task]) -> None:
        micro = partition.step.microbatching
        assert micro is not None
        self.eqns: list[JaxprEqn] = []
        self.totals = [total for task in tasks for total in partition.totals.get(task, ())]
        self._numbers: dict[int, int] = {}  # by the number in the whole step
        body: list[Numbered] = []
        ends: list[int] = []
        for task in tasks:
            if task.phase != "U":
                body += self._add(partition.eqns[task])
                ends.append(len(self.eqns) - 1)
        self.task_ends = tuple(ends)
        positions = _positions(self.eqns)
        totals = sorted(self.totals, key=lambda total: _position(total.part, positions))
        marks = self._accumulate(totals, micro.marks[0][1])
        last_sum = {total.total: k for k, total in enumerate(totals)}
        tail: list[Numbered] = []
        for task in tasks:
            if task.phase == "U":
                tail += self._add(_in_order_of_sums(partition.eqns[task], last_sum))
        self.positions = _positions(self.eqns)
        self.microbatching = Microbatching(
            micro.count,
            tuple(body),
            tuple(tail),
            tuple(marks),
            tuple(total.combine for total in totals),
            chunks=micro.chunks,
        )

    def _add(self, eqns: Iterable[Numbered]) -> list[Numbered]:
        """Append the equations that are new, and return them numbered as in the stage."""
        first = len(self.eqns)
        for number, eqn in eqns:
            if number not in self._numbers:
                self._numbers[number] = len(self.eqns)
                self.eqns.append(eqn)
        return list(enumerate(self.eqns))[first:]

    def _accumulate(self, totals: Sequence[Total], mark: JaxprEqn) -> list[Numbered]:
        """Append an equation like `mark` for each total; return these, numbered."""
        first = len(self.eqns)
        self.eqns += [mark.replace(invars=[total.part], outvars=[total.total]) for total in totals]
        return list(enumerate(self.eqns))[first:]

    def renumbered(self, eqns: Iterable[Numbered]) -> tuple[Numbered, ...]:
        """Return equations of the whole step, numbered as in the stage."""
        return tuple((self._numbers[number], eqn) for number, eqn in eqns)


def _positions(eqns: Sequence[JaxprEqn]) -> dict[Var, int]:
    """Return the place of each result in the order in which equations compute them."""
    return {var: k for k, var in enumerate(var for eqn in eqns for var in eqn.outvars)}


def _position(atom: graph.Atom, positions: Mapping[Var, int]) -> int:
    """Return where a value is computed; values that come from elsewhere are first."""
    return positions.get(atom, -1) if isinstance(atom, Var) else -1


def _in_order_of_sums(update: Sequence[Numbered], last_sum: dict[Var, int]) -> Iterator[Numbered]:
    """Yield the equations of an update, ordered by the last accumulated sum that they depend on.

    Equations that depend on no sum come just before their first use.

    Args:
        update: numbered equations.
        last_sum: for each total its place among the sums. The results of the update are added.
    """
    update_units = units(update)
    place: dict[int, float] = {}
    for unit in update_units:
        last = max((last_sum.get(var, -1) for var in unit.reads), default=-1)
        last_sum.update(dict.fromkeys(unit.makes, last))
        place[unit.number] = last
    first_use: dict[Var, float] = {}
    for unit in reversed(update_units):
        if place[unit.number] < 0:
            place[unit.number] = min((first_use.get(var, inf) for var in unit.makes), default=inf)
        for var in unit.reads:
            first_use[var] = min(place[unit.number], first_use.get(var, inf))
    for unit in sorted(update_units, key=lambda unit: place[unit.number]):
        yield from unit.eqns


def _inputs(partition: Partition, stage: int, eqns: Sequence[JaxprEqn]) -> tuple[int, ...]:
    """Return the inputs of the whole step that the stage reads, in the order of their first use."""
    first_use = dict.fromkeys(graph.variables(atom for eqn in eqns for atom in eqn.invars))
    order = {var: k for k, var in enumerate(first_use)}
    inputs = [i for i, stages in partition.input_stages.items() if stage in stages]
    invars = partition.step.jaxpr.invars
    return tuple(sorted(inputs, key=lambda i: order.get(invars[i], len(order))))


def _received(
    partition: Partition, tasks: Sequence[Task], inputs: Sequence[int], stage_eqns: _StageEquations
) -> tuple[Var, ...]:
    """Return the values that tasks of a stage read and other stages compute."""
    local = {partition.step.jaxpr.invars[i] for i in inputs}
    local.update(stage_eqns.positions, (total.sum for total in stage_eqns.totals))
    return tuple(var for var in _read_by(partition, tasks) if var not in local)


def _read_by(partition: Partition, tasks: Sequence[Task]) -> Iterable[Var]:
    return dict.fromkeys(var for task in tasks for var in partition.reads[task])


def _sent(partition: Partition, tasks: Sequence[Task], eqns: Sequence[JaxprEqn]) -> tuple[Var, ...]:
    """Return the results of a stage that are read outside of it, in the order of its equations."""
    others = (reads for task, reads in partition.reads.items() if task not in tasks)
    read_elsewhere = {var for reads in others for var in reads}.union(partition.external_reads)
    results = {var for task in tasks for var in partition.results[task]}
    return tuple(
        var for eqn in eqns for var in eqn.outvars if var in results and var in read_elsewhere
    )


def _outputs(partition: Partition, stage: int, positions: Mapping[Var, int]) -> tuple[int, ...]:
    """Return the whole step's outputs that belong to a stage, in the order of its equations."""
    values = partition.step.jaxpr.outvars
    producers, input_stages = partition.producers, partition.input_stages
    number_of = {var: i for i, var in enumerate(partition.step.jaxpr.invars)}

    def stage_of(atom: graph.Atom) -> int:
        """Return the stage of an output: the stage of its producer, or the home of an input.

        A constant belongs to the first stage.
        """
        if not isinstance(atom, Var):
            return 0
        if atom in producers:
            return producers[atom].stage
        return input_stages[number_of[atom]][0] if atom in number_of else 0

    outputs = [o for o, atom in enumerate(values) if stage_of(atom) == stage]
    return tuple(sorted(outputs, key=lambda o: _position(values[o], positions)))


def _passed_between(
    partition: Partition, tasks: Sequence[Task], stage_eqns: _StageEquations
) -> tuple[Var, ...]:
    """Return the values that one task of a stage computes and another one reads, sums aside."""
    totals = {total.total for total in stage_eqns.totals}
    read = _read_by(partition, tasks)
    return tuple(var for var in read if var in stage_eqns.positions and var not in totals)


def _saved(
    partition: Partition,
    tasks: Sequence[Task],
    received: Collection[Var],
    before: Collection[Phase],
    after: Collection[Phase],
) -> tuple[Var, ...]:
    """Return the values that a stage stores between two parts of a microbatch.

    They are results of the first part, and values that the stage received for it. Where weight
    gradients are a task of their own (W), they read other values than the input gradients do, but
    hardly more bytes (Qi et al., "Zero Bubble Pipeline Parallelism", arXiv:2401.10241, table 1).

    Args:
        partition: the tasks of all stages.
        tasks: the tasks of the stage.
        received: values that the stage receives.
        before: phases of the first part.
        after: phases of the second part, which reads the values.
    """
    first = [task for task in tasks if task.phase in before]
    available = {var for task in first for var in partition.results[task]}
    available.update(set(_read_by(partition, first)).intersection(received))
    second = [task for task in tasks if task.phase in after]
    return tuple(var for var in _read_by(partition, second) if var in available)


@dataclass(frozen=True)
class _DividedSteps:
    """A stage as a step, for microbatches that are divided into parts.

    Attributes:
        exchanged: values that the stage receives and sends.
    """

    partition: Partition
    stage: int
    tasks: tuple[Task, ...]
    exchanged: tuple[Var, ...]
    _steps: dict[int, StepGraph] = field(default_factory=dict, init=False, repr=False)

    def step(self, count: int) -> StepGraph:
        """Return the stage's step with another number of microbatches: `StepGraph.retrace`.

        Raises:
            MicrobatchError: the tasks would exchange other values, or values that cannot be put
                together.
        """
        if count not in self._steps:
            self._steps[count] = self._divided(count)
        return self._steps[count]

    def is_even(self, parts: int) -> bool:
        """Return whether microbatches surely divide into parts: `StepGraph.divides_evenly`.

        The microbatch and the whole batch are computed alike, and so are parts of several runs of
        examples. It takes a trace if the examples of a microbatch share more than weights, such as
        statistics or positions in the batch, or if tasks pass rows that depend on no example, such
        as a mask that a loop over tokens stores.
        """
        whole, facts = self.partition.step, self.partition.batch_facts
        micro = whole.microbatching
        if micro is None or micro.own_statistics or micro.parts > 1:
            return False
        if whole.positions is not None or whole.preparation or whole.first_pass:
            return False
        if micro.chunks % parts or micro.chunks == parts:
            return False
        sources = graph.sources(whole.jaxpr, whole.jaxpr.eqns)
        if any(
            sources[var] in micro.powers and var not in facts.rows
            for var in _passed(self.partition, self.tasks)
        ):
            return False
        return facts.mixed.isdisjoint(self.exchanged) and all(
            sources[var] in micro.powers and graph.aval_of(var).shape[facts.rows[var]] % parts == 0
            for var in self.exchanged
            if var in facts.rows
        )

    def _divided(self, count: int) -> StepGraph:
        step, facts = self.partition.step, self.partition.batch_facts
        if any(var in facts.mixed for var in self.exchanged):
            raise MicrobatchError(
                "a stage sends a statistic of the batch, which needs the examples of all devices"
            )
        parts = count // step.num_micro_batches
        divided = self.partition.divided(parts)
        sources = graph.sources(step.jaxpr, step.jaxpr.eqns)
        micro = divided.step.microbatching
        with_rows = [sources[var] for var in self.exchanged if var in facts.rows]
        if micro is None or any(source not in micro.powers for source in with_rows):
            raise MicrobatchError(
                "a stage sends values of examples, and it is unknown how they depend on the size of"
                " the batch"
            )
        if not _exchange_alike(self.partition, divided, self.tasks, parts):
            raise MicrobatchError(
                "the step does different things for the few examples that a device has of a"
                " microbatch"
            )
        return stage_graph(divided, self.stage).step


def _passed(partition: Partition, tasks: Iterable[Task]) -> set[Var]:
    """Return the values that forward and backward tasks read and return, sums aside."""
    return {
        var
        for task in tasks
        if task.phase != "U"
        for var in (*partition.reads[task], *partition.results[task])
    }


def _exchange_alike(
    whole: Partition, divided: Partition, tasks: Sequence[Task], parts: int
) -> bool:
    """Whether tasks exchange the same values when microbatches are smaller by `parts`."""
    if whole.step.equation_forms != divided.step.equation_forms:
        return False
    for task in tasks:
        if task.phase == "U":
            continue
        expected = [
            _divided_shape(whole, var, parts) for var in (*whole.reads[task], *whole.results[task])
        ]
        shapes = [
            graph.aval_of(var).shape for var in (*divided.reads[task], *divided.results[task])
        ]
        if shapes != expected:
            return False
    return True


def _divided_shape(partition: Partition, var: Var, parts: int) -> tuple[int, ...]:
    row_dim = partition.batch_facts.rows.get(var)
    return tuple(
        size // parts if dim == row_dim else size
        for dim, size in enumerate(graph.aval_of(var).shape)
    )
