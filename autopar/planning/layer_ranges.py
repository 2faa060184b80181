"""Stages of consecutive layers, composed without partitioning the step again.

The step is partitioned once, with every layer as a stage of its own. The tasks of a longer stage
are the tasks of its layers, one after the other.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from jax.extend.core import JaxprEqn, Var

from autopar.ir.array_sizes import value_bytes
from autopar.ir.control_flow import MARKERS
from autopar.ir.evaluate import Numbered
from autopar.ir.graph import aval_of, variables
from autopar.ir.host_memory import is_on_host
from autopar.ir.memo import memoized_on_step
from autopar.ir.step_graph import StepGraph
from autopar.pipeline.partition import Partition, Task, Total
from autopar.pipeline.partitioner import partition_step
from autopar.pipeline.stage_graph import StageGraph, stage_graph
from autopar.primitives import record_of

_PHASES = "FBIWU"
"""Phases in the order in which a stage runs them for one microbatch."""


@dataclass(frozen=True, slots=True)
class _RangeStage:
    """The partition in which layers `start` to `stop` - 1 are the only stage with tasks."""

    num_layers: int
    split_backward: bool
    start: int
    stop: int

    def partition(self, step: StepGraph) -> Partition:
        """Return the tasks of `step`."""
        ranges = _layer_ranges(step, self.num_layers, self.split_backward)
        return ranges.partition_of(self.start, self.stop)


class LayerRanges:
    """The layers of a step and the stages that they can form.

    Attributes:
        num_layers: number of layers.
        partition: the step with every layer as a stage.
        layers: graph of every layer.
    """

    def __init__(self, step: StepGraph, num_layers: int, split_backward: bool = False) -> None:
        self.num_layers = num_layers
        self.split_backward = split_backward
        self.partition = partition_step(step, range(num_layers), split_backward)
        self._readers: dict[Var, list[int]] = defaultdict(list)  # layers
        self._tasks: list[list[Task]] = [[] for _ in range(num_layers)]
        for task in self.partition.eqns:
            self._tasks[task.stage].append(task)
            for var in self.partition.reads[task]:
                self._readers[var].append(task.stage)
        self.layers = [self.graph(layer, layer + 1) for layer in range(num_layers)]

    def graph(self, start: int, stop: int) -> StageGraph:
        """Return layers `start` to `stop` - 1 as a stage."""
        return stage_graph(self.partition_of(start, stop), 1)

    def partition_of(self, start: int, stop: int) -> Partition:
        """Return the partition in which layers `start` to `stop` - 1 are stage 1 of three.

        The stages before and after it have no tasks, but for values that every stage computes for
        itself: they belong to stage 0 unless a layer of the range is the first to compute them.
        """
        layers = range(start, stop)
        eqns, totals = self._merged_tasks(layers)
        foreign = {
            number: eqn
            for task_eqns in eqns.values()
            for number, eqn in task_eqns.items()
            if any(self._is_foreign(var, layers) for var in eqn.outvars)
        }
        if foreign:
            eqns[Task(0, "F")] = foreign
        results = (
            var
            for layer in layers
            for task in self._tasks[layer]
            for var in self.partition.results[task]
        )
        read_later = (
            var for var in results if any(r not in layers for r in self._readers.get(var, ()))
        )
        return replace(
            self.partition,
            num_stages=3,
            partitioner=_RangeStage(self.num_layers, self.split_backward, start, stop),
            eqns={task: tuple(sorted(eqns[task].items(), key=_number)) for task in _ordered(eqns)},
            totals={task: tuple(sums) for task, sums in totals.items() if sums},
            external_reads=tuple(dict.fromkeys(read_later)),
        )

    def _merged_tasks(
        self, layers: range
    ) -> tuple[dict[Task, dict[int, JaxprEqn]], dict[Task, list[Total]]]:
        """Return the equations, by number, and the totals of several layers by task of stage 1."""
        eqns: dict[Task, dict[int, JaxprEqn]] = {}
        totals: dict[Task, list[Total]] = defaultdict(list)
        for layer in layers:
            for task in self._tasks[layer]:
                eqns[task._replace(stage=1)] = {}
        for task in _ordered(eqns):
            is_backward = task.phase in ("B", "I", "W")
            for layer in reversed(layers) if is_backward else layers:
                layer_task = task._replace(stage=layer)
                eqns[task].update(self.partition.eqns.get(layer_task, ()))
                totals[task] += self.partition.totals.get(layer_task, ())
        return eqns, totals

    def _is_foreign(self, var: Var, layers: range) -> bool:
        producer = self.partition.producers.get(var)
        return producer is not None and producer.stage not in layers

    @cached_property
    def kinds(self) -> Sequence[Hashable]:
        """The kind of each layer; layers of the same kind are interchangeable.

        A kind says what a layer computes, from which layers it takes its operands and which layers
        read its results, counted from the layer itself.
        """
        return [
            (graph_key(graph), self._sources(layer), self._destinations(layer))
            for layer, graph in enumerate(self.layers)
        ]

    def _sources(self, layer: int) -> Hashable:
        """Return for each value that a layer reads how far away it is computed."""
        tasks = [task for task in self._tasks[layer] if task.phase != "U"]
        read = dict.fromkeys(var for task in tasks for var in self.partition.reads[task])
        producers = self.partition.producers
        return tuple(producers[var].stage - layer for var in read if var in producers)

    def _destinations(self, layer: int) -> Hashable:
        """Return for each value that a layer sends how far away it is read."""
        return tuple(
            tuple(sorted({reader - layer for reader in self._readers.get(var, ())}))
            for var in self.layers[layer].sent
        )

    @cached_property
    def crossing_bytes(self) -> tuple[float, ...]:
        """Bytes of one microbatch that cross the boundary before each layer.

        They are the activations of the forward pass and their gradients in the backward pass.
        """
        change = [0.0] * (self.num_layers + 1)
        for var, readers in self._readers.items():
            producer = self.partition.producers.get(var)
            if producer is None or producer.phase == "U":
                continue
            if any(var is total.sum for total in self.partition.totals.get(producer, ())):
                continue
            size = value_bytes(var)
            change[min(producer.stage, *readers) + 1] += size
            change[max(producer.stage, *readers) + 1] -= size
        return tuple(sum(change[: layer + 1]) for layer in range(self.num_layers))

    def state_bytes(self, start: int, stop: int) -> int:
        """Return the bytes of the state of layers `start` to `stop` - 1.

        It consists of carried inputs and accumulated sums.
        """
        return sum(_union(self._state[start:stop]).values())

    def saved_bytes(self, start: int, stop: int) -> int:
        """Return the bytes that layers `start` to `stop` - 1 save for a microbatch's backward pass.

        Only values that the examples determine count. A stage saves what its layers save.
        """
        return sum(_union(self._saved[start:stop]).values())

    def saved_product_bytes(self, start: int, stop: int) -> int:
        """Return the least bytes that `saved_bytes` is if a kernel may compute values again.

        XLA computes matrix products and convolutions once. So where a value is saved that follows
        from the result of one, either of them is stored, or a value between them.
        """
        return sum(_union(self._saved_products[start:stop]).values())

    def least_program_bytes(self, layers: Sequence[int], share: float) -> float:
        """Return a lower bound of the bytes of layers, as parts of one program on one device.

        They are carried inputs, and what products of a part of a microbatch leave for the backward
        pass. Sums over microbatches don't count: those of weights that layers share are one.

        Args:
            layers: numbers of the layers.
            share: size of that part, as a share of a microbatch.
        """
        steps = [self.layers[layer].step for layer in layers]
        carried = {step.jaxpr.invars[i] for step in steps for i in step.carried.values()}
        stored = _union(self._saved_products[layer] for layer in layers)
        return sum(map(value_bytes, carried)) + share * sum(stored.values())

    @cached_property
    def _saved_products(self) -> list[dict[Var, int]]:
        """Least bytes stored for each result of a product or convolution of each layer."""
        return [_saved_product_bytes(graph.step) for graph in self.layers]

    @cached_property
    def _state(self) -> list[dict[Var, int]]:
        """Bytes of each value of each layer's state."""
        return [{var: value_bytes(var) for var in graph.step.state} for graph in self.layers]

    @cached_property
    def _saved(self) -> list[dict[Var, int]]:
        """Bytes of each value that each layer saves for its backward pass."""
        return [_saved_bytes(graph.step) for graph in self.layers]


