"""Tracing of a Python training step to a `StepGraph`, at the batch sizes of its microbatches."""

from collections.abc import Callable, Collection, Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from functools import cache, partial
from typing import Any

import jax
from jax.extend.core import Jaxpr, Literal, Var

from autopar._cpython import builds_graphs
from autopar.ir.array_cuts import Cut
from autopar.ir.flatten import flatten
from autopar.ir.graph import aval_of, is_backward
from autopar.ir.step_graph import (
    Exactness,
    MicrobatchError,
    StepGraph,
)
from autopar.layering.gradient_layers import gradient_layers
from autopar.layering.layer_clustering import NoLayersError
from autopar.layering.layer_options import AutoLayerOption
from autopar.layering.layer_scopes import num_layers
from autopar.layering.stack_cutting import cut_stacks
from autopar.microbatch.body_boundary import has_gradient
from autopar.microbatch.row_positions import POSITIONS
from autopar.microbatch.same_step import DifferentStepsError
from autopar.microbatch.sized_traces import SizedTraces
from autopar.microbatch.splitting import split_once
from autopar.primitives.shard_map import SHARD_MAP
from autopar.progress import progress_part
from autopar.tracing.accumulation_loop import has_gradient_in_loop
from autopar.tracing.argument_arrays import path_name
from autopar.tracing.chunk_step import ChunkStep, OwnMicrobatchesError, chunk_step
from autopar.tracing.microbatch_traces import DividedTrace, MicrobatchTraces, SplitStep
from autopar.tracing.shared_traces import shared
from autopar.tracing.step_traces import StepTraces, TracedStep, TraceOptions
from autopar.tracing.unrolled_chunks import UnlikeChunksError

DEFAULT_OPTIONS = TraceOptions()


@builds_graphs
def trace(
    fun: Callable[..., Any],
    args: Sequence[Any],
    batch_argnums: Collection[int],
    num_micro_batches: int = 1,
    options: TraceOptions = DEFAULT_OPTIONS,
) -> StepGraph:
    """Return `fun`, traced for arguments like `args`.

    Args:
        fun: the step.
        args: its arguments, pytrees of arrays or ShapeDtypeStructs.
        batch_argnums: the arguments whose arrays have the batch as their first dim.
        num_micro_batches: the number of microbatches.
        options: how it is traced.

    Raises:
        TraceError: `fun` depends on the values of its arguments, or returns something other than
            arrays.
        MicrobatchError: The batch can't be divided, or the step does not have the same result in
            microbatches.
    """
    tracer, key = _tracer(fun, args, batch_argnums, options)

    def traced() -> StepGraph:
        num_traces = 1 if num_micro_batches == 1 else _TRACES_IN_MICROBATCHES
        seconds = num_traces * len(tracer.traces.avals) * _SECONDS_PER_ARRAY
        with progress_part(0, 1, "tracing", seconds):
            return tracer.graph(num_micro_batches)

    return shared((key, num_micro_batches), traced)


def own_microbatches(
    fun: Callable[..., Any],
    args: Sequence[Any],
    batch_argnums: Collection[int],
    exactness: Exactness,
) -> int | None:
    """Return the number of chunks whose gradients a step accumulates itself; None if it does not.

    It is None, too, if the chunks are no microbatches. See `trace` for the arguments.
    """
    options = TraceOptions(marked=True, exactness=exactness)
    tracer, _ = _tracer(fun, args, batch_argnums, options)
    return tracer.num_chunks()


def with_output_cuts(step: StepGraph, cuts: Sequence[Cut | None]) -> StepGraph:
    """Return a step that computes its outputs in pieces.

    Args:
        step: a step whose outputs are in one piece.
        cuts: the cut of each output; None for an output that stays in one piece.
    """
    seeds = {
        atom: cut
        for atom, cut in zip(step.jaxpr.outvars, cuts, strict=True)
        if cut is not None and isinstance(atom, Var)
    }
    if not seeds:
        return step
    cut = cut_stacks(step.jaxpr, seeds, out_pieces=seeds)
    result = replace(step.result, cuts=cut.outputs)
    return replace(
        step,
        jaxpr=cut.jaxpr,
        result=result,
        out_paths=result.piece_paths,
        out_tree=result.piece_tree,
        carried={},
    )


