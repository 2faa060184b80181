"""Partitions a traced step into the tasks of a pipeline: which equation runs in which stage and phase, and which values cross.

Forward and backward equations go where their layer goes (`autopar.layering.layers`), those outside of layers where what they read
is. What depends on constants alone, or on small inputs, is computed wherever it is needed, and so is a weight's cast to the dtype
that several stages compute in. A gradient that several stages
contribute to (tied weights) is accumulated in each and added up once. The update of a parameter runs where its gradient is;
where stages need one another's results for it (a global norm) it takes several rounds.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

from jax.extend.core import Literal, Var

from autopar.ir.array_sizes import array_bytes
from autopar.ir.equation_groups import Unit, units
from autopar.ir.evaluate import Numbered
from autopar.ir.graph import Atom, aval_of
from autopar.ir.step_graph import Combine, StepGraph
from autopar.layering.layers import layer_of
from autopar.pipeline.partition import WHOLE_STEP_TASK, Cut, Task, Total

_CASTS = {
    "convert_element_type",
    "transpose",
    "reshape",
    "squeeze",
    "broadcast_in_dim",
    "copy",
    "copy_p",
}


def uncut_step(step: StepGraph) -> Cut:
    """Return `step` as the one task of one stage."""
    eqns = {WHOLE_STEP_TASK: tuple(enumerate(step.jaxpr.eqns))}
    return Cut(step, 1, eqns, {}, lambda ways: uncut_step(step.cut(ways)))


def cut_step(
    step: StepGraph,
    stage_of_layer: Sequence[int],
    split_backward: bool = False,
    homes: Mapping[int, int] | None = None,
) -> Cut:
    """Cut `step` into tasks.

    Args:
        stage_of_layer: the stage of each layer; stages are numbered in the order of layers.
        split_backward: make tasks I, of what other stages wait for, and W of the rest, out of each B.
        homes: the stage at which an input is, if it is given.
    """

    @cache
    def parts(ways: int) -> Cut:
        return cut_step(step.cut(ways), stage_of_layer, split_backward, homes)

    builder = _Builder(step, stage_of_layer)
    builder.place_body()
    builder.spread_casts()
    builder.place_totals()
    builder.place_tail()
    found = builder.cut(parts, homes or {})
    return _split_backward(found) if split_backward else found


class _Builder:
    def __init__(self, step: StepGraph, stage_of_layer: Sequence[int]) -> None:
        self.step = step
        self.num_stages = max(stage_of_layer) + 1
        self.stage_of_layer = tuple(stage_of_layer)
        micro = step.microbatching
        self.body = units(micro.body if micro else enumerate(step.jaxpr.eqns))
        shared = {unit.number for unit in self.body}
        self.tail = [
            unit for unit in units(micro.tail if micro else ()) if unit.number not in shared
        ]
        self.maker = {var: unit for unit in (*self.body, *self.tail) for var in unit.makes}
        self.readers = Counter(var for unit in (*self.body, *self.tail) for var in unit.reads)
        self.inputs = set(step.jaxpr.invars)
        self.constants = set(step.jaxpr.constvars)
        self.task_of: dict[int, Task] = {}  # by the number of a unit's first equation
        self.anywhere: set[int] = set()  # units that are computed wherever they are needed
        self.totals: dict[Task, list[Total]] = defaultdict(list)
        self.total_stage: dict[Var, int] = {}
        self.joined: dict[Var, Var] = {}

    # -- forward and backward

    def place_body(self) -> None:
        """Tasks of the body, numbered in the order in which a microbatch goes through them: 0F 1F ... 1B 0B."""
        position: dict[Var, int] = {}
        for unit in self.body:
            before = [position[var] for var in unit.reads if var in position]
            label = self._label(unit)
            if label is None and not before:
                self.anywhere.add(unit.number)
                continue
            if label is not None and not unit.reads:
                self.anywhere.add(unit.number)
                continue
            if self._is_constant(unit):
                self.anywhere.add(unit.number)
                continue
            place = max([*before, *(() if label is None else (label,))])
            position.update(dict.fromkeys(unit.makes, place))
            last = self.num_stages - 1
            self.task_of[unit.number] = (
                Task(place, "F") if place <= last else Task(2 * last + 1 - place, "B")
            )

    def spread_casts(self) -> None:
        """Let stages cast and view for themselves a weight that several read: sent as an input, it goes to them once per step."""
        reading: dict[Var, list[Unit]] = defaultdict(list)
        for unit in self.body:
            for var in unit.reads:
                reading[var].append(unit)
        for unit in self.body:
            task = self.task_of.get(unit.number)
            if task is None or len(unit.eqns) != 1 or unit.eqns[0][1].primitive.name not in _CASTS:
                continue
            batch = {self.step.jaxpr.invars[i] for i in self.step.batch}
            given = all(
                (var in self.inputs and var not in batch) or self._is_anywhere(var)
                for var in unit.reads
            )
            tasks = (
                self.task_of.get(reader.number) for var in unit.makes for reader in reading[var]
            )
            if given and any(each is not None and each.stage != task.stage for each in tasks):
                del self.task_of[unit.number]
                self.anywhere.add(unit.number)

    def _is_anywhere(self, var: Var) -> bool:
        return var in self.maker and self.maker[var].number in self.anywhere

    def _is_constant(self, unit: Unit) -> bool:
        """Whether it depends on nothing but constants, and on what is computed anywhere."""
        return all(var in self.constants or self._is_anywhere(var) for var in unit.reads)

    def _label(self, unit: Unit) -> int | None:
        found = layer_of(unit.eqns[0][1])
        if found is None:
            return None
        layer, backward = found
        stage = self.stage_of_layer[layer]
        return 2 * self.num_stages - 1 - stage if backward else stage

    # -- what is accumulated

    def place_totals(self) -> None:
        micro = self.step.microbatching
        if micro is None:
            return
        self.moved: list[Unit] = []
        combine = iter(micro.combine)
        for _, mark in micro.marks:
            for atom, total in zip(mark.invars, mark.outvars, strict=True):
                self._accumulate(atom, total, next(combine))
        self.tail = [*self.moved, *self.tail]
        self.maker.update((var, unit) for unit in self.moved for var in unit.makes)

    def _accumulate(self, atom: Atom, total: Var, combine: Combine) -> None:
        if isinstance(atom, Literal):
            self.totals[Task(0, "F")].append(Total(atom, Var(total.aval), total, combine))
            self.total_stage[total] = 0
            return
        if combine == "rows":
            unit = self.maker[atom]
            if unit.number in self.anywhere:
                self.anywhere.remove(unit.number)
                self.task_of[unit.number] = Task(0, "F")
            self.joined[total] = atom
            return
        unit = self.maker.get(atom)
        if (
            unit is not None
            and (combine != "same" or self.step.num_micro_batches == 1)
            and self._adds_stages(unit, atom)
        ):
            ((number, eqn),) = unit.eqns
            parts = [Var(var.aval) for var in unit.reads]
            del self.task_of[unit.number]
            self.body.remove(unit)
            for part, each in zip(unit.reads, parts, strict=True):
                self._accumulate(part, each, combine)
            after = eqn.replace(invars=list(parts), outvars=[total])
            self.moved.append(Unit(((number, after),), tuple(parts), (total,)))
            return
        task = self.task_of.get(unit.number, Task(0, "F")) if unit is not None else Task(0, "F")
        self.totals[task].append(Total(atom, Var(atom.aval), total, combine))
        self.total_stage[total] = task.stage

    def _adds_stages(self, unit: Unit, var: Var) -> bool:
        """Whether the unit adds up what several stages made, for nobody but the accumulation."""
        if (
            unit.eqns[0][1].primitive.name not in ("add", "add_any")
            or self.readers[var] > 0
            or len(unit.reads) != 2
        ):
            return False
        if len(unit.eqns[0][1].invars) != len(unit.reads):
            return False
        makers = [self.maker.get(var) for var in unit.reads]
        stages = {
            self.task_of[m.number].stage
            for m in makers
            if m is not None and m.number in self.task_of
        }
        return len(stages) > 1

    # -- the update

    def place_tail(self) -> None:
        stages = self._tail_stages()
        rounds: dict[Var, tuple[int, int]] = {
            var: (stage, 0) for var, stage in self.total_stage.items()
        }
        for unit in self.tail:
            if unit.number in self.anywhere:
                continue
            stage = stages[unit.number]
            read = [rounds[var] for var in unit.reads if var in rounds]
            turn = max((turn + (where != stage) for where, turn in read), default=0)
            self.task_of[unit.number] = Task(stage, "U", turn)
            rounds.update(dict.fromkeys(unit.makes, (stage, turn)))

    def _tail_stages(self) -> dict[int, int]:
        """The stage of each unit of the update: that of the largest value it reads; of its first reader, if it reads inputs only."""
        where: dict[Var, int] = dict(self.total_stage)
        first: dict[Var, int] = {}
        for unit in self.body:
            task = self.task_of.get(unit.number)
            for var in unit.reads if task is not None else ():
                if var in self.inputs and not _is_small(var):
                    first[var] = min(task.stage, first.get(var, task.stage))  # pyright: ignore[reportOptionalMemberAccess]
        where.update(first)
        for unit in self.tail:
            inside = all(
                var in self.constants
                or (var in self.inputs and _is_small(var))
                or self._is_anywhere(var)
                for var in unit.reads
            )
            if inside and all(map(_is_small, unit.makes)):
                self.anywhere.add(unit.number)
        found: dict[int, int] = {}
        pending = [unit for unit in self.tail if unit.number not in self.anywhere]
        while True:
            known = len(found)
            for unit in pending:
                placed = [var for var in unit.reads if var in where]
                if unit.number not in found and placed:
                    found[unit.number] = where[
                        max(placed, key=lambda var: (_size(var), -where[var]))
                    ]
                if unit.number in found:
                    where.update((var, found[unit.number]) for var in unit.makes)
            for unit in reversed(pending):
                for var in unit.reads if unit.number in found else ():
                    maker = self.maker.get(var)
                    if (
                        maker is not None
                        and maker.number not in found
                        and maker.number not in self.anywhere
                    ):
                        found[maker.number] = found[unit.number]
                    elif var in self.inputs and not _is_small(var):
                        where.setdefault(var, found[unit.number])
            if len(found) == known:
                return found | {unit.number: 0 for unit in pending if unit.number not in found}

    # -- put together

    def cut(self, parts: Callable[[int], Cut], homes: Mapping[int, int]) -> Cut:
        tasks: dict[Task, list[Unit]] = defaultdict(list)
        for stage in range(self.num_stages):  # a stage has a forward, whatever it does
            tasks[Task(stage, "F")] = []
        for unit in (*self.body, *self.tail):
            if unit.number in self.task_of:
                tasks[self.task_of[unit.number]].append(unit)
        if self.step.microbatching is not None:
            for stage in range(self.num_stages):
                tasks.setdefault(Task(stage, "B"), [])
                tasks.setdefault(Task(stage, "U"), [])
        self._compute_anywhere(tasks)
        ordered = {task: tasks[task] for task in sorted(tasks, key=self._order)}
        eqns = {
            task: tuple(each for unit in mine for each in unit.eqns)
            for task, mine in ordered.items()
        }
        totals = {task: tuple(each) for task, each in self.totals.items()}
        return Cut(self.step, self.num_stages, eqns, totals, parts, joined=self.joined, homes=homes)

    def _order(self, task: Task) -> tuple[int, int, int]:
        if task.phase == "U":
            return 2 * self.num_stages, task.round, task.stage
        return (task.stage if task.phase == "F" else 2 * self.num_stages - 1 - task.stage), 0, 0

    def _compute_anywhere(self, tasks: dict[Task, list[Unit]]) -> None:
        """Give each task what is computed anywhere and needed there; what only the step's outputs need goes to the first."""
        order = {unit.number: position for position, unit in enumerate((*self.body, *self.tail))}
        needed = {
            task: self._needed_anywhere(self._read_by(task, mine)) for task, mine in tasks.items()
        }
        made = {var for found in needed.values() for unit in found.values() for var in unit.makes}
        first = Task(0, "F" if self.step.microbatching is None else "U")
        outputs = (
            atom for atom in self.step.jaxpr.outvars if isinstance(atom, Var) and atom not in made
        )
        needed[first] |= self._needed_anywhere(outputs)
        for task, mine in tasks.items():
            mine[:] = sorted([*needed[task].values(), *mine], key=lambda unit: order[unit.number])

    def _read_by(self, task: Task, mine: Sequence[Unit]) -> Iterator[Var]:
        yield from (var for unit in mine for var in unit.reads)
        yield from (each.part for each in self.totals.get(task, ()) if isinstance(each.part, Var))

    def _needed_anywhere(self, read: Iterable[Var]) -> dict[int, Unit]:
        """The units computed anywhere on which the values depend, by number."""
        pending, found = list(read), {}
        while pending:
            unit = self.maker.get(pending.pop())
            if unit is not None and unit.number in self.anywhere and unit.number not in found:
                found[unit.number] = unit
                pending.extend(unit.reads)
        return found