_layer_ranges = memoized_on_step(LayerRanges)


def _union(parts: Iterable[dict[Var, int]]) -> dict[Var, int]:
    return {var: size for part in parts for var, size in part.items()}


def _saved_bytes(step: StepGraph) -> dict[Var, int]:
    examples = {step.jaxpr.invars[i] for i in (*step.batch, *step.received_inputs)}
    for eqn in step.jaxpr.eqns:
        if not examples.isdisjoint(variables(eqn.invars)):
            examples.update(eqn.outvars)
    saved = (var for var in step.saved_for_backward if var in examples and not is_on_host(var))
    return {var: value_bytes(var) for var in saved}


def _saved_product_bytes(step: StepGraph) -> dict[Var, int]:
    """Return the least bytes stored for each result of a product from which a value is saved."""
    sources = _product_sources(step)
    stored: dict[Var, int] = {}
    for var in _saved_bytes(step):
        if var in sources:
            source, least = sources[var]
            stored[source] = max(least, stored.get(source, 0))
    return stored


def _product_sources(step: StepGraph) -> dict[Var, tuple[Var, int]]:
    """Return the product that each value follows from, and the least bytes of a value on the way.

    Only values count that follow element by element from one product and from smaller values.
    """
    sources: dict[Var, tuple[Var, int]] = {}
    broadcast: set[Var] = set()
    for eqn in step.jaxpr.eqns:
        if len(eqn.outvars) != 1 or eqn.primitive in MARKERS:
            continue
        result, record = eqn.outvars[0], record_of(eqn)
        num_bytes = value_bytes(result)
        if record.is_contraction:
            sources[result] = result, num_bytes
        elif record.is_inlined or record.is_view:
            alike = {
                v
                for v in eqn.invars
                if isinstance(v, Var) and _size(v) >= _size(result) and v not in broadcast
            }
            if not alike:
                broadcast.add(result)
            elif alike <= sources.keys() and {_size(v) for v in alike} == {_size(result)}:
                found = [sources[v] for v in alike]
                if len({source for source, _ in found}) == 1:
                    least = min(least for _, least in found)
                    sources[result] = found[0][0], min(least, num_bytes)
    return sources


def _size(var: Var) -> int:
    return aval_of(var).size


def _ordered(tasks: Iterable[Task]) -> list[Task]:
    return sorted(tasks, key=lambda task: (task.stage, _PHASES.index(task.phase), task.round))


def _number(numbered: Numbered) -> int:
    return numbered[0]


def graph_key(graph: StageGraph) -> Hashable:
    """Return a key that is equal for stages that are planned alike, whatever their names are."""
    step, micro = graph.step, graph.step.microbatching
    assert micro is not None
    return (
        step.fingerprint,
        step.batch,
        tuple(step.carried.items()),
        tuple(step.received_inputs.items()),
        micro.count,
        micro.combine,
    )
