"""Runs of layers as stages: graphs for any of them, without cutting the step anew.

The step is cut once, every layer a stage of its own; the tasks of a longer stage are those of its layers, one after the other.
"""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import cache, cached_property

from jax.extend.core import Var

from autopar.ir.array_sizes import array_bytes
from autopar.ir.graph import aval_of
from autopar.ir.step_graph import StepGraph
from autopar.pipeline.partition import Task, Total
from autopar.pipeline.partitioner import cut_step
from autopar.pipeline.stage_graph import StageGraph, stage_graph


class LayerRanges:
    """The layers of a step, and the stages that can be made of them.

    Attributes:
        cut: the step with every layer as a stage.
        layers: the graph of every layer.
    """

    def __init__(self, step: StepGraph, num_layers: int, split_backward: bool = False) -> None:
        self.num_layers = num_layers
        self.cut = cut_step(step, range(num_layers), split_backward)
        self._parts = cache(lambda ways: LayerRanges(step.cut(ways), num_layers, split_backward))
        self._readers: dict[Var, list[int]] = defaultdict(list)
        self._tasks: list[list[Task]] = [[] for _ in range(num_layers)]
        for task in self.cut.eqns:
            self._tasks[task.stage].append(task)
            for var in self.cut.reads[task]:
                self._readers[var].append(task.stage)
        self.layers = [self.graph(layer, layer + 1) for layer in range(num_layers)]

    def graph(self, start: int, stop: int) -> StageGraph:
        """Layers `start` to `stop` - 1 as a stage; number 1, of three: what comes before it and after it has no tasks."""
        layers = range(start, stop)
        eqns: dict[Task, dict] = defaultdict(dict)
        totals: dict[Task, list[Total]] = defaultdict(list)
        for layer in layers:
            for task in self._tasks[layer]:
                eqns[task._replace(stage=1)] = {}
        for task in sorted(eqns, key=lambda task: ("FBIWU".index(task.phase), task.round)):
            for layer in reversed(layers) if task.phase in ("B", "I", "W") else layers:
                part = task._replace(stage=layer)
                eqns[task].update(self.cut.eqns.get(part, ()))
                totals[task] += self.cut.totals.get(part, ())
        # What every stage computes for itself belongs to the first that does.
        foreign = {
            number: eqn
            for each in eqns.values()
            for number, eqn in each.items()
            if any(
                var in self.cut.made_by and self.cut.made_by[var].stage not in layers
                for var in eqn.outvars
            )
        }
        if foreign:
            eqns[Task(0, "F")] = foreign
        ordered = sorted(eqns, key=lambda task: (task.stage, "FBIWU".index(task.phase), task.round))
        made = (
            var for layer in layers for task in self._tasks[layer] for var in self.cut.results[task]
        )
        found = replace(
            self.cut,
            num_stages=3,
            parts=lambda ways: self._parts(ways).graph(start, stop).cut,
            eqns={
                task: tuple(sorted(eqns[task].items(), key=lambda each: each[0]))
                for task in ordered
            },
            totals={task: tuple(each) for task, each in totals.items() if each},
            wanted=tuple(
                dict.fromkeys(
                    v for v in made if any(r not in layers for r in self._readers.get(v, ()))
                )
            ),
        )
        return stage_graph(found, 1)

    @cached_property
    def kinds(self) -> Sequence[Hashable]:
        """For each layer what it computes and from which layers, counted from itself, it takes its operands: layers with the same kind are
        interchangeable."""

        def near(layer: int, graph: StageGraph) -> Hashable:
            steps = [task for task in self._tasks[layer] if task.phase != "U"]
            read = dict.fromkeys(var for task in steps for var in self.cut.reads[task])
            sources = [
                self.cut.made_by[var].stage - layer for var in read if var in self.cut.made_by
            ]
            readers = [
                tuple(sorted({r - layer for r in self._readers.get(var, ())})) for var in graph.sent
            ]
            return tuple(sources), tuple(readers)

        return [(graph_key(graph), near(layer, graph)) for layer, graph in enumerate(self.layers)]

    @cached_property
    def crossing_bytes(self) -> tuple[float, ...]:
        """For each layer, bytes of one microbatch that cross the cut before it: activations forth, their gradients back."""
        change = [0.0] * (self.num_layers + 1)
        for var, readers in self._readers.items():
            maker = self.cut.made_by.get(var)
            if (
                maker is None
                or maker.phase == "U"
                or any(var is e.sum for e in self.cut.totals.get(maker, ()))
            ):
                continue
            size = array_bytes(aval_of(var).shape, aval_of(var).dtype)
            change[min(maker.stage, *readers) + 1] += size
            change[max(maker.stage, *readers) + 1] -= size
        return tuple(sum(change[: cut + 1]) for cut in range(self.num_layers))


def graph_key(graph: StageGraph) -> Hashable:
    """Equal for stages that are planned alike: whatever their values are called."""
    step, micro = graph.step, graph.step.microbatching
    assert micro is not None
    return (
        step.fingerprint,
        step.batch,
        tuple(step.carried.items()),
        tuple(step.received.items()),
        micro.count,
        micro.combine,
    )