def _tracer(
    fun: Callable[..., Any],
    args: Sequence[Any],
    batch_argnums: Collection[int],
    options: TraceOptions,
) -> "tuple[_StepTracer, Hashable]":
    """Return the tracer of a step, which numbers of microbatches share, and its key."""
    traces = StepTraces(fun, args, batch_argnums, options)
    key = fun, traces.in_tree, tuple(traces.avals), frozenset(batch_argnums), options
    return shared(key, lambda: _StepTracer(traces)), key


_SECONDS_PER_ARRAY = 3e-3
"""Usual seconds of tracing for each array among the arguments, for an estimate before tracing."""

_TRACES_IN_MICROBATCHES = 4
"""Number of traces of a step in microbatches, see `_StepTracer._split_like`."""


class _StepTracer:
    """A step in several numbers of microbatches.

    Attributes:
        traces: the traces of the step.
        options: their options.
        graph: see `_graph`; a graph is made once for each number of microbatches.
    """

    def __init__(self, traces: StepTraces) -> None:
        self.traces = traces
        self.options = traces.options
        self.graph = cache(self._graph)
        self._chunked = cache(self._chunk_step)

    def _graph(self, count: int) -> StepGraph:
        """Return the step in `count` microbatches."""
        traces = self.traces
        if count > 1 and not traces.batch:
            raise MicrobatchError(
                f"{count} microbatches were asked for, but no argument of {traces.name} is a batch;"
                " pass the examples after the model, or name their argument in batch_argnums"
            )
        for i in traces.batch:
            _check_divisible(traces.avals[i], count, path_name(traces.in_keys[i]))
        traced, step = self._in_parts(count)
        out_paths = traced.result.piece_paths
        jaxpr = step.jaxpr
        paths = [*traced.arguments.piece_paths, *step.prepared_paths]
        has_positions = len(jaxpr.invars) > len(paths)
        positions = len(paths) if has_positions else None
        return StepGraph(
            jaxpr=jaxpr,
            in_paths=(*paths, *([POSITIONS] if has_positions else [])),
            out_paths=out_paths,
            batch=traced.batch | step.rows | ({len(paths)} if has_positions else set()),
            carried=_carried(jaxpr, traced.in_keys, traced.out_keys, traced.batch),
            positions=positions,
            preparation=step.preparation,
            first_pass=step.first_pass,
            unconstrained=traced.unconstrained,
            in_tree=traced.arguments.piece_tree,
            out_tree=traced.result.piece_tree,
            arguments=traced.arguments,
            result=traced.result,
            name=traces.name,
            microbatching=step.microbatching,
            retrace=self.graph,
        )

    def _in_parts(self, count: int) -> tuple[TracedStep, SplitStep]:
        """Return the trace of one microbatch in layers, and the step as it runs in `count`."""
        try:
            if count > 1:
                traced = self.traces.trace_of_part(Fraction(1, count), False)
            else:
                traced = self.traces.trace(Fraction(1), self.options.marked, False)
            if self.options.marked and has_gradient_in_loop(traced.jaxpr):
                own = self._in_chunks(count)
                if own is not None:
                    return own
            whole = self._in_microbatches(traced, count)
        except (MicrobatchError, NoLayersError) as error:
            refused = error
        else:
            if count == 1 or _takes_gradient(whole[1]):
                return whole
            own = self._in_chunks(count)
            unlike = self._unlike_chunks(count) if self.options.marked and own is None else None
            if unlike is not None:
                raise unlike
            return own or whole
        own = self._in_chunks(count)
        if own is not None:
            return own
        unlike = self._unlike_chunks(count)
        raise MicrobatchError(f"{refused}. As it is, {unlike}") if unlike else refused

    def _in_microbatches(self, traced: TracedStep, count: int) -> tuple[TracedStep, SplitStep]:
        """Return the step in layers, and as it runs in microbatches; `traced` is one of them."""
        try:
            traced = self._in_layers(traced)
        except NoLayersError as error:
            raise NoLayersError(f"{error}{self._why_not_split(traced, count)}") from None
        if self.options.marked or count > 1:
            return traced, self._split(traced, count)
        return traced, SplitStep(traced.jaxpr, None)

    def _in_chunks(self, count: int) -> tuple[TracedStep, SplitStep] | None:
        """Return the step with the chunks whose gradients it accumulates as microbatches.

        Args:
            count: the number of microbatches that were asked for.

        Returns:
            The trace of one microbatch in layers, and as it runs; None if the step does not
            accumulate gradients of chunks.

        Raises:
            MicrobatchError: The chunks are no microbatches, or not as many as were asked for.
        """
        if self.options.forward:
            return None
        chunks, *outputs = self._chunked()
        if not isinstance(chunks, ChunkStep):
            return None
        if chunks.length != count:
            raise OwnMicrobatchesError(self.traces.name, chunks.line, chunks.length, count)
        traced = self._in_layers(self.traces.flat(chunks.jaxpr, *outputs))
        return traced, chunks.in_microbatches(traced.jaxpr, traced.arguments)

    def _unlike_chunks(self, count: int) -> UnlikeChunksError | None:
        """Return the error if the step adds `count` gradients that it does not compute alike."""
        unlike = None if self.options.forward else self._chunked()[0]
        if not isinstance(unlike, UnlikeChunksError) or unlike.count != count:
            return None
        return unlike

    def num_chunks(self) -> int | None:
        """Return the number of chunks whose gradients the step accumulates; None if it does not."""
        try:
            chunks, *_ = self._chunked()
        except MicrobatchError:
            return None
        return chunks.length if isinstance(chunks, ChunkStep) else None

    def _chunk_step(self) -> tuple[ChunkStep | UnlikeChunksError | None, list[Any], Any]:
        """Return one iteration of the step's own loop, with the key paths and tree of its outputs.

        It is the same for all numbers of microbatches. If the step adds gradients that it does not
        compute alike, the error stands in place of the iteration.
        """
        jaxpr, out_keys, out_tree = self.traces.jaxpr_of_batch()
        whole = flatten(jaxpr, loops=False, keeps_remat=self.options.keeps_remat)
        try:
            chunks = chunk_step(whole, self.traces.batch)
        except UnlikeChunksError as error:
            chunks = error
        return chunks, out_keys, out_tree

    def _in_layers(self, traced: TracedStep) -> TracedStep:
        """Return a step whose gradients JAX took, divided into layers; others as they are."""
        jaxpr = traced.jaxpr
        if not isinstance(self.options.layers, AutoLayerOption) or (
            num_layers(jaxpr) and not self.traces.scan_assignments
        ):
            return traced
        return traced._replace(jaxpr=gradient_layers(jaxpr, self.options.layers))

    def _split(self, traced: TracedStep, count: int) -> SplitStep:
        """Return the step as it runs in microbatches; `traced` is the step for one of them.

        Values of a microbatch with a single example, or a single run of examples, may have dims of
        size one that hide how they scale with the batch. The split then follows the step for a
        batch twice as large. If groups of examples are larger than a microbatch, it follows the
        step for two whole batches.
        """
        if Fraction(1, count) in self.traces.rounded_scales:
            return self._split_like(2 * count, traced, count)
        if any(self.traces.avals[i].shape[0] == count for i in self.traces.batch):
            return self._split_like(2, traced, count)
        try:
            split = self._split_like(1, traced, count)
        except MicrobatchError as refused:
            try:
                return self._split_like(2, traced, count)
            except (MicrobatchError, TypeError, ValueError) as other:
                # Dims of size one may hide the reason from the smaller trace.
                kinds = [isinstance(e, DifferentStepsError) for e in (refused, other)]
                is_told = isinstance(other, MicrobatchError) and kinds == [True, False]
                reason = other if is_told else refused
                raise MicrobatchError(f"{reason}{self._unlike_rows()}") from None
        if not _takes_gradient(split) and has_gradient(traced.jaxpr):
            # Dims of size one, as of a single chunk of examples, may hide how gradients scale.
            with suppress(MicrobatchError, TypeError, ValueError):
                larger = self._split_like(2, traced, count)
                return larger if _takes_gradient(larger) else split
        return split

    def _why_not_split(self, traced: TracedStep, count: int) -> str:
        """Return why a step does not run in microbatches, for an error; "" if it does."""
        try:
            if count > 1:
                self._split(traced, count)
        except MicrobatchError as refused:
            return f".\nNor does the step run in {count} microbatches: {refused}"
        return ""

    def _unlike_rows(self) -> str:
        """Return what to do if inputs have different numbers of rows, such as those of graphs."""
        paths: dict[int, str] = {}
        for i in sorted(self.traces.batch):
            paths.setdefault(self.traces.avals[i].shape[0], path_name(self.traces.in_keys[i]))
        if len(paths) < 2:
            return ""
        sizes = ", ".join(f"{path} has {rows} rows" for rows, path in paths.items())
        return (
            f"\nInputs of the batch differ in their rows: {sizes}. If rows of one refer to those of"
            " another, as the edges of graphs to nodes, stack examples of equal size, such as"
            " padded graphs, and apply the model to each by jax.vmap."
        )

    def _split_like(self, scale: int, traced: TracedStep, count: int) -> SplitStep:
        """Return the step, split like the step for a batch that is larger by `scale`.

        What the step computes from the whole batch alone is computed before its microbatches, if
        these can't be right otherwise.
        """
        micro, traces, options = traced.jaxpr, self.traces, self.options
        on_shards = any(eqn.primitive.name == SHARD_MAP for eqn in micro.eqns)
        if count == 1:
            return SplitStep(*split_once(micro, traced.batch, options.forward))
        whole = traces.trace(Fraction(1), True, False).jaxpr
        part = traces.trace(Fraction(1, count), True, on_shards).jaxpr
        small = traces.trace_of_part(Fraction(scale, count), on_shards).jaxpr
        large = traces.trace_of_part(Fraction(scale), on_shards).jaxpr
        full = traces.trace(Fraction(1), True, on_shards).jaxpr
        unlabelled, in_layers = traces.trace_of_part(Fraction(1, count), False).jaxpr, None
        if isinstance(options.layers, AutoLayerOption) and unlabelled is not micro:
            divide = partial(gradient_layers, option=options.layers)
            in_layers = DividedTrace(unlabelled, divide)
        splitter = MicrobatchTraces(
            traces=SizedTraces(micro, whole, part, full, small, large),
            paths=traced.arguments.piece_paths,
            batch=traced.batch,
            count=count,
            exactness=options.exactness,
            stages=options.marked,
            gradient_free=options.forward or not options.marked,
            name=traces.name,
            retrace=self.graph,
            in_layers=in_layers,
        )
        return splitter.split()


