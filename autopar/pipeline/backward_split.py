"""The split of each backward task in two, for zero-bubble schedules.

I computes what other stages depend on. W computes the rest, mostly gradients of weights, and may
run later.
"""

from collections.abc import Iterable
from dataclasses import replace

from autopar.ir.equation_groups import Unit, units
from autopar.ir.evaluate import Numbered
from autopar.pipeline.partition import Partition, Task


def split_backward_tasks(partition: Partition) -> Partition:
    """Split each B into I, which other stages depend on, and W, the rest."""
    eqns: dict[Task, tuple[Numbered, ...]] = {}
    totals = {task: sums for task, sums in partition.totals.items() if task.phase != "B"}
    for task, task_eqns in partition.eqns.items():
        if task.phase != "B":
            eqns[task] = task_eqns
            continue
        needed = {
            var
            for other, reads in partition.reads.items()
            if other.phase == "B" and other != task
            for var in reads
        }.intersection(partition.results[task])
        task_units = units(task_eqns)
        early: set[int] = set()
        for unit in reversed(task_units):
            if not needed.isdisjoint(unit.makes):
                early.add(unit.number)
                needed.update(unit.reads)
        eqns[Task(task.stage, "I")] = _eqns_of(u for u in task_units if u.number in early)
        eqns[Task(task.stage, "W")] = _eqns_of(u for u in task_units if u.number not in early)
        totals[Task(task.stage, "W")] = partition.totals.get(task, ())
    return replace(partition, eqns=eqns, totals=totals)


def _eqns_of(task_units: Iterable[Unit]) -> tuple[Numbered, ...]:
    return tuple(eqn for unit in task_units for eqn in unit.eqns)