def _split_backward(cut: Cut) -> Cut:
    """Each B as I, what other stages wait for, and W, the rest."""
    eqns: dict[Task, tuple[Numbered, ...]] = {}
    totals = {task: each for task, each in cut.totals.items() if task.phase != "B"}
    for task, mine in cut.eqns.items():
        if task.phase != "B":
            eqns[task] = mine
            continue
        awaited = {
            var
            for other, reads in cut.reads.items()
            if other.phase == "B" and other != task
            for var in reads
        }.intersection(cut.results[task])
        parts = units(mine)
        first: list[Unit] = []
        for unit in reversed(parts):
            if not awaited.isdisjoint(unit.makes):
                first.append(unit)
                awaited.update(unit.reads)
        early = {unit.number for unit in first}
        eqns[Task(task.stage, "I")] = tuple(e for unit in first[::-1] for e in unit.eqns)
        eqns[Task(task.stage, "W")] = tuple(
            e for unit in parts if unit.number not in early for e in unit.eqns
        )
        totals[Task(task.stage, "W")] = cut.totals.get(task, ())
    return replace(cut, eqns=eqns, totals=totals)


def _size(var: Var) -> int:
    return array_bytes(aval_of(var).shape, aval_of(var).dtype)


def _is_small(var: Var) -> bool:
    """Whether a value may as well be computed twice: scalars and random keys."""
    return _size(var) <= 16
