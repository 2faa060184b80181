"""Split the traces of a step into microbatches, in one pass over them or in two."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
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
    completing,
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
from autopar.microbatch.splitting import split
from autopar.primitives import record_of


class SplitStep(NamedTuple):
    """A step as it runs in microbatches.

    Attributes:
        jaxpr: The flat jaxpr.
        microbatching: Which equations run when; None without microbatches.
        preparation: What is computed before the step; None if nothing is.
        rows: The numbers of the inputs whose first dim is the batch, with prepared ones, without
            the positions of the examples.
        first_pass: The pass that computes further inputs; None if the step is one pass.
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
        pairs: The traces for a part of the batch, each with that for all of it.
        batch: The numbers of the inputs whose first dim is the batch.
        positions: The number of the input with the positions of the examples, or None.
    """

    pairs: Sequence[tuple[Jaxpr, Jaxpr]]
    batch: frozenset[int]
    positions: int | None


class DividedTrace(NamedTuple):
    """How a trace was divided into layers.

    Attributes:
        trace: The trace without layers.
        divide: Divides it into layers.
    """

    trace: Jaxpr
    divide: Callable[[Jaxpr], Jaxpr]


@dataclass(frozen=True)
class MicrobatchTraces:
    """The traces of a step that is split into microbatches.

    Attributes:
        traces: The traces, in turns for a part of the batch and for `count` times as many examples.
            The first two run: a microbatch and the batch. The last two are for more examples and
            say how values scale with the batch. The next two are like the last two, for as many
            examples as run.
        paths: The name of each argument.
        batch: The numbers of the arguments whose first dim is the batch.
        count: The number of microbatches.
        exactness: In what microbatches may differ from the whole batch.
        stages: Whether the step is cut into pipeline stages.
        gradient_free: Whether the step may take no gradient.
        name: The name of the user's function.
        retrace: A function that returns the step for another number of microbatches.
        in_layers: How the trace of a microbatch was divided into layers; None if it was not, or was
            traced in layers.
        divide: A function that divides each pass over the microbatches into layers; None if the
            traces are in layers as they are to run.
        is_first_pass: Whether the step is a first pass.
        blocks: The number of blocks in the created arrays that have several, as in `add_positions`.
    """

    traces: tuple[Jaxpr, ...]
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

        What the step computes from the whole batch alone is computed before its microbatches, if
        these can't be right otherwise. What they need of the model for the whole batch, a first
        pass completes. Only steps that are not exact so use statistics of each microbatch.

        Raises:
            MicrobatchError: The step does not have the same result in microbatches.
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
            more = more_prepared(self.traces, numbered.pairs[-1][0], numbered.batch, found)
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
                *numbered.pairs[-1], numbered.batch, self.count, own_loops=self._own_loops
            )
        return None

    def _blocks_of_created(self, numbered: _Numbered, found: BatchScalings) -> dict[int, Blocks]:
        """Return the blocks of created arrays that need several and are not in `blocks`."""
        if numbered.positions is None:
            return {}
        small = numbered.pairs[-1][0]
        needed = blocks_of_created(small, numbered.batch, numbered.positions, found.kinds)
        return {order: blocks for order, blocks in needed.items() if order not in self.blocks}

    @property
    def _own_loops(self) -> bool:
        """Whether each microbatch runs loops until the last of its own examples is done."""
        return self.exactness.while_loops == "microbatch"

    def _numbered(self, places: Sequence[TracedValue]) -> _Numbered:
        """Return the traces with the values at `places` and the positions as inputs."""
        num_inputs = len(self.traces[0].invars) + len(places)
        batch = self.batch | prepared_rows(self.traces[0], self.traces[1], places)
        # Usually the traces that run also say how values scale, and the pairs are one pair.
        prepared = {trace: with_prepared(trace, places) for trace in dict.fromkeys(self.traces)}
        traces = [prepared[trace] for trace in self.traces]
        pairs = list(zip(traces[::2], traces[1::2], strict=True))
        distinct = list(dict.fromkeys(pairs))
        folds = self.exactness.rng == "fold_in"
        numbered = add_positions(distinct, batch, self.count, folds, self.blocks)
        if numbered is None:
            return _Numbered(pairs, batch, None)
        with_positions = dict(zip(distinct, numbered, strict=True))
        pairs = [with_positions[pair] for pair in pairs]
        return _Numbered(pairs, batch | {num_inputs}, num_inputs)

    def _split(
        self, numbered: _Numbered, places: Sequence[TracedValue], num_completed: int = 0
    ) -> SplitStep:
        """Return a pass with the values at `places` prepared.

        Further inputs follow these if a first pass completes them.
        """
        # What only prepared values need is no part of the step.
        traces = {each: reading(each) if places else each for each in chain(*numbered.pairs)}
        micro, whole, part, _, small, large = (traces[each] for each in chain(*numbered.pairs))
        jaxpr, microbatching = split(
            self.divide(micro) if self.divide else micro,
            whole,
            part,
            (small, large),
            self._options(numbered, num_completed),
        )
        if self.is_first_pass:
            check_no_model(microbatching.tail, micro, whole, numbered.batch)
        jaxpr = without_unread_positions(jaxpr, numbered.positions)
        rows = numbered.batch - {numbered.positions}
        prepared = preparation(self.traces[1], places) if places else None
        return SplitStep(jaxpr, microbatching, prepared, rows)

    def _options(self, numbered: _Numbered, num_completed: int) -> PassOptions:
        """Return the options of a pass whose last inputs, as many as given, are completed."""
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
            numbered: The traces with the values at `places` and the positions as inputs.
            places: The values that are prepared.

        Raises:
            MicrobatchError: Passes will not do, or each layer would need a further one.
        """
        completed: tuple[TracedValue, ...] = ()
        second = numbered
        while True:
            options = self._options(second, len(completed))
            more = more_completed(self.traces, second.pairs[-1], options)
            more = tuple(place for place in dict.fromkeys(more) if place not in completed)
            if not more:
                break
            values = values_at(self.traces[-2], more)
            self._check_between_layers(numbered, completed, second, values)
            completed += more
            second = self._second_pass(places, completed)
            if self.is_first_pass:
                part, _ = second.pairs[-1]
                self._check_between_layers(numbered, completed, second, part.outvars)
                with suppress(MicrobatchError):  # it may compute the rest once
                    self._split(second, places, len(completed))
                    break
        if not completed:
            raise MicrobatchError("two passes over the microbatches will not do")
        latest = latest_completed(
            self.traces,
            second.pairs[-1][0],
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
        small, _ = second.pairs[-1]
        inputs = _last_inputs(second, len(completed))
        more = finished_with(completed, self.traces, small, inputs, second.batch, found)
        more = tuple(place for place in more if place not in completed)
        if not more:
            return ()
        fewer, _ = self._second_pass(places, (*completed, *more)).pairs[-1]
        return more if _num_costly(fewer) < _num_costly(small) else ()

    def _check_between_layers(
        self,
        numbered: _Numbered,
        completed: Sequence[TracedValue],
        second: _Numbered,
        results: Iterable[Atom],
    ) -> None:
        """Check that three passes in a row complete no statistics between layers of the model.

        A further pass for every layer that mixes examples would take too long.

        Args:
            numbered: The traces of all passes.
            completed: The values that the first of the passes completes.
            second: The traces with these values as inputs.
            results: The values of the last but one of them that the second of the passes computes.

        Raises:
            MicrobatchError: Layers or loops make a completed value, other layers read it for the
                results, and no gradient is taken between them.
        """
        small, _ = numbered.pairs[-1]
        made = results_of(model_layers(enumerate(small.eqns), numbered.pairs[-1], numbered.batch))
        made |= results_of(eqn for eqn in small.eqns if record_of(eqn).runs_body)
        part, _ = second.pairs[-1]
        eqns = needed(enumerate(part.eqns), results)
        forward = [each for each in eqns if not is_backward(each[1])]
        inputs = _last_inputs(second, len(completed))
        # A product with a statistic, as in a ridge regression, belongs to the loss.
        read = results_of(model_layers(forward, second.pairs[-1], second.batch.union(inputs)))
        for value, i in zip(completed, inputs, strict=True):
            makers = completing(self.traces[-2], [value]).eqns
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
            traces = (micro, *self.traces[1:])
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
        pairs = [(reading(part, inputs), reading(whole, inputs)) for part, whole in numbered.pairs]
        return numbered._replace(pairs=pairs)

    def _first_pass(self, completed: tuple[TracedValue, ...]) -> FirstPass:
        """Return the first pass, which computes the values `completed`.

        Raises:
            MicrobatchError: It does not run in microbatches, or computes all that the step does.
        """
        divided = self.in_layers
        traces = replace(
            self,
            traces=tuple(completing(trace, completed) for trace in self.traces),
            gradient_free=True,
            name=f"the first pass of {self.name}",
            retrace=partial(first_pass_of, self.retrace, completed),
            in_layers=divided and divided._replace(trace=completing(divided.trace, completed)),
            is_first_pass=True,
            blocks={},
        )
        if self.is_first_pass and len(traces.traces[1].eqns) >= len(self.traces[1].eqns):
            raise MicrobatchError("a pass before the first one would compute as much as it does")
        step, reads = traces._graph(len(completed))
        lines = (source_line(self.traces[1].eqns[value.number]) for value in completed)
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
        MicrobatchError: There is none, or it completes other values than `completed`.
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
    end = len(numbered.pairs[0][0].invars) - (numbered.positions is not None)
    return range(end - count, end)


def _prepared_paths(count: int) -> list[str]:
    """Return the paths of prepared inputs."""
    return [f"{PREPARED} {k}" for k in range(count)]


def _tuple_of(paths: Sequence[str]) -> CutTree:
    """Return a tuple of arrays in one piece, with these names."""
    return CutTree(jax.tree.structure((0,) * len(paths)), tuple(paths), (None,) * len(paths))
