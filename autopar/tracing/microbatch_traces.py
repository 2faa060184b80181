"""Split the traces of a step into microbatches, in one pass over them or in two."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import jax
from jax.extend.core import Jaxpr, JaxprEqn

from autopar.ir.array_cuts import CutTree
from autopar.ir.equation_groups import dependents
from autopar.ir.graph import Atom, is_backward, needed, source_line, variables
from autopar.ir.preparation import Preparation, TracedValue
from autopar.ir.step_graph import (
    Exactness,
    FirstPass,
    MicrobatchError,
    Microbatching,
    StepGraph,
)
from autopar.layering.layer_clustering import NoLayersError
from autopar.microbatch.batch_scaling import BatchScalings
from autopar.microbatch.example_blocks import Blocks
from autopar.microbatch.first_pass import (
    COMPLETED,
    check_no_model,
    finished_with,
    latest_completed,
    model_layers,
    more_completed,
    reading,
    results_of,
)
from autopar.microbatch.pass_options import PassOptions
from autopar.microbatch.prepared_inputs import (
    PREPARED,
    computing,
    more_prepared,
    preparation,
    prepared_rows,
    values_at,
    with_prepared,
)
from autopar.microbatch.row_positions import (
    POSITIONS,
    add_positions,
    blocks_of_created,
    without_unread_positions,
)
from autopar.microbatch.sized_traces import SizedTraces
from autopar.microbatch.splitting import split
from autopar.primitives import record_of


class SplitStep(NamedTuple):
    """A step as it runs in microbatches.

    Attributes:
        jaxpr: the flat jaxpr.
        microbatching: which equations run when; None without microbatches.
        preparation: what is computed before the step; None if nothing is.
        rows: the numbers of the inputs whose first dim is the batch, with prepared ones, without
            the positions of the examples.
        first_pass: the pass that computes further inputs; None if the step is one pass.
    """

    jaxpr: Jaxpr
    microbatching: Microbatching | None
    preparation: Preparation | None = None
    rows: frozenset[int] = frozenset()
    first_pass: FirstPass | None = None

    @property
    def prepared_paths(self) -> list[str]:
        """The paths of the inputs that are computed before the step."""
        count = len(self.preparation.places) if self.preparation else 0
        return [
            *_prepared_paths(count),
            *(self.first_pass.step.out_paths if self.first_pass else ()),
        ]


class _Numbered(NamedTuple):
    """The traces of a step with inputs that are no arguments.

    Attributes:
        traces: the traces.
        batch: the numbers of the inputs whose first dim is the batch.
        positions: the number of the input with the positions of the examples, or None.
    """

    traces: SizedTraces
    batch: frozenset[int]
    positions: int | None

    @property
    def sizes(self) -> tuple[Jaxpr, Jaxpr]:
        """The traces that say how values scale with the batch."""
        return self.traces.small, self.traces.large


class DividedTrace(NamedTuple):
    """How a trace was divided into layers.

    Attributes:
        trace: the trace without layers.
        divide: the function that divided it into layers.
    """

    trace: Jaxpr
    divide: Callable[[Jaxpr], Jaxpr]


@dataclass(frozen=True)
class MicrobatchTraces:
    """The traces of a step that is split into microbatches.

    Attributes:
        traces: the traces of the step.
        paths: the name of each argument.
        batch: the numbers of the arguments whose first dim is the batch.
        count: the number of microbatches.
        exactness: in what microbatches may differ from the whole batch.
        stages: whether the step is cut into pipeline stages.
        gradient_free: whether the step may take no gradient.
        name: the name of the user's function.
        retrace: a function that returns the step for another number of microbatches.
        in_layers: how the trace of a microbatch was divided into layers after it was traced; None
            if it was not.
        divide: a function that divides each pass over the microbatches into layers; None if
            `traces.micro` is divided already, or runs without layers.
        is_first_pass: whether the step is a first pass.
        blocks: the number of blocks in the created arrays that have several, as in `add_positions`.
    """

    traces: SizedTraces
    paths: tuple[str, ...]
    batch: frozenset[int]
    count: int
    exactness: Exactness
    stages: bool
    gradient_free: bool
    name: str
    retrace: Callable[[int], StepGraph]
    in_layers: DividedTrace | None = None
    divide: Callable[[Jaxpr], Jaxpr] | None = None
    is_first_pass: bool = False
    blocks: Mapping[int, Blocks] = MappingProxyType({})

    def split(self) -> SplitStep:
        """Return the step as it runs in microbatches.

        The first of these that equals the whole batch is chosen: one pass; one pass after values
        that follow from the batch alone are computed; two passes, the first of which computes what
        the model makes of the whole batch. Statistics of each microbatch, where they are allowed,
        replace those of the batch only if none of these does.

        Raises:
            MicrobatchError: the step does not have the same result in microbatches.
        """
        if self.exactness.batch_statistics == "microbatch":
            exactness = replace(self.exactness, batch_statistics="exact")
            with suppress(MicrobatchError):
                return replace(self, exactness=exactness).split()
        places: tuple[TracedValue, ...] = ()
        refused: MicrobatchError | None = None
        while True:
            numbered = self._numbered(places)
            try:
                return self._split(numbered, places)
            except MicrobatchError as error:
                refused = refused or error
            found = self._scalings(numbered)
            if found is None:
                break
            if blocks := self._blocks_of_created(numbered, found):
                return replace(self, blocks={**self.blocks, **blocks}).split()
            more = more_prepared(self.traces, numbered.traces.small, numbered.batch, found)
            if not more:
                break
            places += more
        with suppress(MicrobatchError):
            return self._in_two_passes(numbered, places)
        raise refused from None

    def _scalings(self, numbered: _Numbered) -> BatchScalings | None:
        """Return the scalings of the values of a microbatch; None if the traces differ."""
        with suppress(MicrobatchError):
            return BatchScalings(
                *numbered.sizes, numbered.batch, self.count, own_loops=self._own_loops
            )
        return None

    def _blocks_of_created(self, numbered: _Numbered, found: BatchScalings) -> dict[int, Blocks]:
        """Return the blocks of created arrays that need several and are not in `blocks`."""
        if numbered.positions is None:
            return {}
        needed = blocks_of_created(
            numbered.traces.small, numbered.batch, numbered.positions, found.kinds
        )
        return {order: blocks for order, blocks in needed.items() if order not in self.blocks}

    @property
    def _own_loops(self) -> bool:
        """Whether each microbatch runs loops until the last of its own examples is done."""
        return self.exactness.while_loops == "microbatch"

    def _numbered(self, places: Sequence[TracedValue]) -> _Numbered:
        """Return the traces with the values at `places` and the positions as inputs."""
        num_inputs = len(self.traces.micro.invars) + len(places)
        batch = self.batch | prepared_rows(self.traces.micro, self.traces.whole, places)
        traces = self.traces.map(lambda trace: with_prepared(trace, places))
        distinct = list(dict.fromkeys(traces.pairs))
        folds = self.exactness.rng == "fold_in"
        numbered = add_positions(distinct, batch, self.count, folds, self.blocks)
        if numbered is None:
            return _Numbered(traces, batch, None)
        with_positions = dict(zip(distinct, numbered, strict=True))
        traces = SizedTraces.of_pairs([with_positions[pair] for pair in traces.pairs])
        return _Numbered(traces, batch | {num_inputs}, num_inputs)

    def _split(
        self, numbered: _Numbered, places: Sequence[TracedValue], num_completed: int = 0
    ) -> SplitStep:
        """Return a pass with the values at `places` prepared.

        Further inputs follow these if a first pass completes them.
        """
        # What only prepared values need is no part of the step.
        traces = numbered.traces.map(reading) if places else numbered.traces
        jaxpr, microbatching = split(
            self.divide(traces.micro) if self.divide else traces.micro,
            traces.whole,
            traces.part,
            (traces.small, traces.large),
            self._options(numbered, num_completed),
        )
        if self.is_first_pass:
            check_no_model(microbatching.tail, traces.micro, traces.whole, numbered.batch)
        jaxpr = without_unread_positions(jaxpr, numbered.positions)
        rows = numbered.batch - {numbered.positions}
        prepared = preparation(self.traces.whole, places) if places else None
        return SplitStep(jaxpr, microbatching, prepared, rows)

    def _options(self, numbered: _Numbered, num_completed: int) -> PassOptions:
        """Return the options of a pass whose last `num_completed` inputs a first pass completes."""
        return PassOptions(
            self.count,
            numbered.batch,
            numbered.positions,
            completed=_last_inputs(numbered, num_completed),
            stages=self.stages,
            gradient_free=self.gradient_free,
            own_statistics=self.exactness.batch_statistics == "microbatch",
            own_loops=self._own_loops,
            is_first_pass=self.is_first_pass,
        )

    # -- two passes

    def _in_two_passes(self, numbered: _Numbered, places: tuple[TracedValue, ...]) -> SplitStep:
        """Return the second of two passes over the microbatches, with the first one.

        The first pass may be two passes itself.

        Args:
            numbered: the traces with the values at `places` and the positions as inputs.
            places: the values that are prepared.

        Raises:
            MicrobatchError: the step is not right in several passes either, or each of its layers
                would need a further one.
        """
        completed: tuple[TracedValue, ...] = ()
        second = numbered
        while True:
            options = self._options(second, len(completed))
            more = more_completed(self.traces, second.sizes, options)
            more = tuple(place for place in dict.fromkeys(more) if place not in completed)
            if not more:
                break
            values = values_at(self.traces.small, more)
            self._check_between_layers(numbered, completed, second, values)
            completed += more
            second = self._second_pass(places, completed)
            if self.is_first_pass:
                results = second.traces.small.outvars
                self._check_between_layers(numbered, completed, second, results)
                with suppress(MicrobatchError):  # it may compute the rest once
                    self._split(second, places, len(completed))
                    break
        if not completed:
            raise MicrobatchError("two passes over the microbatches do not equal the whole batch")
        latest = latest_completed(
            self.traces,
            second.traces.small,
            second.batch,
            _last_inputs(second, len(completed)),
            completed,
        )
        attempts = [latest, completed] if self.is_first_pass else [latest]
        if finished := self._finished(places, latest):
            attempts.insert(0, (*latest, *finished))
        *attempts, last = attempts
        for values in attempts:
            with suppress(MicrobatchError):
                return self._passes(places, values)
        return self._passes(places, last)

    def _finished(
        self, places: tuple[TracedValue, ...], completed: tuple[TracedValue, ...]
    ) -> tuple[TracedValue, ...]:
        """Return further values to complete, with which the second pass has fewer layers."""
        second = self._second_pass(places, completed)
        found = self._scalings(second)
        if found is None:
            return ()
        small = second.traces.small
        inputs = _last_inputs(second, len(completed))
        more = finished_with(completed, self.traces, small, inputs, second.batch, found)
        more = tuple(place for place in more if place not in completed)
        if not more:
            return ()
        fewer = self._second_pass(places, (*completed, *more)).traces.small
        return more if _num_costly(fewer) < _num_costly(small) else ()

    def _check_between_layers(
        self,
        numbered: _Numbered,
        completed: Sequence[TracedValue],
        second: _Numbered,
        results: Iterable[Atom],
    ) -> None:
        """Check that no statistic of the batch lies between two layers of the model.

        Each such statistic needs a pass of its own, so a model with one in every layer would take
        as many passes as it has layers. What a backward pass computes is no such statistic: several
        updates may follow one another.

        Args:
            numbered: the traces of the whole step.
            completed: the values that the first pass completes.
            second: the traces of what follows, with these values as inputs.
            results: the values of `second.traces.small` that the next pass completes, or returns.

        Raises:
            MicrobatchError: a completed value is computed by a layer or loop of the forward pass,
                and another layer of the forward pass reads it to compute one of `results`.
        """
        small, part = numbered.traces.small, second.traces.small
        made = results_of(model_layers(enumerate(small.eqns), numbered.sizes, numbered.batch))
        made |= results_of(eqn for eqn in small.eqns if record_of(eqn).runs_body)
        eqns = needed(enumerate(part.eqns), results)
        forward = [each for each in eqns if not is_backward(each[1])]
        inputs = _last_inputs(second, len(completed))
        # A product with a statistic, as in a ridge regression, belongs to the loss.
        read = results_of(model_layers(forward, second.sizes, second.batch.union(inputs)))
        for value, i in zip(completed, inputs, strict=True):
            makers = computing(self.traces.small, [value]).eqns
            if any(map(is_backward, makers)) or made.isdisjoint(results_of(makers)):
                continue
            if not read.isdisjoint(dependents(forward, [part.invars[i]])):
                raise MicrobatchError("what mixes examples is between layers of the model")

    def _passes(
        self, places: tuple[TracedValue, ...], completed: tuple[TracedValue, ...]
    ) -> SplitStep:
        """Return the second of two passes, with the first one that computes `completed`."""
        first = self._first_pass(completed)
        if first.has_backward and self.in_layers is not None:
            # Both passes have gradients, and each gradient is divided into all layers.
            micro, divide = self.in_layers
            traces = self.traces._replace(micro=micro)
            own = replace(self, traces=traces, in_layers=None, divide=divide)
            with suppress(MicrobatchError, NoLayersError):
                return own._passes(places, completed)
        second = self._split(self._second_pass(places, completed), places, len(completed))
        return second._replace(first_pass=first)

    def _second_pass(
        self, places: tuple[TracedValue, ...], completed: tuple[TracedValue, ...]
    ) -> _Numbered:
        """Return the traces of the second pass, without what only the first one computes."""
        numbered = self._numbered((*places, *completed))
        inputs = _last_inputs(numbered, len(completed))
        traces = numbered.traces.map(lambda trace: reading(trace, inputs))
        return numbered._replace(traces=traces)

    def _first_pass(self, completed: tuple[TracedValue, ...]) -> FirstPass:
        """Return the first pass, which computes the values `completed`.

        Raises:
            MicrobatchError: the first pass does not run in microbatches, or would compute all that
                the step does.
        """
        divided = self.in_layers
        traces = replace(
            self,
            traces=self.traces.map(lambda trace: computing(trace, completed)),
            gradient_free=True,
            name=f"the first pass of {self.name}",
            retrace=partial(first_pass_of, self.retrace, completed),
            in_layers=divided and divided._replace(trace=computing(divided.trace, completed)),
            is_first_pass=True,
            blocks={},
        )
        if self.is_first_pass and len(traces.traces.whole.eqns) >= len(self.traces.whole.eqns):
            raise MicrobatchError("a pass before the first one would compute as much as it does")
        step, reads = traces._graph(len(completed))
        lines = (source_line(self.traces.whole.eqns[value.number]) for value in completed)
        assert step.microbatching is not None
        has_backward = any(_is_of_gradient(eqn) for _, eqn in step.microbatching.body)
        return FirstPass(step, reads, completed, tuple(dict.fromkeys(lines)), has_backward)

    def _graph(self, num_results: int) -> tuple[StepGraph, tuple[int, ...]]:
        """Return a first pass as a step, and the numbers of the arguments that it has."""
        result, count = self.split(), len(self.paths)
        made = result.jaxpr.invars[count:]
        read = set(variables(atom for eqn in result.jaxpr.eqns for atom in eqn.invars))
        early: set[int] = set()
        for source in (result.preparation, result.first_pass):
            early.update(source.reads if source else ())
        reads = tuple(i for i in range(count) if i in early or result.jaxpr.invars[i] in read)
        number = {i: k for k, i in enumerate(reads)}
        number |= {count + k: len(reads) + k for k in range(len(made))}
        prepared = result.prepared_paths
        has_positions = len(made) > len(prepared)
        inputs = _tuple_of([self.paths[i] for i in reads])
        results = _tuple_of([f"{COMPLETED} {k}" for k in range(num_results)])
        rows = {*self.batch, *result.rows, *([count + len(prepared)] if has_positions else [])}
        preparation, first = result.preparation, result.first_pass
        if preparation is not None:
            arguments = preparation.jaxpr.invars
            preparation = replace(
                preparation,
                jaxpr=preparation.jaxpr.replace(invars=[arguments[i] for i in reads]),
                reads=tuple(number[i] for i in preparation.reads),
            )
        if first is not None:
            first = replace(first, reads=tuple(number[i] for i in first.reads))
        step = StepGraph(
            jaxpr=result.jaxpr.replace(invars=[*(result.jaxpr.invars[i] for i in reads), *made]),
            in_paths=(*inputs.paths, *prepared, *([POSITIONS] if has_positions else [])),
            out_paths=results.paths,
            batch=frozenset(number[i] for i in rows if i in number),
            carried={},
            positions=len(inputs.paths) + len(prepared) if has_positions else None,
            preparation=preparation,
            first_pass=first,
            in_tree=inputs.tree,
            out_tree=results.tree,
            arguments=inputs,
            result=results,
            name=self.name,
            microbatching=result.microbatching,
            retrace=self.retrace,
        )
        return step, reads


def first_pass_of(
    retrace: Callable[[int], StepGraph], completed: Sequence[TracedValue], count: int
) -> StepGraph:
    """Return the first pass of a step in `count` microbatches.

    Raises:
        MicrobatchError: there is none, or it completes other values than `completed`.
    """
    step = retrace(count)
    if step.first_pass is None:
        raise MicrobatchError(f"{step.name} has no first pass in {count} microbatches")
    if step.first_pass.places != tuple(completed):
        raise MicrobatchError(
            f"the first pass of {step.name} completes other values in {count} microbatches"
        )
    return step.first_pass.step


def _is_of_gradient(eqn: JaxprEqn) -> bool:
    """Return whether an equation is a product of a backward pass."""
    return is_backward(eqn) and record_of(eqn).is_contraction


def _num_costly(jaxpr: Jaxpr) -> int:
    return sum(record_of(eqn).is_costly for eqn in jaxpr.eqns)


def _last_inputs(numbered: _Numbered, count: int) -> range:
    """Return the numbers of the last inputs before the positions of the examples."""
    end = len(numbered.traces.micro.invars) - (numbered.positions is not None)
    return range(end - count, end)


def _prepared_paths(count: int) -> list[str]:
    """Return the paths of prepared inputs."""
    return [f"{PREPARED} {k}" for k in range(count)]


def _tuple_of(paths: Sequence[str]) -> CutTree:
    """Return a tuple of arrays in one piece, with these names."""
    return CutTree(jax.tree.structure((0,) * len(paths)), tuple(paths), (None,) * len(paths))
