"""One stage of a plan as a step of its own: what the intra-operator planner is asked to shard.

A step that is not cut is its own stage. Of a stage of a pipeline, the inputs, sums, update and outputs are in the order in which the stage comes to them: the order of the whole
step follows the names of parameters, which tell stages apart that do the same.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import inf

import jax
from jax.extend.core import Jaxpr, Var

from autopar.ir import graph
from autopar.ir.equation_groups import units
from autopar.ir.evaluate import Numbered
from autopar.ir.step_graph import MicrobatchError, Microbatching, StepGraph
from autopar.pipeline.partition import Cut, Task


@dataclass(frozen=True)
class StageGraph:
    """The tasks of a stage, one after the other, as one step that ends in the update.

    Attributes:
        step: its inputs are those of the whole step that the stage reads, then what it receives from other stages; its outputs are
            those of the whole step that it makes, then what it sends.
        inputs: for each of the first inputs, its number in the whole step.
        received, sent: values from and for other stages.
        outputs: for each of the first outputs, its number in the whole step.
        tasks: for each task its equations, numbered as in `step`.
        parts: the graph of the same stage for microbatches cut into more parts.
    """

    cut: Cut

    stage: int
    step: StepGraph
    inputs: tuple[int, ...]
    received: tuple[Var, ...]
    outputs: tuple[int, ...]
    sent: tuple[Var, ...]
    tasks: dict[Task, tuple[Numbered, ...]]
    parts: "Callable[[int], StageGraph]"

    @cached_property
    def task_of(self) -> dict[int, Task]:
        """The task in which each equation counts: the first that computes it. Those of none bring results where the next step wants them."""
        found: dict[int, Task] = {}
        for task, eqns in self.tasks.items():
            for number, _ in eqns:
                found.setdefault(number, task)
        return found


def stage_graphs(cut: Cut) -> list[StageGraph]:
    """A graph for every stage."""
    return [stage_graph(cut, stage) for stage in range(cut.num_stages)]


def stage_graph(cut: Cut, stage: int) -> StageGraph:
    """Return the graph of one stage."""
    if cut.is_whole_step:
        return _whole_step_graph(cut)
    step, micro = cut.step, cut.step.microbatching
    assert micro is not None
    mine = [task for task in cut.eqns if task.stage == stage]
    numbers: dict[int, int] = {}
    eqns, marks, combine = [], [], []
    awaited: dict[Var, int] = {}

    def add(wanted: Iterable[Numbered]) -> list[Numbered]:
        first = len(eqns)
        for number, eqn in wanted:
            if number not in numbers:
                numbers[number] = len(eqns)
                eqns.append(eqn)
        return list(enumerate(eqns))[first:]

    body = add(each for task in mine if task.phase != "U" for each in cut.eqns[task])
    order = {var: place for place, var in enumerate(var for eqn in eqns for var in eqn.outvars)}
    summed = [each for task in mine for each in cut.totals.get(task, ())]
    for place, each in enumerate(sorted(summed, key=lambda each: _place(each.part, order))):
        mark = micro.marks[0][1].replace(invars=[each.part], outvars=[each.total])
        marks.append((len(eqns), mark))
        combine.append(each.combine)
        eqns.append(mark)
        awaited[each.total] = place
    tail = add(
        each for task in mine if task.phase == "U" for each in _in_order(cut.eqns[task], awaited)
    )

    made = {var: place for place, var in enumerate(var for eqn in eqns for var in eqn.outvars)}
    first_use = dict.fromkeys(atom for eqn in eqns for atom in eqn.invars if isinstance(atom, Var))
    order = {var: place for place, var in enumerate(first_use)}
    inputs = (i for i, stages in cut.input_stages.items() if stage in stages)
    inputs = tuple(sorted(inputs, key=lambda i: order.get(step.jaxpr.invars[i], len(order))))
    own = {step.jaxpr.invars[i] for i in inputs}
    read = dict.fromkeys(var for task in mine for var in cut.reads[task])
    sums = {each.sum for each in summed}
    received = tuple(var for var in read if var not in made and var not in own and var not in sums)
    elsewhere = {
        var for task, reads in cut.reads.items() if task.stage != stage for var in reads
    }.union(cut.wanted)
    wanted = elsewhere.intersection(v for task in mine for v in cut.results[task])
    sent = tuple(var for eqn in eqns for var in eqn.outvars if var in wanted)
    outputs = (o for o, atom in enumerate(step.jaxpr.outvars) if _makes(cut, stage, cut.part(atom)))
    outputs = tuple(sorted(outputs, key=lambda o: _place(cut.part(step.jaxpr.outvars[o]), made)))
    constants = dict(zip(step.jaxpr.constvars, step.jaxpr.consts, strict=True))
    invars = [*(step.jaxpr.invars[i] for i in inputs), *received]
    outvars = [*(cut.part(step.jaxpr.outvars[o]) for o in outputs), *sent]
    jaxpr = Jaxpr(
        constvars=list(constants),
        invars=invars,
        outvars=outvars,
        eqns=eqns,
        consts=list(constants.values()),
        debug_info=step.jaxpr.debug_info.with_unknown_names(),
    )
    names = [*(step.in_paths[i] for i in inputs), *(f"received/{k}" for k in range(len(received)))]
    out_names = [*(step.out_paths[o] for o in outputs), *(f"sent/{k}" for k in range(len(sent)))]
    place = {i: position for position, i in enumerate(inputs)}
    totals = {each.total for each in summed}

    @cache
    def parts(ways: int) -> StageGraph:
        return stage_graph(cut.parts(ways), stage)

    def retrace(count: int) -> StepGraph:
        if any(var in cut.facts.mixed for var in (*received, *sent)):
            raise MicrobatchError(
                "a stage sends a statistic of the batch, of which a device would have a part"
            )
        ways = count // micro.count
        found = parts(ways)
        made = numbers_of(step)
        known = found.cut.step.microbatching
        if known is None or any(
            made[var] not in known.powers for var in (*received, *sent) if var in cut.facts.rows
        ):
            raise MicrobatchError(
                "a stage sends examples of which it is not known how they depend on the size of the batch"
            )
        if not _alike(cut, found.cut, mine, ways):
            raise MicrobatchError(
                "the step does different things for the few examples that a device has of a microbatch"
            )
        return found.step

    whole = StepGraph(
        jaxpr=jaxpr,
        in_paths=tuple(names),
        out_paths=tuple(out_names),
        batch=frozenset(place[i] for i in inputs if i in step.batch),
        carried={
            o: place[step.carried[output]]
            for o, output in enumerate(outputs)
            if step.carried.get(output) in place
        },
        in_tree=jax.tree.structure(invars),
        out_tree=jax.tree.structure(outvars),
        microbatching=Microbatching(
            micro.count, tuple(body), tuple(tail), tuple(marks), tuple(combine)
        ),
        name=f"{step.name}, stage {stage}",
        handed_on=tuple(var for var in read if var in made and var not in totals),
        held=_held(cut, mine, received),
        retrace=retrace,
        received={
            len(inputs) + k: cut.facts.dims.get(var, frozenset()) for k, var in enumerate(received)
        },
    )
    tasks = {task: tuple((numbers[number], eqn) for number, eqn in cut.eqns[task]) for task in mine}
    return StageGraph(cut, stage, whole, inputs, received, outputs, sent, tasks, parts)


def _whole_step_graph(cut: Cut) -> StageGraph:
    """Return the graph of the only stage of a step that is not cut: the step itself."""
    jaxpr = cut.step.jaxpr
    inputs, outputs = tuple(range(len(jaxpr.invars))), tuple(range(len(jaxpr.outvars)))
    return StageGraph(
        cut,
        0,
        cut.step,
        inputs,
        (),
        outputs,
        (),
        cut.eqns,
        lambda ways: _whole_step_graph(cut.parts(ways)),
    )


def numbers_of(step: StepGraph) -> dict[Var, tuple[int, int]]:
    """For each value the number of the equation that makes it, and of the result."""
    return {
        var: (number, r)
        for number, eqn in enumerate(step.jaxpr.eqns)
        for r, var in enumerate(eqn.outvars)
    }


def _alike(whole: Cut, part: Cut, tasks: Sequence[Task], ways: int) -> bool:
    """Whether tasks hand the same values to one another when microbatches are smaller by `ways`."""

    def expected(var: Var) -> tuple[int, ...]:
        shape = graph.aval_of(var).shape
        return tuple(
            size // ways if dim == whole.facts.rows.get(var) else size
            for dim, size in enumerate(shape)
        )

    eqns = whole.step.jaxpr.eqns, part.step.jaxpr.eqns
    if [eqn.primitive for eqn in eqns[0]] != [eqn.primitive for eqn in eqns[1]]:
        return False
    for task in tasks:
        mine = (*whole.reads[task], *whole.results[task])
        theirs = (*part.reads[task], *part.results[task])
        if [expected(var) for var in mine if task.phase != "U"] != [
            graph.aval_of(v).shape for v in theirs if task.phase != "U"
        ]:
            return False
    return True


def _place(atom: graph.Atom, order: Mapping[Var, int]) -> int:
    """Where a value is made; what is not made here comes first."""
    return order.get(atom, -1) if isinstance(atom, Var) else -1


def _in_order(update: Sequence[Numbered], awaited: dict[Var, int]) -> Iterator[Numbered]:
    """The equations of an update by the last sum, of those in `awaited`, that they have to wait for; adds to those what they make.

    Those that wait for none come when they are needed.
    """
    found = units(update)
    waits: dict[int, float] = {}
    for unit in found:
        last = max((awaited.get(var, -1) for var in unit.reads), default=-1)
        awaited.update(dict.fromkeys(unit.makes, last))
        waits[unit.number] = last
    needed: dict[Var, float] = {}
    for unit in reversed(found):
        if waits[unit.number] < 0:
            waits[unit.number] = min((needed.get(var, inf) for var in unit.makes), default=inf)
        for var in unit.reads:
            needed[var] = min(waits[unit.number], needed.get(var, inf))
    for unit in sorted(found, key=lambda unit: waits[unit.number]):
        yield from unit.eqns


def _held(cut: Cut, mine: Sequence[Task], received: Sequence[Var]) -> tuple[Var, ...]:
    """What a stage keeps of each microbatch for its backward pass: results, and what it received, of its forward pass."""
    forward = [task for task in mine if task.phase in ("F", "I")]
    made = {var for task in forward for var in cut.results[task]}
    made.update({var for task in forward for var in cut.reads[task]}.intersection(received))
    backward = [var for task in mine if task.phase in ("B", "I", "W") for var in cut.reads[task]]
    return tuple(dict.fromkeys(var for var in backward if var in made))


def _makes(cut: Cut, stage: int, atom: graph.Atom) -> bool:
    """Whether an output of the step is this stage's to give; one that is an input, or constant, is the first stage's that has it."""
    if isinstance(atom, Var) and atom in cut.made_by:
        return cut.made_by[atom].stage == stage
    if isinstance(atom, Var) and atom in cut.step.jaxpr.invars:
        return cut.input_stages[cut.step.jaxpr.invars.index(atom)][0] == stage
    return stage == 0