def _takes_gradient(step: SplitStep) -> bool:
    """Return whether each microbatch of a step takes gradients."""
    found = step.microbatching
    return found is not None and any(is_backward(eqn) for _, eqn in found.body)


def _check_divisible(aval: jax.ShapeDtypeStruct, count: int, path: str) -> None:
    if aval.shape[0] % count:
        raise MicrobatchError(
            f"batch input {path} has shape {aval.shape}: its first dim can't be cut into {count}"
            " microbatches; pad the batch, choose a divisor as num_micro_batches, name all"
            " arguments with examples in batch_argnums, with the dim of the examples if it is not"
            " the first, as in {1: 1}, or pass arrays without examples, such as keys, in an"
            " argument of their own"
        )


def _carried(
    jaxpr: Jaxpr, in_paths: list, out_paths: list, batch: frozenset[int]
) -> dict[int, int]:
    """Return the input for each output that is the input's next value.

    Such an output has the path, shape and dtype of the input, as when `params` of argument 0 is
    returned as `params` of result 0. Paths are compared without the position of the argument or, in
    a tuple, of the result. If a path is only a position, only the first argument and the first
    result match.
    """
    by_name: dict[tuple[str, Any, Any], int] = {}
    arguments = jaxpr.invars[: len(in_paths)]
    for i, (path, var) in enumerate(zip(in_paths, arguments, strict=True)):
        if i not in batch and (path[1:] or path[0].idx == 0):
            by_name.setdefault((path_name(path[1:]), aval_of(var).shape, aval_of(var).dtype), i)
    carried: dict[int, int] = {}
    for o, (path, atom) in enumerate(zip(out_paths, jaxpr.outvars, strict=True)):
        if isinstance(atom, Literal):
            continue
        names = [path_name(path)]
        if path and (path[1:] or path_name(path) == "0"):
            names.append(path_name(path[1:]))
        for name in names:
            match = by_name.get((name, aval_of(atom).shape, aval_of(atom).dtype))
            if match is not None and match not in carried.values():
                carried[o] = match
                break
    return carried
